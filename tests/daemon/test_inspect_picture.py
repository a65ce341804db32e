"""The picture: all of the program is in it, nothing covers anything, nothing leaves its place."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from functools import cache
from html import unescape
from itertools import combinations, pairwise

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.daemon.artifacts.picture import PictureTooLarge, content, to_html, to_svg
from bbnode.daemon.artifacts.picture.content import Box, DrawnProgram, Panel, Rect, read
from bbnode.daemon.artifacts.picture.layout import lay_out
from bbnode.daemon.artifacts.picture.placing import (
    GAP,
    Stacking,
    parts_of,
    place,
    rows_of,
    without_implied,
)
from bbnode.daemon.artifacts.picture.svg import DARK
from bbnode.daemon.artifacts.picture.text import clean, duration, fit, width_of
from bbnode.examples.multi_target import compile_program
from bbnode.ir import keys
from bbnode.ir.graph import Function, Program
from bbnode.ir.onnx_file import model_of, program_of
from tests.daemon.views import federated, relay, scaffold, store

MODELS = {
    "federated": lambda: federated()[0],
    "relay": relay,
    "retrieval": cache(compile_program),
    "scaffold": scaffold,
    "store": store,
}


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> onnx.ModelProto:
    return MODELS[request.param]()


@pytest.fixture
def graph(model: onnx.ModelProto) -> Program:
    return program_of(model)


@pytest.fixture
def placed(graph: Program) -> DrawnProgram:
    return lay_out(read(graph))


def mains(program: Program) -> list[Function]:
    """The partitions, in the order of the picture."""
    found = [f for f in program.functions if keys.TARGET_KEY in f.metadata]
    classes = ["server", "client", "coordinator", "worker", "relay", "door", "encoder", "store"]
    return sorted(found, key=lambda main: classes.index(main.metadata[keys.HOME_KEY]))


def covers(a: Rect, b: Rect) -> bool:
    return (
        a.x < b.x + b.width
        and b.x < a.x + a.width
        and a.y < b.y + b.height
        and b.y < a.y + a.height
    )


def whole(box: Box) -> Rect:
    """The box with its gates."""
    top = box.before[0].rect.y if box.before else box.rect.y
    bottom = max(r.bottom for r in (box.rect, *(pill.rect for pill in box.behind)))
    return Rect(box.rect.x, top, box.rect.width, bottom - top)


# --- content -------------------------------------------------------------------------------


def test_every_op_is_a_box_or_on_one(graph: Program) -> None:
    found = read(graph, fold=False)
    panels = [panel for panel in found.panels if "bootstrap" not in panel.subtitle]
    assert [panel.ops for panel in panels] == [len(main.nodes) for main in mains(graph)]
    for panel, main in zip(panels, mains(graph), strict=True):
        numbers = {box.number for box in panel.boxes}
        for index, node in enumerate(main.nodes):
            on_another = node.op_type in keys.GATE_OPS or node.op_type == keys.OP_DEADLINE_CHECK
            assert (index + 1 in numbers) != on_another
        gates = [pill.label for box in panel.boxes for pill in (*box.before, *box.behind)]
        assert sorted(gates) == sorted(n.op_type for n in main.nodes if n.op_type in keys.GATE_OPS)
        # A deadline that nobody gave is none to show: it is a limit of the node.
        checks = sum(
            n.op_type == keys.OP_DEADLINE_CHECK
            and n.metadata.get(keys.DEADLINE_FROM_KEY) != keys.DEADLINE_FROM_NOBODY
            for n in main.nodes
        )
        assert sum(bool(box.deadline) for box in panel.boxes) == checks


def test_boxes_say_slot_component_and_settings() -> None:
    server, client = read(program_of(federated()[0])).panels
    train = next(box for box in client.boxes if box.title == "Train")
    assert train.lines == ("local · OnnxModel", "epochs=5, batch=32")
    assert (train.role, train.deadline) == ("Model", "10 s")  # of the request
    recv = next(box for box in client.boxes if box.title == "RecvReq")
    assert recv.lines == ("round ← server",)
    assert [pill.label for pill in recv.behind] == [
        "DedupGateRx", "PeerHealthGateRx", "BackoffGateRx",
    ]  # fmt: skip
    graph = next(box for box in server.boxes if box.kind == "backend")
    assert graph.lines == ("compute · OrtBackend", "ArgMax, Equal, Cast, ReduceMean")
    assert {box.title for box in server.boxes if box.kind == "output"} == {
        "accuracy", "loss", "stats", "model",
    }  # fmt: skip
    assert [slot.slot for slot in server.slots][:3] == ["cohort", "global", "fedavg"]


def test_wires_join_the_ops_that_talk() -> None:
    found = read(program_of(relay()))
    classes = [panel.title for panel in found.panels]
    ends = {wire.label: tuple(classes[p] for p in wire.panels) for wire in found.wires}
    assert ends == {
        "weights · Tensor.FLOAT": ("coordinator", "worker"),
        "gossip · Tensor.FLOAT": ("worker", "worker"),
        "update · Composite": ("worker", "relay"),
        "n · Metadata": ("worker", "relay"),
        "mean · Tensor.FLOAT": ("relay", "coordinator"),
    }
    for wire in found.wires:
        assert (wire.source.title, wire.target.title) == ("Send", "Recv")
        assert wire.source in found.panels[wire.panels[0]].boxes
        assert wire.target in found.panels[wire.panels[1]].boxes


def test_a_program_that_nobody_could_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MAX_BOXES", 36)
    with pytest.raises(PictureTooLarge, match=r"37 ops.*at most 36"):
        to_svg(federated()[0])


def test_edges_that_nobody_could_follow_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MAX_PASSED_ROWS", 20)
    with pytest.raises(PictureTooLarge, match=r"edges that pass \d+ rows.*at most 20"):
        to_html(federated()[0])


def test_the_home_class_is_leftmost_then_those_that_it_reaches(placed: DrawnProgram) -> None:
    classes = [panel.peer_class for panel in placed.panels]
    assert classes in (
        ["server", "client"],
        ["coordinator", "worker", "relay"],
        ["door", "encoder", "store"],
        ["store", "store"],
    )
    lefts = [panel.rect.x for panel in placed.panels]
    assert lefts == sorted(lefts)


@pytest.mark.parametrize("said", [None, "", "{", "[]", "[" * 9999, '{"metadata":{}}'])
def test_without_a_known_home_the_class_with_inputs_is_leftmost(said: str | None) -> None:
    program = program_of(federated()[0])
    for key in [key for key in program.metadata if key.startswith(keys.RECORDED_KEY)]:
        del program.metadata[key]
    if said is not None:
        program.metadata[keys.RECORDED_KEY] = said
    assert [panel.title for panel in read(program).panels] == ["server", "client"]


def test_the_legend_names_every_sign_of_the_picture_and_no_other(placed: DrawnProgram) -> None:
    samples = {(each.sign, each.name): each.label for each in placed.legend}
    boxes = [box for panel in placed.panels for box in panel.boxes]
    assert {box.role for box in boxes if box.role} <= {name for _, name in samples}
    for box in boxes:
        if not box.role:
            kind = "input" if box.is_port else box.kind
            assert ("box", kind) in samples or kind == "backend"
    lines = {edge.kind for panel in placed.panels for edge in panel.edges}
    lines |= {"wire"} if placed.wires else set()
    assert {name for sign, name in samples if sign == "line"} >= lines
    assert ("gate" in samples.values()) == any(box.before or box.behind for box in boxes)
    assert len({each.label for each in placed.legend}) == len(placed.legend)


def values_in(panel: Panel) -> dict[str, str]:
    """The line of constants in each box that has one, by the box's title."""
    return {
        box.title: line for box in panel.boxes for line in box.lines if line.startswith("constant")
    }


