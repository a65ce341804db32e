"""Lists of peers in the DSL: types, nodes without a backend, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.compiler import Compiler
from bbnode.compiler.errors import TypeConstraintFailed
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import (
    BackendSlot,
    BadArgument,
    Graph,
    Module,
    Output,
    PeerSelectorSlot,
    peer_lists,
    syscalls,
    types,
)
from bbnode.ir import keys
from bbnode.ir.graph import is_onnx_domain
from bbnode.sim import Network
from tests import protos


class _Recorded(Module):
    """Runs one function in its body."""

    def __init__(self, record: object) -> None:
        self.recorded = record
        self.made: Output | None = None

    def body(self, g: Graph) -> None:
        peers = PeerSelectorSlot("cohort", peer_class="worker").current_view(g)
        self.made = self.recorded(g, peers)  # type: ignore[operator]
        g.output("made", self.made)


def _recorded(record: object) -> tuple[Output, list[object]]:
    module = _Recorded(record)
    model = module.build()
    assert module.made is not None
    (function,) = model.functions
    return module.made, [node for node in function.node if is_onnx_domain(node.domain)]


@pytest.mark.parametrize(
    ("op_type", "record", "kind"),
    [
        ("Slice", lambda g, p: peer_lists.slice_list(g, p, 1, 3), types.PEER_ID_VEC),
        ("Slice", lambda g, p: peer_lists.slice_list(g, p, -2), types.PEER_ID_VEC),
        ("Gather", lambda g, p: peer_lists.gather_list(g, p, [0, -1]), types.PEER_ID_VEC),
        ("Concat", lambda g, p: peer_lists.concat_lists(g, p, p), types.PEER_ID_VEC),
        ("Squeeze", lambda g, p: peer_lists.only_one(g, p), types.PEER_ID),
        ("Identity", lambda g, p: BackendSlot("b").identity(g, p), types.PEER_ID_VEC),
        ("Slice", lambda g, p: BackendSlot("b").op(g, "Slice", p, _i(g), _i(g)), types.PEER_ID_VEC),
    ],
)
def test_an_op_on_peers_has_their_type_and_no_slot(op_type, record, kind):
    made, nodes = _recorded(record)
    assert made.type is kind
    (node,) = [node for node in nodes if node.op_type == op_type]
    assert protos.get_meta(node, keys.SLOT_KEY) is None


def _i(g: Graph) -> Output:
    return g.constant(np.array([1], np.int64))


def test_one_peer_becomes_a_list_again():
    made, _ = _recorded(
        lambda g, p: peer_lists.list_of_one(g, peer_lists.only_one(g, peer_lists.slice_list(g, p)))
    )
    assert made.type is types.PEER_ID_VEC


def test_a_list_of_addresses_stays_one():
    made, _ = _recorded(
        lambda g, _: peer_lists.slice_list(g, g.addresses(["/ip4/127.0.0.1/tcp/1"]), stop=1)
    )
    assert made.type is types.ADDRESS_VEC


def test_an_input_without_a_type_is_taken_for_peers():
    made, _ = _recorded(lambda g, _: peer_lists.slice_list(g, g.input("worker"), 0, 1))
    assert made.type is types.PEER_ID_VEC


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda g, p: peer_lists.slice_list(g, p, step=0), "1 or more"),
        (lambda g, p: peer_lists.slice_list(g, p, 0.5), "whole numbers"),
        (lambda g, _: peer_lists.slice_list(g, g.constant([1.0])), "BackendSlot has it"),
        (lambda g, p: peer_lists.gather_list(g, p, "ab"), "whole numbers"),
        (lambda g, p: peer_lists.list_of_one(g, p), "takes PeerId or Multiaddress"),
        (lambda g, _: peer_lists.concat_lists(g), "got 0"),
        (lambda g, p: peer_lists.concat_lists(g, p, g.addresses([])), "got PeerIdVec, address_vec"),
        (lambda g, p: BackendSlot("b").squeeze(g, peer_lists.only_one(g, p)), "got PeerId"),
    ],
)
def test_what_does_not_fit_is_refused(record, message):
    with pytest.raises(BadArgument, match=message):
        _recorded(record)


class _Recruiting(Module):
    """Asks the peers whose score is high enough, the first `most` of them, and not `boss`."""

    home = "server"

    def body(self, g: Graph) -> None:
        scores = g.input("scores", types.TENSOR_FLOAT)
        most = g.input("most", types.TENSOR_INT64)
        boss = g.input("boss", types.PEER_ID)
        compute = BackendSlot("compute")
        view = PeerSelectorSlot("cohort", peer_class="worker").current_view(g)
        fit = peer_lists.filter_list(g, view, compute.greater(g, scores, g.constant(0.5)))
        some = peer_lists.slice_list(g, peer_lists.without(g, fit, boss), 0, most)
        some = peer_lists.where(g, peer_lists.contains(g, view, boss), some, view)
        heard = g.net_out("hired", some, scores)
        syscalls.app_emit(g, heard, name="hired")
        g.output("asked", peer_lists.length(g, some))


def test_peers_are_chosen_by_values_and_stay_of_their_class() -> None:
    compiler = Compiler().bind_backend("compute", OrtBackend)
    model = compiler.bind_peer_selector("cohort", ConnectedView).compile(_Recruiting().build())
    net = Network(seed=3)
    server = net.add("server", model, ["server"])
    names = [f"w{n}" for n in range(5)]
    for name in names:
        net.add(name, model, ["worker"])
        net.connect("server", name)
    net.run_until_idle()
    in_order = sorted(names, key=Network.peer_id)
    scores = np.array([1, 0, 1, 1, 1], np.float32)
    boss = Network.peer_id(in_order[2])
    execution = server.invoke("server", {"scores": scores, "most": np.array([2]), "boss": boss})
    net.run_until_idle()
    assert server.failures() == []
    assert int(server.outputs(execution)["asked"]) == 2
    hired = [name for name in in_order if net[name].values("hired")]
    assert hired == [in_order[0], in_order[3]]


def test_bounds_and_masks_of_another_type_are_refused() -> None:
    with pytest.raises(BadArgument, match="int64"):
        _recorded(lambda g, p: peer_lists.slice_list(g, p, g.constant(1.5)))
    with pytest.raises(BadArgument, match="int64"):
        _recorded(lambda g, p: peer_lists.gather_list(g, p, g.constant([1.5])))

    class Masked(Module):
        home = "server"

        def body(self, g: Graph) -> None:
            view = PeerSelectorSlot("cohort", peer_class="worker").current_view(g)
            some = peer_lists.filter_list(g, view, g.constant([1, 2]))
            g.net_out("x", some, g.constant(1.0))

    with pytest.raises(TypeConstraintFailed, match=r"(?i)bool"):
        Compiler().bind_peer_selector("cohort", ConnectedView).compile(Masked().build())
