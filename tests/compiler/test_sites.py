"""Site ids: they move with what crosses, and with nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.compiler.errors import SiteCollision
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, Output, PeerSelectorSlot, types
from bbnode.dsl.compiled import CompiledModule
from bbnode.ir import keys
from bbnode.ir.onnx_file import program_of
from tests.compiler.back_units import unit_until
from tests.compiler.programs import Body
from tests.sim.versions import Versioned, version

COMPUTE = BackendSlot("compute")
COMPILER = (
    Compiler().bind_backend("compute", OrtBackend).bind_peer_selector("clients", ConnectedView)
)


def sites(model: ModelProto) -> dict[tuple[str, str, str], str]:
    """By class, port and op type of each receiver: its site."""
    found = {}
    for main in program_of(model).functions:
        for node in main.nodes:
            if keys.SITE_ID_KEY in node.metadata:
                scope = node.metadata.get(keys.PORT_SCOPE_KEY, "")
                port = f"{scope}:{node.metadata[keys.PORT_KEY]}"
                found[main.metadata[keys.HOME_KEY], port, node.op_type] = node.metadata[
                    keys.SITE_ID_KEY
                ]
    return found


def names(model: ModelProto) -> list[str]:
    return [f.name for f in program_of(model).functions if keys.TARGET_KEY in f.metadata]


V1 = sites(version())


def test_each_crossing_has_a_site_of_its_own() -> None:
    assert len(set(V1.values())) == len(V1) == 6


@pytest.mark.parametrize("edit", ["client_body", "server_body"])
def test_an_edited_body_leaves_all_sites(edit: str) -> None:
    assert sites(version(edit)) == V1
    assert names(version(edit)) != names(version())


def test_an_added_crossing_leaves_the_others() -> None:
    added = sites(version("added"))
    assert added.items() > V1.items()
    assert {port for _, port, _ in added.keys() - V1.keys()} == {":ping"}
    other = sites(version("other_call"))
    assert other.items() > V1.items()
    assert {port for _, port, _ in other.keys() - V1.keys()} == {"Other_0:scale"}


def test_a_call_in_a_scope_leaves_the_calls_without() -> None:
    added = sites(version("call_before"))
    assert added.items() > V1.items()
    assert {port for _, port, _ in added.keys() - V1.keys()} == {"added.Scale_0:scale"}


@pytest.mark.parametrize(
    ("edit", "moved"),
    [
        ("renamed_port", {"tell", "renamed"}),
        ("changed_type", {"update"}),
        ("bundled", {"update"}),
    ],
)
def test_what_crosses_moves_its_own_site_only(edit: str, moved: set[str]) -> None:
    changed = sites(version(edit)).items() ^ V1.items()
    assert {port for (_, port, _), _ in changed} == {f":{name}" for name in moved}


def test_types_inside_of_a_composite_count() -> None:
    def made(kind: types.TypeNode, *, hidden: bool, deep: bool) -> str:
        class Bundled(Module):
            home = "server"

            def body(self, g: Graph) -> None:
                x = g.input("x", types.TENSOR_FLOAT)
                clients = PeerSelectorSlot("clients", peer_class="client").current_view(g, after=x)
                part = COMPUTE.cast(g, x, to=kind.elem_type)
                both: Output = g.bundle([x, part])
                if deep:
                    both = g.bundle([both])
                if hidden:
                    both = Handed().call().input("v", both).build(g).output("w")
                g.output("got", g.net_out("both", clients, both))

        (site,) = sites(COMPILER.compile(Bundled().build())).values()
        return site

    class Handed(Module):
        name = "Handed"

        def body(self, g: Graph) -> None:
            g.output("w", g.input("v", types.COMPOSITE))

    double = made(types.TENSOR_DOUBLE, hidden=False, deep=False)
    assert made(types.TENSOR_INT64, hidden=False, deep=False) != double
    assert made(types.TENSOR_DOUBLE, hidden=True, deep=False) == double
    deep = made(types.TENSOR_DOUBLE, hidden=False, deep=True)
    assert deep not in (double, made(types.TENSOR_INT64, hidden=False, deep=True))


def test_the_name_of_the_program_counts() -> None:
    renamed = Versioned()
    renamed.name = "Another"
    assert not set(sites(COMPILER.compile(renamed.build())).values()) & set(V1.values())


def test_a_sender_more_leaves_the_site() -> None:
    def made(*, more: bool) -> ModelProto:
        class FanIn(Module):
            home = "server"

            def body(self, g: Graph) -> None:
                x = g.input("x", types.TENSOR_FLOAT)
                clients = PeerSelectorSlot("clients", peer_class="client").current_view(g, after=x)
                if more:
                    back = g.net_out("start", clients, x)
                    mates = PeerSelectorSlot("mates", peer_class="client").current_view(
                        g, after=back
                    )
                    g.net_out("tell", mates, back)
                g.output("told", g.net_out("tell", clients, x))

        return COMPILER.bind_peer_selector("mates", ConnectedView).compile(FanIn().build())

    ((at, site),) = sites(made(more=False)).items()
    assert sites(made(more=True))[at] == site


def test_a_program_opened_again_has_the_same_sites() -> None:
    for edits in ((), ("added", "call_before", "other_call", "bundled")):
        model = version(*edits)
        for again in (
            COMPILER.compile(model),
            COMPILER.compile(CompiledModule(model).build()),
            COMPILER.compile(CompiledModule(Versioned(edits).build()).build()),
        ):
            assert sites(again) == sites(model)


def test_two_receivers_of_one_name_are_refused() -> None:
    body = Body("Twice", home="a", root=True)
    value = body.input("value", types.TENSOR_FLOAT)
    peers = body.sample("b", "bs", slot="pick_b")
    for name in ("one", "other"):
        body.send(value, peers, name)
        body.function.nodes[-1].metadata[keys.PORT_KEY] = "same"
        body.output(f"{name}_out", name)
    with pytest.raises(SiteCollision, match="port 'same' of class 'b'") as caught:
        unit_until("analyze_wire_edges", body)
    assert caught.value.receiver == "b"


# --- any edit ---------------------------------------------------------------------------------

Edit = Callable[[Graph, Output], Output]


def _named(g: Graph, value: Output) -> Output:
    with g.with_module("scoped"):
        return COMPUTE.add(g, value, value)


class Doubled(Module):
    """A part that sends nothing."""

    def body(self, g: Graph) -> None:
        g.output("doubled", COMPUTE.add(g, x := g.input("x", types.TENSOR_FLOAT), x))


EDITS: dict[str, Edit] = {
    "add": lambda g, value: COMPUTE.add(g, value, value),
    "constant": lambda g, value: COMPUTE.mul(g, value, g.tensor(2.0)),
    "scoped": _named,
    "call": lambda g, value: Doubled().call().input("x", value).build(g).output("doubled"),
    "unpacked": lambda g, value: g.unbundle(g.bundle([value]), [types.TENSOR_FLOAT])[0],
}


class Edited(Module):
    """Sends, a request and a part that sends, with any ops before and behind each."""

    home = "server"

    def __init__(self, edits: Sequence[Sequence[str]]) -> None:
        self.edits = edits

    def body(self, g: Graph) -> None:
        steps = iter(self.edits)

        def edited(value: Output) -> Output:
            for name in next(steps):
                value = EDITS[name](g, value)
            return value

        x = edited(g.input("x", types.TENSOR_FLOAT))
        clients = PeerSelectorSlot("clients", peer_class="client").current_view(g, after=x)
        r = g.request("ask", clients, x, deadline=2.0)
        r.respond(g.bundle([edited(r.received), r.received]))
        g.output("answers", r.responses)
        told = g.net_out("tell", clients, edited(x))
        g.output("back", edited(g.net_out("tell", told.sender, edited(told))))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.sampled_from(sorted(EDITS)), max_size=4), min_size=5, max_size=5))
def test_any_edit_of_bodies_leaves_all_sites(edits: list[list[str]]) -> None:
    edited = sites(COMPILER.compile(Edited(edits).build()))
    plain = sites(COMPILER.compile(Edited([()] * 5).build()))
    assert edited == plain
    assert len(edited) == 4
