"""The picture's geometry: classes side by side, rows below each other, wires around boxes.

A class has a column, in which its panels stand below each other: its partition, and below it a
bootstrap or a Module body that it calls.

Rule: data flows down in curves between rows. A wire leaves its op below, runs level in the gap
between two rows, down in the gutter beside a panel, level again, and enters its receiver from
above; wires that pass the same height have tracks of their own, so no two run on one line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from bbnode.daemon.artifacts.picture import content, placing, text
from bbnode.daemon.artifacts.picture.content import (
    Box,
    Chip,
    DrawnProgram,
    DrawnWire,
    Edge,
    Panel,
    Point,
    Rect,
)

MARGIN = 24.0
TITLE_HEIGHT = 62.0
MIN_BOX_WIDTH = 128.0
MAX_BOX_WIDTH = 236.0
TITLE_LINE = 21.0
LINE = 16.0
BOX_PADDING = 8.0
PILL_HEIGHT = 18.0
ROW_GAP = 34.0
STACK_GAP = 16.0  # between two panels of a class
TRACK = 11.0
# The smallest text of a picture: all of it can be read at 100 %.
SMALL = 12.0
BOX_TITLE_SIZE = 14.0
PANEL_PADDING = 26.0
MIN_PANEL_WIDTH = 240.0
# A longer name of a class or message is cut, so that it widens nothing.
MAX_HEADER_WIDTH = 420.0
MAX_LABEL_WIDTH = 300.0
HEADER_TITLE = 56.0
CHIP_HEIGHT = 21.0
CHIP_GAP = 6.0
CHIP_SIZE = SMALL
LABEL_SIZE = SMALL
LABEL_HEIGHT = 20.0
LABEL_PADDING = 8.0
EMPTY_GUTTER = 36.0
PORT_SPACING = 22.0
LEGEND_SIZE = SMALL
LEGEND_LINE = 21.0
LEGEND_GAP = 22.0
MIN_PICTURE_WIDTH = 520.0
# Widths of the signs in the legend.
SIGN_WIDTHS = {"box": 26.0, "line": 30.0, "gate": 26.0, "": 0.0}
SIGN_GAP = 7.0


def lay_out(program: DrawnProgram, *, captioned: bool = True) -> DrawnProgram:
    """Place everything: set the positions of all parts, and drop edges that others imply.

    With `captioned` there is room for the title above and for the legend below; otherwise the page
    around the picture has both. Raises PictureTooLarge if edges pass too many rows.
    """
    for panel in program.panels:
        for box in panel.boxes:
            box.rect = Rect(width=_box_width(box), height=_box_height(box))
    columns, header_rows = _place_rows(program)
    gutters = _place_panels(program, columns, at_least=MIN_PICTURE_WIDTH if captioned else 0.0)
    tops = _place_heights(program, header_rows, captioned=captioned)
    _draw_lines(program, columns, gutters, tops)
    return program


def _box_width(box: Box) -> float:
    """Return the width of a box: as wide as its longest text, within bounds."""
    if box.is_port:
        longest = max(text.width_of(t, SMALL, bold=True) for t in (box.title, *box.lines))
        return min(MAX_BOX_WIDTH, max(70.0, longest + 30))
    longest = text.width_of(box.title, BOX_TITLE_SIZE, bold=True) + 26 + 4 * SMALL
    for index, line in enumerate(box.lines):
        # The deadline is at the right end of the first line.
        timed = 6 + text.width_of(f"≤ {box.deadline}", SMALL) if box.deadline and not index else 0
        longest = max(longest, text.width_of(line, SMALL) + 24 + timed)
    for pill in (*box.before, *box.behind):
        longest = max(longest, text.width_of(pill.label, SMALL) + 40)
    return min(MAX_BOX_WIDTH, max(MIN_BOX_WIDTH, longest))


def _box_height(box: Box) -> float:
    """Return the height of the op itself, without its gates."""
    lines = max(len(box.lines), 1 if box.deadline else 0)
    return 2 * BOX_PADDING + TITLE_LINE - 4 + LINE * lines


def _place_rows(
    program: DrawnProgram,
) -> tuple[list[placing.Columns], dict[int, int]]:
    """Set the row of each box and the column of each panel.

    Returns:
        The columns of each panel, whose edges are those to draw; and the rows in which the header
        of a panel stands that is below another, by the panel's index.
    """
    boxes = [box for panel in program.panels for box in panel.boxes]
    number = {box: index for index, box in enumerate(boxes)}

    def ends(line: Edge | DrawnWire) -> tuple[int, int]:
        return number[line.source], number[line.target]

    every = [ends(edge) for panel in program.panels for edge in panel.edges]
    every += [ends(wire) for wire in program.wires]
    stacking = placing.Stacking(len(boxes), every)
    numbers = [[number[box] for box in panel.boxes] for panel in program.panels]
    headers = _stack_panels(program, stacking, numbers)
    natural = placing.rows_of(len(boxes), every)
    for panel, members in zip(program.panels, numbers, strict=True):
        parts = placing.parts_of(members, [ends(edge) for edge in panel.edges])
        stacking.stack(sorted(parts, key=lambda part: (min(natural[b] for b in part), part[0])))
    # Empty rows are left out.
    rows = stacking.rows()
    used = {*rows[: len(boxes)], *(rows[header] for header in headers.values())}
    place_of = {row: index for index, row in enumerate(sorted(used))}
    header_rows = {panel: place_of[rows[header]] for panel, header in headers.items()}
    rows = [place_of[row] for row in rows[: len(boxes)]]
    for box, row in zip(boxes, rows, strict=True):
        box.row = row
    passed = sum(rows[target] - rows[source] for source, target in every)
    if passed > content.MAX_PASSED_ROWS:
        raise content.PictureTooLarge(
            f"edges that pass {passed} rows of ops", content.MAX_PASSED_ROWS
        )
    columns = []
    for panel, members in zip(program.panels, numbers, strict=True):
        # Edges for the order alone are drawn only if nothing else implies them.
        optional = {ends(edge) for edge in panel.edges if edge.kind != "data"}
        kept = placing.without_implied(rows, every, optional) if optional else set()
        panel.edges = [
            edge
            for edge in panel.edges
            if edge.source.row < edge.target.row and (edge.kind == "data" or ends(edge) in kept)
        ]
        columns.append(
            placing.place(
                members,
                rows,
                [box.rect.width for box in boxes],
                [ends(edge) for edge in panel.edges],
            )
        )
        for box in panel.boxes:
            box.rect.x = columns[-1].centres[number[box]] - box.rect.width / 2
    return columns, header_rows


def _stack_panels(
    program: DrawnProgram, stacking: placing.Stacking, numbers: Sequence[Sequence[int]]
) -> dict[int, int]:
    """Set the column of each panel: a class's panels stand in one, below each other.

    A panel without ops, or one that sends to a panel above it, gets a column of its own. Returns
    the virtual boxes that stand for the headers of panels below others, by the panel's index.
    """
    last: dict[str, int] = {}
    above: dict[str, list[int]] = {}
    headers: dict[int, int] = {}
    count = 0
    for index, panel in enumerate(program.panels):
        name, members = panel.peer_class, numbers[index]
        if not members:
            panel.column, count = count, count + 1
        elif name in last and not stacking.leads_back(members, above[name]):
            panel.column = program.panels[last[name]].column
            headers[index] = stacking.put_below(numbers[last[name]], members)
            above[name] += members
            last[name] = index
        else:
            panel.column, count = count, count + 1
            if name not in last:
                last[name], above[name] = index, list(members)
    return headers


def _gutter_of(program: DrawnProgram, wire: DrawnWire) -> int:
    """Return the gutter that a wire runs down in: that with number g lies right of column g."""
    source, target = (program.panels[index].column for index in wire.panels)
    return source - 1 if target < source else source


def _gaps_of(wire: DrawnWire) -> tuple[int, int]:
    """Return the gaps in which a wire leaves and enters, by the row below; it may be one."""
    return wire.source.row + 1, wire.target.row


def _lanes(program: DrawnProgram) -> dict[DrawnWire, int]:
    """Return each wire's lane in its gutter, from 0; wires in one lane share no gap of rows."""
    ends: dict[int, list[int]] = {}
    lanes: dict[DrawnWire, int] = {}
    for wire in sorted(program.wires, key=_gaps_of):
        first, last = _gaps_of(wire)
        taken = ends.setdefault(_gutter_of(program, wire), [])
        lane = next((lane for lane, end in enumerate(taken) if end < first), len(taken))
        taken[lane : lane + 1] = [last]
        lanes[wire] = lane
    return lanes


