"""`SecAggClient`: the client's side of secure aggregation, as a component.

Rule: of a round its id alone is saved, by which this client takes part in it once, over restarts
too. A client that restarts has dropped out of its round: keys and masks are not used twice, and a
snapshot holds no secret. Every method is offloaded, so that a
record of a run holds the results, and a replay, which has no secrets, takes them from there.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import ClassVar, Final, TypeVar

import numpy as np

from bbnode.components.contracts import OpContext, ProtocolComponent, offload
from bbnode.components.errors import ComponentError
from bbnode.components.registry import register_component
from bbnode.components.secure_aggregation import ops as ops
from bbnode.components.secure_aggregation.client_round import CLIENT_TYPE, ClientRound
from bbnode.components.secure_aggregation.errors import (
    NotMaskable,
    RoundUnknown,
    RoundViolated,
)
from bbnode.components.secure_aggregation.messages import ROUND_ID_BYTES
from bbnode.components.secure_aggregation.plan import RoundPlan, SecAggConfig
from bbnode.ir.decoding import shown
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Metadata, Value

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

_USED_BYTES: Final = 16
# Rounds, of all servers, that this client remembers: 128 KiB of a snapshot. That an older one is
# asked for again gains nothing, as no signature of it names this client's new keys.
MAX_USED: Final = 1 << 13


@register_component
class SecAggClient(ProtocolComponent):
    """Masks this node's vectors, and helps to unmask the sums of all.

    It takes part in one round of a server at a time: a new one ends the one before.
    """

    TYPE_NAME: ClassVar[str] = CLIENT_TYPE
    Config: ClassVar[type] = SecAggConfig
    config: SecAggConfig

    def __init__(self, config: SecAggConfig) -> None:
        super().__init__(config)
        self._plan = RoundPlan.of(config)
        self._rounds: dict[PeerId, tuple[bytes, ClientRound]] = {}  # by server, oldest first
        self._used: dict[bytes, None] = {}  # rounds that it took part in, oldest first
        self._is_light = False  # weighs less than its examples, which it said

    @offload
    def advertise_keys(self, ctx: OpContext, round: Value) -> bytes:
        """Return the public keys of a round that the caller begins, signed by this node."""
        round_id, digest = _head(round)
        if digest != self._plan.digest:
            raise RoundViolated(
                "the server's round has other settings, or is of another version of bbnode, than "
                "this client's; run the same artifact and version"
            )
        server = self._server(ctx)
        self._use(server, round_id)
        self._rounds.pop(server, None)
        while len(self._rounds) >= self.config.max_rounds:
            del self._rounds[next(iter(self._rounds))]
        begun = ClientRound(self._plan, me=ctx.self_peer, server=server, round_id=round_id)
        self._rounds[server] = round_id, begun
        return self._step(ctx, lambda: begun.advertise(ctx.random_bytes, ctx.sign))

    @offload
    def share_keys(self, ctx: OpContext, listing: Value) -> bytes:
        """Return a sealed letter for each neighbour, once the keys of all are checked."""
        found, body = self._found(ctx, listing)
        return self._step(ctx, lambda: found.share(body, ctx.random_bytes))

    @offload(reads_only=True)
    def current_round(self, ctx: OpContext) -> bytes:
        """Return the id of the round under way with the caller."""
        return self._known(ctx)[0]

    @offload
    def mask(
        self, ctx: OpContext, mail: Value, tensor: Value, metadata: Metadata
    ) -> tuple[Value, Metadata]:
        """Return a vector under masks, uint8 [W (P + 1)], and metadata that says nothing.

        `tensor` is [P] float32; `num_samples` of `metadata` is its weight.
        """
        found, body = self._found(ctx, mail)
        weight = 1 if self.config.equal_weights else metadata.get("num_samples")
        if isinstance(weight, bool) or not isinstance(weight, int):
            raise NotMaskable(f"{self.TYPE_NAME}: num_samples is {shown(weight)}, no whole number")
        if not isinstance(tensor, np.ndarray):
            raise NotMaskable(f"{self.TYPE_NAME}: {shown(tensor)} is no tensor")
        if not self.config.equal_weights and weight > self.config.max_samples:
            self._say_light(weight)
        words = self._step(ctx, lambda: found.mask(body, tensor, weight, ctx.random_bytes))
        return words.view(np.uint8), Metadata()

    def _say_light(self, weight: int) -> None:
        """Log once that this client weighs less than its examples."""
        if not self._is_light:
            self._is_light = True
            logger.warning(
                "%s: %d examples count as %d, the most that one client weighs (max_samples); raise "
                "it in the program, where larger clients are to weigh more",
                self.TYPE_NAME, weight, self.config.max_samples,
            )  # fmt: skip

    @offload
    def confirm(self, ctx: OpContext, listing: Value) -> bytes:
        """Return this node's signature of the list of survivors."""
        found, body = self._found(ctx, listing)
        return self._step(ctx, lambda: found.confirm(body, ctx.sign))

    @offload
    def reveal(self, ctx: OpContext, signatures: Value) -> bytes:
        """Return a share of each neighbour, by the signed list of survivors; the round is over."""
        found, body = self._found(ctx, signatures)
        try:
            return self._step(ctx, lambda: found.reveal(body))
        finally:
            self._rounds.pop(self._server(ctx), None)

    def serialize(self) -> bytes:
        """Return by which rounds are known that this client took part in; nothing secret."""
        return b"".join(self._used)

    def restore(self, data: bytes) -> None:
        """Forget the rounds under way, but not which there were. Raises ComponentError."""
        if len(data) % _USED_BYTES or len(data) > MAX_USED * _USED_BYTES:
            raise ComponentError(
                f"{self.TYPE_NAME}: {len(data)} bytes are no list of up to {MAX_USED} rounds"
            )
        starts = range(0, len(data), _USED_BYTES)
        self._used = dict.fromkeys(data[at : at + _USED_BYTES] for at in starts)
        self._rounds = {}

    # -- parts -------------------------------------------------------------------------------

    def _use(self, server: PeerId, round_id: bytes) -> None:
        """Note a round that a server begins. Raises RoundViolated for one that there was."""
        digest = hashlib.sha256(server.to_bytes() + round_id).digest()[:_USED_BYTES]
        if digest in self._used:
            raise RoundViolated(
                f"{self.TYPE_NAME}: the server began round {round_id.hex()} before; a round is "
                "taken part in once, and its keys are not drawn again"
            )
        while len(self._used) >= MAX_USED:
            del self._used[next(iter(self._used))]
        self._used[digest] = None

    def _server(self, ctx: OpContext) -> PeerId:
        if ctx.source_peer is None:
            raise RoundViolated(f"{self.TYPE_NAME}: a step of a round that no server asked for")
        return ctx.source_peer

    def _known(self, ctx: OpContext) -> tuple[bytes, ClientRound]:
        known = self._rounds.get(self._server(ctx))
        if known is None:
            raise RoundUnknown(
                f"{self.TYPE_NAME}: no round with this server is under way: it is over, or this "
                "node restarted and dropped out of it"
            )
        return known

    def _found(self, ctx: OpContext, message: Value) -> tuple[ClientRound, bytes]:
        round_id, body = _head(message)
        known_id, known = self._known(ctx)
        if known_id != round_id:
            raise RoundUnknown(f"{self.TYPE_NAME}: the message is of another round of this server")
        return known, body

    def _step(self, ctx: OpContext, take: Callable[[], Made]) -> Made:
        """Take a step; if it fails, this node drops out of the round and its secrets go."""
        try:
            return take()
        except BaseException:
            dropped = self._rounds.pop(self._server(ctx), None)
            if dropped is not None:
                dropped[1].forget()
            raise


def _head(message: Value) -> tuple[bytes, bytes]:
    """Return the id of the round and the body of a message; raises RoundViolated."""
    if not isinstance(message, bytes) or len(message) < ROUND_ID_BYTES:
        raise RoundViolated(f"{shown(message)} is no message of a round")
    return message[:ROUND_ID_BYTES], message[ROUND_ID_BYTES:]
