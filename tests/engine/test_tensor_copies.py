"""A large tensor on its way through a node: how often its bytes are copied, and where."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, PeerSelectorSlot, types
from bbnode.engine import Limits, install, steps
from bbnode.engine.admission import adopt
from bbnode.ir import codec
from bbnode.ir.address import site_suffix
from bbnode.ir.envelope import SlotFill, WireCorrelation, WireEnvelope, encode_envelope
from bbnode.ir.keys import SITE_ID_KEY
from bbnode.ir.peer import PeerId
from tests.protos import get_meta

SIZE = 8 << 20
ME, SENDER = PeerId.from_seed(0), PeerId.from_seed(1)


class Ship(Module):
    home = "left"

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        sent = g.net_out("there", PeerSelectorSlot("peers", peer_class="right").sample(g, n=1), x)
        g.output("y", g.net_out("back", sent.sender, BackendSlot("compute").neg(g, sent)))


@pytest.fixture(scope="module")
def compiled():
    compiler = Compiler().bind_peer_selector("peers", ConnectedView)
    return compiler.bind_backend("compute", OrtBackend).compile(Ship().build())


def bring_up(compiled):
    main = next(f for f in compiled.functions if f.name.startswith("right#"))
    recv = next(node for node in main.node if node.op_type == "Recv")
    limits = Limits(envelope_bytes=2 * SIZE, ingress_bytes=8 * SIZE)
    node = install(compiled, [main.name], peer_id=ME, limits=limits)
    node.peer_connected(SENDER, ("left",))
    node.poll(0)
    return node, site_suffix(int(get_meta(recv, SITE_ID_KEY)))


def envelope(suffix: bytes, value: np.ndarray, aligned: bool) -> bytes:
    """One whose tensor does, or does not, begin at an address that a float may have."""
    payload = codec.encode_value(value)
    fill = SlotFill(dest_suffix=suffix, payload=payload, type_hash=types.TENSOR_FLOAT.wire_hash)
    for padding in range(1, 9):
        parts = encode_envelope(
            WireEnvelope(
                dest_peer_addresses=(bytes(padding),),
                fills=(fill,),
                correlation=WireCorrelation(wire_req_id=1),
                src_peer_bytes=SENDER.to_bytes(),
            )
        )
        data = b"".join(parts)
        at = np.frombuffer(data, np.uint8).ctypes.data + data.index(payload[:16])
        if (at % 4 == 0) is aligned:
            return data
    raise AssertionError("no padding gives that alignment")


class Watch:
    """Stands in front of the graph that the Recv feeds."""

    def __init__(self, node) -> None:
        self._run = node._rt.graphs[0].run
        self.input = self.result = None
        self.traced: list[tuple[int, int]] = []
        node._rt.graphs[0].run = self.run

    def run(self, inputs):
        (self.input,) = inputs
        (self.result,) = self._run(inputs)
        self.traced.append(tracemalloc.get_traced_memory())
        tracemalloc.reset_peak()
        return [self.result]


@pytest.mark.parametrize(("aligned", "copies"), [(True, 0), (False, 1)])
def test_in_at_most_once_and_out_never(compiled, aligned: bool, copies: int) -> None:
    node, suffix = bring_up(compiled)
    watch = Watch(node)
    value = np.arange(SIZE // 4, dtype=np.float32)
    data = envelope(suffix, value, aligned)
    tracemalloc.start()
    try:
        node.deliver_inbound(SENDER, data)
        made = node.poll(0)
        watch.traced.append(tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    (before, peak_in), (_, peak_out) = watch.traced
    assert round(peak_in / SIZE, 1) == copies
    assert round((peak_out - before) / SIZE, 1) == 0
    assert np.shares_memory(watch.input, np.frombuffer(data, np.uint8)) is aligned
    (sent,) = [step for step in made if isinstance(step, steps.SendEnvelope)]
    shared = [p for p in sent.parts if np.shares_memory(np.frombuffer(p, np.uint8), watch.result)]
    assert [len(part) for part in shared] == [SIZE]
    np.testing.assert_array_equal(np.frombuffer(shared[0], np.float32), -value)


def test_a_buffer_that_the_caller_may_reuse_is_copied_at_the_boundary(compiled) -> None:
    node, suffix = bring_up(compiled)
    watch = Watch(node)
    value = np.ones(1024, np.float32)
    buffer = bytearray(envelope(suffix, value, aligned=True))
    node.deliver_inbound(SENDER, buffer)
    buffer[:] = bytes(len(buffer))
    node.poll(0)
    np.testing.assert_array_equal(watch.input, value)


def test_what_nobody_can_change_is_taken_as_it_is() -> None:
    raw = np.arange(6, dtype=np.float32).tobytes()
    for array in (
        np.frombuffer(raw, np.float32),
        np.frombuffer(memoryview(raw), np.float32).reshape(2, 3)[1:],
    ):
        assert adopt(array) is array


def test_what_somebody_could_change_is_copied() -> None:
    owned = np.arange(6, dtype=np.float32)
    view = owned[:]
    view.flags.writeable = False
    locked = owned.copy()
    locked.flags.writeable = False  # its owner can lift that
    buffer = np.frombuffer(bytearray(owned.tobytes()), np.float32)
    buffer.flags.writeable = False
    for array in (owned, view, locked, buffer):
        taken = adopt(array)
        assert not np.shares_memory(taken, array)
        assert not taken.flags.writeable
        np.testing.assert_array_equal(taken, array)