def _place_panels(
    program: DrawnProgram, columns: Sequence[placing.Columns], *, at_least: float
) -> dict[int, tuple[float, float]]:
    """Place panels, boxes and edges from left to right; return left end and width of gutters."""
    gutters: dict[int, tuple[float, float]] = {}
    widths: dict[int, float] = {}
    for panel, column in zip(program.panels, columns, strict=True):
        title = text.width_of(panel.title, 18, bold=True) + text.width_of("1,500 ops", SMALL) + 16
        header = min(MAX_HEADER_WIDTH, max(title, text.width_of(panel.subtitle, SMALL)) + 32)
        width = max(MIN_PANEL_WIDTH, header, column.width + 2 * PANEL_PADDING)
        widths[panel.column] = max(widths.get(panel.column, 0.0), width)
    lanes = _lanes(program)
    x = MARGIN
    for number in sorted(widths):
        width = widths[number]
        for panel, column in zip(program.panels, columns, strict=True):
            if panel.column == number:
                panel.rect = Rect(x=x, width=width)
                for box in panel.boxes:
                    box.rect.x += x + (width - column.width) / 2
        x += width
        wires = [wire for wire in lanes if _gutter_of(program, wire) == number]
        labels = max((_label_width(wire) + 24 for wire in wires), default=0.0)
        tracks = TRACK * (max(lanes[wire] for wire in wires) + 4) if wires else 0.0
        gutters[number] = (x, max(EMPTY_GUTTER, labels, tracks))
        if number < len(widths) - 1 or wires:
            x += gutters[number][1]
    program.width = max(x + MARGIN, at_least)
    return gutters


