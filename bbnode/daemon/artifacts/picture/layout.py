"""The picture's geometry: panels side by side, rows below each other, wires around boxes.

Rule: data flows down in curves between rows. A wire leaves its op below, runs level in the gap
between two rows, down in the gutter beside a panel, level again, and enters its receiver from
above; each wire has a track of its own in every gap and gutter, so no two run on one line.
"""

from __future__ import annotations

from collections.abc import Sequence

from bbnode.daemon.artifacts.picture import columns, rows, text
from bbnode.daemon.artifacts.picture.geometry import (
    Chip,
    Layout,
    PlacedBox,
    PlacedEdge,
    PlacedPanel,
    PlacedWire,
    Rect,
)
from bbnode.daemon.artifacts.picture.program import Box, Panel, Program, Wire

MARGIN = 24.0
TITLE_HEIGHT = 62.0
BOX_WIDTH = 212.0
TITLE_LINE = 20.0
LINE = 14.0
BOX_PADDING = 8.0
PILL_HEIGHT = 17.0
ROW_GAP = 34.0
TRACK = 11.0
PANEL_PADDING = 26.0
MIN_PANEL_WIDTH = 300.0
HEADER_TITLE = 54.0
CHIP_HEIGHT = 20.0
CHIP_GAP = 6.0
CHIP_SIZE = 11.0
LABEL_SIZE = 11.0
LABEL_HEIGHT = 19.0
LABEL_PADDING = 9.0
EMPTY_GUTTER = 36.0
PORT_SPACING = 22.0
LEGEND_HEIGHT = 44.0
MIN_PICTURE_WIDTH = 900.0  # the legend's


def lay_out(program: Program) -> Layout:
    """Place everything."""
    return _Layout(program).result()


def box_width(box: Box) -> float:
    """Width of a box: ports are pills as wide as their name."""
    if box.kind in ("input", "output"):
        longest = max(text.width_of(t, 12, bold=True) for t in (box.title, *box.lines))
        return min(BOX_WIDTH, max(70.0, longest + 30))
    return BOX_WIDTH


def box_height(box: Box) -> float:
    """Height of the op itself, without its gates."""
    lines = max(len(box.lines), 1 if box.deadline else 0)
    return 2 * BOX_PADDING + TITLE_LINE - 4 + LINE * lines


