"""A node with every kind of door, what to throw at it, and what must hold whatever comes.

Rule: nothing that comes from outside makes `poll` raise, and what is left behind does not grow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bbnode.engine import Limits, Node, steps
from bbnode.engine.messaging.actions import suffix_of
from bbnode.ir import codec, keys, types
from bbnode.ir.address import REFUSED_SUFFIX, site_suffix
from bbnode.ir.envelope import (
    CorrelationKind,
    EdgeRttReport,
    SlotFill,
    WireCorrelation,
    WireEnvelope,
    encode_envelope,
)
from bbnode.ir.types import TypeNode
from bbnode.ir.values import TRIGGER, Composite, Metadata, PeerIdVec, Timestamp, Value, type_of
from tests.engine import protocols  # noqa: F401 - registers the component and its ops
from tests.engine.builder import Partition, model
from tests.engine.support import S, bring_up, component, peer

AGG = keys.role_domain("Aggregator")
COMP = keys.COMPOSITE_DOMAIN
BUDGET = 1 << 20

_P = Partition("server", inputs=["x", "peers"])
_P.bind("agg", "Aggregator", "test.SumAggregator")
_P.bind("chat", "Protocol", "test.Chatter")
_P.bind("m", "Model", "test.ScriptModel")
_OTHER = Partition("client")

VALUES: tuple[Value, ...] = (
    TRIGGER,
    np.ones(3, np.float32),
    np.zeros((2, 2), np.int64),
    Composite([np.ones(2, np.float32), Metadata(num_samples=3)]),
    Composite([Composite([TRIGGER]), peer(4)]),
    PeerIdVec([peer(1), peer(2)]),
    Metadata(a=1, b="x"),
    Timestamp(5),
    b"some bytes",
)


def _declare() -> None:
    p = _P
    head = p.recv("tensor", node=types.TENSOR_FLOAT, gates=True)
    p.op(keys.role_domain("Model"), "Forward", [head], ["y"], slot="m")
    p.output("forwarded", "y")
    p.send("y", "tensor.sender", _OTHER.site("back"))
    p.recv("anything", node=types.ANY)
    p.output("any_out", "anything")
    p.sys("Record", ["anything"], named={"name": "seen"})
    p.recv("parts", node=types.COMPOSITE)
    p.op(COMP, "Unbundle", ["parts"], ["part0", "part1"], child_count=2)
    p.op(AGG, "Contribute", ["part0", "part1"], ["took"], slot="agg")
    p.recv("tick", node=types.TRIGGER)
    p.sys("After", ["tick"], "tock", delay_ns=S)
    p.op(keys.role_domain("Model"), "Train", (), ["stats"], slot="m", after=["tock"], epochs=1)
    p.recv("question", request="qid", sender="who")
    p.respond("question", "who", "qid", _OTHER.site("answer"))
    p.recv("queued", node=types.ANY)
    p.sys("Serialize.Enqueue", ["queued"], "put", queue="q")
    p.sys("Serialize.Dequeue", ["put"], "got", queue="q")
    p.recv("units")
    p.sys("Limit.Acquire", ["units"], "unit", n=2, named={"name": "u"})
    p.recv("whom", node=types.PEER_ID_VEC)
    p.send("whom", "whom", _OTHER.site("back"))
    p.request("x", "peers", _OTHER.site("asked"), "answers", quorum=1)
    p.output("answered", "answers")


_declare()
MODEL = model(_P)
SITES = tuple(
    site_suffix(_P.site(name))
    for name in ("tensor", "anything", "parts", "tick", "question", "queued", "units", "whom",
                 "answers", "nobody")
)  # fmt: skip
OPS = (
    *(suffix_of("chat", op) for op in ("Echo", "Hear", "Later", "Slow", "None")),
    suffix_of("agg", "Echo"),
    suffix_of("nobody", "Echo"),
)
SUFFIXES = (*SITES, *OPS, REFUSED_SUFFIX, b"", b"\xe2\x01", b"\xe3\x01\x00\x00\x00\x01\xe4\x01\xff")
PEERS = tuple(peer(n) for n in range(1, 5))


def node_under_test(**more: Any) -> Node:
    """A small node with small caps, a few neighbours and a request that is open."""
    limits = Limits(
        ingress_bytes=BUDGET, envelope_bytes=1 << 16, frames=256, pending_async=128,
        ingress_events=256, outbound=256,
    )  # fmt: skip
    node = bring_up(MODEL, "server", limits=limits, **more)
    for other in PEERS:
        node.peer_connected(other, ["client"])
    node.poll(0)
    return node


def ask(node: Node) -> int:
    """Open a request; returns its id on the wire."""
    node.invoke("server", {"x": np.ones(1, np.float32), "peers": PeerIdVec(PEERS)})
    node.poll(node._rt.clock.now_ns)
    cohorts = node._rt.cohorts.table.open_cohorts()
    return cohorts[-1].wire_req_id if cohorts else 0


def envelope(
    *,
    suffixes: list[bytes],
    payload: bytes,
    type_hash: int,
    source: bytes,
    kind: int = 0,
    wire_req_id: int = 1,
    trigger_only: bool = False,
    remaining_ns: int = 0,
    claimed: tuple[bytes, ...] = (),
    report: int = 0,
) -> bytes:
    """A well-formed envelope of whatever content."""
    fills = tuple(
        SlotFill(
            dest_suffix=suffix, payload=payload, type_hash=type_hash, trigger_only=trigger_only
        )
        for suffix in suffixes
    )
    return b"".join(
        encode_envelope(
            WireEnvelope(
                fills=fills,
                correlation=WireCorrelation(
                    kind=CorrelationKind(kind % 3), wire_req_id=wire_req_id
                ),
                remaining_deadline_ns=remaining_ns,
                edge_rtt_reports=(EdgeRttReport(site=report, srtt_ns=report, rttvar_ns=1),)
                if report
                else (),
                src_peer_bytes=source,
                src_peer_addresses=claimed,
            )
        )
    )


def encoded(value: Value) -> tuple[bytes, TypeNode]:
    """Payload and type of a value."""
    return codec.encode_value(value), type_of(value)


def poll(node: Node, now_ns: int) -> list[steps.Step]:
    """Poll, carry out tasks at once, and check what always holds."""
    made = node.poll(now_ns)
    for step in made:
        if isinstance(step, steps.RunTask):
            node.complete(step.token, step.fn())
    check(node)
    return made


def check(node: Node) -> None:
    """What holds at any time."""
    rt = node._rt
    assert 0 <= rt.ingress.budget.used <= BUDGET
    assert len(rt.executor.frames) <= 256
    assert len(rt.suspensions) <= 128
    assert all(count >= 0 for count in rt.executor.under_way.values())


def settle(node: Node, now_ns: int) -> int:
    """Let everything end that came from outside, and check that nothing is left of it."""
    for _ in range(12):
        now_ns += Limits().wait_ns + S
        poll(node, now_ns)
    rt = node._rt
    component(node, "chat").heard.clear()  # what test components note is theirs
    component(node, "agg").got.clear()
    component(node, "m").calls.clear()
    assert not rt.executor.frames
    assert not len(rt.suspensions)
    assert not len(rt.cohorts.table)
    assert not len(rt.calls)
    assert not any(rt.executor.under_way.values())
    assert not rt.executor.ready
    assert not any(cell.busy or cell.line for cell in rt.cells)
    kept = sum(row.kept.charge.size for row in rt.records._rows)
    kept += sum(held.charge.size for queue in rt.stores.queues for held in queue.values)
    assert rt.ingress.budget.used == kept
    assert len(rt.round_trips) <= 1024
    return now_ns
