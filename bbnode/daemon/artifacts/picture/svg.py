"""A picture as SVG text.

Rule: one file that shows the same in every viewer: no script, no style sheet, no font of its
own. Boxes carry `data-key`, edges `data-from` and `data-to`, for the page around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import onnx

from bbnode.daemon.artifacts.artifact import as_graph
from bbnode.daemon.artifacts.picture import layout, text
from bbnode.daemon.artifacts.picture.content import (
    Box,
    DrawnProgram,
    DrawnWire,
    Edge,
    Panel,
    Point,
    Rect,
    Sample,
    read,
)

FONT = "Inter, 'Segoe UI', 'Liberation Sans', Helvetica, Arial, sans-serif"
INK, SOFT_INK, PALE_INK = "#1b2733", "#5b6875", "#8a96a3"
PAPER, PANEL, PANEL_LINE = "#ffffff", "#f6f8fa", "#d5dce3"

# (line, fill) by role; ops without a slot are coloured by the kind of their box.
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
# Dark enough for thin lines on white, and easy to distinguish side by side.
WIRE_COLOURS = ("#c2410c", "#0f766e", "#7c3aed", "#b91c68", "#1d4ed8", "#4d7c0f")
EDGE_STYLES = {
    "data": ("#54616e", "1.4", "", "arrow"),
    "after": ("#8a96a3", "1.1", "5 3", "arrow-soft"),
    "control": ("#8a96a3", "1.1", "1.5 3", "arrow-soft"),
}
WIRE_STYLE = (WIRE_COLOURS[0], "2", "", "arrow-wire0")
CORNER = 7.0
# Replacements of each colour on a dark screen: text and lines brighter, fills dim.
DARK = {
    INK: "#e3e9ef",
    SOFT_INK: "#a3afbb",
    PALE_INK: "#8291a0",
    PAPER: "#12171d",
    PANEL: "#171d25",
    PANEL_LINE: "#323d48",
    "#54616e": "#94a1ad",
    "#3f4a56": "#b5bfc9",
    "#7b8794": "#97a3af",
    "#eceff2": "#262e37",
    "#c9a227": "#a88a2a",
    "#fff8dc": "#2f2a17",
    "#6b4fbb": "#ab97ee",
    "#f3f0fc": "#231f36",
    "#2f6fb7": "#79b0ef",
    "#edf4fc": "#182838",
    "#16806f": "#4cc4ae",
    "#e9f7f4": "#152b28",
    "#8a6d1a": "#d3b04c",
    "#fbf6e4": "#2b2615",
    "#b0437f": "#e88bbd",
    "#fcedf5": "#331f2a",
    "#4a7d1f": "#93c75f",
    "#f0f7e7": "#1f2b16",
    "#9a4a1c": "#e0986a",
    "#fbf0e9": "#30221a",
    "#5c5f9e": "#a2a6e6",
    "#eff0fa": "#20223a",
    "#c2410c": "#f28b54",
    "#fff3ea": "#33211a",
    "#0f766e": "#45bdb2",
    "#7c3aed": "#b18cf9",
    "#b91c68": "#f07db0",
    "#1d4ed8": "#7fa6fb",
    "#4d7c0f": "#9cca55",
}


def to_svg(model: onnx.ModelProto) -> str:
    """Return a compiled model as an SVG document. Raises PictureTooLarge."""
    return draw(layout.lay_out(read(as_graph(model)))) + "\n"


def draw(program: DrawnProgram, *, captioned: bool = True) -> str:
    """Return the SVG element of a picture that was laid out with the same `captioned`."""
    return "\n".join(_document(program, captioned=captioned))


def summary(program: DrawnProgram) -> str:
    """Return the counts of a picture's parts, as text."""
    counts = [
        text.counted(len(program.panels), "part"),
        text.counted(sum(panel.ops for panel in program.panels), "op"),
        text.counted(len(program.wires), "message"),
    ]
    return " · ".join(counts)


