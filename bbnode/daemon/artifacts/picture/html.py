"""A picture as one HTML page: pan and zoom, and what is known of the op that is chosen.

Rule: the page loads nothing and talks to nobody; its own policy forbids it. What it shows is
set as text, never as markup.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import onnx

from bbnode.daemon.artifacts.artifact import as_graph
from bbnode.daemon.artifacts.picture import layout, svg, text
from bbnode.daemon.artifacts.picture.content import DrawnProgram, read

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def to_html(model: onnx.ModelProto) -> str:
    """Return a compiled model as a self-contained HTML page. Raises PictureTooLarge."""
    program = layout.lay_out(read(as_graph(model)))
    return _PAGE.format(
        title=text.clean(program.name),
        policy=POLICY,
        style=_file("page.css"),
        svg=svg.draw(program),
        legend=_legend(program),
        data=_data(program),
        script=_file("page.js"),
    )


def _data(program: DrawnProgram) -> str:
    """Return the details as JSON that can stand in a script element."""
    parts = {
        key: panel.title
        for panel in program.panels
        for box in panel.boxes
        for key in (box.key, *(pill.key for pill in (*box.before, *box.behind)))
    }
    content: dict[str, Any] = {"details": program.details, "parts": parts}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _legend(program: DrawnProgram) -> str:
    """Return the legend as rows of a sign and a label, which keep their size when one zooms."""
    rows = []
    for sample in program.legend:
        width = layout.SIGN_WIDTHS[sample.sign] or 1
        drawn = svg.sign(sample, 1, 8)
        sign = f'<svg width="{width + 2:g}" height="16" aria-hidden="true">{drawn}</svg>'
        rows.append(f"<span>{sign}</span><span>{text.clean(sample.label)}</span>")
    return "\n".join(rows)


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header>
<strong>{title}</strong>
<input id="search" type="search" placeholder="Find an op, a slot, a value…" aria-label="Find">
<span id="found" role="status"></span>
<span class="space"></span>
<button id="out" title="Smaller">&minus;</button>
<button id="in" title="Larger">+</button>
<button id="fit" title="All of it">Fit</button>
</header>
<main>
<div id="view" tabindex="0" aria-label="The program; drag to move, scroll to zoom">
{svg}
</div>
<aside id="side" aria-live="polite">
<section id="legend">
<h3>Legend</h3>
{legend}
</section>
</aside>
</main>
<script id="data" type="application/json">{data}</script>
<script>
{script}</script>
</body>
</html>
"""