class _Layout:
    """All boxes of all panels are numbered through; `_first[p]` is the first of panel p."""

    def __init__(self, program: Program) -> None:
        self._program = program
        panels = program.panels
        self._first = [0]
        for panel in panels:
            self._first.append(self._first[-1] + len(panel.boxes))
        self._boxes = [box for panel in panels for box in panel.boxes]
        self._widths = [box_width(box) for box in self._boxes]
        self._wires = [(self._at(w.source), self._at(w.target)) for w in program.wires]
        local = [
            [(self._first[p] + e.source, self._first[p] + e.target) for e in panel.edges]
            for p, panel in enumerate(panels)
        ]
        every = [edge for edges in local for edge in edges] + self._wires
        self._rows = rows.rows_of(len(self._boxes), every)
        self._edges = [
            self._shown(panel, edges, every) for panel, edges in zip(panels, local, strict=True)
        ]
        self._gutter_of = [self._gutter(wire) for wire in program.wires]
        self._columns = [
            columns.place(
                range(self._first[p], self._first[p + 1]),
                self._rows,
                self._widths,
                [edge for edge, _, _ in self._edges[p]],
            )
            for p in range(len(panels))
        ]
        self._place_panels()
        self._place_rows()

    def _at(self, end: tuple[int, int]) -> int:
        return self._first[end[0]] + end[1]

    def _shown(
        self, panel: Panel, edges: list[tuple[int, int]], every: list[tuple[int, int]]
    ) -> list[tuple[tuple[int, int], str, str]]:
        """Edges to draw: those for the order only where nothing else implies them."""
        named = list(zip(edges, panel.edges, strict=True))
        optional = {ends for ends, edge in named if edge.kind != "data"}
        kept = rows.without_implied(self._rows, every, optional) if optional else set()
        return [
            (ends, edge.kind, edge.label)
            for ends, edge in named
            if self._rows[ends[0]] < self._rows[ends[1]] and (edge.kind == "data" or ends in kept)
        ]

    def _gutter(self, wire: Wire) -> int:
        """Gutter g lies right of panel g; gutter -1 is left of the first."""
        source, target = wire.source[0], wire.target[0]
        return source - 1 if target < source else source

    # --- panels, left to right -----------------------------------------------------------

    def _place_panels(self) -> None:
        self._left: list[float] = []
        self._panel_width: list[float] = []
        self._gutter_left: dict[int, float] = {}
        self._gutter_width: dict[int, float] = {}
        x = MARGIN
        for p, panel in enumerate(self._program.panels):
            header = max(
                text.width_of(panel.title, 18, bold=True), text.width_of(panel.subtitle, 11)
            )
            width = max(MIN_PANEL_WIDTH, header + 150, self._columns[p].width + 2 * PANEL_PADDING)
            self._left.append(x)
            self._panel_width.append(width)
            x += width
            self._gutter_left[p] = x
            self._gutter_width[p] = self._width_of_gutter(p)
            last = p == len(self._program.panels) - 1
            x += self._gutter_width[p] if not last or self._wires_in(p) else 0.0
        self._total_width = x + MARGIN

    def _wires_in(self, gutter: int) -> list[int]:
        return [w for w, g in enumerate(self._gutter_of) if g == gutter]

    def _width_of_gutter(self, gutter: int) -> float:
        wires = self._wires_in(gutter)
        if not wires:
            return EMPTY_GUTTER
        labels = max(_label_width(self._program.wires[w]) for w in wires)
        return max(EMPTY_GUTTER, labels + 24, TRACK * (len(wires) + 3))

    # --- rows, top to bottom -------------------------------------------------------------

    def _place_rows(self) -> None:
        self._chips = [self._chips_of(p) for p in range(len(self._program.panels))]
        heights = [
            max((c.rect.y + c.rect.height for c in chips), default=HEADER_TITLE - CHIP_GAP)
            for chips in self._chips
        ]
        self._header = max(heights, default=HEADER_TITLE) + 12
        count = max(self._rows, default=-1) + 1
        row_height = [0.0] * count
        for box, row in zip(self._boxes, self._rows, strict=True):
            pills = PILL_HEIGHT * (len(box.before) + len(box.behind))
            row_height[row] = max(row_height[row], box_height(box) + pills)
        tracks = [0] * (count + 1)  # in the gap above each row
        for source, target in self._wires:
            tracks[self._rows[source] + 1] += 1
            tracks[self._rows[target]] += 1
        self._gap_top: list[float] = []
        self._row_top: list[float] = []
        y = MARGIN + TITLE_HEIGHT + self._header
        for row in range(count + 1):
            self._gap_top.append(y)
            y += ROW_GAP + TRACK * tracks[row]
            self._row_top.append(y)
            if row < count:
                y += row_height[row]
        self._row_bottom = [top + h for top, h in zip(self._row_top, row_height, strict=False)]
        self._panel_bottom = y
        self._tracks_used = [0] * (count + 1)

    def _chips_of(self, p: int) -> list[Chip]:
        """Slots of a panel, wrapped; y counts from the panel's top."""
        chips: list[Chip] = []
        left, room = self._left[p] + 16, self._panel_width[p] - 32
        x, y = left, HEADER_TITLE
        for binding in self._program.panels[p].slots:
            name = binding.type_name.rpartition(".")[2]
            label = text.fit(f"{binding.slot} · {name}", CHIP_SIZE, room - 26)
            width = text.width_of(label, CHIP_SIZE) + 26
            if x > left and x + width > left + room:
                x, y = left, y + CHIP_HEIGHT + CHIP_GAP
            chips.append(Chip(Rect(x, y, width, CHIP_HEIGHT), label, binding.role))
            x += width + CHIP_GAP
        return chips

    # --- the parts -----------------------------------------------------------------------

    def result(self) -> Layout:
        self._rects = [self._rect_of(i) for i in range(len(self._boxes))]
        ports = self._ports()
        panels = tuple(self._placed_panel(p, ports) for p in range(len(self._program.panels)))
        wires = self._placed_wires(ports)
        height = self._panel_bottom + MARGIN + LEGEND_HEIGHT
        return Layout(max(self._total_width, MIN_PICTURE_WIDTH), height, panels, wires)

    def _panel_of(self, box: int) -> int:
        return next(p for p in range(len(self._first) - 1) if box < self._first[p + 1])

    def _rect_of(self, index: int) -> Rect:
        box, row = self._boxes[index], self._rows[index]
        panel = self._panel_of(index)
        spare = self._panel_width[panel] - self._columns[panel].width
        centre = self._left[panel] + spare / 2 + self._columns[panel].centres[index]
        top = self._row_top[row] + PILL_HEIGHT * len(box.before)
        return Rect(centre - self._widths[index] / 2, top, self._widths[index], box_height(box))

    def _ports(self) -> dict[tuple[str, int, bool], float]:
        """x where an edge or wire meets a box: (kind, its number, whether it leaves the box)."""
        ends: dict[tuple[int, bool], list[tuple[float, tuple[str, int, bool]]]] = {}
        number = 0
        for p, edges in enumerate(self._edges):
            offset = self._left[p] + (self._panel_width[p] - self._columns[p].width) / 2
            for at, ((source, target), _, _) in enumerate(edges):
                points = self._columns[p].points[at]
                towards = points[0][1] + offset if points else _centre(self._rects[target])
                back = points[-1][1] + offset if points else _centre(self._rects[source])
                ends.setdefault((source, True), []).append((towards, ("edge", number, True)))
                ends.setdefault((target, False), []).append((back, ("edge", number, False)))
                number += 1
        for w, (source, target) in enumerate(self._wires):
            gutter = self._gutter_left[self._gutter_of[w]]
            ends.setdefault((source, True), []).append((gutter, ("wire", w, True)))
            ends.setdefault((target, False), []).append((gutter, ("wire", w, False)))
        found: dict[tuple[str, int, bool], float] = {}
        for (box, _), meeting in ends.items():
            meeting.sort()
            rect = self._rects[box]
            room = rect.width - 2 * PORT_SPACING
            step = min(PORT_SPACING, room / max(1, len(meeting) - 1))
            start = _centre(rect) - step * (len(meeting) - 1) / 2
            for at, (_, key) in enumerate(meeting):
                found[key] = start + step * at
        return found

    def _placed_panel(self, p: int, ports: dict[tuple[str, int, bool], float]) -> PlacedPanel:
        top = MARGIN + TITLE_HEIGHT
        rect = Rect(self._left[p], top, self._panel_width[p], self._panel_bottom - top)
        boxes = range(self._first[p], self._first[p + 1])
        chips = tuple(
            Chip(Rect(c.rect.x, c.rect.y + top, c.rect.width, c.rect.height), c.label, c.role)
            for c in self._chips[p]
        )
        number = sum(len(edges) for edges in self._edges[:p])
        offset = self._left[p] + (self._panel_width[p] - self._columns[p].width) / 2
        edges = []
        for at, ((source, target), kind, label) in enumerate(self._edges[p]):
            through = [(row, x + offset) for row, x in self._columns[p].points[at]]
            points = self._edge_points(source, target, through, number + at, ports)
            ends = (self._boxes[source].key, self._boxes[target].key)
            edges.append(PlacedEdge(kind, label, *ends, points))
        return PlacedPanel(
            panel=self._program.panels[p],
            rect=rect,
            header_height=self._header,
            chips=chips,
            boxes=tuple(self._placed_box(i) for i in boxes),
            edges=tuple(edges),
        )

    def _placed_box(self, index: int) -> PlacedBox:
        box, rect = self._boxes[index], self._rects[index]
        top = rect.y - PILL_HEIGHT * len(box.before)
        bottom = rect.y + rect.height
        inset, width = rect.x + 14, rect.width - 28
        return PlacedBox(
            box,
            rect,
            tuple(
                Rect(inset, top + PILL_HEIGHT * i, width, PILL_HEIGHT)
                for i in range(len(box.before))
            ),
            tuple(
                Rect(inset, bottom + PILL_HEIGHT * i, width, PILL_HEIGHT)
                for i in range(len(box.behind))
            ),
        )

    def _edge_points(
        self,
        source: int,
        target: int,
        through: Sequence[tuple[int, float]],
        number: int,
        ports: dict[tuple[str, int, bool], float],
    ) -> tuple[tuple[float, float], ...]:
        x = ports["edge", number, True]
        points = [(x, self._bottom_of(source)), (x, self._row_bottom[self._rows[source]])]
        for row, x in through:
            points += [(x, self._row_top[row]), (x, self._row_bottom[row])]
        points.append((ports["edge", number, False], self._top_of(target)))
        return tuple(points)

    def _bottom_of(self, index: int) -> float:
        rect, box = self._rects[index], self._boxes[index]
        return rect.y + rect.height + PILL_HEIGHT * len(box.behind)

    def _top_of(self, index: int) -> float:
        return self._rects[index].y - PILL_HEIGHT * len(self._boxes[index].before)

    # --- wires ---------------------------------------------------------------------------

    def _placed_wires(self, ports: dict[tuple[str, int, bool], float]) -> tuple[PlacedWire, ...]:
        placed = []
        taken: dict[int, list[float]] = {}
        lanes: dict[int, int] = {}
        for w, wire in enumerate(self._program.wires):
            source, target = self._wires[w]
            gutter = self._gutter_of[w]
            count = len(self._wires_in(gutter))
            lane = lanes[gutter] = lanes.get(gutter, -1) + 1
            middle = self._gutter_left[gutter] + self._gutter_width[gutter] / 2
            x = middle + TRACK * (lane - (count - 1) / 2)
            first = self._track(self._rows[source] + 1)
            second = self._track(self._rows[target])
            leaves, enters = ports["wire", w, True], ports["wire", w, False]
            points = (
                (leaves, self._bottom_of(source)),
                (leaves, first),
                (x, first),
                (x, second),
                (enters, second),
                (enters, self._top_of(target)),
            )
            width = _label_width(wire)
            y = _free((first + second) / 2, taken.setdefault(gutter, []))
            label = Rect(middle - width / 2, y - LABEL_HEIGHT / 2, width, LABEL_HEIGHT)
            ends = (self._boxes[source].key, self._boxes[target].key)
            placed.append(PlacedWire(wire, points, label, *ends))
        return tuple(placed)

    def _track(self, gap: int) -> float:
        self._tracks_used[gap] += 1
        return self._gap_top[gap] + ROW_GAP / 2 - TRACK / 2 + TRACK * self._tracks_used[gap]


def _label_width(wire: Wire) -> float:
    return text.width_of(wire.label, LABEL_SIZE) + 2 * LABEL_PADDING


def _centre(rect: Rect) -> float:
    return rect.x + rect.width / 2


def _free(wanted: float, taken: list[float]) -> float:
    """The y nearest to the wanted one at which a label covers no other of the gutter."""
    step = LABEL_HEIGHT + 3
    candidates = [wanted, *(t + step for t in taken), *(t - step for t in taken)]
    free = [y for y in candidates if all(abs(y - t) >= step - 0.01 for t in taken)]
    y = min(free, key=lambda candidate: (abs(candidate - wanted), candidate))
    taken.append(y)
    return y