def test_constants_are_lines_in_the_boxes_of_their_readers() -> None:
    program = program_of(scaffold())
    folded, whole = read(program), read(program, fold=False)
    assert len(folded.folded) == 8
    assert values_in(folded.panels[0])["Slice"] == "constants [15], [30]"
    assert not values_in(whole.panels[0])
    for few, every in zip(folded.panels, whole.panels, strict=True):
        assert few.ops == every.ops
        gone = {box.key for box in every.boxes} - {box.key for box in few.boxes}
        assert gone == {key for key in folded.folded if key in gone}
        # Those that wait for something are a step of the program, and stay.
        left = [box for box in few.boxes if box.title == "Constant"]
        assert all(any(edge.target is box for edge in few.edges) for box in left)
        assert all(edge.source.key not in gone for edge in few.edges)
    boxes = {box.key for panel in folded.panels for box in panel.boxes}
    for key, readers in folded.folded.items():
        assert folded.details[key]["op"] == "Constant"
        assert readers
        assert set(readers) <= boxes
    assert whole.folded == {}
    assert whole.details == folded.details


def test_a_constant_that_no_op_reads_or_that_is_malformed_is_drawn_or_shown_by_its_shape() -> None:
    def constant(name: str, tensor: onnx.TensorProto) -> onnx.NodeProto:
        return onnx.helper.make_node("Constant", [], [name], name=name, value=tensor)

    def tensor(dims: list[int], raw: bytes) -> onnx.TensorProto:
        return onnx.TensorProto(data_type=onnx.TensorProto.INT64, dims=dims, raw_data=raw)

    model = federated()[0]
    model = onnx.ModelProto.FromString(model.SerializeToString())
    (main,) = (f for f in model.functions if any(m.value == "client" for m in f.metadata_props))
    read_by = onnx.helper.make_node("Bundle", ["a", "b", "c"], ["all"], name="all")
    read_by.domain = keys.COMPOSITE_DOMAIN
    main.node.extend(
        (
            constant("a", tensor([2], np.array([4, 2]).tobytes())),
            constant("b", tensor([2], b"short")),
            constant("c", tensor([9], np.arange(9).tobytes())),
            constant("lone", tensor([], np.array(7).tobytes())),
            constant("out", tensor([], np.array(7).tobytes())),
            read_by,
        )
    )
    main.output.append("out")
    found = read(program_of(model))
    (panel,) = (each for each in found.panels if each.title == "client")
    (box,) = (each for each in panel.boxes if found.details.get(each.key, {}).get("name") == "all")
    assert box.lines[-1] == "constants [4, 2], int64[2], int64[9]"
    assert [each.title for each in panel.boxes if each.title == "Constant"] == ["Constant"] * 2


