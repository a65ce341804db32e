"""Snapshots: what comes back, and what is refused."""

from __future__ import annotations

import hashlib

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.engine import errors, steps
from bbnode.ir import keys
from bbnode.ir.values import PeerIdVec
from tests.engine.builder import Partition, model
from tests.engine.support import bring_up, component, of, peer

MODEL = keys.role_domain("Model")
ADDRESS = Multiaddr("/ip4/10.0.0.1/tcp/1")


def program(extra: bool = False):
    p = Partition("server", inputs=["x", "to"])
    p.bind("m", "Model", "test.ScriptModel")
    if extra:
        p.bind("n", "Model", "test.ScriptModel")
    p.op(MODEL, "LoadParameters", ["x"], ["c"], slot="m")
    p.sys("IncrMetric", ["c"], name="loads")
    p.send("x", "to", 1)
    return model(p)


def wire_id(made) -> int:
    from bbnode.ir.envelope import decode_envelope

    (send,) = of(steps.SendEnvelope, made)
    return decode_envelope(b"".join(send.parts)).correlation.wire_req_id


def one_round(node) -> int:
    node.invoke("server", {"x": np.array([7], np.float32), "to": PeerIdVec([peer(1)])})
    return wire_id(node.poll(1))


def test_a_restored_node_has_its_state_and_makes_no_id_twice() -> None:
    node = bring_up(program(), "server")
    node.peer_connected(peer(1), [], [ADDRESS])
    ids = [one_round(node) for _ in range(3)]
    data = node.snapshot()
    again = bring_up(program(), "server", addresses=[Multiaddr("/ip4/10.9.9.9/tcp/1")])
    again.restore(data)
    assert component(again, "m").value.tolist() == [7]
    assert again.counters()["metric.loads"] == 3
    assert again.incarnation == 2
    (send,) = [again.invoke("server", {"x": np.zeros(1, np.float32), "to": peer(1)})]
    made = again.poll(1)
    assert send == 1
    assert of(steps.SendEnvelope, made)[0].addresses == (ADDRESS,)
    assert wire_id(made) not in ids
    assert [str(a) for a in again._rt.neighbours.own_addresses] == ["/ip4/10.9.9.9/tcp/1"]


def test_the_same_state_gives_the_same_bytes() -> None:
    made = []
    for _ in range(2):
        node = bring_up(program(), "server")
        node.peer_connected(peer(1), [])
        one_round(node)
        made.append(node.snapshot())
    assert made[0] == made[1]


def resealed(data: bytes, **changes) -> bytes:
    fields = {**msgpack.unpackb(data[40:]), **changes}
    body = msgpack.packb({k: v for k, v in fields.items() if v is not None})
    return data[:8] + hashlib.sha256(body).digest() + body


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: b"", "cut short"),
        (lambda d: b"OTHER" + d, "not a snapshot"),
        (lambda d: d[:-1], "checksum"),
        (lambda d: resealed(d, version=9), "format 9"),
        (lambda d: resealed(d, peer=peer(5).to_bytes()), "another peer"),
        (lambda d: resealed(d, components=[["m", "test.Other", b""]]), "another artifact"),
        (lambda d: resealed(d, components=[["m", 3, b""]]), "malformed"),
        (lambda d: resealed(d, components=None), "components"),
        (lambda d: resealed(d, address_book=[[b"x", 1, []]]), "address book"),
        (lambda d: resealed(d, address_book=[3]), "address book"),
        (lambda d: resealed(d, counters={"a": "b"}), "malformed"),
    ],
)
def test_what_is_not_a_snapshot_of_this_node_is_refused(change, says) -> None:
    node = bring_up(program(), "server")
    data = node.snapshot()
    with pytest.raises(errors.SnapshotRefused, match=says):
        bring_up(program(), "server").restore(change(data))
    with pytest.raises(errors.SnapshotRefused, match="another artifact"):
        bring_up(program(extra=True), "server").restore(data)


@given(st.data())
def test_a_changed_snapshot_is_refused(data) -> None:
    raw = bytearray(bring_up(program(), "server").snapshot())
    index = data.draw(st.integers(0, len(raw) - 1))
    raw[index] ^= data.draw(st.integers(1, 255))
    with pytest.raises(errors.SnapshotRefused):
        bring_up(program(), "server").restore(bytes(raw))


def test_a_component_that_refuses_its_state_is_named() -> None:
    node = bring_up(program(), "server")
    data = node.snapshot()
    fresh = bring_up(program(), "server")

    def refuse(_state):
        raise errors.InvalidOperand("not mine")

    component(fresh, "m").restore = refuse
    with pytest.raises(errors.SnapshotRefused, match="slot 'm': not mine"):
        fresh.restore(data)
