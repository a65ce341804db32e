"""Deadlines in words: which number ended a wait, and where it is set.

Rule: a wait ends by what its author said: of the op itself, of the request or message that started
its execution, or of the call. Where nobody said anything it is the limit `wait_s` of the node.
"""

from __future__ import annotations

from bbnode.engine.frame import Frame, Op
from bbnode.ir import keys

_REQUESTS = frozenset({keys.OP_SEND_REQ_BATCHED, keys.OP_RECV_RESP_BATCHED})


def seconds(time_ns: int) -> str:
    """Return a time as `600 s`, `0.25 s`."""
    return f"{time_ns / 1e9:.12g} s"


def bound_by(frame: Frame, op: Op, until_ns: int, wait_ns: int) -> str:
    """Return what said that an op may wait until then; `wait_ns` is the limit of its node."""
    if until_ns == frame.deadline_ns:
        return bound_of(frame)
    if op.deadline_from == keys.DEADLINE_FROM_NOBODY:
        return bound_of_node(wait_ns)
    if op.op_type in _REQUESTS:
        return "the request's deadline, g.request(deadline=…)"
    return "the op's own deadline, deadline=… (or Compiler.with_per_hop_budget_ns)"


def bound_of(frame: Frame) -> str:
    """Return what said how long a whole execution may take."""
    if frame.source_peer is None:
        return "the deadline of its call, invoke(deadline_s=…) or deadline_s of [[invoke]]"
    if frame.plan.is_request:
        return f"the deadline of {frame.source_peer.short}'s request, g.request(deadline=…)"
    return (
        f"the time that came with the message of {frame.source_peer.short}: that of its call or "
        "request, net_out(budget=…), or its limit wait_s"
    )


def bound_of_node(wait_ns: int) -> str:
    """Return that nobody but the node said how long."""
    return (
        f"nobody bounds it but this node, limits.wait_s = {wait_ns / 1e9:.12g}; raise that, or say "
        "deadline=… in the program"
    )
