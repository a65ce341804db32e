"""The messages of the access protocol: redeeming a ticket, and passing on revocation lists.

Rule: a request and an answer on one stream of ACCESS_PROTOCOL, each one length-bounded msgpack
list of exactly these fields. The peer who asks is the one that the connection proved; no
message says who it is from.

    ["redeem", <ticket>]                 -> ["member", <membership>, <revocation list or empty>]
    ["revoked", <list or empty>]         -> ["revoked", <list or empty>]    each sends its own
    anything that is refused             -> ["refused", <Refusal value>, <text>]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgpack

from bbnode.access import sealed
from bbnode.access.errors import AccessRefused, Refusal
from bbnode.access.revocation import REVOCATIONS
from bbnode.access.sealed import Kind, Reader
from bbnode.access.statement import MAX_MEMBERSHIP_BYTES
from bbnode.access.ticket import TICKET
from bbnode.ir.caps import MAX_DETAIL_BYTES
from bbnode.ir.decoding import shown

ACCESS_PROTOCOL = "/bbnode/access/1.0.0"


MESSAGE = Kind(
    name="access message",
    max_bytes=REVOCATIONS.max_bytes + TICKET.max_bytes + 64,
    error=AccessRefused,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Redeem:
    """Asks for the membership that a ticket invites to."""

    ticket: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The membership, and the newest revocation list (empty if there is no list)."""

    membership: bytes
    revocations: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocations:
    """The newest revocation list of its sender (empty when it has none)."""

    revocations: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The reason why a request was not granted."""

    reason: Refusal
    detail: str


Message: TypeAlias = Redeem | Member | Revocations | Refused


def _reason(kind: Kind, name: str, value: object) -> Refusal:
    label = sealed.text(64)(kind, name, value)
    known = next((item for item in Refusal if item.value == label), None)
    if known is None:
        raise sealed.malformed(kind, f"{shown(label)} is not a known reason")
    return known


_REVOKED = sealed.octets(REVOCATIONS.max_bytes)
# The first word of each message, and its fields.
_MESSAGES: Mapping[str, tuple[type[Message], Mapping[str, Reader]]] = {
    "redeem": (Redeem, {"ticket": sealed.octets(TICKET.max_bytes)}),
    "member": (
        Member,
        {"membership": sealed.octets(MAX_MEMBERSHIP_BYTES), "revocations": _REVOKED},
    ),
    "revoked": (Revocations, {"revocations": _REVOKED}),
    "refused": (Refused, {"reason": _reason, "detail": sealed.text(MAX_DETAIL_BYTES)}),
}


def encode_message(message: Message) -> bytes:
    """Return the bytes of a message."""
    word, fields = next((w, f) for w, (cls, f) in _MESSAGES.items() if type(message) is cls)
    values = [getattr(message, name) for name in fields]
    if isinstance(message, Refused):
        detail = "".join(c if c.isprintable() else " " for c in message.detail)
        cut = detail.encode("utf-8", "replace")[:MAX_DETAIL_BYTES].decode("utf-8", "ignore")
        values = [message.reason.value, cut]
    return bytes(msgpack.packb([word, *values]))


def decode_message(raw: bytes) -> Message:
    """Return the message in these bytes; raises AccessRefused.

    Its content still has to be opened with `parse_ticket`, `open_membership` and
    `open_revocations`.
    """
    if len(raw) > MESSAGE.max_bytes:
        raise MESSAGE.refuse(
            Refusal.TOO_LARGE, f"{len(raw)} bytes; at most {MESSAGE.max_bytes} are taken"
        )
    with sealed.boundary(MESSAGE):
        word, *values = sealed.unpack_list(MESSAGE, raw) or [None]
        cls, fields = _MESSAGES.get(word, (None, {})) if isinstance(word, str) else (None, {})
        if cls is None or len(values) != len(fields):
            raise sealed.malformed(MESSAGE, "it is not one of the messages")
        return cls(**MESSAGE.read(values, fields))
