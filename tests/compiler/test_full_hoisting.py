"""Bodies that several calls share: equal ones converge, and are named by their content."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.compiler.driver.admission import admit
from bbnode.compiler.rewriting.hoisting import body_hash
from bbnode.compiler.unit import CompileOptions
from bbnode.components import ConstantView, OrtBackend
from bbnode.dsl import BackendSlot, Graph, ModelSlot, Module, Output, syscalls, types
from bbnode.ir import keys
from bbnode.ir.graph import Function, Program
from bbnode.ir.onnx_file import model_of, program_of
from bbnode.ir.types import TypeNode
from bbnode.sim import Network
from tests.compiler import back_units, programs
from tests.compiler.programs import FakeModel
from tests.compiler.test_full_chains import Written

HOISTED = re.compile(r"Hoist_\w+_[0-9a-f]{16}")


class Learner(Module):
    """Loads parameters and gives those there are; what it is called, and what its values are
    called, is up to the test."""

    def __init__(self, name: str, port: str = "w", kind: TypeNode = types.TENSOR_FLOAT,
                 home: str = keys.SELF_CLASS, slot: str = "m") -> None:  # fmt: skip
        self.name = name
        self.home = home
        self._port = port
        self._kind = kind
        self._slot = slot

    def body(self, g: Graph) -> None:
        w = g.input(self._port, self._kind)
        loaded = ModelSlot(self._slot).load_parameters(g, w)
        syscalls.app_emit(g, loaded, name="loaded")
        g.output(f"{self._port}_out", w, after=loaded)


def calls(*modules: Learner) -> Callable[[Graph], None]:
    def body(g: Graph) -> None:
        w = g.input("start", types.TENSOR_FLOAT)
        for module in modules:
            port = module._port
            w = module.call().input(port, w).build(g).output(f"{port}_out")
        g.output("end", w)

    return body


def compiled(body: Callable[[Graph], object]) -> Program:
    made = Compiler().bind_model("m", FakeModel).bind_model("n", FakeModel)
    return program_of(made.bind_backend("compute", OrtBackend).compile(Written(body).build()))


def hoisted(model: Program | ModelProto) -> list[str]:
    return [f.name for f in model.functions if HOISTED.fullmatch(f.name)]


def called(model: Program) -> list[str]:
    main = model.functions[0]
    return [n.op_type for n in main.nodes if n.domain == keys.MODULE_DOMAIN]


def test_a_body_that_is_called_twice_is_named_by_its_content() -> None:
    learner = Learner("Learner")
    model = compiled(calls(learner, learner))
    (name,) = hoisted(model)
    assert re.fullmatch("Hoist_Learner_[0-9a-f]{16}", name)
    assert called(model) == [name, name]
    assert compiled(calls(learner, learner)).functions[1].name == name


def test_equal_bodies_of_other_names_are_one() -> None:
    model = compiled(calls(Learner("One"), Learner("Two", port="v"), Learner("Three", port="u")))
    (name,) = hoisted(model)
    assert name.startswith("Hoist_One_")
    assert called(model) == [name] * 3


def test_programs_that_share_a_body_share_its_hash() -> None:
    def also(g: Graph) -> None:
        calls(Learner("Other"), Learner("Another", port="z"))(g)
        g.output("more", g.input("unrelated", types.TENSOR_INT64))

    first, second = (hoisted(compiled(body))[0] for body in (calls(*[Learner("L")] * 2), also))
    assert first.rpartition("_")[2] == second.rpartition("_")[2]


def test_bodies_that_differ_in_anything_that_counts_stay_apart() -> None:
    learners = [Learner("A"), Learner("B", slot="n")]
    model = compiled(calls(*learners, *learners))
    assert len(hoisted(model)) == 2
    unit = admit(Written(calls(Learner("A"), Learner("B"))).build(), CompileOptions())
    base = body_hash(unit.program.functions[1], {}, unit.prints)
    assert body_hash(unit.program.functions[2], {}, unit.prints) == base

    def changed(change: Callable[[Function], object]) -> str:
        body = unit.program.functions[1].copy()
        change(body)
        return body_hash(body, {}, unit.prints)

    assert changed(lambda f: f.metadata.update({keys.HOME_KEY: "elsewhere"})) != base
    assert changed(lambda f: f.nodes[0].metadata.update({keys.SLOT_ID_KEY: "7"})) != base
    assert changed(lambda f: f.nodes[1].set_attr("name", "other")) != base
    assert changed(lambda f: f.declare({"w": types.TENSOR_DOUBLE})) != base
    assert changed(lambda f: setattr(f.nodes[2], "after", ())) != base
    assert changed(lambda f: setattr(f.nodes[0], "source_line", "x.py:9")) == base
    assert changed(lambda f: f.nodes[0].metadata.update({keys.MODULE_INSTANCE_KEY: "X"})) == base


def test_bodies_that_call_equal_bodies_are_equal() -> None:
    class Outer(Learner):
        def __init__(self, name: str, inner: Learner) -> None:
            super().__init__(name)
            self._inner = inner

        def body(self, g: Graph) -> None:
            w = g.input("w", types.TENSOR_FLOAT)
            port = self._inner._port
            for _ in range(2):
                w = self._inner.call().input(port, w).build(g).output(f"{port}_out")
            g.output("w_out", w)

    model = compiled(calls(Outer("P", Learner("In")), Outer("Q", Learner("Im", port="v"))))
    assert [name.split("_")[1] for name in hoisted(model)] == ["In", "P"]


def test_types_that_only_the_calls_show_keep_bodies_apart() -> None:
    class Echo(Learner):
        def body(self, g: Graph) -> None:
            x = g.input("x")
            syscalls.app_emit(g, x, name="echo")
            g.output("x_out", x)

    def body(g: Graph) -> None:
        values = g.input("f", types.TENSOR_FLOAT), g.input("i", types.TENSOR_INT64)
        for name, value in zip(("Floats", "Ints"), values, strict=True):
            for index in range(2):
                made = Echo(name).call().input("x", value).build(g)
                g.output(f"{name}_{index}", made.output("x_out"))

    assert len(hoisted(compiled(body))) == 2  # equal as recorded, and still two


def test_untyped_bodies_of_one_type_converge_once_types_are_known() -> None:
    learners = [Learner("A", kind=types.ANY), Learner("B", port="v", kind=types.ANY)]
    assert len(hoisted(compiled(calls(*learners, *learners)))) == 1


def test_joined_bodies_run_at_every_call() -> None:
    def halve(port: str) -> Callable[[Graph], None]:
        def body(g: Graph) -> None:
            x = g.input(port, types.TENSOR_FLOAT)
            half = BackendSlot("compute").mul(g, x, g.constant(0.5))
            syscalls.app_emit(g, half, name="half")
            g.output("y", half)

        return body

    def program(g: Graph) -> None:
        value: Output = g.input("x", types.TENSOR_FLOAT)
        for name, port in (("One", "a"), ("Two", "b")):
            value = Written(halve(port), name).call().input(port, value).build(g).output("y")
        g.output("z", value)

    model = compiled(program)
    assert len(hoisted(model)) == 1
    network = Network(seed=0)
    node = network.add("node", model_of(model), ["a"])
    node.invoke("a", {"x": np.array(8, np.float32)})
    network.run_until_idle()
    assert float(node.values("z")[0]) == 2.0
    assert [float(v) for v in node.values("half")] == [4.0, 2.0]


def test_what_sends_is_inlined_and_never_hoisted() -> None:
    def program(g: Graph) -> None:
        from tests.compiler.test_full_ports import announce

        x = g.input("x", types.TENSOR_FLOAT)
        for name in ("One", "Two"):
            Written(announce, name).call().input("x", x).build(g)

    made = Compiler().bind_backend("compute", OrtBackend)
    for slot in ("to_b", "to_c"):
        made = made.bind_peer_selector(slot, ConstantView)
    assert hoisted(made.compile(Written(program).build())) == []


@pytest.mark.parametrize("name", sorted(programs.PROGRAMS))
def test_partitioning_twice_renames_nothing_twice(name: str) -> None:
    unit = programs.unit_of(*programs.PROGRAMS[name]())
    options = CompileOptions(permissive_types=True)
    order = ("inline_for_partition", "validate", "expand_ops", "type_solver",
             "infer_peer_classes", "synthesize_wire_recvs", "partition_by_wire_ops")  # fmt: skip
    programs.run(unit, *order, options=options)
    before = back_units.content(unit)
    programs.run(unit, "partition_by_wire_ops", options=options)
    assert back_units.content(unit) == before