# --- layout --------------------------------------------------------------------------------


def test_no_box_covers_another_and_all_are_inside_of_their_panel(placed: DrawnProgram) -> None:
    for panel in placed.panels:
        boxes = [whole(box) for box in panel.boxes]
        assert not any(covers(a, b) for a, b in combinations(boxes, 2))
        for box in boxes:
            assert panel.rect.x < box.x
            assert box.x + box.width < panel.rect.x + panel.rect.width
            assert panel.rect.y + panel.header_height < box.y
            assert box.y + box.height < panel.rect.y + panel.rect.height
        chips = [chip.rect for chip in panel.chips]
        assert not any(covers(a, b) for a, b in combinations(chips, 2))
        assert all(c.x + c.width <= panel.rect.x + panel.rect.width for c in chips)
    assert not any(covers(a.rect, b.rect) for a, b in combinations(placed.panels, 2))
    right = max(p.rect.x + p.rect.width for p in placed.panels)
    assert right < placed.width


def test_the_legend_stands_below_the_panels_in_the_picture(placed: DrawnProgram) -> None:
    places = [sample.rect for sample in placed.legend]
    lowest = max(panel.rect.bottom for panel in placed.panels)
    assert not any(covers(a, b) for a, b in combinations(places, 2))
    assert min(each.y for each in places) >= lowest
    assert max(each.x + each.width for each in places) <= placed.width
    assert max(each.bottom for each in places) <= placed.height


def test_lines_lead_down_and_run_below_no_box(placed: DrawnProgram) -> None:
    for panel in placed.panels:
        where = {box: whole(box) for box in panel.boxes}
        for edge in panel.edges:
            heights = [y for _, y in edge.points]
            assert heights == sorted(heights)
            source, target = where[edge.source], where[edge.target]
            assert heights[0] == pytest.approx(source.y + source.height)
            assert heights[-1] == pytest.approx(target.y)
            for (x0, y0), (x1, y1) in pairwise(edge.points):
                if x0 == x1:  # upright, past a row; curves are in the gaps
                    line = Rect(x0 - 1, y0 + 0.1, 2, y1 - y0 - 0.2)
                    assert not any(covers(line, box) for box in where.values())