def _place_heights(
    program: DrawnProgram, header_rows: Mapping[int, int], *, captioned: bool
) -> list[tuple[float, float, float]]:
    """Place everything from top to bottom; return of each row where its gap, it, and its end is."""
    top = MARGIN + TITLE_HEIGHT * captioned
    header = HEADER_TITLE
    for index, panel in enumerate(program.panels):
        panel.rect.y = top
        panel.chips = list(_chips(panel))
        lowest = max((chip.rect.bottom - top + CHIP_GAP for chip in panel.chips), default=0.0)
        panel.header_height = max(HEADER_TITLE, lowest) + 12 - CHIP_GAP
        if index not in header_rows:
            header = max(header, panel.header_height)
    for index, panel in enumerate(program.panels):
        if index not in header_rows:
            panel.header_height = header
    boxes = [box for panel in program.panels for box in panel.boxes]
    count = max((box.row for box in boxes), default=-1) + 1
    tracks = Counter(gap for wire in program.wires for gap in set(_gaps_of(wire)))
    heights = [0.0] * (count + 1)
    for box in boxes:
        pills = PILL_HEIGHT * (len(box.before) + len(box.behind))
        heights[box.row] = max(heights[box.row], box.rect.height + pills)
    for index, row in header_rows.items():
        heights[row] = max(heights[row], program.panels[index].header_height)
    rows = []
    y = top + header
    for row, height in enumerate(heights):
        row_top = y + ROW_GAP + TRACK * tracks[row]
        rows.append((y, row_top, row_top + height))
        y = row_top + height
    for box in boxes:
        at = rows[box.row][1]
        inset, width = box.rect.x + 14, box.rect.width - 28
        for pill in box.before:
            pill.rect = Rect(inset, at, width, PILL_HEIGHT)
            at += PILL_HEIGHT
        box.rect.y = at
        at += box.rect.height
        for pill in box.behind:
            pill.rect = Rect(inset, at, width, PILL_HEIGHT)
            at += PILL_HEIGHT
    ends: dict[int, float] = {}
    for index, panel in reversed(list(enumerate(program.panels))):
        if index in header_rows:
            panel.rect.y = rows[header_rows[index]][1]
            for chip in panel.chips:
                chip.rect.y += panel.rect.y - top
        panel.rect.height = ends.get(panel.column, y) - panel.rect.y
        ends[panel.column] = panel.rect.y - STACK_GAP
    program.height = y + MARGIN
    if captioned:
        program.height = _place_legend(program, y + MARGIN) + MARGIN
    return rows


def _place_legend(program: DrawnProgram, top: float) -> float:
    """Place the legend below the panels, in as many lines as it needs; return its lower edge."""
    x, y = MARGIN, top
    for sample in program.legend:
        sign = SIGN_WIDTHS[sample.sign]
        width = sign + SIGN_GAP * bool(sign) + text.width_of(sample.label, LEGEND_SIZE)
        if x > MARGIN and x + width > program.width - MARGIN:
            x, y = MARGIN, y + LEGEND_LINE
        sample.rect = Rect(x, y, width, LEGEND_LINE)
        x += width + LEGEND_GAP
    return y + LEGEND_LINE


def _chips(panel: Panel) -> Sequence[Chip]:
    """Return the slots of a panel that is placed, wrapped."""
    chips: list[Chip] = []
    left, room = panel.rect.x + 16, panel.rect.width - 32
    x, y = left, panel.rect.y + HEADER_TITLE
    for binding in panel.slots:
        name = binding.type_name.rpartition(".")[2]
        label = text.fit(f"{binding.slot} · {name}", CHIP_SIZE, room - 26)
        width = text.width_of(label, CHIP_SIZE) + 26
        if x > left and x + width > left + room:
            x, y = left, y + CHIP_HEIGHT + CHIP_GAP
        chips.append(Chip(Rect(x, y, width, CHIP_HEIGHT), label, binding.role))
        x += width + CHIP_GAP
    return chips


