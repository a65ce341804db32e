"""A protocol that talks over the control plane, for tests: it does what a script says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import msgpack

from bbnode.components.contracts import PENDING, ComponentError, ProtocolComponent, inbound, offload
from bbnode.ir import keys, opset
from bbnode.ir.peer import PeerId
from bbnode.ir.values import PeerIdVec
from tests.engine.builder import Partition, model
from tests.engine.support import S, _once, bring_up

DOMAIN = f"{keys.PROTOCOL_DOMAIN_PREFIX}chatter"

if opset.lookup_op(DOMAIN, "Call") is None:
    opset.op(DOMAIN, "Call", "peers:peers", "cmd:cmd", role="Protocol", suspends=True, text="hello")
    opset.op(DOMAIN, "Tell", "peers:peers", "cmd:cmd", role="Protocol", suspends=True, text="hello")
    opset.op(DOMAIN, "Beat", "trigger:trigger", "cmd:cmd", role="Protocol", period_ns=S)
    opset.op(DOMAIN, "Known", "", "peers:peers", role="Protocol")


@dataclass(frozen=True, kw_only=True)
class ChatterConfig:
    deadline_ns: int = 5 * S


@_once
class Chatter(ProtocolComponent):
    """Asks others' `Echo`, notes what it hears, and beats."""

    TYPE_NAME: ClassVar[str] = "test.Chatter"
    Config = ChatterConfig

    def __init__(self, config: ChatterConfig) -> None:
        super().__init__(config)
        self.heard: list[Any] = []
        self.reasons: list[str] = []
        self.silent = False
        self.beats = 0
        self.period_ns = 0
        self.raises: BaseException | None = None
        self.returns: Any = None
        self.completion: Any = None
        self.ctx: Any = None

    def call(self, ctx, peers: PeerIdVec, *, text: str) -> None:
        for peer in peers:
            ctx.request(
                peer, "chat", "Echo", text.encode(), tag=text, deadline_ns=self.config.deadline_ns
            )
        if self.raises is not None:
            raise self.raises

    def tell(self, ctx, peers: PeerIdVec, *, text: str) -> None:
        self.ctx = ctx
        for peer in peers:
            ctx.send(peer, "chat", "Hear", text.encode())

    def beat(self, ctx, trigger, *, period_ns: int) -> None:
        self.period_ns = period_ns
        ctx.set_timer("beat", period_ns)

    def known(self, ctx) -> PeerIdVec:
        return PeerIdVec(peer for peer, *_ in self.heard)

    @inbound("Echo")
    def echo(self, ctx, payload: bytes) -> Any:
        self.heard.append((ctx.source_peer, ctx.correlation.kind.name, payload))
        if self.raises is not None:
            raise self.raises
        if self.silent:
            return None
        return payload[::-1] if self.returns is None else self.returns

    @inbound("Hear")
    def hear(self, ctx, payload: bytes) -> None:
        self.heard.append((ctx.source_peer, ctx.correlation.kind.name, payload))

    @inbound("Later")
    def later(self, ctx, payload: bytes) -> Any:
        self.completion = ctx.open_completion()
        return PENDING

    @inbound("Slow")
    @offload
    def slow(self, ctx, payload: bytes) -> bytes:
        try:
            ctx.set_timer("x", 1)
        except ComponentError as error:
            self.heard.append(str(error))
        return b"slow " + payload

    def on_timer(self, ctx, key: str) -> None:
        self.beats += 1
        self.heard.append(("timer", key, ctx.now_ns))
        ctx.set_timer(key, self.period_ns)

    def on_answer(self, ctx, tag: str, payload: bytes) -> None:
        self.heard.append((ctx.source_peer, ctx.correlation.kind.name, tag, payload))

    def on_no_answer(self, ctx, tag: str, peer: PeerId) -> None:
        self.heard.append(("no answer", tag, peer))
        self.reasons.append(ctx.reason)

    def serialize(self) -> bytes:
        return msgpack.packb([self.beats, self.period_ns])

    def restore(self, data: bytes) -> None:
        self.beats, self.period_ns = msgpack.unpackb(data)


def chatting(me: int = 0, **more: Any):
    """A node with a Chatter in slot `chat` and a model in slot `m`."""
    p = Partition("talker", inputs=["peers"])
    p.bind("chat", "Protocol", "test.Chatter")
    p.op(DOMAIN, "Call", ["peers"], ["done"], slot="chat", called="call")
    q = Partition("teller", inputs=["peers"])
    q.bind("chat", "Protocol", "test.Chatter")
    q.op(DOMAIN, "Tell", ["peers"], ["done"], slot="chat", called="tell")
    r = Partition("beater", inputs=["go"])
    r.bind("chat", "Protocol", "test.Chatter")
    r.op(DOMAIN, "Beat", ["go"], ["done"], slot="chat", called="beat")
    made = model(p, q, r)
    return bring_up(made, "talker", "teller", "beater", me=me, **more)
