"""Build hook: the README that goes into packages, whose relative links lead to the repository.

Rule: README.md itself keeps relative links, which a checkout and its tests follow.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A link of Markdown to a file: not to another site, nor to a place on the page itself.
_LINK = re.compile(r"(\]\()(?![a-z][a-z0-9+.-]*:|#)([^)\s]+\))")


def absolute(text: str, source: str) -> str:
    """Return a page at the root of the repository `source`, readable from anywhere."""
    return _LINK.sub(rf"\1{source}/blob/main/\2", text)


class PackagedReadme(MetadataHookInterface):
    """Sets the project's readme."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in "readme", which pyproject.toml says is dynamic."""
        text = Path(self.root, "README.md").read_text("utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, metadata["urls"]["Source"]),
        }
