"""`invoke` with the inputs of one part of a program, and inputs on several classes of peer."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.compiler import Compiler
from bbnode.compiler.errors import CrossClassDataflow
from bbnode.components import ConnectedView, OrtBackend, values
from bbnode.dsl import (
    BackendSlot,
    BadArgument,
    BadName,
    Graph,
    Module,
    PeerSelectorSlot,
    syscalls,
    types,
)
from bbnode.engine import errors
from bbnode.sim import Network, steps

ONE, TWO = np.float32(1), np.float32(2)


class Shop(Module):
    """The asker has "price" and "count" that are multiplied, and "note"; the keeper has "stock"."""

    home = "asker"

    def body(self, g: Graph) -> None:
        compute = BackendSlot("compute")
        price, count, note = (g.input(n, types.TENSOR_FLOAT) for n in ("price", "count", "note"))
        either = syscalls.any_of(g, compute.neg(g, price), compute.identity(g, price))
        g.output("sum", compute.mul(g, either, count))
        g.output("noted", note)
        keepers = PeerSelectorSlot("keepers", peer_class="keeper").current_view(g, after=note)
        g.output("kept", g.net_out("note", keepers, note))
        stock = g.input("stock", types.TENSOR_FLOAT, home="keeper", shape=[2])
        left = g.input("left", types.TENSOR_FLOAT, home="keeper")
        g.output("stocked", compute.identity(g, stock))
        g.output("doubled", compute.add(g, left, left))
        g.input("unread", types.TENSOR_FLOAT, home="keeper")


def network() -> Network:
    compiler = Compiler().bind_backend("compute", OrtBackend)
    artifact = compiler.bind_peer_selector("keepers", ConnectedView).compile(Shop().build())
    made = Network(0)
    made.add("asker", artifact, ["asker"])
    made.add("keeper", artifact, ["keeper"])
    return made


def test_a_part_runs_alone_and_all_inputs_run_everything() -> None:
    net = network()
    asker, keeper = net["asker"], net["keeper"]
    sums = asker.invoke("asker", {"price": TWO, "count": TWO})
    noted = asker.invoke("asker", {"note": ONE})
    stocked = keeper.invoke("keeper", {"stock": np.ones(2, np.float32)})
    doubled = keeper.invoke("keeper", {"left": TWO})
    unread = keeper.invoke("keeper", {"unread": TWO})
    everything = asker.invoke("asker", {"price": TWO, "count": ONE, "note": ONE})
    net.run_until_idle()
    assert asker.outputs(sums) == {"sum": -4}
    assert asker.outputs(noted) == {"noted": 1}
    assert keeper.outputs(stocked).keys() == {"stocked"}
    assert keeper.outputs(doubled) == {"doubled": 4}
    assert keeper.outputs(unread) == {}
    assert keeper.has_finished(unread)
    assert asker.outputs(everything) == {"sum": -2, "noted": 1}
    assert keeper.values("kept") == [1, 1]
    assert asker.failures() == keeper.failures() == []


@pytest.mark.parametrize(
    ("target", "given", "error", "says"),
    [
        ("asker", {"price": ONE}, errors.MissingInput, "no value for count; give all inputs, or"),
        ("asker", {}, errors.MissingInput, r"\(price, count; note\)"),
        ("asker", {"price": ONE, "note": ONE}, errors.MissingInput, "no value for count"),
        ("asker", {"price": ONE, "coutn": ONE}, errors.UnknownInput, "mean 'count'"),
        ("asker", {"stock": ONE}, errors.UnknownInput, "it has: price, count, note"),
        ("keeper", {"stock": np.ones(3, np.float32)}, errors.InputShapeMismatch, "stock"),
        ("keeper", {"left": ONE, "stock": np.ones(2, np.float32)}, errors.MissingInput, "unread"),
    ],
)
def test_what_is_no_part_is_refused(target, given, error, says) -> None:
    net = network()
    with pytest.raises(error, match=says):
        net[target].invoke(target, given)


def test_an_execution_of_a_part_outlives_a_restart() -> None:
    net = network()
    asker = net["asker"]
    number = asker.invoke("asker", {"price": TWO, "count": TWO})
    asker.checkpoint()
    net.crash("asker")
    net.restart("asker")
    net.run_until_idle()
    assert asker.outputs(number) == {"sum": -4}


def test_inputs_of_two_classes_do_not_meet() -> None:
    class Meets(Module):
        home = "one"

        def body(self, g: Graph) -> None:
            here = g.input("here", types.TRIGGER)
            there = g.input("there", types.TRIGGER, home="two")
            g.output("both", g.bundle([here, there]))

    with pytest.raises(CrossClassDataflow):
        Compiler().compile(Meets().build())


def test_a_called_module_has_its_inputs_where_it_is_called() -> None:
    class Inner(Module):
        def body(self, g: Graph) -> None:
            g.output("y", g.input("x", types.TENSOR_FLOAT, home="other"))

    class Outer(Module):
        home = "one"

        def body(self, g: Graph) -> None:
            x = g.input("x", types.TENSOR_FLOAT)
            g.output("y", Inner().call().input("x", x).build(g).output("y"))

    with pytest.raises(BadArgument, match="input 'x' is given to another class of peer"):
        Outer().build()


def test_a_class_with_a_wrong_name_is_refused() -> None:
    class Wrong(Module):
        def body(self, g: Graph) -> None:
            g.input("x", home="no class")

    with pytest.raises(BadName, match="no class"):
        Wrong().build()


def test_an_output_that_needs_nothing_is_of_all_inputs() -> None:
    class Says(Module):
        home = "one"

        def body(self, g: Graph) -> None:
            g.output("a", g.input("x", types.TRIGGER))
            g.output("b", g.input("y", types.TRIGGER))
            g.output("c", g.constant(3))

    net = Network(0)
    node = net.add("n", Compiler().compile(Says().build()), ["one"])
    part = node.invoke("one", {"x": values.TRIGGER})
    whole = node.invoke("one", {"x": values.TRIGGER, "y": values.TRIGGER})
    net.run_until_idle()
    assert node.outputs(part).keys() == {"a"}
    assert node.outputs(whole).keys() == {"a", "b", "c"}
    assert not node.seen(steps.OpFailed)