def _draw_lines(
    program: DrawnProgram,
    columns: Sequence[placing.Columns],
    gutters: dict[int, tuple[float, float]],
    rows: Sequence[tuple[float, float, float]],
) -> None:
    through: dict[Edge, list[Point]] = {}
    for panel, column in zip(program.panels, columns, strict=True):
        offset = panel.rect.x + (panel.rect.width - column.width) / 2
        for edge, points in zip(panel.edges, column.points, strict=True):
            through[edge] = [(row, x + offset) for row, x in points]
    leaves, enters = _ports(program, through, gutters)
    for edge, between in through.items():
        x = leaves[edge]
        drawn = [(x, _bottom(edge.source)), (x, rows[edge.source.row][2])]
        for row, x in between:
            drawn += [(x, rows[int(row)][1]), (x, rows[int(row)][2])]
        edge.points = (*drawn, (enters[edge], _top(edge.target)))
    used: Counter[int] = Counter()
    lanes = _lanes(program)
    last_lane: dict[int, int] = {}
    for wire, lane in lanes.items():
        gutter = _gutter_of(program, wire)
        last_lane[gutter] = max(last_lane.get(gutter, 0), lane)
    labels: dict[int, list[float]] = {}

    def track(gap: int) -> float:
        used[gap] += 1
        return rows[gap][0] + ROW_GAP / 2 - TRACK / 2 + TRACK * used[gap]

    for wire in program.wires:
        gutter = _gutter_of(program, wire)
        left, width = gutters[gutter]
        middle = left + width / 2
        x = middle + TRACK * (lanes[wire] - last_lane[gutter] / 2)
        upper, lower = _gaps_of(wire)
        first = track(upper)
        second = first if lower == upper else track(lower)
        wire.points = (
            *((leaves[wire], _bottom(wire.source)), (leaves[wire], first), (x, first)),
            *((x, second), (enters[wire], second), (enters[wire], _top(wire.target))),
        )
        y = _free((first + second) / 2, labels.setdefault(gutter, []))
        wide = _label_width(wire)
        wire.place = Rect(middle - wide / 2, y - LABEL_HEIGHT / 2, wide, LABEL_HEIGHT)


def _ports(
    program: DrawnProgram,
    through: dict[Edge, list[Point]],
    gutters: dict[int, tuple[float, float]],
) -> tuple[dict[Edge | DrawnWire, float], dict[Edge | DrawnWire, float]]:
    """Return the x at which each edge or wire leaves its source, and enters its target."""
    leaving: dict[Box, list[tuple[float, Edge | DrawnWire]]] = {}
    entering: dict[Box, list[tuple[float, Edge | DrawnWire]]] = {}
    for edge, between in through.items():
        towards = between[0][1] if between else edge.target.rect.centre
        back = between[-1][1] if between else edge.source.rect.centre
        leaving.setdefault(edge.source, []).append((towards, edge))
        entering.setdefault(edge.target, []).append((back, edge))
    for wire in program.wires:
        x = gutters[_gutter_of(program, wire)][0]
        leaving.setdefault(wire.source, []).append((x, wire))
        entering.setdefault(wire.target, []).append((x, wire))
    ends_at: tuple[dict[Edge | DrawnWire, float], dict[Edge | DrawnWire, float]] = ({}, {})
    for meetings, at in zip((leaving, entering), ends_at, strict=True):
        for box, lines in meetings.items():
            lines.sort(key=lambda line: line[0])
            step = min(PORT_SPACING, (box.rect.width - 2 * PORT_SPACING) / max(1, len(lines) - 1))
            start = box.rect.centre - step * (len(lines) - 1) / 2
            at.update((line, start + step * index) for index, (_, line) in enumerate(lines))
    return ends_at


def _bottom(box: Box) -> float:
    return box.rect.bottom + PILL_HEIGHT * len(box.behind)


def _top(box: Box) -> float:
    return box.rect.y - PILL_HEIGHT * len(box.before)


def _label_width(wire: DrawnWire) -> float:
    return min(MAX_LABEL_WIDTH, text.width_of(wire.label, LABEL_SIZE) + 2 * LABEL_PADDING)


def _free(wanted: float, taken: list[float]) -> float:
    """Return the y nearest to the wanted one at which a label covers no other of the gutter."""
    step = LABEL_HEIGHT + 3
    candidates = [wanted, *(t + step for t in taken), *(t - step for t in taken)]
    free = [y for y in candidates if all(abs(y - t) >= step - 0.01 for t in taken)]
    y = min(free, key=lambda candidate: (abs(candidate - wanted), candidate))
    taken.append(y)
    return y
