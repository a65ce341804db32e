"""A picture as SVG text.

Rule: one file that shows the same in every viewer: no script, no style sheet, no font of its
own. Boxes carry `data-key`, edges `data-from` and `data-to`, for the page around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import onnx

from bbnode.daemon.artifacts.picture import layout, text
from bbnode.daemon.artifacts.picture.geometry import (
    Layout,
    PlacedBox,
    PlacedEdge,
    PlacedPanel,
    PlacedWire,
)
from bbnode.daemon.artifacts.picture.program import Program, read

FONT = "Inter, 'Segoe UI', 'Liberation Sans', Helvetica, Arial, sans-serif"
INK, SOFT_INK, PALE_INK = "#1b2733", "#5b6875", "#8a96a3"
PAPER, PANEL, PANEL_LINE = "#ffffff", "#f6f8fa", "#d5dce3"

# (line, fill) by role; what is no slot op goes by the kind of its box.
ROLE_COLOURS = {
    "Backend": ("#6b4fbb", "#f3f0fc"),
    "Model": ("#2f6fb7", "#edf4fc"),
    "Aggregator": ("#16806f", "#e9f7f4"),
    "DataSource": ("#8a6d1a", "#fbf6e4"),
    "PeerSelector": ("#b0437f", "#fcedf5"),
    "Index": ("#4a7d1f", "#f0f7e7"),
    "Codec": ("#9a4a1c", "#fbf0e9"),
    "Protocol": ("#5c5f9e", "#eff0fa"),
}
KIND_COLOURS = {
    "wire": ("#c2410c", "#fff3ea"),
    "backend": ROLE_COLOURS["Backend"],
    "call": ("#3f4a56", "#eceff2"),
    "input": ("#5b6875", "#ffffff"),
    "output": ("#5b6875", "#ffffff"),
}
PLAIN = ("#7b8794", "#ffffff")
GATE = ("#c9a227", "#fff8dc")
# Dark enough for thin lines on white, and told apart when they run side by side.
WIRE_COLOURS = ("#c2410c", "#0f766e", "#7c3aed", "#b91c68", "#1d4ed8", "#4d7c0f")
EDGE_STYLES = {
    "data": ("#54616e", "1.4", "", "arrow"),
    "after": ("#8a96a3", "1.1", "5 3", "arrow-soft"),
    "control": ("#8a96a3", "1.1", "1.5 3", "arrow-soft"),
}
CORNER = 7.0


def to_svg(model: onnx.ModelProto) -> str:
    """A compiled model as an SVG document. Raises PictureTooLarge."""
    program = read(model)
    return "\n".join(_document(program, layout.lay_out(program))) + "\n"


def draw(program: Program, placed: Layout) -> str:
    """The SVG element of a picture that was laid out."""
    return "\n".join(_document(program, placed))


def _document(program: Program, placed: Layout) -> Iterator[str]:
    w, h = _n(placed.width), _n(placed.height)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" '
        f'viewBox="0 0 {w} {h}" font-family="{FONT}" font-size="12" fill="{INK}">'
    )
    yield f"<title>{text.clean(program.name)}: what each class of peer runs</title>"
    yield "<defs>"
    arrows = [("arrow", EDGE_STYLES["data"][0]), ("arrow-soft", EDGE_STYLES["after"][0])]
    arrows += [(f"arrow-wire{i}", colour) for i, colour in enumerate(WIRE_COLOURS)]
    for name, colour in arrows:
        yield (
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7.2" refY="4" markerWidth="7" '
            f'markerHeight="7" markerUnits="userSpaceOnUse" orient="auto">'
            f'<path d="M0 .8 7.6 4 0 7.2z" fill="{colour}"/></marker>'
        )
    yield "</defs>"
    yield f'<rect width="{w}" height="{h}" fill="{PAPER}"/>'
    yield from _title(program)
    for panel in placed.panels:
        yield from _panel(panel)
    for panel in placed.panels:
        yield from (_edge(edge) for edge in panel.edges)
    for index, wire in enumerate(placed.wires):
        yield _wire(index, wire)
    for panel in placed.panels:
        for box in panel.boxes:
            yield from _box(box)
    for index, wire in enumerate(placed.wires):
        yield from _wire_label(index, wire)
    yield from _legend(program, placed)
    yield "</svg>"


def _title(program: Program) -> Iterator[str]:
    said = [
        text.counted(len(program.panels), "part"),
        text.counted(sum(panel.ops for panel in program.panels), "op"),
        text.counted(len(program.wires), "wire edge"),
    ]
    x = layout.MARGIN
    yield _text(x, layout.MARGIN + 22, program.name, size=22, bold=True)
    yield _text(x, layout.MARGIN + 42, " · ".join(said), colour=SOFT_INK)


def _panel(placed: PlacedPanel) -> Iterator[str]:
    r = placed.rect
    yield (
        f'<rect x="{_n(r.x)}" y="{_n(r.y)}" width="{_n(r.width)}" height="{_n(r.height)}" rx="10" '
        f'fill="{PANEL}" stroke="{PANEL_LINE}"/>'
    )
    yield _text(r.x + 16, r.y + 25, placed.panel.title, size=18, bold=True)
    yield _text(r.x + 16, r.y + 42, placed.panel.subtitle, size=11, colour=SOFT_INK)
    said = text.counted(placed.panel.ops, "op")
    yield _text(r.x + r.width - 16, r.y + 25, said, colour=SOFT_INK, anchor="end")
    for chip in placed.chips:
        c = chip.rect
        line, fill = ROLE_COLOURS.get(chip.role, PLAIN)
        yield (
            f"<g><title>{text.clean(f'slot of role {chip.role}')}</title>"
            f'<rect x="{_n(c.x)}" y="{_n(c.y)}" width="{_n(c.width)}" height="{_n(c.height)}" '
            f'rx="{_n(c.height / 2)}" fill="{fill}" stroke="{line}" stroke-width="1"/>'
            f'<circle cx="{_n(c.x + 11)}" cy="{_n(c.y + c.height / 2)}" r="3.5" fill="{line}"/>'
            + _text(c.x + 19, c.y + 14, chip.label, size=layout.CHIP_SIZE)
            + "</g>"
        )
    y = r.y + placed.header_height
    yield (
        f'<line x1="{_n(r.x)}" y1="{_n(y)}" x2="{_n(r.x + r.width)}" y2="{_n(y)}" '
        f'stroke="{PANEL_LINE}"/>'
    )


def _box(placed: PlacedBox) -> Iterator[str]:
    box, r = placed.box, placed.rect
    line, fill = ROLE_COLOURS.get(box.role) or KIND_COLOURS.get(box.kind, PLAIN)
    yield f'<g class="box" data-key="{text.clean(box.key)}">'
    tooltip = " — ".join((box.title, *box.lines))
    yield f"<title>{text.clean(tooltip)}</title>"
    for pill, where in zip((*box.before, *box.behind), (*placed.above, *placed.below), strict=True):
        yield (
            f'<g class="box" data-key="{text.clean(pill.key)}">'
            f'<rect x="{_n(where.x)}" y="{_n(where.y)}" width="{_n(where.width)}" '
            f'height="{_n(where.height)}" rx="3" fill="{GATE[1]}" stroke="{GATE[0]}" '
            'stroke-width=".9"/>'
            + _text(
                where.x + where.width / 2, where.y + 12.4, pill.label, size=10.5, anchor="middle"
            )
            + "</g>"
        )
    rounding = r.height / 2 if box.kind in ("input", "output") else 6
    yield (
        f'<rect class="body" x="{_n(r.x)}" y="{_n(r.y)}" width="{_n(r.width)}" '
        f'height="{_n(r.height)}" rx="{_n(min(rounding, 18))}" fill="{fill}" stroke="{line}" '
        'stroke-width="1.3"/>'
    )
    if box.kind in ("input", "output"):
        yield from _port_texts(placed)
    else:
        yield from _op_texts(placed, line)
    yield "</g>"


def _port_texts(placed: PlacedBox) -> Iterator[str]:
    box, r = placed.box, placed.rect
    x, room = r.x + r.width / 2, r.width - 20
    y = r.y + layout.BOX_PADDING + 12
    title = text.fit(box.title, 12, room, bold=True)
    yield _text(x, y, title, bold=True, anchor="middle")
    for line in box.lines:
        y += layout.LINE
        yield _text(x, y, text.fit(line, 10.5, room), size=10.5, colour=SOFT_INK, anchor="middle")


def _op_texts(placed: PlacedBox, colour: str) -> Iterator[str]:
    box, r = placed.box, placed.rect
    yield (
        f'<path d="M{_n(r.x + 4)} {_n(r.y + 6)}V{_n(r.y + r.height - 6)}" stroke="{colour}" '
        'stroke-width="3" stroke-linecap="round"/>'
    )
    y = r.y + layout.BOX_PADDING + 12
    right = r.x + r.width - 9
    corner = str(box.number)
    room = r.width - 26 - text.width_of(corner, 10.5)
    title = text.fit(box.title, 13, room, bold=True)
    yield _text(r.x + 13, y, title, size=13, bold=True, colour=colour)
    yield _text(right, y, corner, size=10.5, colour=PALE_INK, anchor="end")
    timed = f"≤ {box.deadline}" if box.deadline else ""
    room = r.width - 24 - (text.width_of(timed, 10.5) + 6 if timed else 0)
    for line in box.lines or ("",) * bool(timed):
        y += layout.LINE
        yield _text(r.x + 13, y, text.fit(line, 11, room), size=11, colour=SOFT_INK)
        if timed:
            yield _text(right, y, timed, size=10.5, colour=SOFT_INK, anchor="end")
            timed, room = "", r.width - 24


def _edge(edge: PlacedEdge) -> str:
    colour, width, dashes, marker = EDGE_STYLES[edge.kind]
    points = edge.points
    path = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        if abs(x0 - x1) < 0.5:
            path.append(f"L{_n(x1)} {_n(y1)}")
        else:
            bend = (y1 - y0) * 0.55
            path.append(f"C{_n(x0)} {_n(y0 + bend)} {_n(x1)} {_n(y1 - bend)} {_n(x1)} {_n(y1)}")
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    ends = f'data-from="{text.clean(edge.source)}" data-to="{text.clean(edge.target)}"'
    return (
        f'<g class="edge" {ends}>'
        f"<title>{text.clean(edge.label)}</title>"
        f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="{width}"{dash} '
        f'marker-end="url(#{marker})"/></g>'
    )


def _wire(index: int, wire: PlacedWire) -> str:
    number = index % len(WIRE_COLOURS)
    path = _rounded(wire.points)
    ends = f'data-from="{text.clean(wire.source)}" data-to="{text.clean(wire.target)}"'
    return (
        f'<g class="edge wire" {ends}><title>{text.clean(wire.wire.tooltip)}</title>'
        f'<path d="{path}" fill="none" stroke="{PAPER}" stroke-width="5" stroke-opacity=".75"/>'
        f'<path d="{path}" fill="none" stroke="{WIRE_COLOURS[number]}" stroke-width="2" '
        f'marker-end="url(#arrow-wire{number})"/></g>'
    )


def _wire_label(index: int, wire: PlacedWire) -> Iterator[str]:
    colour = WIRE_COLOURS[index % len(WIRE_COLOURS)]
    r = wire.label
    ends = f'data-from="{text.clean(wire.source)}" data-to="{text.clean(wire.target)}"'
    yield (
        f'<g class="edge label" {ends}><title>{text.clean(wire.wire.tooltip)}</title>'
        f'<rect x="{_n(r.x)}" y="{_n(r.y)}" width="{_n(r.width)}" height="{_n(r.height)}" rx="4" '
        f'fill="{PAPER}" stroke="{colour}"/>'
        + _text(
            r.x + r.width / 2,
            r.y + 13.3,
            wire.wire.label,
            size=layout.LABEL_SIZE,
            colour=colour,
            anchor="middle",
        )
        + "</g>"
    )


def _rounded(points: Sequence[tuple[float, float]]) -> str:
    """A polyline of level and upright pieces, with its corners rounded."""
    kept = [points[0]]
    for point in points[1:]:
        if abs(point[0] - kept[-1][0]) + abs(point[1] - kept[-1][1]) > 0.5:
            kept.append(point)
    path = [f"M{_n(kept[0][0])} {_n(kept[0][1])}"]
    for before, at, behind in zip(kept, kept[1:], kept[2:], strict=False):
        radius = min(CORNER, _distance(before, at) / 2, _distance(at, behind) / 2)
        start, end = _towards(at, before, radius), _towards(at, behind, radius)
        path.append(f"L{_n(start[0])} {_n(start[1])}")
        path.append(f"Q{_n(at[0])} {_n(at[1])} {_n(end[0])} {_n(end[1])}")
    path.append(f"L{_n(kept[-1][0])} {_n(kept[-1][1])}")
    return "".join(path)


def _distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _towards(
    start: tuple[float, float], end: tuple[float, float], by: float
) -> tuple[float, float]:
    share = by / (_distance(start, end) or 1.0)
    return start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share


def _legend(program: Program, placed: Layout) -> Iterator[str]:
    x, y = layout.MARGIN, placed.height - layout.LEGEND_HEIGHT + 14
    kinds = {edge.kind for panel in placed.panels for edge in panel.edges}
    samples = [("data", "data"), ("after", "order, by the author"), ("control", "order in a slot")]
    for kind, label in samples:
        if kind in kinds:
            colour, width, dashes, marker = EDGE_STYLES[kind]
            dash = f' stroke-dasharray="{dashes}"' if dashes else ""
            yield (
                f'<path d="M{_n(x)} {_n(y)}h30" stroke="{colour}" stroke-width="{width}"{dash} '
                f'marker-end="url(#{marker})"/>'
            )
            yield _text(x + 37, y + 4, label, size=11, colour=SOFT_INK)
            x += 37 + text.width_of(label, 11) + 22
    if program.wires:
        yield (
            f'<path d="M{_n(x)} {_n(y)}h30" stroke="{WIRE_COLOURS[0]}" stroke-width="2" '
            'marker-end="url(#arrow-wire0)"/>'
        )
        label = "over the network"
        yield _text(x + 37, y + 4, label, size=11, colour=SOFT_INK)
        x += 37 + text.width_of(label, 11) + 22
    boxes = [box.box for panel in placed.panels for box in panel.boxes]
    if any(box.before or box.behind for box in boxes):
        yield (
            f'<rect x="{_n(x)}" y="{_n(y - 6)}" width="26" height="12" rx="3" fill="{GATE[1]}" '
            f'stroke="{GATE[0]}"/>'
        )
        yield _text(x + 33, y + 4, "gate", size=11, colour=SOFT_INK)
        x += 33 + text.width_of("gate", 11) + 22
    if any(box.deadline for box in boxes):
        label = "≤ 10 s: checked against this deadline"
        yield _text(x, y + 4, label, size=11, colour=SOFT_INK)
        x += text.width_of(label, 11) + 22
    yield _text(x, y + 4, "small number: place in program order", size=11, colour=SOFT_INK)


def _text(
    x: float,
    y: float,
    content: str,
    *,
    size: float = 12,
    bold: bool = False,
    colour: str = INK,
    anchor: str = "start",
) -> str:
    weight = ' font-weight="600"' if bold else ""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return (
        f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"{weight}{at} fill="{colour}">'
        f"{text.clean(content)}</text>"
    )


def _n(number: float) -> str:
    """A coordinate: a tenth of a pixel is enough."""
    return f"{number:.1f}".removesuffix(".0")