def test_wires_run_around_boxes_and_share_no_track(placed: DrawnProgram) -> None:
    boxes = [whole(box) for panel in placed.panels for box in panel.boxes]
    level: list[tuple[float, float, float]] = []
    for wire in placed.wires:
        assert wire.points[0][1] < wire.points[-1][1]
        for (x0, y0), (x1, y1) in pairwise(wire.points):
            assert x0 == x1 or y0 == y1
            line = Rect(min(x0, x1), min(y0, y1) + 0.1, abs(x1 - x0), abs(y1 - y0) - 0.2)
            assert not any(covers(line, box) for box in boxes)
            if y0 == y1:
                level.append((y0, min(x0, x1), max(x0, x1)))
    for (y0, left0, right0), (y1, left1, right1) in combinations(level, 2):
        assert y0 != y1 or right0 <= left1 or right1 <= left0
    labels = [wire.place for wire in placed.wires]
    assert not any(covers(a, b) for a, b in combinations(labels, 2))
    assert not any(covers(label, panel.rect) for label in labels for panel in placed.panels)


def rows_of_panel(panel: Panel) -> tuple[int, int]:
    rows = [box.row for box in panel.boxes]
    return min(rows), max(rows)


def test_the_second_part_of_a_class_stands_below_its_first() -> None:
    partition, bootstrap = lay_out(read(program_of(store()))).panels
    assert bootstrap.subtitle == "bootstrap of store, before it is ready"
    assert (partition.rect.x, partition.rect.width) == (bootstrap.rect.x, bootstrap.rect.width)
    assert bootstrap.rect.y > partition.rect.bottom
    assert rows_of_panel(bootstrap)[0] > rows_of_panel(partition)[1]
    # Two deliveries of one class: no wider than the wider one, and one below the other.
    client = lay_out(read(program_of(scaffold()))).panels[1]
    places = {box.lines[0]: whole(box) for box in client.boxes if box.title.startswith("Recv")}
    first, second = places["round ← server"], places["taken ← server"]
    assert second.y > max(whole(box).bottom for box in client.boxes if box.title == "SendResp")
    assert abs(first.centre - second.centre) < client.rect.width / 2
    for panel in lay_out(read(program_of(compile_program()))).panels:
        index = {box: number for number, box in enumerate(panel.boxes)}
        edges = [(index[edge.source], index[edge.target]) for edge in panel.edges]
        parts = parts_of(range(len(index)), edges)
        assert len(parts) > 1
        heights = sorted(
            (min(panel.boxes[b].row for b in part), max(panel.boxes[b].row for b in part))
            for part in parts
        )
        assert all(upper[1] < lower[0] for upper, lower in pairwise(heights))


def test_panels_of_a_class_that_send_back_stand_side_by_side() -> None:
    found = read(program_of(federated()[0]))
    for panel in found.panels:
        panel.peer_class = "both"
    assert [panel.column for panel in lay_out(found).panels] == [0, 1]


edges_of = st.integers(1, 14).flatmap(
    lambda count: st.tuples(
        st.just(count),
        st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=30),
    )
)


@given(edges_of)
def test_rows_lead_down_but_for_edges_that_close_a_ring(drawn) -> None:
    count, edges = drawn
    rows = rows_of(count, edges)
    forward = [(s, t) for s, t in edges if s < t]
    assert all(rows[s] < rows[t] for s, t in forward if set(edges) == set(forward))
    assert len(rows) == count
    assert min(rows) >= 0


@given(edges_of, st.lists(st.integers(0, 3), min_size=14, max_size=14))
def test_stacked_groups_share_no_row_unless_a_path_leads_back(drawn, groups) -> None:
    count, edges = drawn
    members = [[box for box in range(count) if groups[box] == group] for group in range(4)]
    members = [group for group in members if group]
    plain = rows_of(count, edges)
    forward = [(s, t) for s, t in edges if plain[s] < plain[t]]
    stacking = Stacking(count, forward)
    upper, *others = members
    put = [lower for lower in others[:1] if not stacking.leads_back(lower, upper)]
    for lower in put:
        between = stacking.put_below(upper, lower)
        rows = stacking.rows()
        assert max(rows[b] for b in upper) < rows[between] < min(rows[b] for b in lower)
    stacking.stack(members)
    rows = stacking.rows()
    assert all(rows[s] < rows[t] for s, t in forward)
    for lower in put:
        assert max(rows[b] for b in upper) < min(rows[b] for b in lower)


