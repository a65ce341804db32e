"""Homes of called Modules: where they say that they live, and where their inputs do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bbnode.compiler import Compiler
from bbnode.compiler.errors import HomeContradicted
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, Output, PeerSelectorSlot, syscalls, types
from bbnode.ir import keys
from bbnode.ir.graph import Program
from bbnode.ir.onnx_file import program_of

COMPUTE = BackendSlot("compute")


class Twice(Module):
    """Is inlined, as it is only ONNX. It names no home."""

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR)
        g.output("y", COMPUTE.add(g, x, x))


class Counted(Module):
    """Stays a call where it is called twice. It names no home."""

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR)
        syscalls.incr_metric(g, syscalls.threshold(g, x, n=1), name="seen")
        g.output("y", COMPUTE.add(g, x, x))


class ServerTwice(Twice):
    home = "server"


class ServerCounted(Counted):
    home = "server"


class Outer(Module):
    """Names no home, and calls what names one."""

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR)
        y = ServerTwice().call().input("x", x).build(g).output("y")
        g.output("y", ServerCounted().call().input("x", y).build(g).output("y"))


class Beats(Module):
    """Reads nothing."""

    home = "server"

    def body(self, g: Graph) -> None:
        tick = syscalls.pulse(g)
        syscalls.incr_metric(g, tick, name="beats")
        g.output("y", tick)


def compiled(record: Callable[[Graph, Output, Output], None], home: str = "server") -> Program:
    class Asks(Module):
        def body(self, g: Graph) -> None:
            here = g.input("here", types.TENSOR_FLOAT)
            clients = PeerSelectorSlot("cohort", peer_class="client").current_view(g, after=here)
            record(g, here, g.net_out("over", clients, here))

    Asks.home = home
    made = (
        Compiler()
        .bind_peer_selector("cohort", ConnectedView)
        .bind_backend("compute", OrtBackend)
        .compile(Asks().build())
    )
    return program_of(made)


def homes(program: Program, *calls: str) -> set[str | None]:
    return {
        f.metadata.get(keys.HOME_KEY)
        for f in program.functions
        for node in f.nodes
        if any(node.op_type.startswith(call) for call in calls)
    }


def called(module: type[Module], uses: int, x: str) -> Callable[[Graph, Output, Output], None]:
    def record(g: Graph, here: Output, there: Output) -> None:
        for index in range(uses):
            call = module().call().input("x", here if x == "here" else there)
            g.output(f"y{index}", call.build(g).output("y"))

    return record


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("module", [ServerTwice, ServerCounted, Outer])
def test_a_home_that_contradicts_the_input_is_refused(module: type[Module], uses: int) -> None:
    with pytest.raises(HomeContradicted) as caught:
        compiled(called(module, uses, "there"))
    error = caught.value
    assert (error.home, error.lives_on) == ("server", "client")
    assert error.called.startswith("Server")
    assert "test_homes_of_calls.py:" in str(error)
    assert "name no home in 'Server" in str(error)


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("module", [ServerTwice, ServerCounted, Outer, Twice, Counted])
def test_a_home_that_agrees_is_as_good_as_none(module: type[Module], uses: int) -> None:
    assert compiled(called(module, uses, "here"))


@pytest.mark.parametrize("module", [Twice, Counted])
def test_a_module_that_names_no_home_lives_where_it_is_called(module: type[Module]) -> None:
    assert compiled(called(module, 2, "there"))


def test_one_module_without_a_home_is_called_on_two_classes() -> None:
    def record(g: Graph, here: Output, there: Output) -> None:
        for name, x in (("a", here), ("b", there)):
            g.output(name, Counted().call().input("x", x).build(g).output("y"))

    assert homes(compiled(record), "Hoist_Counted") == {"server", "client"}


def test_an_input_of_the_root_lives_at_the_roots_home() -> None:
    with pytest.raises(HomeContradicted, match=r"'here', which lives on class 'client'"):
        compiled(called(ServerTwice, 1, "here"), home="client")


def test_a_constant_has_no_home_to_contradict() -> None:
    def record(g: Graph, here: Output, there: Output) -> None:
        y = ServerTwice().call().input("x", g.constant([1.0])).build(g).output("y")
        g.output("sum", COMPUTE.add(g, here, y))

    assert compiled(record)


@pytest.mark.parametrize("uses", [1, 2])
def test_what_reads_nothing_lives_at_the_home_that_its_module_names(uses: int) -> None:
    def record(g: Graph, here: Output, there: Output) -> None:
        for index in range(uses):
            g.output(f"y{index}", Beats().call().build(g).output("y"))

    made = compiled(record, home="observer")
    mains = [f for f in made.functions if keys.TARGET_KEY in f.metadata]
    (server,) = [f for f in mains if f.metadata.get(keys.HOME_KEY) == "server"]
    assert set(server.outputs) == {f"y{index}" for index in range(uses)}


@pytest.mark.parametrize("uses", [1, 2])
def test_what_waits_elsewhere_contradicts_its_home_too(uses: int) -> None:
    def record(g: Graph, here: Output, there: Output) -> None:
        for index in range(uses):
            g.output(f"y{index}", Beats().call().build(g, after=there).output("y"))

    with pytest.raises(HomeContradicted, match="Beats"):
        compiled(record)


def test_open_bodies_that_are_copied_keep_their_homes() -> None:
    class Kinds(Module):
        """Calls what names a home, with values of two types."""

        def body(self, g: Graph) -> None:
            x = g.input("x", types.TENSOR)
            syscalls.incr_metric(g, syscalls.threshold(g, x, n=1), name="kinds")
            g.output("y", ServerTwice().call().input("x", x).build(g).output("y"))

    def record(g: Graph, here: Output, there: Output) -> None:
        whole = COMPUTE.cast(g, there, to=types.TENSOR_DOUBLE)
        for index, x in enumerate((here, whole)):
            g.output(f"y{index}", Kinds().call().input("x", x).build(g).output("y"))

    with pytest.raises(HomeContradicted, match="'client'"):
        compiled(record)
