"""Answers of this node over the access protocol: redeeming tickets, handing on revocations.

Rule: bytes in, bytes out; whoever owns the stream moves them and bounds their size
(`exchange.MESSAGE.max_bytes`). A use of a ticket is on disk before its answer exists. What is
refused is an answer too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from bbnode.access.errors import AccessRefused, GrantError, Refusal
from bbnode.access.exchange import (
    Member,
    Message,
    Redeem,
    Refused,
    Revocations,
    decode_message,
    encode_message,
)
from bbnode.access.redeem import Ledger, redeem
from bbnode.access.revocation import RevocationList, open_revocations
from bbnode.access.signing import SigningKey
from bbnode.access.ticket import ticket_from_bytes
from bbnode.daemon.access import files as access_files
from bbnode.ir.peer import PeerId

logger = logging.getLogger(__name__)


class AccessService:
    """One node's side of the protocol. One task uses it: it has no lock."""

    def __init__(
        self,
        state_dir: Path,
        key: SigningKey,
        *,
        unix_s: Callable[[], float],
        serial: Callable[[], int],
        on_revocations: Callable[[RevocationList], None],
        on_redeemed: Callable[[Ledger], None],
    ) -> None:
        """`key` is the node's own; `serial` draws 64 random bits.

        `on_revocations` is called with each newer list, once it is stored, and `on_redeemed` with
        the ledger after each use of a ticket.
        """
        self._state_dir = state_dir
        self._key = key
        self._unix_s = unix_s
        self._serial = serial
        self._on_revocations = on_revocations
        self._on_redeemed = on_redeemed

    def answer(self, peer: PeerId, request: bytes) -> bytes:
        """Return the answer to a request of `peer`, as its connection proved it.

        Raises StorageError when the disk denies it; then nothing was granted.
        """
        try:
            message = decode_message(request)
            return encode_message(self._answer(peer, message))
        except AccessRefused as error:
            return encode_message(Refused(reason=error.reason, detail=str(error)))
        except GrantError as error:
            return encode_message(Refused(reason=Refusal.NOT_GRANTED, detail=str(error)))

    def offer(self) -> bytes:
        """Return the request that hands this node's newest list to another member."""
        kept = access_files.load_node(self._state_dir, self._key.peer_id).revocations
        return encode_message(Revocations(revocations=b"" if kept is None else kept.raw))

    def take(self, raw: bytes) -> None:
        """Store a list that another member sent, if it is newer; raises AccessRefused."""
        network = access_files.load_node(self._state_dir, self._key.peer_id).network
        if not raw or network is None:
            return
        offered = open_revocations(raw, network)
        kept = access_files.load_node(self._state_dir, self._key.peer_id).revocations
        # A member that lags behind gets ours in the answer; that is no fault of its own.
        if kept is not None and offered.sequence <= kept.sequence:
            return
        if access_files.save_revocations(self._state_dir, offered):
            self._on_revocations(offered)

    def _answer(self, peer: PeerId, message: Message) -> Message:
        match message:
            case Redeem():
                return self._redeem(peer, message.ticket)
            case Revocations():
                self.take(message.revocations)
                kept = access_files.load_node(self._state_dir, self._key.peer_id).revocations
                return Revocations(revocations=b"" if kept is None else kept.raw)
            case _:
                return Refused(reason=Refusal.MALFORMED, detail="that is an answer, no request")

    def _redeem(self, peer: PeerId, raw: bytes) -> Member:
        access = access_files.load_node(self._state_dir, self._key.peer_id)
        before = access_files.load_ledger(self._state_dir)
        membership, ledger = redeem(
            ticket_from_bytes(raw),
            peer,
            key=self._key,
            ledger=before,
            unix_s=self._unix_s(),
            serial=self._serial(),
            granter=access.membership,
            revoked=access.revocations,
        )
        if ledger is not before:
            access_files.save_ledger(self._state_dir, ledger)
            self._on_redeemed(ledger)
            logger.info(
                "ticket redeemed",
                extra={"peer": str(peer), "serial": membership.own.serial_text},
            )
        kept = access.revocations
        return Member(membership=membership.raw, revocations=b"" if kept is None else kept.raw)
