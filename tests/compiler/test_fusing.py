"""Fusing is not seen: random programs do the same with and without it, and what they mean."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.dsl import BackendSlot, Graph, ModelSlot, Module
from bbnode.engine import steps
from bbnode.ir import keys, types
from bbnode.ir.values import ResponseBatch
from bbnode.sim import LinkModel, Network
from tests.compiler.fusing import (
    BINDINGS,
    GAP_NS,
    JOIN_NS,
    Generator,
    Oracle,
    Program,
    Recorded,
    Seen,
    text_of,
)

PASS = "collapse_backend_subgraphs"
Named = Counter[tuple[int, str, str]]  # time, op, kind


def run(program: Program, made: ModelProto) -> tuple[dict[str, list[Seen]], Named]:
    """Return what the nodes show, and the names of the ops that fail."""
    network = Network(0, link=LinkModel(latency_ns=0))
    nodes = {"home": network.add("home", made, ["home"])}
    if program.away:
        nodes["away"] = network.add("away", made, ["away"])
    network.run_until_idle()
    began = network.now_ns
    nodes["home"].invoke("home", program.inputs)
    network.run(until=began + GAP_NS)
    nodes["home"].invoke("home", program.second)
    network.run(until=began + GAP_NS + 2 * JOIN_NS)
    seen: dict[str, list[Seen]] = {"home": [], "away": []}
    named: Named = Counter()
    for name, node in nodes.items():
        for at_ns, step in node.history():
            if isinstance(step, steps.AppEvent):
                seen[name].append(Seen(at_ns - began, "output", step.topic, _text(step.value)))
            elif isinstance(step, steps.OutputSkipped):
                seen[name].append(Seen(at_ns - began, "skipped", step.name))
            elif isinstance(step, steps.OpNotRun):
                seen[name].append(Seen(at_ns - began, "not run", ""))
                named[at_ns - began, step.op, step.reason] += 1
            elif isinstance(step, steps.OpFailed):
                seen[name].append(Seen(at_ns - began, "failed", step.kind))
                named[at_ns - began, step.op, step.kind] += 1
    return seen, named


def _text(value: object) -> str:
    if isinstance(value, ResponseBatch):
        return " ".join(text_of(answer) for _, answer in value.responses)
    return text_of(value)


def check(seed: int) -> Counter[str]:
    """Compare a program with its meaning; returns what it shows, and its graphs of several ops."""
    program = Generator(seed).draw()
    oracle = Oracle(program)
    oracle.run()
    recorded = Recorded(program).build()
    fused = Compiler().bind_all(BINDINGS).compile(recorded)
    plain = Compiler().without_stage(PASS).bind_all(BINDINGS).compile(recorded)
    seen, named = run(program, fused)
    seen_plain, named_plain = run(program, plain)
    for cls in ("home", "away"):
        wanted = sorted(oracle.seen[cls])
        assert sorted(seen_plain[cls]) == wanted, (seed, cls)
        assert sorted(seen[cls]) == wanted, (seed, cls)
    assert named == named_plain, seed
    shown = Counter(each.what for found in oracle.seen.values() for each in found)
    shown["graph"] = sum(
        function.domain == keys.BACKEND_SUBGRAPH_DOMAIN and len(function.node) > 1
        for function in fused.functions
    )
    return shown


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_a_program_does_the_same_with_and_without_fused_graphs(first: int) -> None:
    shown: Counter[str] = Counter()
    for seed in range(first, first + 20):
        shown += check(seed)
    # Else nothing is said above.
    assert shown.keys() >= {"output", "skipped", "failed", "graph"}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1_000, 3_000, 100))
def test_fusing_long(first: int) -> None:
    for seed in range(first, first + 100):
        check(seed)


class OverAnOrderEdge(Module):
    """A look at a model behind a change that is skipped; only one of two ops needs the change."""

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        compute, model = BackendSlot("compute"), ModelSlot("model")
        total = compute.reduce_sum(g, x, keepdims=False)
        loaded = model.load_parameters(
            g, x, after=g.when(compute.greater(g, total, g.constant(9.0)))
        )
        held = model.params(g, after=x)
        negated = compute.neg(g, held)
        g.output("negated", negated)
        g.output("both", compute.add(g, negated, held, after=loaded))


@pytest.mark.parametrize("stages", [(), (PASS,)])
def test_an_order_edge_is_waited_for_and_not_needed(stages: tuple[str, ...]) -> None:
    compiler = Compiler().bind_all({name: BINDINGS[name] for name in ("compute", "model")})
    for stage in stages:
        compiler = compiler.without_stage(stage)
    network = Network(0)
    node = network.add("node", compiler.compile(OverAnOrderEdge().build()), ["@self"])
    execution = node.invoke("@self", {"x": np.zeros(3, np.float32)})
    network.run_until_idle()
    assert node.outputs(execution).keys() == {"negated"}
    assert node.skipped(execution).keys() == {"both"}
