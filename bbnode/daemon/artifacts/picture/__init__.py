"""A compiled artifact as a picture: SVG, or one HTML page around it.

Rule: like `inspect`, it reads only the artifact, and shows what the compiler left on the nodes. It
uses Python's standard library alone: the layout is our own, the page loads nothing. The same
artifact gives the same text.
"""

from __future__ import annotations

from bbnode.daemon.artifacts.picture.content import PictureTooLarge
from bbnode.daemon.artifacts.picture.html import to_html
from bbnode.daemon.artifacts.picture.svg import to_svg

__all__ = ["PictureTooLarge", "to_html", "to_svg"]