@given(edges_of)
def test_columns_keep_their_distance(drawn) -> None:
    count, edges = drawn
    down = sorted({(s, t) for s, t in edges if s < t})
    rows = rows_of(count, down)
    widths = [40.0 + 10 * (box % 3) for box in range(count)]
    found = place(range(count), rows, widths, down)
    assert set(found.centres) == set(range(count))
    for a, b in combinations(range(count), 2):
        if rows[a] == rows[b]:
            apart = abs(found.centres[a] - found.centres[b])
            assert apart >= (widths[a] + widths[b]) / 2 + GAP - 1e-6
    for box, centre in found.centres.items():
        assert centre - widths[box] / 2 >= -1e-6
        assert centre + widths[box] / 2 <= found.width + 1e-6
    for (source, target), points in zip(down, found.points, strict=True):
        assert [row for row, _ in points] == list(range(rows[source] + 1, rows[target]))


def test_an_edge_that_others_imply_is_not_drawn() -> None:
    rows = [0, 1, 2, 1]
    edges = [(0, 1), (1, 2), (0, 2), (0, 3)]
    assert without_implied(rows, edges, {(0, 2), (0, 3)}) == {(0, 3)}


def test_a_straight_chain_is_drawn_straight() -> None:
    found = place(range(4), [0, 1, 2, 3], [50.0] * 4, [(0, 1), (1, 2), (2, 3)])
    assert len(set(found.centres.values())) == 1


# --- text ----------------------------------------------------------------------------------


def test_svg_is_well_formed_and_the_same_each_time(model: onnx.ModelProto) -> None:
    drawn = to_svg(model)
    assert drawn == to_svg(model)
    root = ET.fromstring(drawn)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = " ".join(root.itertext())
    for panel in read(program_of(model)).panels:
        assert panel.subtitle in texts


def legend_of(page: str) -> list[str]:
    (section,) = re.findall(r'<section id="legend">(.*?)</section>', page, re.DOTALL)
    rows = ET.fromstring(f"<section>{section}</section>").find("div")
    assert rows is not None
    return [span.text for span in rows.findall("span") if span.text]


def test_the_picture_opens_whole_with_its_legend(model: onnx.ModelProto) -> None:
    drawn = to_svg(model)
    (head,) = re.findall(r"<svg [^>]*>", drawn)
    assert re.search(r'viewBox="0 0 [\d.]+ [\d.]+"', head)
    assert "max-width:100%;max-height:100vh" in head
    legend = ET.fromstring(drawn).find(".//*[@class='legend']")
    assert legend is not None
    assert legend_of(to_html(model)) == [each.text for each in legend if each.text]


def test_the_page_opens_at_100_percent_where_the_program_begins(model: onnx.ModelProto) -> None:
    page = to_html(model)
    assert page.rstrip().endswith("</html>")
    head, *_ = re.findall(r"<svg xmlns[^>]*>", page)
    (size,) = re.findall(
        r'width="([\d.]+)" height="([\d.]+)" viewBox="0 0 ([\d.]+) ([\d.]+)"', head
    )
    assert size[:2] == size[2:]
    assert ">100 %</button>" in page
    (script,) = re.findall(r"<script>\n(.*?)</script>", page, re.DOTALL)
    opening = script[script.index("const open = ") : script.index("const draw = ")]
    assert opening.startswith("const open = () => {\n    rescale(1);\n    view.scrollTop = 0;")
    # The last thing that it does; a resize does it again until somebody moves it.
    assert script.rstrip().endswith("open();\n  view.focus({ preventScroll: true });\n})();")
    assert "if (untouched) open();" in script
    # Neither title nor legend takes room in the picture: the page around it has both.
    picture = page[page.index("<svg xmlns") : page.index("</svg>")]
    assert 'class="legend"' not in picture
    (top,) = {float(y) for y in re.findall(r'class="panel"[^>]* y="([\d.]+)"', picture)[:1]}
    assert top < 30


def test_text_is_readable_where_it_opens_on_light_and_dark(model: onnx.ModelProto) -> None:
    for drawn in (to_svg(model), to_html(model)):
        sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)"', drawn)]
        assert min(sizes) >= 12
    page = to_html(model)
    assert min(float(s) for s in re.findall(r"font(?:-size)?: (?:\d+ )?([\d.]+)px", page)) >= 12
    colours = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]+)"', page))
    assert colours <= set(DARK)
    for light, dark in DARK.items():
        assert f'svg [fill="{light}"] {{ fill: {dark}; }}' in page
    assert page.count("prefers-color-scheme: dark") == 2


