"""Answers of several peers, opened in the program: stacks, parts, peers, merged searches."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from bbnode.compiler import Compiler
from bbnode.compiler.errors import TypeConstraintFailed, UnresolvedType
from bbnode.components import ConnectedView, OrtBackend, register_component
from bbnode.components.contracts import ProtocolComponent
from bbnode.dsl import (
    BackendSlot,
    BadArgument,
    Graph,
    Module,
    Output,
    PeerSelectorSlot,
    ProtocolSlot,
    peer_lists,
    protocol_op,
    types,
)
from bbnode.dsl.core.graph import AnswersOutput, ResultsOutput
from bbnode.engine.limits import Limits
from bbnode.ir.values import TRIGGER, Composite, Metadata, PeerIdVec, SearchResults, TensorSequence
from bbnode.sim import Network, SimNode, steps

KINDS = {
    "Tensor": types.TENSOR_FLOAT,
    "Long": types.TENSOR_INT64,
    "Stats": types.METADATA,
    "Found": types.SEARCH_RESULTS,
    "Pair": types.COMPOSITE,
}
for _op_type, _kind in KINDS.items():
    protocol_op("says", _op_type, {"asked": types.TRIGGER}, {"said": _kind})

COMPUTE = BackendSlot("compute")


@dataclass(frozen=True, kw_only=True)
class SaysConfig:
    says: Any = None


@register_component
class Says(ProtocolComponent):
    """Gives what its setting says, whatever the op."""

    TYPE_NAME: ClassVar[str] = "test.answers.Says"
    Config: ClassVar[type] = SaysConfig

    def __init__(self, config: SaysConfig) -> None:
        super().__init__(config)
        self._says = config.says

    def tensor(self, ctx: Any, asked: Any) -> Any:
        return self._says

    long = stats = found = pair = tensor


class Asks(Module):
    """Asks all of the class "voter" and hands out what `opened` makes of their answers."""

    home = "server"

    def __init__(self, op_type: str, opened: Callable[[Graph, AnswersOutput], Any]) -> None:
        self._op_type = op_type
        self._opened = opened

    def body(self, g: Graph) -> None:
        tick = g.input("tick", types.TRIGGER)
        voters = PeerSelectorSlot("voters", peer_class="voter").current_view(g, after=tick)
        asked = g.request("vote", voters, tick, quorum=0, deadline=1.0)
        asked.respond(ProtocolSlot("voice", "says").op(g, self._op_type, asked.received))
        made = self._opened(g, asked.responses)
        for index, value in enumerate(made if isinstance(made, tuple) else (made,)):
            g.output(f"made_{index}", value)


def run(
    op_type: str,
    answers: Sequence[Any],
    opened: Callable[[Graph, AnswersOutput], Any],
    limits: Limits | None = None,
) -> SimNode:
    compiled = (
        Compiler()
        .bind_peer_selector("voters", ConnectedView)
        .bind_protocol("voice", Says)
        .bind_backend("compute", OrtBackend)
        .compile(Asks(op_type, opened).build())
    )
    network = Network(seed=0)
    server = network.add("server", compiled, ["server"], limits=limits)
    for index, answer in enumerate(answers):
        network.add(f"voter-{index}", compiled, ["voter"], config={"voice": {"says": answer}})
    server.invoke("server", {"tick": TRIGGER})
    network.run_until_idle()
    return server


def made(server: SimNode) -> Any:
    assert not server.failures()
    (value,) = server.values("made_0")
    return value


def failure(server: SimNode, kind: str) -> str:
    found = [step for step in server.failures() if step.kind == kind]
    assert found, server.failures()
    assert not server.values("made_0")
    return found[0].detail


def rows(*numbers: float) -> list[Any]:
    return [np.array([number, -number], np.float32) for number in numbers]


def test_a_median_over_stacked_answers_is_computed_in_the_program() -> None:
    def opened(g: Graph, answers: AnswersOutput) -> Output:
        middle = COMPUTE.op(g, "TopK", answers.stacked, g.constant([2]), axis=0)[0]
        return COMPUTE.gather(g, middle, g.constant(1), axis=0)

    median = made(run("Tensor", rows(5.0, 1.0, 100.0), opened))
    assert median.tolist() == [5.0, -5.0]


def test_rows_are_in_the_order_of_peers() -> None:
    server = run("Tensor", rows(1.0, 2.0, 3.0), lambda _, a: (a.stacked, a.peers, a.count))
    stacked, peers, count = (server.values(f"made_{i}")[0] for i in range(3))
    assert peers == PeerIdVec(sorted(peers))
    assert len(peers) == count == len(stacked) == 3
    assert stacked.dtype == np.float32
    assert sorted(stacked[:, 0].tolist()) == [1.0, 2.0, 3.0]

    def one_by_one(g: Graph, answers: AnswersOutput) -> Output:
        last = peer_lists.only_one(g, peer_lists.gather_list(g, answers.peers, [-1]))
        return answers.of(last)

    assert made(run("Tensor", rows(1.0, 2.0, 3.0), one_by_one)).tolist() == stacked[-1].tolist()


def test_answers_of_several_lengths_are_joined_and_not_stacked() -> None:
    ragged = [np.zeros(n, np.float32) for n in (2, 3, 2, 2)]
    joined = made(run("Tensor", ragged, lambda _, a: a.concatenated()))
    assert joined.shape == (9,)
    text = failure(run("Tensor", ragged, lambda _, a: a.stacked), "AnswersDiffer")
    assert re.search(r"3 are float32 \[2\], but Qm\w+ float32 \[3\]$", text)
    flat = [np.array(1, np.float32)] * 2
    text = failure(run("Tensor", flat, lambda _, a: a.concatenated()), "AnswersDiffer")
    assert "zero-dim" in text


def test_answers_of_several_lengths_are_a_sequence() -> None:
    ragged = [np.full(n, n, np.float32) for n in (2, 0, 3)]

    def opened(g: Graph, answers: AnswersOutput) -> Any:
        listed = answers.values
        assert listed is answers.values  # one op
        last = COMPUTE.sequence_at(g, listed, COMPUTE.constant(g, np.int64(-1)))
        every = COMPUTE.concat_from_sequence(g, listed, axis=0)
        return listed, COMPUTE.sequence_length(g, listed), last, every, answers.concatenated()

    server = run("Tensor", ragged, opened)
    assert not server.failures()
    listed, count, last, every, joined = (server.values(f"made_{i}")[0] for i in range(5))
    assert listed.type is types.SEQUENCE_OF[types.TENSOR_FLOAT]
    assert sorted(map(len, listed)) == [0, 2, 3]
    assert count == 3
    assert last.tolist() == listed[-1].tolist()
    assert every.tolist() == joined.tolist()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 2)], ids=str)
def test_a_sequence_of_answers_of_one_shape_stacks_to_their_stack(shape: tuple[int, ...]) -> None:
    def opened(g: Graph, answers: AnswersOutput) -> Any:
        piled = COMPUTE.concat_from_sequence(g, answers.values, axis=0, new_axis=1)
        return piled, answers.stacked, answers.values

    server = run("Tensor", [np.full(shape, n, np.float32) for n in range(4)], opened)
    piled, stacked, listed = (server.values(f"made_{i}")[0] for i in range(3))
    assert np.array_equal(piled, stacked)
    assert np.array_equal(np.stack(listed), stacked)


def test_a_sequence_of_answers_is_of_their_type_and_travels() -> None:
    def sent(g: Graph, answers: AnswersOutput) -> Output:
        told = g.net_out("all", answers.peers, answers.values)
        return g.net_out("back", told.sender, told)

    kind = types.SEQUENCE_OF[types.TENSOR_INT64]
    server = run("Long", [np.arange(n) for n in (1, 2)], sent)
    assert not server.failures()
    assert [value.type for value in server.values("made_0")] == [kind, kind]
    assert made(run("Long", [], lambda _, a: a.values)) == TensorSequence([], types.TENSOR_INT64)
    pairs = [Composite((np.zeros(n, np.float64), Metadata())) for n in (1, 2)]

    def parts(_: Graph, answers: AnswersOutput) -> Output:
        return answers.unbundled([types.TENSOR_DOUBLE, types.METADATA])[0].values

    assert sorted(map(len, made(run("Pair", pairs, parts)))) == [1, 2]


def test_a_module_opens_answers_of_two_types() -> None:
    class Opens(Module):
        def body(self, g: Graph) -> None:
            answers = g.input("answers", types.RESPONSE_BATCH)
            assert isinstance(answers, AnswersOutput)
            g.output("listed", answers.values)

    class AsksTwice(Module):
        home = "server"

        def body(self, g: Graph) -> None:
            for name, kind in (("float", types.TENSOR_FLOAT), ("long", types.TENSOR_INT64)):
                x = g.input(name, kind)
                voters = PeerSelectorSlot("voters", peer_class="voter").current_view(g, after=x)
                asked = g.request(f"ask_{name}", voters, x, deadline=1.0)
                asked.respond(asked.received)
                call = Opens().call().input("answers", asked.responses).build(g)
                g.output(f"listed_{name}", call.output("listed"))

    compiled = Compiler().bind_peer_selector("voters", ConnectedView).compile(AsksTwice().build())
    network = Network(seed=0)
    server = network.add("server", compiled, ["server"])
    network.add("voter", compiled, ["voter"])
    given = {"float": np.ones(2, np.float32), "long": np.arange(3)}
    server.invoke("server", given)
    network.run_until_idle()
    for name, value in given.items():
        assert server.values(f"listed_{name}") == [TensorSequence([value])]


def test_parts_of_answers_are_batches_of_their_own() -> None:
    answers = [
        Composite((np.array([n], np.float32), Metadata(num_samples=k)))
        for n, k in ((1.0, 1), (5.0, 3))
    ]

    def weighted(g: Graph, answers: AnswersOutput) -> Output:
        params, stats = answers.unbundled([types.TENSOR_FLOAT, types.METADATA])
        weights = stats.entry("num_samples")
        total = COMPUTE.reduce_sum(g, weights, keepdims=0)
        shares = COMPUTE.div(g, weights, total)
        return COMPUTE.matmul(g, shares, params.stacked)

    assert made(run("Pair", answers, weighted)).tolist() == [4.0]
    liar = [*answers, Composite((np.array([9.0], np.float32),))]
    text = failure(run("Pair", liar, weighted), "AnswersDiffer")
    assert re.search(r"the answer of Qm\w+ is no composite of 2", text)
    liar = [*answers, Composite((np.array([9.0], np.float64), Metadata()))]
    text = failure(run("Pair", liar, weighted), "AnswersDiffer")
    assert "is Tensor.DOUBLE where the program says Tensor.FLOAT" in text
    for entry in ({}, {"num_samples": "many"}, {"num_samples": b"1"}):
        liar = [*answers, Composite((np.array([9.0], np.float32), Metadata(entry)))]
        assert "expected a number" in failure(run("Pair", liar, weighted), "AnswersDiffer")


def test_an_entry_has_the_type_that_is_asked_for() -> None:
    stats = [Metadata(n=1 << 40), Metadata(n=True)]
    values = made(run("Stats", stats, lambda _, a: a.entry("n", types.TENSOR_INT64)))
    assert values.dtype == np.int64
    assert sorted(values.tolist()) == [1, 1 << 40]
    huge = [Metadata(n=1), Metadata(n=-1)]
    text = failure(
        run("Stats", huge, lambda _, a: a.entry("n", types.TENSOR_UINT64)), "AnswersDiffer"
    )
    assert "is no Tensor.UINT64" in text


def test_the_peers_of_answers_can_be_sent_to() -> None:
    def opened(g: Graph, answers: AnswersOutput) -> Output:
        told = g.net_out("thanks", answers.peers, answers.stacked)
        return g.net_out("welcome", told.sender, told)

    server = run("Tensor", rows(1.0, 2.0), opened)
    assert not server.failures()
    assert len(server.values("made_0")) == 2


def test_who_is_missing_is_a_list_of_peers_too() -> None:
    class Late(Module):
        home = "server"

        def body(self, g: Graph) -> None:
            tick = g.input("tick", types.TRIGGER)
            voters = PeerSelectorSlot("voters", peer_class="voter").current_view(g, after=tick)
            asked = g.request("vote", voters, tick, quorum=1, deadline=1.0)
            voice = ProtocolSlot("voice", "says")
            asked.respond(voice.op(g, "Tensor", asked.received))
            g.output("missing", asked.responses.missing)
            g.output("stacked", asked.responses.stacked)
            g.output("lost", asked.responses.of(g.peer_id(PEER)))

    compiled = (
        Compiler()
        .bind_peer_selector("voters", ConnectedView)
        .bind_protocol("voice", Says)
        .compile(Late().build())
    )
    network = Network(seed=0)
    server = network.add("server", compiled, ["server"])
    network.add("up", compiled, ["voter"], config={"voice": {"says": rows(1.0)[0]}})
    network.add("down", compiled, ["voter"])  # fails when it is asked
    gone = network.peer_id("down")
    server.invoke("server", {"tick": TRIGGER})
    network.run_until_idle()
    assert server.values("missing") == [PeerIdVec((gone,))]
    assert server.values("stacked")[0].shape == (1, 2)
    assert [(step.kind, "was not asked" in step.detail) for step in server.failures()] == [
        ("NoAnswer", True)
    ]


PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def test_nobody_to_stack() -> None:
    assert "nobody has answered" in failure(run("Tensor", [], lambda _, a: a.stacked), "NoAnswer")
    assert made(run("Tensor", [], lambda _, a: a.peers)) == ()
    assert made(run("Stats", [], lambda _, a: a.entry("n"))).shape == (0,)
    assert made(run("Found", [], lambda _, a: a.merged(k=3).ids)).shape == (0,)


def test_searches_of_many_shards_are_merged() -> None:
    shards = [
        SearchResults.of_pairs([(1, 0.5), (2, 2.0)]),
        SearchResults.of_pairs([(1001, 0.25), (1002, float("nan"))]),
        SearchResults.of_pairs([(2001, 0.5), (2002, 1e300)]),
    ]

    def opened(g: Graph, answers: AnswersOutput) -> Any:
        results = answers.merged(k=5)
        return results.ids, results.distances, results.senders

    server = run("Found", shards, opened)
    ids, distances, senders = (server.values(f"made_{i}")[0] for i in range(3))
    assert ids.tolist() == [1001, 1, 2001, 2, 2002]
    assert distances.tolist() == [0.25, 0.5, 0.5, 2.0, float("inf")]
    assert distances.dtype == np.float32
    assert senders[1] == senders[3]  # one shard
    assert len({senders[0], senders[1], senders[2]}) == 3


def test_results_to_another_number_of_queries_are_left_out_and_reported() -> None:
    good = SearchResults.of_pairs([(1, 0.5)])
    batch = SearchResults([[2]], [[0.0]])
    server = run("Found", [good, batch, good], lambda _, a: a.merged(k=5))
    assert made(server).ids.tolist() == [1, 1]
    (refused,) = (s for s in server.seen(steps.Telemetry) if s.name == "contribution.refused")
    told = dict(refused.attributes)
    assert told["reason"] == "search results [1, 1] to one query"
    assert told["peer"] not in made(server).senders

    def asked_for_two(g: Graph, answers: AnswersOutput) -> Output:
        query = g.constant(np.zeros((2, 3), np.float32))
        return answers.merged(k=5, query=query, distinct=True)

    assert made(run("Found", [good, batch, good], asked_for_two)).ids.shape == (2, 0)


def test_what_hits_say_is_opened() -> None:
    told = [
        Metadata(title="a", year=2000, kept=True),
        Metadata(title=3, year=float("inf")),
        Metadata(year="x"),
    ]
    found = SearchResults([[4, 5, -1], [6, -1, -1]], [[0, 1, 2], [0, 1, 2]], told)

    def opened(_: Graph, answers: AnswersOutput) -> Any:
        merged = answers.merged()
        kinds = (types.TENSOR_FLOAT, types.TENSOR_INT64, types.TENSOR_BOOL)
        years = (merged.entry("year", kind) for kind in kinds)
        return merged.ids, merged.metadata, merged.entry("title"), *years, merged.senders

    server = run("Found", [found], opened)
    ids, metadata, titles, floats, integers, kept, senders = (
        server.values(f"made_{index}")[0] for index in range(7)
    )
    assert ids.tolist() == [[4, 5], [6, -1]]
    assert metadata == tuple(told)
    assert titles.tolist() == ["a", "", ""]
    np.testing.assert_array_equal(floats, np.float32([2000, np.inf, np.nan]))
    assert integers.tolist() == [2000, 0, 0]
    assert kept.tolist() == [True, True, False]
    assert len(senders) == 3


def test_a_copy_of_answers_is_charged() -> None:
    big = [np.zeros(300_000, np.float32)] * 2
    limits = Limits(ingress_bytes=4_000_000)
    text = failure(run("Tensor", big, lambda _, a: a.stacked, limits), "BudgetExceeded")
    assert "Stack_0: 2400000 bytes to keep" in text
    text = failure(run("Tensor", big, lambda _, a: a.values, limits), "BudgetExceeded")
    assert "Values_0: 2400000 bytes to keep" in text
    assert made(run("Tensor", big, lambda _, a: a.count, limits)) == 2


@pytest.mark.parametrize(
    ("op_type", "opened", "said"),
    [
        ("Stats", lambda _, a: a.stacked, "Metadata meets Tensor at Stack"),
        ("Stats", lambda _, a: a.values, "with `.entry(name)`"),
        ("Pair", lambda _, a: a.values, "Composite meets Tensor at Values"),
        ("Pair", lambda _, a: a.values, "with `.unbundled([…])` first"),
        ("Pair", lambda _, a: a.stacked, "with `.unbundled([…])` first"),
        ("Found", lambda _, a: a.values, "with `.merged()`"),
        (
            "Tensor",
            lambda g, a: COMPUTE.add(
                g, COMPUTE.sequence_at(g, a.values, g.constant(0)), g.constant(1)
            ),
            "Tensor.INT64 meets Tensor.FLOAT at SequenceAt",
        ),
        ("Tensor", lambda _, a: a.entry("n"), "the answers: Tensor.FLOAT meets Metadata"),
        ("Tensor", lambda _, a: a.merged().ids, "Tensor.FLOAT meets SearchResults"),
        ("Tensor", lambda _, a: a.unbundled([types.TENSOR])[0], "Tensor.FLOAT meets Composite"),
        (
            "Tensor",
            lambda g, a: COMPUTE.add(g, a.stacked, g.constant(1)),
            "Tensor.FLOAT meets Tensor.INT64",
        ),
    ],
)
def test_what_answers_are_not_is_refused_at_compile(
    op_type: str, opened: Callable[[Graph, AnswersOutput], Any], said: str
) -> None:
    with pytest.raises(TypeConstraintFailed, match=re.escape(said)) as caught:
        run(op_type, [], opened)
    assert "test_answers.py:" in str(caught.value)


def test_a_stack_of_parts_needs_their_types_from_somewhere() -> None:
    def opened(g: Graph, answers: AnswersOutput) -> Output:
        return answers.unbundled([types.TENSOR])[0].stacked

    with pytest.raises(UnresolvedType):
        run("Pair", [], opened)


def test_outputs_know_what_they_are() -> None:
    seen: dict[str, Any] = {}

    class Shown(Module):
        def body(self, g: Graph) -> None:
            answers = g.input("answers", types.RESPONSE_BATCH)
            found = g.input("found", types.SEARCH_RESULTS)
            assert isinstance(answers, AnswersOutput)
            assert isinstance(found, ResultsOutput)
            assert answers.stacked is answers.stacked  # one op
            assert answers.concatenated(axis=0) is not answers.concatenated(axis=1)
            assert answers.stacked.type is types.TENSOR
            assert answers.peers.type is types.PEER_ID_VEC
            for wrong in (
                lambda: answers.unbundled([]),
                lambda: answers.unbundled([1]),
                lambda: answers.concatenated(axis="x"),
                lambda: answers.concatenated(axis=[]),
                lambda: answers.entry("n", types.METADATA),
                lambda: answers.of(3),
                lambda: answers.merged(k="x"),
            ):
                with pytest.raises(BadArgument):
                    wrong()
            seen["ok"] = True
            g.output("y", found.ids)

    Shown().build()
    assert seen


class Gathers(Module):
    """Workers send on their own; the server takes three at a time."""

    home = "worker"

    def body(self, g: Graph) -> None:
        value = g.input("value", types.TENSOR_FLOAT)
        server = PeerSelectorSlot("servers", peer_class="server").current_view(g, after=value)
        batch = g.collect(g.net_out("value", server, value), n=3, until=60.0)
        g.output("stacked", batch.stacked)
        thanks = g.net_out("thanks", batch.peers, COMPUTE.reduce_sum(g, batch.stacked, keepdims=0))
        g.output("thanks", thanks)


def gathered(*values: Any) -> tuple[Network, SimNode]:
    compiled = (
        Compiler()
        .bind_peer_selector("servers", ConnectedView)
        .bind_backend("compute", OrtBackend)
        .compile(Gathers().build())
    )
    network = Network(seed=0)
    server = network.add("server", compiled, ["server"])
    for index in range(len(values)):
        network.add(f"worker-{index}", compiled, ["worker"])
    for index, value in enumerate(values):
        network[f"worker-{index}"].invoke("worker", {"value": value})
    network.run_until_idle()
    return network, server


def test_what_is_collected_is_opened_like_answers() -> None:
    network, server = gathered(*rows(1.0, 2.0, 3.0))
    (stacked,) = server.values("stacked")
    assert sorted(stacked[:, 0].tolist()) == [1.0, 2.0, 3.0]
    assert all(network[f"worker-{i}"].values("thanks") == [0.0] for i in range(3))


def test_what_is_collected_and_does_not_fit_names_the_peer() -> None:
    odd = np.zeros(7, np.float32)
    network, server = gathered(*rows(1.0, 2.0), odd)
    assert not server.values("stacked")
    (failed,) = {step.detail for step in server.failures()}
    assert f"but {network.peer_id('worker-2')} float32 [7]" in failed


def test_what_is_collected_has_the_type_that_was_sent() -> None:
    class Wrong(Module):
        home = "worker"

        def body(self, g: Graph) -> None:
            value = g.input("value", types.TENSOR_FLOAT)
            server = PeerSelectorSlot("servers", peer_class="server").current_view(g, after=value)
            batch = g.collect(g.net_out("value", server, value), n=3, until=60.0)
            g.output("sum", batch.merged())

    with pytest.raises(TypeConstraintFailed, match=r"Tensor\.FLOAT meets SearchResults"):
        Compiler().bind_peer_selector("servers", ConnectedView).compile(Wrong().build())
