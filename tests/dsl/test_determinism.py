"""Same source, same bytes: random small programs, built twice and in other processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import onnx
from hypothesis import given
from hypothesis import strategies as st

from bbnode.dsl import (
    AggregatorSlot,
    BackendSlot,
    ConcreteSpec,
    Graph,
    ModelSlot,
    Module,
    Output,
    PeerSelectorSlot,
    syscalls,
    types,
)
from tests import protos
from tests.dsl.programs import build
from tests.patience import PATIENCE_S

NET = ConcreteSpec(role="Model", type_name="my.Net", config=b"\x81\xa1a\x01")


class Half(Module):
    """A sub-Module of two bodies, with a bootstrap."""

    def __init__(self, op_type: str) -> None:
        self.op_type = op_type

    def body(self, g: Graph) -> None:
        g.output("y", BackendSlot("compute").op(g, self.op_type, g.input("x", types.TENSOR)))

    def bootstrap(self, g: Graph) -> None:
        ModelSlot("student", concrete=NET).load_parameters(g, g.input("params"))


def _request(g: Graph, v: Output, k: int) -> Output:
    r = g.request(f"ask{k}", g.input(f"peers{k}", types.PEER_ID_VEC), v, deadline=k / 10)
    r.respond(g.bundle([r.received, r.received.sender]))
    return AggregatorSlot("fedavg").contribute_all(g, r.responses)


def _send(g: Graph, v: Output, k: int) -> Output:
    peers = PeerSelectorSlot(f"view{k % 2}", peer_class="b").sample(g, n=k + 1, after=v)
    return g.net_out(f"send{k}", peers, v)


def _scoped(g: Graph, v: Output, k: int) -> Output:
    with g.with_module(f"block{k % 2}"):
        return BackendSlot("compute").tanh(g, v)


STEPS: dict[str, Callable[[Graph, Output, int], Output]] = {
    "relu": lambda g, v, _: BackendSlot("compute").relu(g, v),
    "constant": lambda g, v, k: BackendSlot("compute").add(g, v, g.constant(float(k), after=v)),
    "scope": _scoped,
    "forward": lambda g, v, k: ModelSlot(("student", "teacher")[k % 2], concrete=NET).forward(g, v),
    "half": lambda g, v, k: Half(("Relu", "Tanh")[k % 2]).call().input("x", v).build(g).output("y"),
    "send": _send,
    "request": _request,
    "sleep": lambda g, v, k: syscalls.sleep(g, v, duration_ns=k),
    "tee": lambda g, v, k: syscalls.tee(g, v, fanout=k + 1)[-1],
    "unbundle": lambda g, v, _: g.unbundle(g.bundle([v, v]), [types.TENSOR, types.ANY])[0],
}

programs = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 40)), max_size=12)


def body_of(steps: list[tuple[str, int]]) -> Callable[[Graph], None]:
    def body(g: Graph) -> None:
        made = [g.input("x", types.TENSOR_FLOAT)]
        for number, (step, pick) in enumerate(steps):
            made.append(STEPS[step](g, made[pick % len(made)], number))
        for number, value in enumerate(made):
            g.output(f"y{number}", value)

    return body


@given(programs)
def test_a_program_builds_twice_to_the_same_bytes(steps) -> None:
    first, second = build(body_of(steps)), build(body_of(steps))
    assert first.SerializeToString() == second.SerializeToString()


@given(programs)
def test_every_recorded_program_is_well_formed(steps) -> None:
    model = build(body_of(steps))
    onnx.checker.check_model(model, full_check=True)
    functions = {protos.function_key(f) for f in model.functions}
    assert len(functions) == len(model.functions)
    for function in model.functions:
        defined = set(function.input)
        names = [node.name for node in function.node]
        assert len(names) == len(set(names))
        for node in function.node:
            after = (protos.get_meta(node, "ai.bytesandbrains.after") or "").split(",")
            assert {*node.input, *after} - {""} <= defined
            assert not set(node.output) & defined
            defined.update(node.output)
            if node.domain == "ai.bytesandbrains.module":
                assert protos.call_key(node) in functions
        assert set(function.output) <= defined
        assert {info.name for info in function.value_info} == defined


# Hash seeds change the order of sets between processes; the artifact must not notice.
_SCRIPT = """
import hashlib
from bbnode.examples.federated_digits import FederatedRound
print(hashlib.sha256(FederatedRound(clients=3).build().SerializeToString()).hexdigest())
"""


def test_other_processes_build_the_same_bytes() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert all(digests)
