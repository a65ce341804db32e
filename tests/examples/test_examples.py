"""Every example runs, prints what it says, and its numbers are right.

Rule: an example is run as its reader runs it (`main`), and what it claims is checked on its
pieces, against numpy where there are numbers.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import ModelProto

import bbnode.examples
from bbnode.compiler import Compiler, target_names
from bbnode.compiler.errors import UnboundDependency, UnresolvedType
from bbnode.components import (
    ConnectedView,
    OrtBackend,
    ReferenceBackend,
    offload,
    register_component,
)
from bbnode.components.contracts import ComponentError
from bbnode.daemon.artifacts.build import compile_module
from bbnode.engine import steps
from bbnode.examples import (
    both_sides,
    bulletin,
    component_with_dependency,
    custom_index,
    custom_pass,
    gossip_averaging,
    multi_target,
    polymorphic_types,
    quickstart,
)
from bbnode.ir.peer import PeerId
from bbnode.ir.values import TRIGGER
from bbnode.sim import Network, S

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")

# Programs that `bbnode demo` and `bbnode run` run; they have no main of their own.
WITHOUT_MAIN = {"federated_digits"}


def example_names() -> list[str]:
    files = Path(bbnode.examples.__file__).parent.glob("*.py")
    return sorted(file.stem for file in files if file.stem not in {"__init__", *WITHOUT_MAIN})


def printed(capsys: pytest.CaptureFixture[str], module) -> list[str]:
    module.main()
    shown = capsys.readouterr()
    assert not shown.err
    return shown.out.splitlines()


@pytest.mark.parametrize("name", example_names())
def test_it_says_how_to_run_it_and_stands_on_the_page(name: str) -> None:
    module = importlib.import_module(f"bbnode.examples.{name}")
    command = f"python -m bbnode.examples.{name}"
    assert f"Run it with `{command}`." in module.__doc__
    assert f"| `{name}` |" in PAGE


def test_the_page_lists_no_other() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert listed == set(example_names())


@pytest.mark.parametrize("name", example_names())
def test_it_prints_the_same_each_time(name: str, capsys) -> None:
    module = importlib.import_module(f"bbnode.examples.{name}")
    first = printed(capsys, module)
    assert first
    assert printed(capsys, module) == first


def test_the_command_of_the_page_works() -> None:
    """Run as a script: `__main__` registers the component, nothing else is imported."""
    made = subprocess.run(
        [sys.executable, "-W", "error", "-m", "bbnode.examples.component_with_dependency"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (made.returncode, made.stderr) == (0, "")
    assert "travelled as" in made.stdout


# --- quickstart ----------------------------------------------------------------------------


def test_quickstart(capsys) -> None:
    cut, squares, took = printed(capsys, quickstart)
    assert re.fullmatch(r"one program, cut into: asker#[0-9a-f]{16}, worker#[0-9a-f]{16}", cut)
    assert squares == "the squares of 1, 2, 3: [1.0, 4.0, 9.0]"
    assert took == "there and back took 2 ms of virtual time"


# --- a component with a dependency ---------------------------------------------------------


def test_half_precision_is_half_as_large(capsys) -> None:
    lines = printed(capsys, component_with_dependency)
    sizes = re.fullmatch(r"(\d+) bytes of float32 travelled as (\d+) bytes", lines[0])
    assert sizes is not None
    assert int(sizes[1]) == 40_000
    assert 20_000 < int(sizes[2]) < 20_500
    error = re.fullmatch(r"largest error: (\S+)", lines[1])
    assert error is not None
    assert 0 < float(error[1]) <= np.finfo(np.float16).eps / 2


def test_the_slot_that_the_codec_depends_on_is_bound_on_both_sides() -> None:
    bound = {
        tuple(entry.key.rpartition(".binding.")[2].split(".")): entry.value.split("|")[1]
        for entry in component_with_dependency.compile_program().metadata_props
        if ".binding." in entry.key
    }
    for side in ("sender", "receiver"):
        slots = {slot: name for (target, slot), name in bound.items() if target.startswith(side)}
        assert slots.items() >= {
            ("codec", "example.HalfPrecision"), ("compute", "bbnode.OrtBackend"),
        }  # fmt: skip


def test_what_comes_out_of_the_codec_is_the_rounded_tensor() -> None:
    compiled = component_with_dependency.compile_program()
    network = Network()
    sender = network.add("sender", compiled, ["sender"])
    receiver = network.add("receiver", compiled, ["receiver"])
    tensor = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    sender.invoke("sender", {"tensor": tensor})
    network.run_until_idle()
    (restored,) = receiver.values("restored")
    np.testing.assert_array_equal(restored, tensor.astype(np.float16).astype(np.float32))


def test_without_the_backend_the_program_does_not_compile() -> None:
    compiler = (
        Compiler()
        .bind_peer_selector("receivers", ConnectedView)
        .bind_codec("codec", component_with_dependency.HalfPrecision)
    )
    with pytest.raises(UnboundDependency, match="compute"):
        compiler.compile(component_with_dependency.Compressed().build())


class OutOfRange(ComponentError):
    """A tensor holds numbers that the settings do not allow."""


@dataclass(frozen=True, kw_only=True)
class BoundedConfig:
    largest: float = float(np.finfo(np.float16).max)


@register_component
class BoundedHalfPrecision(component_with_dependency.HalfPrecision):
    """The codec of the example, with a setting and an error of its own."""

    TYPE_NAME = "test.BoundedHalfPrecision"
    Config = BoundedConfig

    def encode(self, ctx, tensor):
        largest = float(np.abs(tensor).max(initial=0))
        if not largest <= self.config.largest:
            raise OutOfRange(f"{largest} is beyond {self.config.largest}; scale the tensor first")
        return super().encode(ctx, tensor)


def test_a_component_has_settings_on_each_node_and_errors_of_its_own() -> None:
    compiled = (
        Compiler()
        .bind_peer_selector("receivers", ConnectedView)
        .bind_codec("codec", BoundedHalfPrecision)
        .bind_backend("compute", OrtBackend)
        .compile(component_with_dependency.Compressed().build())
    )
    network = Network()
    sender = network.add("sender", compiled, ["sender"], config={"codec": {"largest": 100.0}})
    receiver = network.add("receiver", compiled, ["receiver"])
    for largest in (1, 1000):
        sender.invoke("sender", {"tensor": np.linspace(-1, 1, 9, dtype=np.float32) * largest})
        network.run_until_idle()
    assert len(receiver.values("restored")) == 1
    (failed,) = sender.failures()
    assert failed.kind == "OutOfRange"
    text = "1000.0 is beyond 100.0; scale the tensor first (raised at test_examples.py:"
    assert failed.detail.startswith(text)


# --- a pass of one's own -------------------------------------------------------------------


def test_every_partition_has_one_send_with_a_tracing_id(capsys) -> None:
    lines = printed(capsys, custom_pass)
    assert [re.sub(r"#[0-9a-f]{16}", "", line) for line in lines] == [
        "2 sends have a tracing id:",
        "  left: Send_0 ball-0",
        "  right: Send_1 ball-1",
    ]


def test_the_stamped_program_runs_as_before() -> None:
    compiled = custom_pass.compiler().compile(custom_pass.PingPong().build())
    network = Network()
    left = network.add("left", compiled, ["left"])
    network.add("right", compiled, ["right"])
    left.invoke("left", {"ball": np.array([1, -2], np.float32)})
    network.run_until_idle()
    assert left.values("ball_back")[0].tolist() == [-1.0, 2.0]


# --- an index of one's own in a worker thread ----------------------------------------------


def test_the_node_answers_while_the_index_searches(capsys) -> None:
    lines = printed(capsys, custom_index)
    assert lines == [
        "   1.0 ms  library: stored 0",
        "   1.0 ms  library: stored 1",
        "   1.0 ms  library: stored 2",
        "  13.0 ms  reader: pong TRIGGER",
        " 202.0 ms  library: stored 3",
        " 203.0 ms  reader: nearest SearchResults(1 at 0.1, 0 at 0.9)",
    ]


@register_component
class WatchedIndex(custom_index.BruteForceIndex):
    """The index of the example; tells in which threads it searched."""

    TYPE_NAME = "test.WatchedIndex"

    def __init__(self, config):
        super().__init__(config)
        self.searched_in: list[str] = []

    @offload
    def search(self, ctx, query, where=None, *, k):
        self.searched_in.append(threading.current_thread().name)
        return super().search(ctx, query, where, k=k)


def test_the_search_runs_in_a_worker_thread_and_finds_what_numpy_finds() -> None:
    compiler = Compiler().bind_peer_selector("libraries", ConnectedView)
    compiled = compiler.bind_index("books", WatchedIndex).compile(custom_index.Library().build())
    network = Network(threads=True)
    reader = network.add("reader", compiled, ["reader"])
    library = network.add("library", compiled, ["library"])
    vectors = np.random.default_rng(1).normal(size=(50, 8)).astype(np.float32)
    for vector in vectors:
        reader.deliver_event("reader", "book", vector)
    query = np.zeros(8, np.float32)
    network.run_until_idle()
    reader.deliver_event("reader", "question", query)
    network.run_until_idle()
    (nearest,) = reader.values("nearest")
    distances = np.linalg.norm(vectors - query, axis=1)
    assert nearest.ids.tolist() == np.argsort(distances)[:2].tolist()
    np.testing.assert_allclose(nearest.distances, np.sort(distances)[:2], rtol=1e-6)
    index = library.component("books")
    assert len(index.searched_in) == 1
    assert index.searched_in[0].startswith("bbnode-task-")


def test_a_vector_of_another_length_fails_its_op_alone() -> None:
    compiled = custom_index.compile_program()
    network = Network()
    reader = network.add("reader", compiled, ["reader"])
    library = network.add("library", compiled, ["library"])
    for size in (2, 3, 2):
        reader.deliver_event("reader", "book", np.ones(size, np.float32))
    network.run_until_idle()
    (failed,) = library.failures()
    assert failed.kind == "ComponentError"
    assert failed.detail == "shape (3,); the index holds (2,)"
    assert library.values("stored") == [0, 1]


# --- three classes -------------------------------------------------------------------------


def test_documents_go_around_and_questions_are_gathered(capsys) -> None:
    lines = printed(capsys, multi_target)
    assert [name.split("#")[0] for name in lines[0].split(": ")[1].split(", ")] == [
        "door", "encoder", "store",
    ]  # fmt: skip
    assert lines[1] == "most like (10, 2, 0), the best of each store:"
    assert len(lines[2:]) == 3
    assert "  apples (distance 0.087)" in lines[2:]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_gather_is_the_best_of_every_store(seed: int) -> None:
    network, door = multi_target.build_network(multi_target.compile_program(), seed)
    titles = multi_target.store_documents(network, door)
    assert sorted(titles.values()) == sorted(multi_target.DOCUMENTS)
    question = np.array([1, 5, 5], np.float32)
    door.deliver_event("door", "question", question)
    network.run_until_idle()
    (nearest,) = door.values("nearest")
    assert nearest.peers == tuple(sorted(network[f"store-{i}"].peer_id for i in range(3)))
    best: dict[PeerId, tuple[float, int]] = {}
    for (store, number), title in titles.items():
        far = distance(multi_target.DOCUMENTS[title], question)
        best[store] = min(best.get(store, (far, number)), (far, number))
    found = {store: results.hits()[0] for store, results in nearest.responses if results}
    assert {store: hit.id for store, hit in found.items()} == {
        store: number for store, (_, number) in best.items()
    }
    for store, hit in found.items():
        assert hit.distance == pytest.approx(best[store][0], abs=1e-6)
    assert not [failed for node in network.nodes for failed in node.failures()]


def distance(document, question) -> float:
    unit = [np.array(v, np.float64) / np.linalg.norm(v) for v in (document, question)]
    return float(np.linalg.norm(unit[0] - unit[1]))


def test_two_questions_at_once_do_not_mix() -> None:
    network, door = multi_target.build_network(multi_target.compile_program())
    titles = multi_target.store_documents(network, door)
    for title in ("apples", "cars"):
        features = np.array(multi_target.DOCUMENTS[title], np.float32)
        door.deliver_event("door", "question", features)
    network.run_until_idle()
    firsts = set()
    for nearest in door.values("nearest"):
        far, store, number = min(
            (hit.distance, peer, hit.id)
            for peer, found in nearest.responses
            for hit in found.hits()
        )
        assert far == pytest.approx(0, abs=1e-6)
        firsts.add(titles[store, number])
    assert firsts == {"apples", "cars"}


# --- one node, both sides ------------------------------------------------------------------


def test_one_node_gives_itself_what_two_give_each_other(capsys) -> None:
    assert printed(capsys, both_sides) == [
        "everything plays front and back: mean 3.0",
        "  envelopes on the network: 0",
        "  envelopes that it gave itself: 2",
        "spread over two nodes: mean 3.0",
        "  envelopes on the network: 2",
    ]


# --- polymorphic types ---------------------------------------------------------------------


def compile_for(station, backend=OrtBackend) -> ModelProto:
    return (
        Compiler()
        .bind_peer_selector("offices", ConnectedView)
        .bind_protocol("readings", station)
        .bind_backend("compute", backend)
        .compile(polymorphic_types.Report().build())
    )


def type_on_the_wire(model: ModelProto) -> str:
    """The type that the office expects."""
    (found,) = (
        attribute.tp.denotation
        for function in model.functions
        for node in function.node
        for attribute in node.attribute
        if attribute.name == "payload_type"
    )
    return found


def test_floats_and_doubles_and_what_is_refused(capsys) -> None:
    single, double, refused = printed(capsys, polymorphic_types)
    assert re.fullmatch(r"example.SingleStation: sum 1.55555558\d* \(float32\)", single)
    assert re.fullmatch(r"example.DoubleStation: sum 1.5555555555\d* \(float64\)", double)
    assert refused.startswith("example.Station is refused: UnresolvedType: ")


@pytest.mark.parametrize("backend", [OrtBackend, ReferenceBackend])
@pytest.mark.parametrize(
    ("station", "dtype", "wire_type"),
    [
        (polymorphic_types.SingleStation, np.float32, "ai.bytesandbrains.Tensor.FLOAT"),
        (polymorphic_types.DoubleStation, np.float64, "ai.bytesandbrains.Tensor.DOUBLE"),
    ],
)
def test_the_bound_component_decides_the_type(station, dtype, wire_type, backend) -> None:
    compiled = compile_for(station, backend)
    assert type_on_the_wire(compiled) == wire_type
    total = polymorphic_types.run(compiled)
    readings = np.array(polymorphic_types.READINGS, dtype)
    assert total.dtype == dtype
    np.testing.assert_allclose(total, (readings * readings).sum(), rtol=np.finfo(dtype).eps * 2)


def test_programs_of_two_types_do_not_understand_each_other() -> None:
    singles = polymorphic_types.compile_for(polymorphic_types.SingleStation)
    doubles = polymorphic_types.compile_for(polymorphic_types.DoubleStation)
    assert set(target_names(singles)) != set(target_names(doubles))
    network = Network()
    station = network.add("station", doubles, ["station"])
    office = network.add("office", singles, ["office"])
    station.invoke("station", {"go": TRIGGER})
    network.run_until_idle()
    (left_out,) = station.seen(steps.PeerResolveFailed)
    assert "version" in left_out.reason
    assert not office.values("sum")


def test_a_type_that_stays_open_is_refused() -> None:
    with pytest.raises(UnresolvedType, match="storage"):
        polymorphic_types.compile_for(polymorphic_types.Station)


# --- gossip averaging ----------------------------------------------------------------------


def test_gossip_averaging_gets_to_the_mean(capsys) -> None:
    first, *progress = printed(capsys, gossip_averaging)
    assert first == "8 peers; the mean of their vectors is [3.5, 17.5]"
    far = [float(line.rpartition(" ")[2]) for line in progress]
    assert far[0] > 1e-4
    assert far[-1] < 1e-12


def test_the_bulletin_reaches_whoever_follows(capsys) -> None:
    assert printed(capsys, bulletin) == [
        "station-0 heard: nothing",
        "station-1 heard: 12.5 of station-0, 13.0 of station-0",
        "station-2 heard: 12.5 of station-0, 13.0 of station-0",
        "station-3 heard: 13.0 of station-0",
    ]


def gossiping(*starts: tuple[float, ...]) -> Network:
    network = Network()
    compiled = gossip_averaging.compile_program()
    for number, value in enumerate(starts):
        gossip_averaging.add_peer(network, compiled, number, value)
    return network


def test_a_share_of_another_length_is_refused() -> None:
    network = gossiping((1.0,), (1.0, 2.0))
    network.run(until=S)
    for node in network.nodes:
        assert {failed.kind for failed in node.failures()} == {"ComponentError"}
        assert not node.values("estimate")


@pytest.mark.parametrize("share", [[0.0, 0.0], [1.0, -1.0], [np.nan, 1.0], [1.0, np.inf], [1.0]])
def test_a_share_that_would_spoil_the_sum_is_refused(share) -> None:
    (node,) = gossiping((1.0,)).nodes
    component = node.component("mass")
    context = SimpleNamespace(source_peer=node.peer_id)
    with pytest.raises(ComponentError, match="passed on"):
        component.merge(context, np.array(share))
    assert component.held.tolist() == [1.0, 1.0]


def test_a_peer_saves_its_part_of_the_sum_to_the_last_bit() -> None:
    network = gossiping((0.1,), (0.2,), (0.7,))
    network.run(until=S)
    known = network.nodes[0].component("mass")
    fresh = gossip_averaging.PushSum(known.config)
    fresh.restore(known.serialize())
    assert fresh.held.tolist() == known.held.tolist() != [0.1, 1.0]
    for garbage in (b"", b"short", b"\0" * 24):
        with pytest.raises(ComponentError, match="not ours"):
            fresh.restore(garbage)
    assert fresh.serialize() == known.serialize()


def test_a_daemon_compiles_the_same_program() -> None:
    made = compile_module("bbnode.examples.gossip_averaging:GossipAveraging", {})
    assert made == gossip_averaging.compile_program()