def test_the_page_says_how_to_move_zoom_and_find(model: onnx.ModelProto) -> None:
    page = to_html(model)
    (footer,) = re.findall(r"<footer>(.*?)</footer>", page, re.DOTALL)
    words = " ".join(ET.fromstring(f"<p>{unescape(footer)}</p>").itertext())
    for word in ("scroll or drag: move", "Ctrl", "zoom", "100 %", "fit", "click an op", "find"):
        assert word in words
    (actions,) = re.findall(r"const act = \{(.*?)\};", page)
    assert set(re.findall(r'<button id="(\w+)"', page)) <= set(re.findall(r"\w+", actions))


def test_constants_are_drawn_as_boxes_on_demand() -> None:
    page = to_html(scaffold())
    assert ">Show 8 constants</button>" in page
    (spare,) = re.findall(r'<template id="unfolded">(.*?)</template>', page, re.DOTALL)
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page)
    content = json.loads(data)
    drawn, whole = page.replace(spare, ""), set(re.findall(r'data-key="([^"]+)"', spare))
    assert set(content["folded"]) <= whole
    assert set(re.findall(r'data-key="([^"]+)"', drawn)) == whole - set(content["folded"])
    assert set(content["folded"]) <= set(content["details"])
    assert set(content["folded"]) <= set(content["parts"])
    assert [len(frames) for frames in content["drawings"]] == [2, 2]
    without = to_html(relay())
    assert "<template" not in without
    assert 'id="fold"' not in without


def test_html_loads_nothing_and_holds_all_details(model: onnx.ModelProto, graph: Program) -> None:
    page = to_html(model)
    assert "default-src 'none'" in page
    addresses = set(re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"'<]*""", page))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"<(?:link|img|iframe|script[^>]* src)", page)
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page)
    content = json.loads(data)
    names = {detail["name"] for detail in content["details"].values()}
    names |= {name for detail in content["details"].values() for name in detail["guards"]}
    for function in mains(graph):
        assert {node.name for node in function.nodes} <= names
    keys_drawn = set(re.findall(r'class="box" data-key="([^"]+)"', page))
    assert set(content["details"]) <= keys_drawn
    for detail in content["details"].values():
        for value in (*detail["inputs"], *detail["outputs"], *detail["waits"]):
            assert set(value["boxes"]) <= keys_drawn


EVIL = "</script></template></style></title></svg><script>alert(1)</script>&\"'\x1b{0}{title}<!--"


@pytest.mark.parametrize("made", [lambda: federated()[0], scaffold, store])
def test_names_of_the_program_stay_text(made) -> None:
    program = program_of(made())
    plain = to_html(model_of(program))
    program.name = EVIL
    for function in program.functions:
        if keys.HOME_KEY in function.metadata:
            function.metadata[keys.HOME_KEY] += EVIL
        for node in function.nodes:
            node.name = f"{node.name}{EVIL}"
            node.source_line = node.metadata[keys.PORT_KEY] = node.metadata[EVIL] = EVIL
    model = model_of(program)
    ET.fromstring(to_svg(model))
    page = to_html(model)
    for tag in ("script", "style", "template", "title", "svg", "body"):
        for form in (f"<{tag}", f"</{tag}>"):
            if tag not in ("svg", "title"):  # one for each box and line
                assert page.count(form) == plain.count(form)
    assert "<script>alert" not in page
    assert "<!--" not in page
    assert "\x1b" not in page
    # A name makes nothing wider than the widest header and label.
    assert lay_out(read(program)).width < 2 * lay_out(read(program_of(made()))).width


def test_texts_are_cut_to_their_room() -> None:
    assert fit("short", 12, 200) == "short"
    cut = fit("a rather long name for an op", 12, 60)
    assert cut.endswith("…")
    assert width_of(cut, 12) <= 60
    assert clean("<a href='x'>\x00") == "&lt;a href=&#x27;x&#x27;&gt;�"
    assert fit("x" * 9999, 12, 60) == fit("x" * 99, 12, 60)
    assert [duration(n) for n in (40, 250_000_000, 1_500_000_000)] == ["40 ns", "250 ms", "1.5 s"]
