"""Every example runs, prints what it says, and its numbers are right.

Rule: an example is run as its reader runs it (`main`), and what it claims is checked on its
pieces, against numpy where there are numbers.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bbnode.examples
from bbnode.compiler import Compiler, target_names
from bbnode.compiler.errors import UnboundDependency, UnresolvedType
from bbnode.components import ConnectedView, OrtBackend, ReferenceBackend
from bbnode.components.contracts import ComponentError
from bbnode.daemon.artifacts.build import compile_module
from bbnode.engine import steps
from bbnode.examples import (
    both_sides,
    component_with_dependency,
    custom_index,
    custom_pass,
    gossip_averaging,
    multi_target,
    polymorphic_types,
    quickstart,
)
from bbnode.ir.values import TRIGGER
from bbnode.sim import MS, LinkModel, Network, S

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

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
def test_it_says_how_to_run_it_and_stands_in_the_readme(name: str) -> None:
    module = importlib.import_module(f"bbnode.examples.{name}")
    command = f"python -m bbnode.examples.{name}"
    assert f"Run it with `{command}`." in module.__doc__
    assert f"| `{name}` |" in README


def test_the_readme_lists_no_other() -> None:
    section = README.split("## Examples")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert listed == set(example_names())


@pytest.mark.parametrize("name", example_names())
def test_it_prints_the_same_each_time(name: str, capsys) -> None:
    module = importlib.import_module(f"bbnode.examples.{name}")
    first = printed(capsys, module)
    assert first
    assert printed(capsys, module) == first


def test_the_command_of_the_readme_works() -> None:
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


def test_half_precision_is_numpys_and_half_as_large(capsys) -> None:
    lines = printed(capsys, component_with_dependency)
    assert (
        sum("codec = example.HalfPrecision, compute = bbnode.OrtBackend" in x for x in lines) == 2
    )
    sizes = re.fullmatch(r"(\d+) bytes of float32 travelled as (\d+) bytes", lines[2])
    assert sizes is not None
    assert int(sizes[1]) == 40_000
    assert 20_000 < int(sizes[2]) < 20_500
    assert lines[4] == "refused: OutOfRange: 1000.0 is beyond 100.0; scale the tensor first"


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
        "  13.0 ms  reader: pong",
        " 202.0 ms  library: stored 3",
        " 203.0 ms  reader: nearest ((1, 0.10000002384185791), (0, 0.8999999761581421))",
    ]


def test_the_search_runs_in_a_worker_thread_and_finds_what_numpy_finds() -> None:
    compiled = custom_index.compile_program()
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
    assert [number for number, _ in nearest] == np.argsort(distances)[:2].tolist()
    np.testing.assert_allclose([far for _, far in nearest], np.sort(distances)[:2], rtol=1e-6)
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
    assert [failed.kind for failed in library.failures()] == ["WrongLength"]
    assert library.values("stored") == [0, 1]


# --- three classes -------------------------------------------------------------------------


def test_documents_go_around_and_questions_are_gathered(capsys) -> None:
    lines = printed(capsys, multi_target)
    assert [name.split("#")[0] for name in lines[0].split(": ")[1].split(", ")] == [
        "door", "encoder", "store",
    ]  # fmt: skip
    assert {line.split(" keeps ")[1].split(" as ")[0] for line in lines[1:6]} == set(
        multi_target.DOCUMENTS
    )
    assert lines[7].startswith("  apples (distance 0.087)")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_gather_is_the_best_of_every_store(seed: int) -> None:
    network, door = multi_target.build_network(multi_target.compile_program(), seed)
    titles = multi_target.store_documents(network, door)
    assert sorted(titles.values()) == sorted(multi_target.DOCUMENTS)
    question = np.array([1, 5, 5], np.float32)
    door.deliver_event("door", "question", question)
    network.run_until_idle()
    (nearest,) = door.values("nearest")

    def unit(vector):
        return np.array(vector, np.float64) / np.linalg.norm(vector)

    best: dict[int, tuple[float, int]] = {}
    for number, title in titles.items():
        far = float(np.linalg.norm(unit(multi_target.DOCUMENTS[title]) - unit(question)))
        store = number // multi_target.IDS_PER_STORE
        best[store] = min(best.get(store, (far, number)), (far, number))
    expected = sorted(best.values())
    assert nearest[:, 0].astype(int).tolist() == [number for _, number in expected]
    np.testing.assert_allclose(nearest[:, 1], [far for far, _ in expected], atol=1e-6)
    assert not [failed for node in network.nodes for failed in node.failures()]


def test_two_questions_at_once_do_not_mix() -> None:
    network, door = multi_target.build_network(multi_target.compile_program())
    titles = multi_target.store_documents(network, door)
    for title in ("apples", "cars"):
        features = np.array(multi_target.DOCUMENTS[title], np.float32)
        door.deliver_event("door", "question", features)
    network.run_until_idle()
    firsts = {titles[int(rows[0, 0])] for rows in door.values("nearest")}
    assert firsts == {"apples", "cars"}


def test_a_store_that_is_gone_fails_the_question_by_its_deadline() -> None:
    network, door = multi_target.build_network(multi_target.compile_program())
    multi_target.store_documents(network, door)
    asked_ns = network.now_ns
    door.deliver_event("door", "question", np.ones(3, np.float32))
    network.run_until(lambda: network["encoder-0"].node.waiting() or
                      network["encoder-1"].node.waiting())  # fmt: skip
    network.crash("store-0")
    network.run_until_idle()
    assert not door.values("nearest")
    failed = [f.kind for name in ("encoder-0", "encoder-1") for f in network[name].failures()]
    assert failed == ["QuorumNotReached"]
    assert 5000 * MS <= network.now_ns - asked_ns < 5100 * MS


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


@pytest.mark.parametrize("backend", [OrtBackend, ReferenceBackend])
@pytest.mark.parametrize(
    ("station", "dtype", "wire_type"),
    [
        (polymorphic_types.SingleStation, np.float32, "ai.bytesandbrains.Tensor.FLOAT"),
        (polymorphic_types.DoubleStation, np.float64, "ai.bytesandbrains.Tensor.DOUBLE"),
    ],
)
def test_the_bound_component_decides_the_type(station, dtype, wire_type, backend) -> None:
    compiled = polymorphic_types.compile_for(station, backend)
    assert polymorphic_types.type_on_the_wire(compiled) == wire_type
    total = polymorphic_types.run(compiled)
    readings = np.array(polymorphic_types.READINGS, dtype)
    assert total.dtype == dtype
    np.testing.assert_allclose(total, (readings * readings).sum(), rtol=np.finfo(dtype).eps * 2)


def test_programs_of_two_types_do_not_understand_each_other() -> None:
    singles = polymorphic_types.compile_for(polymorphic_types.SingleStation, OrtBackend)
    doubles = polymorphic_types.compile_for(polymorphic_types.DoubleStation, OrtBackend)
    assert set(target_names(singles)) != set(target_names(doubles))
    network = Network()
    station = network.add("station", doubles, ["station"])
    office = network.add("office", singles, ["office"])
    station.invoke("station", {"go": TRIGGER})
    network.run_until_idle()
    assert [step.kind for step in office.seen(steps.WireReceiveFailed)] == ["UnknownSite"]
    assert not office.values("sum")


def test_a_type_that_stays_open_is_refused() -> None:
    with pytest.raises(UnresolvedType, match="storage"):
        polymorphic_types.compile_for(polymorphic_types.VagueStation, OrtBackend)


def test_a_station_deals_its_readings_in_batches() -> None:
    station = polymorphic_types.DoubleStation(None)
    batches = station.epoch_batches(2)
    assert [numbers.tolist() for _, numbers in batches] == [[0, 1], [2]]
    assert np.concatenate([batch for batch, _ in batches]).tolist() == polymorphic_types.READINGS
    assert station.num_samples == 3


# --- gossip averaging ----------------------------------------------------------------------


def test_gossip_averaging_gets_to_the_mean_whatever_happens(capsys) -> None:
    first, *progress, counts, last, books = printed(capsys, gossip_averaging)
    assert first == "8 peers; the mean of their vectors is [3.5, 17.5]"
    far = [float(line.rpartition(" ")[2]) for line in progress]
    assert far[0] > 0.1
    assert far[-1] < 1e-9
    numbers = re.fullmatch(r"(\d+) messages, (\d+) lost, (\d+) doubled", counts)
    assert numbers is not None
    assert all(int(number) > 50 for number in numbers.groups())
    assert last == "peer-3 came back from what it had saved and says [ 3.5 17.5]"
    assert float(books.rpartition(" ")[2]) < 1e-9


def gossiping(values, link: LinkModel | None = None) -> Network:
    network = Network(link=link)
    for number, value in enumerate(values):
        gossip_averaging.add_peer(network, gossip_averaging.compile_program(), number, value)
    return network


def test_mass_that_is_under_way_comes_back_with_the_next_message() -> None:
    """All messages are lost for a while: what they carried is only late."""
    network = gossiping([(0.0,), (10.0,)], LinkModel(loss=1.0))
    network.run(until=S)
    peers = [gossip_averaging.push_sum(node) for node in network.nodes]
    assert sum(peer.held[-1] for peer in peers) < 1e-5
    network.set_links(LinkModel())
    network.run(until=4 * S + 10 * MS)  # between two ticks, with nothing under way
    assert sum(peer.held[-1] for peer in peers) == pytest.approx(2)
    assert [peer.estimate()[0] for peer in peers] == [pytest.approx(5)] * 2


def test_a_share_of_another_length_is_refused() -> None:
    network = gossiping([(1.0,), (1.0, 2.0)])
    network.run(until=S)
    for node in network.nodes:
        assert {failed.kind for failed in node.failures()} == {"UnusableShare"}
        assert not node.values("estimate")
        assert gossip_averaging.push_sum(node).imbalance() < 1e-12


def test_a_peer_saves_its_books_to_the_last_bit() -> None:
    network = gossiping([(0.1,), (0.2,), (0.7,)])
    network.run(until=S)
    known = gossip_averaging.push_sum(network.nodes[0])
    fresh = gossip_averaging.PushSum(known.config)
    fresh.restore(known.serialize())
    assert fresh.serialize() == known.serialize()
    assert fresh.held.tolist() == known.held.tolist()
    for garbage in (b"", b"[]", b"[1, 2, 3]", b'[[1], {}, {"a": "b"}]', b"\xff"):
        with pytest.raises(ComponentError, match="not ours"):
            fresh.restore(garbage)
    assert fresh.serialize() == known.serialize()


def test_books_have_a_bound(monkeypatch) -> None:
    monkeypatch.setattr(gossip_averaging, "MAX_NEIGHBOURS", 1)
    network = gossiping([(0.0,)] * 3)
    network.run(until=S)
    assert {f.kind for n in network.nodes for f in n.failures()} == {"TooManyNeighbours"}
    assert all(gossip_averaging.push_sum(node).imbalance() < 1e-12 for node in network.nodes)


def test_a_daemon_compiles_the_same_program() -> None:
    made = compile_module("bbnode.examples.gossip_averaging:GossipAveraging", {})
    assert made == gossip_averaging.compile_program()
