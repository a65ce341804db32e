"""`Topic` and `BytesTopic`: tensors that peers publish to whoever follows a topic of the network.

Rule: nobody is asked and nobody answers. What is published reaches those who follow the topic,
through each other, a moment later; who is away or overloaded misses it. What came and was not
taken yet waits here, the newest `max_waiting` of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import msgpack
import numpy as np

from bbnode.components.contracts import OpContext, ProtocolComponent
from bbnode.components.errors import ComponentError
from bbnode.components.registry import register_component
from bbnode.ir import codec, types
from bbnode.ir.errors import DecodeError
from bbnode.ir.opset import protocol_op
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TypeNode
from bbnode.ir.values import Value, type_of

PROTOCOL: Final = "topic"
# Of a component that keeps so many of the largest messages: half a gigabyte.
MAX_WAITING: Final = 1024

protocol_op(PROTOCOL, "Subscribe", "", "done:trigger",
    doc="Follow the topic from now on; again does nothing.")  # fmt: skip
protocol_op(PROTOCOL, "Unsubscribe", "", "done:trigger",
    doc="Follow it no more; what has come and was not taken is dropped.")  # fmt: skip
protocol_op(PROTOCOL, "Publish", "message:tensor", "done:trigger",
    doc="Send a tensor to all who follow the topic, whoever they are.")  # fmt: skip
protocol_op(PROTOCOL, "Take", "", "message:tensor publisher:peer",
    doc="The oldest message that waits here, and who has published it.")  # fmt: skip


class NothingPublished(ComponentError):
    """Nothing waits on a topic: all that has come was taken."""


@dataclass(frozen=True, kw_only=True)
class TopicConfig:
    """Settings of `Topic`.

    Attributes:
        topic: its name in the network: 1 to 128 letters, digits and any of `. _ - /`; "": that of
            the slot.
        event: the kind of the event that each message publishes on the node's bus (1024 and up),
            for an EventSource that takes it.
        max_waiting: messages that are kept until they are taken; the oldest go first.
    """

    topic: str = ""
    event: int = 1024
    max_waiting: int = 64


@register_component
class Topic(ProtocolComponent):
    """One topic of float32 tensors of any shape, published on and followed."""

    TYPE_NAME: ClassVar[str] = "bbnode.Topic"
    storage: ClassVar[Mapping[str, TypeNode]] = {"*": types.TENSOR_FLOAT}
    Config: ClassVar[type] = TopicConfig
    config: TopicConfig
    uses_topics: ClassVar[bool] = True

    def __init__(self, config: TopicConfig) -> None:
        super().__init__(config)
        self.require(
            1 <= config.max_waiting <= MAX_WAITING, f"max_waiting has to be in 1 .. {MAX_WAITING}"
        )
        self.require(config.event >= 1024, f"event is {config.event}; 1024 or more")
        self._waiting: deque[tuple[PeerId, bytes]] = deque(maxlen=config.max_waiting)

    # -- ops ---------------------------------------------------------------------------------

    def subscribe(self, ctx: OpContext) -> None:
        """Follow the topic."""
        ctx.follow(self.config.topic or ctx.slot)

    def unsubscribe(self, ctx: OpContext) -> None:
        """Follow it no more."""
        ctx.unfollow(self.config.topic or ctx.slot)
        self._waiting.clear()

    def publish(self, ctx: OpContext, message: Value) -> None:
        """Publish a tensor; raises PayloadTooLarge, and ComponentError for one of a wrong type."""
        ctx.publish(self.config.topic or ctx.slot, self._encoded(message))

    def take(self, ctx: OpContext) -> tuple[Value, PeerId]:
        """Return the oldest message that waits, and its publisher.

        Raises:
            NothingPublished: none waits.
        """
        if not self._waiting:
            raise NothingPublished(
                f"{self.TYPE_NAME}: nothing waits on {self.config.topic or ctx.slot!r}; take once "
                f"for each event {self.config.event}"
            )
        publisher, payload = self._waiting.popleft()
        return self._decoded(payload), publisher

    # -- what comes --------------------------------------------------------------------------

    def on_message(self, ctx: OpContext, topic: str, payload: bytes) -> None:
        """Keep a message that can be decoded, and publish an event of it."""
        publisher = ctx.source_peer or ctx.self_peer
        try:
            self._decoded(payload)
        except (ComponentError, DecodeError) as error:
            ctx.refuse(publisher, f"what it published on {topic!r} is none: {error}")
            return
        self._waiting.append((publisher, payload))
        ctx.publish_event(self.config.event)

    def _encoded(self, message: Value) -> bytes:
        kind = type_of(message)
        if kind is not types.TENSOR_FLOAT:
            raise ComponentError(f"{self.TYPE_NAME}: a message is float32, not {kind.name}")
        return codec.encode_value(message)

    def _decoded(self, payload: bytes) -> Value:
        return codec.decode_value(types.TENSOR_FLOAT, payload)

    # -- state -------------------------------------------------------------------------------

    def serialize(self) -> bytes:
        """Return what waits."""
        rows = [(peer.to_bytes(), payload) for peer, payload in self._waiting]
        return bytes(msgpack.packb(rows))

    def restore(self, data: bytes) -> None:
        """Load what waits; ComponentError for bytes of anything else."""
        with self.restoring():
            rows = msgpack.unpackb(data) if data else []
            self._waiting.extend((PeerId.from_bytes(peer), bytes(raw)) for peer, raw in rows)


@register_component
class BytesTopic(Topic):
    """One topic of bytes, uint8 [N], as they are: other programs that speak libp2p may share it."""

    TYPE_NAME: ClassVar[str] = "bbnode.BytesTopic"
    storage: ClassVar[Mapping[str, TypeNode]] = {"*": types.TENSOR_UINT8}

    def _encoded(self, message: Value) -> bytes:
        if not isinstance(message, np.ndarray) or message.dtype != np.uint8 or message.ndim != 1:
            raise ComponentError(f"{self.TYPE_NAME}: a message is uint8 [N]")
        return message.tobytes()

    def _decoded(self, payload: bytes) -> Value:
        return np.frombuffer(payload, np.uint8)
