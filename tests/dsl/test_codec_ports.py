"""`codec=` on a port: what is recorded, what travels, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bbnode.compiler import Compiler
from bbnode.compiler.errors import IncompatibleStorageOnEdge, TypeConstraintFailed
from bbnode.components import (
    Codec,
    ConnectedView,
    Int8Codec,
    OrtBackend,
    TopKCodec,
    ZstdCodec,
    concrete,
)
from bbnode.daemon.invoke.outcome import Outcomes
from bbnode.dsl import BackendSlot, BadArgument, CodecSlot, Graph, Module, PeerSelectorSlot, types
from bbnode.engine import steps
from bbnode.sim import Network, SimNode

CODEC = CodecSlot("codec")
X = np.linspace(-3, 5, 10_000, dtype=np.float32).reshape(100, 100)


class Sends(Module):
    home = "asker"

    def __init__(self, record: Callable[[Graph], None]) -> None:
        self._record = record

    def body(self, g: Graph) -> None:
        self._record(g)


def compiled(record: Callable[[Graph], None], codec: type[Codec] = Int8Codec, **more: Any) -> Any:
    compiler = (
        Compiler()
        .bind_peer_selector("peers", ConnectedView)
        .bind_backend("compute", OrtBackend)
        .bind_codec("codec", codec)
    )
    for slot, kind in more.items():
        compiler = compiler.bind_codec(slot, kind)
    return compiler.compile(Sends(record).build())


def peers(g: Graph, after: Any) -> Any:
    return PeerSelectorSlot("peers", peer_class="other").current_view(g, after=after)


def run(
    artifact: Any, inputs: dict[str, Any], others: int = 1
) -> tuple[dict[str, Any], SimNode, list[SimNode], list[int]]:
    sizes: list[int] = []

    def watch(_at: int, _node: Any, step: Any) -> None:
        if isinstance(step, steps.SendEnvelope):
            sizes.append(step.size)

    net = Network(observe=watch)
    asker = net.add("asker", artifact, ["asker"])
    answering = [net.add(f"other-{i}", artifact, ["other"]) for i in range(others)]
    execution = asker.invoke("asker", inputs)
    net.run_until_idle()
    back = {name: asker.values(name)[-1] for name in ("back", "numbers") if asker.values(name)}
    return {**asker.outputs(execution), **back}, asker, answering, sizes


def sends(**given: Any) -> Callable[[Graph], None]:
    def record(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        got = g.net_out("port", peers(g, x), x, **given)
        g.output("there", got)
        g.output("back", g.net_out("back", got.sender, got))

    return record


def test_a_send_travels_as_its_code() -> None:
    found, _, _, sizes = run(compiled(sends(codec=CODEC)), {"x": X})
    assert 0 < np.abs(found["back"] - X).max() <= 5 / 254 * 1.001
    assert found["back"].shape == X.shape
    plain = run(compiled(sends()), {"x": X})[3]
    assert sizes[0] / X.nbytes < 0.26
    assert sizes[1] == plain[1] > X.nbytes  # the way back has no codec


def test_codecs_one_after_the_other_and_a_shape() -> None:
    both = [CODEC, CodecSlot("zip")]
    artifact = compiled(sends(codec=both, shape=(100, 100)), zip=ZstdCodec)
    found, _, _, sizes = run(artifact, {"x": X})
    assert np.abs(found["back"] - X).max() <= 5 / 254 * 1.001
    assert sizes[0] < 0.26 * X.nbytes


@pytest.mark.parametrize("kind", [types.TENSOR_FLOAT, types.TENSOR_INT64])
def test_a_lossless_codec_takes_the_type_of_the_value(kind: types.TypeNode) -> None:
    def record(g: Graph) -> None:
        x = g.input("x", kind)
        got = g.net_out("port", peers(g, x), x, codec=CODEC)
        g.output("back", g.net_out("back", got.sender, got))

    x = X.astype(np.float32 if kind is types.TENSOR_FLOAT else np.int64)
    found = run(compiled(record, ZstdCodec), {"x": x})[0]
    assert np.array_equal(found["back"], x)
    assert found["back"].dtype == x.dtype


def test_tensors_of_floats_in_a_bundle_are_encoded_and_the_rest_is_as_it_was() -> None:
    def record(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        bundle = g.bundle([g.constant([1, 2]), x])
        got = g.net_out("port", peers(g, x), bundle, codec=CODEC)
        numbers, tensor = g.unbundle(got, [types.TENSOR_INT64, types.TENSOR_FLOAT])
        g.output("numbers", g.net_out("numbers", got.sender, numbers))
        g.output("back", g.net_out("back", got.sender, tensor))

    found, _, _, sizes = run(compiled(record), {"x": X})
    assert found["numbers"].tolist() == [1, 2]
    assert np.abs(found["back"] - X).max() <= 5 / 254 * 1.001
    assert sizes[0] < 0.27 * X.nbytes


def asks(g: Graph, *, whole: bool = True) -> None:
    x = g.input("x", types.TENSOR_FLOAT)
    r = g.request("ask", peers(g, x), x, codec=CODEC)
    double = BackendSlot("compute").add(g, r.received, r.received)
    answer = double if whole else g.bundle([double, g.constant([7], after=r.received)])
    g.respond(r, answer, codec=CODEC)
    if whole:
        g.output("all", r.responses.stacked)
    else:
        first, second = r.responses.unbundled([types.TENSOR_FLOAT, types.TENSOR_INT64])
        g.output("all", first.stacked)
        g.output("numbers", second.stacked)
    g.output("missing", r.responses.missing)


@pytest.mark.parametrize("whole", [True, False])
def test_a_question_and_its_answers(whole: bool) -> None:
    found, _, _, sizes = run(compiled(lambda g: asks(g, whole=whole)), {"x": X}, others=2)
    assert found["all"].shape == (2, 100, 100)
    assert np.abs(found["all"] - 2 * X).max() <= (5 / 254) * 2 + 10 / 254
    assert max(sizes) < 0.27 * X.nbytes
    if not whole:
        assert found["numbers"].tolist() == [[7], [7]]


class Lying(Int8Codec):
    TYPE_NAME = "bbnode.Int8Codec"

    def encode(self, ctx: Any, tensor: Any) -> Any:
        return np.array(super().encode(ctx, tensor))[:-1]


@pytest.mark.parametrize("liars", [1, 2])
def test_a_code_that_lies_costs_its_peer_its_answer(liars: int) -> None:
    artifact = compiled(asks)
    net = Network()
    asker = net.add("asker", artifact, ["asker"])
    others = [net.add(f"other-{i}", artifact, ["other"]) for i in range(2)]
    for other in others[:liars]:
        other.component("codec").__class__ = Lying
    execution = asker.invoke("asker", {"x": X})
    net.run_until_idle()
    if liars == 1:
        found = asker.outputs(execution)
        assert found["all"].shape == (1, 100, 100)
        assert list(found["missing"]) == [others[0].node.peer_id]
        refused = [s for s in asker.seen(steps.Telemetry) if s.name == "contribution.refused"]
        assert "bytes, and its header says" in str(refused)
    else:
        assert any("bytes, and its header says" in str(f) for f in asker.failures())


def test_nodes_of_other_settings_understand_each_other() -> None:
    artifact = compiled(sends(codec=CODEC), TopKCodec)
    net = Network()
    asker = net.add("asker", artifact, ["asker"], config={"codec": {"fraction": 0.5}})
    net.add("other", artifact, ["other"], config={"codec": {"fraction": 0.001}})
    asker.invoke("asker", {"x": X})
    net.run_until_idle()
    assert np.count_nonzero(asker.values("back")[0]) == X.size // 2


def test_two_slots_of_different_codecs_say_so_on_arrival() -> None:
    def record(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        code = g.net_out("port", peers(g, x), CODEC.encode(g, x))
        g.output("there", CodecSlot("other").decode(g, code))

    _, _, (other,), _ = run(compiled(record, other=TopKCodec), {"x": X})
    assert "bind the same codec to this slot on all peers" in str(other.failures())


def test_both_ends_of_a_port_have_the_codec() -> None:
    """A send that forgets it is refused by the compiler, with both types."""

    def record(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.output("there", CODEC.decode(g, g.net_out("port", peers(g, x), x)))

    with pytest.raises((IncompatibleStorageOnEdge, TypeConstraintFailed), match=r"Codec|UINT8"):
        compiled(record)


def test_a_codec_of_floats_refuses_integers_when_compiled() -> None:
    def record(g: Graph) -> None:
        x = g.input("x", types.TENSOR_INT64)
        g.output("there", g.net_out("port", peers(g, x), x, codec=CODEC))

    with pytest.raises(TypeConstraintFailed, match="INT64"):
        compiled(record)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (lambda g, x, p: g.net_out("port", p, x, codec=Int8Codec), "write codec=CodecSlot"),
        (lambda g, x, p: g.net_out("port", p, x, codec="int8"), "write codec=CodecSlot"),
        (lambda g, x, p: g.net_out("port", p, x, codec=CodecSlot), "write codec=CodecSlot"),
        (lambda g, _, p: g.net_out("port", p, g.constant(b"x"), codec=CODEC), "nothing to encode"),
        (lambda g, _, p: g.net_out("port", p, g.bundle([p]), codec=CODEC), "nothing to encode"),
        (
            lambda g, x, p: [
                g.net_out("port", p, x, codec=CODEC),
                g.net_out("port", p, x),
            ],
            "give all its sends the same",
        ),
        (
            lambda g, x, p: [
                r := g.request("ask", p, x),
                r.responses.stacked,
                r.respond(r.received, codec=CODEC),
            ],
            "were read before",
        ),
    ],
)
def test_codecs_that_are_none_are_refused(record: Any, said: str) -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        record(g, x, peers(g, x))

    with pytest.raises(BadArgument, match=said):
        Sends(body).build()


def test_several_sends_to_one_port_share_its_codec() -> None:
    def record(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        got = g.net_out("port", peers(g, x), x, codec=CODEC)
        g.net_out("port", peers(g, x), x, codec=CODEC)
        g.output("there", got)

    _, _, (other,), _ = run(compiled(record), {"x": X})
    assert other.failures() == []


def test_a_settled_codec_needs_no_binding() -> None:
    slot = CodecSlot("own", concrete=concrete(TopKCodec, fraction=0.5))
    found = run(compiled(sends(codec=slot)), {"x": X})[0]
    assert np.count_nonzero(found["back"]) == X.size // 2


def test_bytes_of_tensors_and_of_codes_are_reported() -> None:
    net = Network()
    artifact = compiled(asks)
    asker = net.add("asker", artifact, ["asker"])
    for i in range(2):
        net.add(f"other-{i}", artifact, ["other"])
    execution = asker.invoke("asker", {"x": X})
    net.run_until_idle()
    told = [s for s in asker.seen(steps.Telemetry) if s.name.startswith("codec.")]
    assert [(s.name, s.attributes["raw_bytes"]) for s in told] == [
        ("codec.encoded", X.nbytes),
        ("codec.decoded", 2 * X.nbytes),
    ]
    assert {s.attributes["execution"] for s in told} == {execution}
    outcomes = Outcomes()
    with outcomes.collect(execution) as outcome:
        for _, step in asker.history():
            outcomes.observe(step)
    assert outcome.as_json(str)["coded"]["raw_bytes"] == 3 * X.nbytes
    counts = asker.node.counters()
    assert counts["codec.decoded.raw_bytes"] == 2 * X.nbytes
    assert counts["codec.decoded.code_bytes"] / (2 * X.nbytes) < 0.26
    line = f"asker codec.encoded codec {X.nbytes} {counts['codec.encoded.code_bytes']} {execution}"
    assert any(each.endswith(line) for each in net.trace.lines())


BIG = np.linspace(-3, 5, 100_000, dtype=np.float32)  # handed to a worker thread, by its size


@pytest.mark.parametrize("kind", [Int8Codec, TopKCodec, ZstdCodec])
def test_large_tensors_in_worker_threads(kind: type[Codec]) -> None:
    found = []
    for threads in (False, True):
        net = Network(threads=threads)
        artifact = compiled(asks, kind)
        asker = net.add("asker", artifact, ["asker"])
        for i in range(2):
            net.add(f"other-{i}", artifact, ["other"])
        executions = [asker.invoke("asker", {"x": BIG}) for _ in range(2)]
        net.run_until_idle()
        assert asker.failures() == []
        assert sum(" task " in line for line in net.trace.lines()) >= 6
        assert asker.node.counters()["codec.encoded.raw_bytes"] == 2 * BIG.nbytes
        found.append([asker.outputs(each)["all"] for each in executions])
    assert np.array_equal(*map(np.array, found))


def test_two_ports_of_one_slot_have_an_error_memory_each() -> None:
    def record(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        first = g.net_out("first", peers(g, x), x, codec=CODEC)
        second = g.net_out("second", peers(g, x), BackendSlot("compute").neg(g, x), codec=CODEC)
        g.output("first", first)
        g.output("second", second)

    artifact = compiled(record, TopKCodec)
    net = Network()
    asker, other = net.add("asker", artifact, ["asker"]), net.add("other", artifact, ["other"])
    for _ in range(3):
        asker.invoke("asker", {"x": X})
        net.run_until_idle()
    first, second = (np.array(other.values(port)) for port in ("first", "second"))
    assert np.array_equal(first, -second)
    assert np.count_nonzero(first.sum(axis=0)) > np.count_nonzero(first[0])
