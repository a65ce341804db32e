"""Types of answers: what a request is answered with, through composites and aggregators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from bbnode.compiler import Compiler
from bbnode.compiler.errors import IncompatibleStorageOnEdge, TypeConstraintFailed
from bbnode.components import (
    Aggregator,
    ArrayDataSource,
    ConnectedView,
    FedAvg,
    OnnxModel,
    OrtBackend,
    register_component,
)
from bbnode.dsl import (
    AggregatorSlot,
    BackendSlot,
    BadArgument,
    Graph,
    ModelSlot,
    Module,
    Output,
    PeerSelectorSlot,
    types,
)
from bbnode.dsl.core.graph import Request
from bbnode.ir.graph import Program
from bbnode.ir.onnx_file import program_of

MEAN = AggregatorSlot("mean")
Body = Callable[[Graph], None]


class Asks(Module):
    home = "server"

    def __init__(self, record: Body) -> None:
        self._record = record

    def body(self, g: Graph) -> None:
        self._record(g)


def compiled(body: Body, aggregator: type[Aggregator] = FedAvg) -> Program:
    made = (
        Compiler()
        .bind_model("local", OnnxModel)
        .bind_aggregator("mean", aggregator)
        .bind_peer_selector("cohort", ConnectedView)
        .bind_backend("compute", OrtBackend)
        .bind_data_source("data", ArrayDataSource)
        .compile(Asks(body).build())
    )
    return program_of(made)


def asked(g: Graph) -> Request:
    tick = g.input("tick", types.TRIGGER)
    clients = PeerSelectorSlot("cohort", peer_class="client").sample(g, n=2, after=tick)
    return g.request("round", clients, tick)


def trained(g: Graph, r: Request) -> tuple[Output, Output]:
    model = ModelSlot("local")
    stats = model.train(g, after=r.received)
    return model.params(g, after=stats), stats


def refusal(body: Body, aggregator: type[Aggregator] = FedAvg) -> str:
    with pytest.raises(TypeConstraintFailed) as caught:
        compiled(body, aggregator)
    return str(caught.value)


def test_a_fedavg_takes_answers_of_parameters_and_statistics() -> None:
    def body(g: Graph) -> None:
        r = asked(g)
        r.respond(g.bundle(trained(g, r)))
        taken = MEAN.contribute_all(g, r.responses)
        weights, summary = MEAN.aggregate(g, after=taken)
        g.output("weights", weights)
        g.output("summary", summary)

    kinds = compiled(body).functions[0].kinds() | compiled(body).functions[1].kinds()
    assert kinds["weights"] is types.TENSOR_FLOAT


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda g, r: trained(g, r)[0], "the answers: Tensor.FLOAT meets Composite"),
        (lambda g, r: g.tensor([1], types.TENSOR_INT64, after=r.received), "Tensor.INT64 meets"),
        (lambda g, r: g.constant(b"no", after=r.received), "Bytes meets Composite"),
        (lambda g, r: g.bundle([trained(g, r)[0]]), "the answers: Composite of 1 meets Composite"),
        (
            lambda g, r: g.bundle(trained(g, r)[::-1]),
            "part 0 of the answers: Metadata meets",
        ),
        (
            lambda g, r: g.bundle([g.constant(1, after=r.received), trained(g, r)[1]]),
            "part 0 of the answers: Tensor.INT64 meets Tensor.FLOAT",
        ),
    ],
)
def test_a_fedavg_over_other_answers_is_refused_with_both_lines(
    answer: Callable[[Graph, Request], Output], said: str
) -> None:
    def body(g: Graph) -> None:
        r = asked(g)
        r.respond(answer(g, r))
        MEAN.contribute_all(g, r.responses)

    text = refusal(body)
    assert said in text
    assert "see SendResp 'SendResp_0' at test_answer_types.py:" in text
    assert "FedAvg takes answers of a bundle of [Tensor, Metadata]" in text
    assert "(in Module Asks, at test_answer_types.py:" in text


def test_the_order_of_recording_does_not_matter() -> None:
    def body(g: Graph) -> None:
        r = asked(g)
        MEAN.contribute_all(g, r.responses)
        r.respond(trained(g, r)[0])

    text = refusal(body)
    assert "Composite meets Tensor.FLOAT" in text or "Tensor.FLOAT meets Composite" in text
    assert "'ContributeAll_0' at test_answer_types.py:" in text


def test_answers_are_typed_through_calls_and_passes() -> None:
    class Collects(Module):
        def body(self, g: Graph) -> None:
            taken = MEAN.contribute_all(g, g.input("all", types.RESPONSE_BATCH))
            g.output("mean", MEAN.aggregate(g, after=taken)[0])

    def body(g: Graph) -> None:
        r = asked(g)
        r.respond(trained(g, r)[0])
        g.output("mean", Collects().call().input("all", r.responses).build(g).output("mean"))

    assert "Composite" in refusal(body)


def test_a_request_is_answered_once_and_the_second_line_names_the_first() -> None:
    def body(g: Graph) -> None:
        r = asked(g)
        r.respond(trained(g, r)[0])
        r.respond(g.constant(3, after=r.received))

    with pytest.raises(BadArgument, match=r"answered already at test_answer_types\.py:\d+"):
        compiled(body)


class Folds(Aggregator):
    """The methods of an aggregator, which are never called."""

    def contribute(self, ctx: Any, tensor: Any, metadata: Any) -> None: ...
    def contribute_all(self, ctx: Any, responses: Any) -> None: ...
    def aggregate(self, ctx: Any) -> Any: ...
    def current_tensor(self, ctx: Any) -> Any: ...


@register_component
class Sums(Folds):
    """Sums tensors of any type."""

    TYPE_NAME: ClassVar[str] = "test.answers.Sums"
    storage: ClassVar[dict[str, types.TypeNode]] = {}
    answers = types.TENSOR


def test_an_aggregator_says_which_answers_it_takes() -> None:
    def body(g: Graph) -> None:
        r = asked(g)
        r.respond(g.constant([1, 2], after=r.received))
        taken = MEAN.contribute_all(g, r.responses)
        total, _ = MEAN.aggregate(g, after=taken)
        g.output("total", BackendSlot("compute").neg(g, total))

    known = [f.kinds().get("total") for f in compiled(body, Sums).functions]
    assert types.TENSOR_INT64 in known  # an aggregate is what was contributed

    def wrong(g: Graph) -> None:
        r = asked(g)
        r.respond(g.bundle(trained(g, r)))
        MEAN.contribute_all(g, r.responses)

    assert "test.answers.Sums takes answers of Tensor" in refusal(wrong, Sums)


def test_parts_of_a_composite_have_the_types_that_were_put_in() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        both = g.bundle([x, g.constant(3)])
        first, second = g.unbundle(both, [types.TENSOR, types.TENSOR])
        g.output("first", first)
        g.output("second", second)

    known = compiled(body).functions[0].kinds()
    assert known["first"] is types.TENSOR_FLOAT
    assert known["second"] is types.TENSOR_INT64

    def too_many(g: Graph) -> None:
        both = g.bundle([g.input("x", types.TENSOR_FLOAT), g.constant(3)])
        g.output("y", g.unbundle(both, [types.TENSOR] * 3)[0])

    assert "Composite of 2 meets Composite of 3" in refusal(too_many)

    def other(g: Graph) -> None:
        both = g.bundle([g.input("x", types.TENSOR_FLOAT), g.constant(3)])
        g.output("y", g.unbundle(both, [types.TENSOR_DOUBLE, types.TENSOR])[0])

    assert "part 0: Tensor.FLOAT meets Tensor.DOUBLE at Unbundle; see the input 'x'" in refusal(
        other
    )


def test_a_composite_that_is_sent_round_and_wrapped_again_is_refused() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        peers = PeerSelectorSlot("cohort", peer_class="server").current_view(g)
        got = g.net_out("ring", peers, g.bundle([x]))
        g.net_out("ring", g.peer_ids([], peer_class="server"), g.bundle([got]))

    with pytest.raises(IncompatibleStorageOnEdge, match="Composite"):
        compiled(body)
