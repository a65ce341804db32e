"""The words of the access protocol: redeeming a ticket, and handing on revocation lists.

Rule: a request and an answer on one stream of ACCESS_PROTOCOL, each one length-bounded msgpack
list of exactly these fields. The peer who asks is the one that the connection proved; no
message says who it is from.

    ["redeem", <ticket>]                 -> ["member", <membership>, <revocation list or empty>]
    ["revoked", <list or empty>]         -> ["revoked", <list or empty>]    each sends its own
    anything that is refused             -> ["refused", <Refusal value>, <text>]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgpack

from bbnode.access import sealed
from bbnode.access.errors import AccessRefused, Refusal
from bbnode.access.revocation import REVOCATIONS
from bbnode.access.sealed import Kind
from bbnode.access.statement import MAX_MEMBERSHIP_BYTES
from bbnode.access.ticket import TICKET
from bbnode.ir.caps import MAX_DETAIL_BYTES
from bbnode.ir.decoding import shown

ACCESS_PROTOCOL = "/bbnode/access/1.0.0"


MESSAGE = Kind(
    name="access message",
    context=b"",
    prefix="",
    version=1,
    fields=0,
    max_bytes=REVOCATIONS.max_bytes + TICKET.max_bytes + 64,
    error=AccessRefused,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Redeem:
    """Asks for the membership that a ticket invites to."""

    ticket: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The membership, and the newest revocation list (empty when there is none)."""

    membership: bytes
    revocations: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocations:
    """The newest revocation list of its sender (empty when it has none)."""

    revocations: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why a request was not granted."""

    reason: Refusal
    detail: str


Message: TypeAlias = Redeem | Member | Revocations | Refused


def encode_message(message: Message) -> bytes:
    """The bytes of a message."""
    fields: list[object]
    match message:
        case Redeem():
            fields = ["redeem", message.ticket]
        case Member():
            fields = ["member", message.membership, message.revocations]
        case Revocations():
            fields = ["revoked", message.revocations]
        case Refused():
            detail = "".join(c if c.isprintable() else " " for c in message.detail)
            cut = detail.encode("utf-8", "replace")[:MAX_DETAIL_BYTES].decode("utf-8", "ignore")
            fields = ["refused", message.reason.value, cut]
    raw: bytes = msgpack.packb(fields)
    return raw


def decode_message(raw: bytes) -> Message:
    """Read a message; raises AccessRefused for anything else.

    What it carries is still to be opened with `parse_ticket`, `open_membership` and
    `open_revocations`.
    """
    if len(raw) > MESSAGE.max_bytes:
        raise MESSAGE.refuse(
            Refusal.TOO_LARGE, f"{len(raw)} bytes; at most {MESSAGE.max_bytes} are taken"
        )
    with sealed.boundary(MESSAGE):
        return _message_of(sealed.unpack_list(MESSAGE, raw))


def _message_of(fields: sealed.Fields) -> Message:
    match fields:
        case ["redeem", ticket]:
            return Redeem(ticket=sealed.take_bytes(MESSAGE, "ticket", ticket, TICKET.max_bytes))
        case ["member", membership, revocations]:
            return Member(
                membership=sealed.take_bytes(
                    MESSAGE, "membership", membership, MAX_MEMBERSHIP_BYTES
                ),
                revocations=_list(revocations),
            )
        case ["revoked", revocations]:
            return Revocations(revocations=_list(revocations))
        case ["refused", reason, detail]:
            label = sealed.take_text(MESSAGE, "reason", reason, 64)
            known = next((item for item in Refusal if item.value == label), None)
            if known is None:
                raise sealed.malformed(MESSAGE, f"{shown(label)} is not a known reason")
            text = sealed.take_text(MESSAGE, "detail", detail, MAX_DETAIL_BYTES)
            return Refused(reason=known, detail=text)
    raise sealed.malformed(MESSAGE, "it is none of the messages")


def _list(value: object) -> bytes:
    return sealed.take_bytes(MESSAGE, "revocation list", value, REVOCATIONS.max_bytes)