def _document(program: DrawnProgram, *, captioned: bool) -> Iterator[str]:
    w, h = _n(program.width), _n(program.height)
    yield (
        # The style makes a window that shows the file alone show all of it.
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" '
        f'viewBox="0 0 {w} {h}" style="max-width:100%;max-height:100vh" font-family="{FONT}" '
        f'font-size="12" fill="{INK}">'
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
    if captioned:
        room = program.width - 2 * layout.MARGIN
        name = text.fit(program.name, 22, room, bold=True)
        yield _text(layout.MARGIN, layout.MARGIN + 22, name, size=22, bold=True)
        yield _text(layout.MARGIN, layout.MARGIN + 42, summary(program), colour=SOFT_INK)
    for panel in program.panels:
        yield from _panel(panel)
    for panel in program.panels:
        yield from map(_edge, panel.edges)
    yield from (_wire(index, wire) for index, wire in enumerate(program.wires))
    for panel in program.panels:
        for box in panel.boxes:
            yield from _box(box)
    yield from (_wire_label(index, wire) for index, wire in enumerate(program.wires))
    if captioned:
        yield from _legend(program)
    yield "</svg>"


def _panel(panel: Panel) -> Iterator[str]:
    r = panel.rect
    yield _rect(r, 10, PANEL, PANEL_LINE, kind="panel")
    ops = text.counted(panel.ops, "op")
    room = r.width - 48 - text.width_of(ops, layout.SMALL)
    yield _text(r.x + 16, r.y + 25, text.fit(panel.title, 18, room, bold=True), size=18, bold=True)
    subtitle = text.fit(panel.subtitle, layout.SMALL, r.width - 30)
    yield _text(r.x + 16, r.y + 43, subtitle, colour=SOFT_INK)
    yield _text(r.x + r.width - 16, r.y + 25, ops, colour=SOFT_INK, anchor="end")
    for chip in panel.chips:
        c = chip.rect
        line, fill = ROLE_COLOURS.get(chip.role, PLAIN)
        yield (
            f"<g><title>{text.clean(f'slot of role {chip.role}')}</title>"
            + _rect(c, c.height / 2, fill, line, 1)
            + f'<circle cx="{_n(c.x + 11)}" cy="{_n(c.y + c.height / 2)}" r="3.5" fill="{line}"/>'
            + _text(c.x + 19, c.y + 14.7, chip.label, size=layout.CHIP_SIZE)
            + "</g>"
        )
    y = _n(r.y + panel.header_height)
    yield (
        f'<line x1="{_n(r.x)}" y1="{y}" x2="{_n(r.x + r.width)}" y2="{y}" stroke="{PANEL_LINE}"/>'
    )


def _box(box: Box) -> Iterator[str]:
    line, fill = _colours(box.role or box.kind)
    yield f'<g class="box" data-key="{text.clean(box.key)}">'
    yield f"<title>{text.clean(' — '.join((box.title, *box.lines)))}</title>"
    for pill in (*box.before, *box.behind):
        r = pill.rect
        yield (
            f'<g class="box" data-key="{text.clean(pill.key)}">'
            + _rect(r, 3, GATE[1], GATE[0], 0.9)
            + _text(r.centre, r.y + 13.2, pill.label, anchor="middle")
            + "</g>"
        )
    rounding = min(box.rect.height / 2, 18) if box.is_port else 6
    yield _rect(box.rect, rounding, fill, line, 1.3, kind="body")
    yield from _port_texts(box) if box.is_port else _op_texts(box, line)
    yield "</g>"


def _port_texts(box: Box) -> Iterator[str]:
    x, room = box.rect.centre, box.rect.width - 20
    y = box.rect.y + layout.BOX_PADDING + 12
    title = text.fit(box.title, layout.SMALL, room, bold=True)
    yield _text(x, y, title, bold=True, anchor="middle")
    for line in box.lines:
        y += layout.LINE
        shown = text.fit(line, layout.SMALL, room)
        yield _text(x, y, shown, colour=SOFT_INK, anchor="middle")


def _op_texts(box: Box, colour: str) -> Iterator[str]:
    r = box.rect
    yield (
        f'<path d="M{_n(r.x + 4)} {_n(r.y + 6)}V{_n(r.bottom - 6)}" stroke="{colour}" '
        'stroke-width="3" stroke-linecap="round"/>'
    )
    y = r.y + layout.BOX_PADDING + 12
    right = r.x + r.width - 9
    corner = str(box.number)
    room = r.width - 26 - text.width_of(corner, layout.SMALL)
    size = layout.BOX_TITLE_SIZE
    title = text.fit(box.title, size, room, bold=True)
    yield _text(r.x + 13, y, title, size=size, bold=True, colour=colour)
    yield _text(right, y, corner, colour=PALE_INK, anchor="end")
    timed = f"≤ {box.deadline}" if box.deadline else ""
    room = r.width - 24 - (text.width_of(timed, layout.SMALL) + 6 if timed else 0)
    for line in box.lines or ("",) * bool(timed):
        y += layout.LINE
        yield _text(r.x + 13, y, text.fit(line, layout.SMALL, room), colour=SOFT_INK)
        if timed:
            yield _text(right, y, timed, colour=SOFT_INK, anchor="end")
            timed, room = "", r.width - 24


def _edge(edge: Edge) -> str:
    colour, width, dashes, marker = EDGE_STYLES[edge.kind]
    path = [f"M{_at(edge.points[0])}"]
    for (x0, y0), (x1, y1) in pairwise(edge.points):
        if abs(x0 - x1) < 0.5:
            path.append(f"L{_at((x1, y1))}")
        else:
            bend = (y1 - y0) * 0.55
            path.append(f"C{_at((x0, y0 + bend))} {_at((x1, y1 - bend))} {_at((x1, y1))}")
    drawn = _line("".join(path), colour, width, dashes, marker)
    return _between(edge, "edge", edge.label, drawn)


def _wire(index: int, wire: DrawnWire) -> str:
    number = index % len(WIRE_COLOURS)
    path = _rounded(wire.points)
    halo = f'<path d="{path}" fill="none" stroke="{PAPER}" stroke-width="5" stroke-opacity=".75"/>'
    drawn = _line(path, WIRE_COLOURS[number], "2", "", f"arrow-wire{number}")
    return _between(wire, "edge wire", wire.tooltip, halo + drawn)


def _wire_label(index: int, wire: DrawnWire) -> str:
    colour, r = WIRE_COLOURS[index % len(WIRE_COLOURS)], wire.place
    at = (r.centre, r.y + 14.2)
    shown = text.fit(wire.label, layout.LABEL_SIZE, r.width - 2 * layout.LABEL_PADDING + 0.1)
    label = _text(*at, shown, size=layout.LABEL_SIZE, colour=colour, anchor="middle")
    return _between(wire, "edge label", wire.tooltip, _rect(r, 4, PAPER, colour) + label)


def _between(line: Edge | DrawnWire, kind: str, title: str, drawn: str) -> str:
    source, target = text.clean(line.source.key), text.clean(line.target.key)
    return (
        f'<g class="{kind}" data-from="{source}" data-to="{target}">'
        f"<title>{text.clean(title)}</title>{drawn}</g>"
    )


def _rounded(points: Sequence[Point]) -> str:
    """Return the path of a polyline of level and upright pieces, with its corners rounded."""
    kept = [points[0]]
    kept += [point for last, point in pairwise(points) if _distance(last, point) > 0.5]
    path = [f"M{_at(kept[0])}"]
    for before, at, behind in zip(kept, kept[1:], kept[2:], strict=False):
        radius = min(CORNER, _distance(before, at) / 2, _distance(at, behind) / 2)
        path.append(f"L{_at(_towards(at, before, radius))}")
        path.append(f"Q{_at(at)} {_at(_towards(at, behind, radius))}")
    path.append(f"L{_at(kept[-1])}")
    return "".join(path)


def _distance(a: Point, b: Point) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _towards(start: Point, end: Point, by: float) -> Point:
    share = by / (_distance(start, end) or 1.0)
    return start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share


def _legend(program: DrawnProgram) -> Iterator[str]:
    yield '<g class="legend">'
    for sample in program.legend:
        r = sample.rect
        middle = r.y + r.height / 2
        yield sign(sample, r.x, middle)
        width = layout.SIGN_WIDTHS[sample.sign]
        x = r.x + width + layout.SIGN_GAP * bool(width)
        yield _text(x, middle + 4, sample.label, size=layout.LEGEND_SIZE, colour=SOFT_INK)
    yield "</g>"


def sign(sample: Sample, x: float, middle: float) -> str:
    """Return the sign of an entry of the legend, from x rightwards, around the height `middle`."""
    width = layout.SIGN_WIDTHS[sample.sign]
    place = Rect(x, middle - 6, width, 12)
    match sample.sign:
        case "box":
            line, fill = _colours(sample.name)
            return _rect(place, 6 if sample.name == "input" else 3, fill, line, 1.3)
        case "gate":
            return _rect(place, 3, GATE[1], GATE[0], 0.9)
        case "line":
            style = WIRE_STYLE if sample.name == "wire" else EDGE_STYLES[sample.name]
            return _line(f"M{_at((x, middle))}h{_n(width)}", *style)
    return ""


def _colours(name: str) -> tuple[str, str]:
    """Return the line and fill colours of a role's boxes, or of a kind without a role."""
    return ROLE_COLOURS.get(name) or KIND_COLOURS.get(name, PLAIN)


def _line(path: str, colour: str, width: str, dashes: str, marker: str) -> str:
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash} '
        f'marker-end="url(#{marker})"/>'
    )


def _rect(
    r: Rect, rounding: float, fill: str, line: str, width: float = 1, *, kind: str = ""
) -> str:
    name = f'class="{kind}" ' if kind else ""
    return (
        f'<rect {name}x="{_n(r.x)}" y="{_n(r.y)}" width="{_n(r.width)}" height="{_n(r.height)}" '
        f'rx="{_n(rounding)}" fill="{fill}" stroke="{line}" stroke-width="{width}"/>'
    )


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


def _at(point: Point) -> str:
    return f"{_n(point[0])} {_n(point[1])}"


def _n(number: float) -> str:
    """Return a coordinate: a tenth of a pixel is enough."""
    return f"{number:.1f}".removesuffix(".0")
