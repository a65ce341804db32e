"""Sends and requests: the only ways in which a value changes its class of peer.

Rule: a send is recorded once, with what lives on the far side among its outputs; the compiler
makes the receiving op from it. `wire.Recv` is never recorded.
"""

from __future__ import annotations

import dataclasses
import math

from bbnode.dsl.errors import BadArgument
from bbnode.dsl.graph_core import GraphCore
from bbnode.dsl.output import After, Output
from bbnode.dsl.record import record, spec_of
from bbnode.dsl.source import author_line
from bbnode.ir import keys

_SEND = spec_of(keys.WIRE_DOMAIN, keys.OP_SEND)
_REQUEST = spec_of(keys.WIRE_DOMAIN, keys.OP_SEND_REQ_BATCHED)
_RESPOND = spec_of(keys.WIRE_DOMAIN, keys.OP_SEND_RESP)

NS_PER_S = 1_000_000_000
MAX_HOPS = 100_000  # what the compiler takes as a chain depth
MAX_DEADLINE_S = 30 * 86_400.0  # a month; a longer one is a typing error


class Request:
    """One request to a cohort of peers and its one batch of answers.

    Attributes:
        port: the author's name of it.
        received: the value, on the peers' class; its `.sender` is who asked.
        responses: a ResponseBatch in PeerId order, back on the class that asked.
        request_id: the request's id, on the class that asked.
    """

    __slots__ = ("_answered", "_remote_id", "port", "received", "request_id", "responses")

    def __init__(self, port: str, recorded: tuple[Output, ...]) -> None:
        request_id, responses, received, sender, remote_id = recorded
        self.port = port
        self.received = dataclasses.replace(received, from_peer=sender)
        self.responses = responses
        self.request_id = request_id
        self._remote_id = remote_id
        self._answered = ""

    def respond(self, value: Output, *, after: After = None) -> None:
        """Answer the request, on the peers' class, once.

        Raises:
            BadArgument: the request is answered already.
        """
        g = self.received.graph
        if self._answered:
            raise g.error(
                BadArgument,
                f"request {self.port!r} is answered already at {self._answered}; a request has "
                "one answer: put several values into one with g.bundle([…])",
            )
        self._record_answer(g, value, after)

    def _record_answer(self, g: GraphCore, value: Output, after: After) -> None:
        record(g, _RESPOND, (value, self.received.sender, self._remote_id), after=after,
               metadata={keys.PORT_KEY: self.port})  # fmt: skip
        self._answered = author_line()


def record_send(
    g: GraphCore, port: str, peers: Output, value: Output, *,
    after: After, hops: object, first: Output | None,
) -> Output:  # fmt: skip
    """Record a `wire.Send`; gives the value on the receiving class, with its sender.

    `first` is what the port's first send delivers, when this is a later one.
    """
    metadata = _metadata(g, port, hops)
    if first is not None:
        metadata[keys.FAN_IN_KEY] = first.name
    received, sender = record(g, _SEND, (value, peers), after=after, metadata=metadata)
    return dataclasses.replace(received, from_peer=sender)


def record_request(
    g: GraphCore, port: str, peers: Output, value: Output, *,
    quorum: int, deadline: object, after: After, hops: object,
) -> Request:  # fmt: skip
    """Record a `wire.SendReqBatched`; `deadline` in seconds, 0 for the per-hop budget."""
    seconds = deadline if isinstance(deadline, int | float) else math.nan
    if not 0 <= seconds <= MAX_DEADLINE_S:
        raise g.error(
            BadArgument,
            f"deadline={deadline!r:.40} of request {port!r} has to be a number of seconds between "
            f"0 (take the per-hop budget) and {MAX_DEADLINE_S:.0f}",
        )
    attributes = {
        keys.ATTR_QUORUM: quorum,
        keys.ATTR_DEADLINE_NS: round(seconds * NS_PER_S),
    }
    metadata = _metadata(g, port, hops)
    recorded = record(g, _REQUEST, (value, peers), attributes, after=after, metadata=metadata)
    return Request(port, recorded)


def _metadata(g: GraphCore, port: str, hops: object) -> dict[str, str]:
    if hops is None:
        return {keys.PORT_KEY: port}
    if type(hops) is not int or not 0 < hops <= MAX_HOPS:
        raise g.error(
            BadArgument,
            f"hops={hops!r:.40} of {port!r} has to be an integer from 1 (the receiver sends "
            f"nothing on) to {MAX_HOPS}, or None to let the compiler count them",
        )
    return {keys.PORT_KEY: port, keys.CHAIN_DEPTH_KEY: str(hops)}
