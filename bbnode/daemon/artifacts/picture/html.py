"""A picture as one HTML page, which opens at 100 % on the ops that run first and shows details.

Rule: the page loads nothing and sends nothing; its own content policy forbids it. All content is
set as text, never as markup.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import onnx

from bbnode.daemon.artifacts.artifact import as_graph
from bbnode.daemon.artifacts.picture import layout, svg, text
from bbnode.daemon.artifacts.picture.content import DrawnProgram, Rect, read

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def to_html(model: onnx.ModelProto) -> str:
    """Return a compiled model as a self-contained HTML page. Raises PictureTooLarge."""
    program = as_graph(model)
    folded = layout.lay_out(read(program), captioned=False)
    drawings = [folded]
    if folded.folded:
        drawings.append(layout.lay_out(read(program, fold=False), captioned=False))
    pictures = [svg.draw(each, captioned=False) for each in drawings]
    return _PAGE.format(
        title=text.clean(folded.name),
        summary=svg.summary(folded),
        policy=POLICY,
        style=_file("page.css") + _dark(),
        svg=pictures[0],
        spare="".join(map(_SPARE.format, pictures[1:])),
        fold=_FOLD.format(text.counted(len(folded.folded), "constant")) if folded.folded else "",
        legend=_legend(folded),
        data=_data(drawings),
        script=_file("page.js"),
    )


def _data(drawings: Sequence[DrawnProgram]) -> str:
    """Return the details as JSON that is safe inside a script element."""
    parts = {
        key: panel.title
        for program in drawings
        for panel in program.panels
        for box in panel.boxes
        for key in (box.key, *(pill.key for pill in (*box.before, *box.behind)))
    }
    frames = [
        [{"title": panel.title, **_frame(panel.rect)} for panel in program.panels]
        for program in drawings
    ]
    content: dict[str, Any] = {
        "details": drawings[0].details,
        "parts": parts,
        "folded": drawings[0].folded,
        "drawings": frames,
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _frame(rect: Rect) -> dict[str, float]:
    return {name: round(getattr(rect, name), 1) for name in ("x", "y", "width", "height")}


def _dark() -> str:
    """Return the CSS rules that replace the colours of a picture by dark ones."""
    rules = (
        f'svg [{kind}="{light}"] {{ {kind}: {dark}; }}'
        for light, dark in svg.DARK.items()
        for kind in ("fill", "stroke")
    )
    body = "\n  ".join((f"svg[fill] {{ fill: {svg.DARK[svg.INK]}; }}", *rules))
    return f"@media screen and (prefers-color-scheme: dark) {{\n  {body}\n}}\n"


def _legend(program: DrawnProgram) -> str:
    """Return the legend as rows of a sign and a label, which keep their size under zoom."""
    rows = []
    for sample in program.legend:
        width = layout.SIGN_WIDTHS[sample.sign] or 1
        drawn = svg.sign(sample, 1, 8)
        sign = f'<svg width="{width + 2:g}" height="16" aria-hidden="true">{drawn}</svg>'
        rows.append(f"<span>{sign}</span><span>{text.clean(sample.label)}</span>")
    return "\n".join(rows)


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


_SPARE = '<template id="unfolded">\n{}\n</template>\n'
_FOLD = (
    '<button id="fold" aria-pressed="false" title="Draw each constant as a box (C)">'
    "Show {}</button>"
)

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
<span class="soft">{summary}</span>
<span class="space"></span>
<span id="found" role="status"></span>
<input id="search" type="search" placeholder="Find an op, slot, value…" aria-label="Find">
{fold}
<span>
<button id="out" title="Smaller (-)">&minus;</button>
<button id="percent" title="100 %, at the first ops (0)">100 %</button>
<button id="in" title="Larger (+)">+</button>
<button id="fit" title="All of it, or of a long program its width (F)">Fit</button>
</span>
<button id="help" title="Legend (?)" aria-controls="side">Legend</button>
</header>
<main>
<div id="stage">
<div id="view" tabindex="0" aria-label="The program: scroll or drag to move">
{svg}
</div>
<div id="names" aria-hidden="true"></div>
</div>
<aside id="side" aria-live="polite">
<section id="legend">
<h2>What each class of peer runs</h2>
<p class="soft">Time runs down: an op stands below all that it waits for.</p>
<h3>Legend</h3>
<div>
{legend}
</div>
</section>
</aside>
</main>
<footer>
<span>scroll or drag: move</span>
<span><kbd>Ctrl</kbd> + scroll, <kbd>+</kbd> <kbd>&minus;</kbd>: zoom</span>
<span><kbd>0</kbd> 100 %</span>
<span><kbd>F</kbd> fit</span>
<span>click an op: its values and settings</span>
<span><kbd>/</kbd> find</span>
</footer>
{spare}<script id="data" type="application/json">{data}</script>
<script>
{script}</script>
</body>
</html>
"""
