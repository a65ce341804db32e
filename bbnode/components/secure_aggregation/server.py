"""`SecAggServer`: the server's side of secure aggregation, as a component.

Rule: rounds belong to the executions that began them, and end with them or with the node: nothing
of them is saved but who lied, whose keys are refused from then on. What the server sees of a client
is no secret from it, and nothing else.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from typing import ClassVar, Final

import numpy as np

from bbnode.components.contracts import OpContext, ProtocolComponent, offload
from bbnode.components.errors import ComponentError
from bbnode.components.registry import register_component
from bbnode.components.secure_aggregation import ops as ops
from bbnode.components.secure_aggregation.errors import RoundUnknown, RoundViolated
from bbnode.components.secure_aggregation.messages import ROUND_ID_BYTES, pack_peers, read_peers
from bbnode.components.secure_aggregation.plan import RoundPlan, SecAggConfig, peers_of
from bbnode.components.secure_aggregation.server_round import ServerRound
from bbnode.ir.decoding import shown
from bbnode.ir.peer import PeerId
from bbnode.ir.texts import listed
from bbnode.ir.values import Metadata, PeerIdVec, ResponseBatch, Value

# Refusals that the metadata of a result spells out: it is shown to people.
_MOST_TOLD = 8
# Clients that lied, of whom a server knows: beyond, those that it has known longest are forgotten.
MAX_LIARS: Final = 4096

logger = logging.getLogger(__name__)


@register_component
class SecAggServer(ProtocolComponent):
    """Leads clients through rounds, and computes the weighted means of their vectors."""

    TYPE_NAME: ClassVar[str] = "bbnode.SecAggServer"
    Config: ClassVar[type] = SecAggConfig
    config: SecAggConfig

    def __init__(self, config: SecAggConfig) -> None:
        super().__init__(config)
        self._plan = RoundPlan.of(config)
        self._rounds: dict[int, ServerRound] = {}  # by execution, oldest first
        self._refused: dict[int, dict[PeerId, str]] = {}
        self._pardoned = peers_of("pardoned", config.pardoned)
        self._liars: dict[PeerId, str] = {}  # oldest first

    def begin(self, ctx: OpContext, peers: PeerIdVec) -> bytes:
        """Begin a round of this execution; return what clients are asked for their keys with."""
        if len(peers) > self.config.clients:
            raise RoundViolated(
                f"{self.TYPE_NAME}: {len(peers)} clients for a round of {self.config.clients}"
            )
        while len(self._rounds) >= self.config.max_rounds:
            self._end(next(iter(self._rounds)))
        said = b"%d/%d/" % (ctx.execution, ctx.now_ns) + ctx.self_peer.to_bytes()
        round_id = hashlib.sha256(said).digest()[:ROUND_ID_BYTES]
        self._rounds[ctx.execution] = ServerRound(
            self._plan, me=ctx.self_peer, round_id=round_id, barred=self._liars
        )
        self._refused[ctx.execution] = {}
        return round_id + self._plan.digest

    def collect_keys(self, ctx: OpContext, responses: ResponseBatch) -> tuple[Value, bytes]:
        """Return whose keys count, bool [N], and the list of all keys."""
        found = self._round(ctx)
        listing, refused = found.take_keys(responses.responses)
        return self._kept(ctx, responses, refused), found.round_id + listing

    def collect_letters(self, ctx: OpContext, responses: ResponseBatch) -> Value:
        """Return whose letters count, bool [N]: they are asked for their vectors."""
        return self._kept(ctx, responses, self._round(ctx).take_letters(responses.responses))

    def mail(self, ctx: OpContext, round: Value) -> bytes:
        """Return the letters to the caller, in the round that it names."""
        for found in self._rounds.values():
            if found.round_id == round:
                return found.round_id + found.mail(ctx.source_peer or ctx.self_peer)
        raise RoundUnknown(f"{self.TYPE_NAME}: no round {shown(round)} is under way")

    def collect_vectors(self, ctx: OpContext, responses: ResponseBatch) -> tuple[Value, bytes]:
        """Return whose masked vectors count, bool [N], and the list of survivors."""
        found = self._round(ctx)
        answers = ((peer, _first(answer)) for peer, answer in responses.responses)
        listing, refused = found.take_vectors(answers)
        return self._kept(ctx, responses, refused), found.round_id + listing

    def collect_signatures(self, ctx: OpContext, responses: ResponseBatch) -> tuple[Value, bytes]:
        """Return whose signatures of the list count, bool [N], and the signatures."""
        found = self._round(ctx)
        signatures, refused = found.take_signatures(responses.responses)
        return self._kept(ctx, responses, refused), found.round_id + signatures

    @offload
    def unmask(self, ctx: OpContext, responses: ResponseBatch) -> tuple[Value, Metadata]:
        """Return the weighted mean, [P] float32, and `num_samples`, `contributors`, `refused`.

        If some were refused, `refused_why` names them; with noise of clients, `zcdp_rho` says how
        private the sum is for one of them (`noise.concentrated`). With groups, `groups` is how
        many the result is made of, and `groups_lost` says of others why. The round is over.
        Clients that lied about shares are named in the log too, and refused in all later rounds.
        """
        found = self._round(ctx)
        try:
            mean, weight, late = found.unmask(responses.responses)
            refused = {**self._refused[ctx.execution], **late}
        finally:
            self._end(ctx.execution)
            for peer in sorted(found.liars):
                self._bar(peer, found.liars[peer])
        told: dict[str, int | float | str] = {
            "num_samples": weight,
            "contributors": len(found.survivors),
            "refused": len(refused),
        }
        if self._plan.deviation:
            told["zcdp_rho"] = self._plan.rho(found.fewest)
        if self.config.groups > 1:
            told["groups"] = self.config.groups - len(found.lost)
        if found.lost:
            rows = [f"group {place}: {found.lost[place]}" for place in sorted(found.lost)]
            told["groups_lost"] = listed(rows, _MOST_TOLD)
        if refused:
            rows = [f"{peer}: {refused[peer]}" for peer in sorted(refused)]
            told["refused_why"] = listed(rows, _MOST_TOLD)
        mean.flags.writeable = False
        return mean, Metadata(told)

    def serialize(self) -> bytes:
        """Return who lied."""
        return pack_peers(self._liars) if self._liars else b""

    def restore(self, data: bytes) -> None:
        """Forget all rounds, which have ended, but not who lied. Raises ComponentError."""
        try:
            liars = read_peers("the list of liars", data, MAX_LIARS) if data else ()
        except RoundViolated as error:
            raise ComponentError(f"{self.TYPE_NAME}: {error}") from error
        self._liars = {}
        for peer in liars:
            if peer not in self._pardoned:
                self._liars[peer] = "before this node restarted"
        self._rounds, self._refused = {}, {}

    # -- parts -------------------------------------------------------------------------------

    def _bar(self, peer: PeerId, why: str) -> None:
        """Name a client that lied, and refuse it from now on, unless this node pardons it."""
        logger.warning("%s: %s lied about shares: %s", self.TYPE_NAME, peer, why)
        if peer not in self._pardoned:
            self._liars.pop(peer, None)
            while len(self._liars) >= MAX_LIARS:
                del self._liars[next(iter(self._liars))]
            self._liars[peer] = why

    def _round(self, ctx: OpContext) -> ServerRound:
        found = self._rounds.get(ctx.execution)
        if found is None:
            raise RoundUnknown(
                f"{self.TYPE_NAME}: this execution has no round under way: it began none, others "
                f"came after it (max_rounds={self.config.max_rounds}), or the node restarted"
            )
        return found

    def _end(self, execution: int) -> None:
        self._rounds.pop(execution, None)
        self._refused.pop(execution, None)

    def _kept(self, ctx: OpContext, responses: ResponseBatch, refused: dict[PeerId, str]) -> Value:
        for peer in sorted(refused):
            ctx.refuse(peer, refused[peer])
        self._refused[ctx.execution].update(refused)
        found = self._round(ctx)
        return np.array(
            [peer not in refused and found.has(peer) for peer in _peers(responses)], bool
        )


def _peers(responses: ResponseBatch) -> Iterable[PeerId]:
    return (peer for peer, _ in responses.responses)


def _first(answer: Value) -> Value:
    """Return the masked vector of an answer (vector, metadata)."""
    return answer[0] if isinstance(answer, tuple) and answer else answer
