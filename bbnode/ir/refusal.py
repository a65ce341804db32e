"""Refusals: the reply to a peer whose request or message a node will not answer or accept.

Rule: one msgpack map with exactly the fields of `WireRefusal`, each a text within its bound. It
travels as a fill to `REFUSED_SUFFIX` with type hash 0, in an envelope with the correlation RESPONSE
and the id of the request, or with NONE and the id of the one-way message. A refusal is never
refused. `kind` is the name of an error or of RECEIVE_FAILURES; like all fields it is an unverified
statement of the peer.

With NONE and the id 0 it is about the sender itself: kind NotReady means that it does not work for
the classes in `where` (separated by commas; empty: all its classes), with the reason; kind Ready
means that it works for all of them.
"""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass
from typing import Any, Final

import msgpack

from bbnode.ir.caps import MAX_NAME_BYTES, MAX_REFUSAL_DETAIL_BYTES, MAX_REFUSAL_PLACE_BYTES
from bbnode.ir.decoding import Boundary, Buffer, shown, unpack
from bbnode.ir.errors import DecodeError
from bbnode.ir.texts import cut_text, printable

# Three texts at their bounds, their names, and the heads of all.
MAX_REFUSAL_BYTES: Final = MAX_NAME_BYTES + MAX_REFUSAL_DETAIL_BYTES + MAX_REFUSAL_PLACE_BYTES + 64
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_FIELDS: Final = {
    "kind": MAX_NAME_BYTES,
    "detail": MAX_REFUSAL_DETAIL_BYTES,
    "where": MAX_REFUSAL_PLACE_BYTES,
}


@dataclass(frozen=True, slots=True)
class WireRefusal:
    """The reason of a refusal: a stable kind, a text, and the op or site where it happened."""

    kind: str
    detail: str = ""
    where: str = ""

    def __str__(self) -> str:
        text = f"{self.kind}: {self.detail}" if self.detail else self.kind
        return f"{text} [{self.where}]" if self.where else text

    def bounded(self) -> WireRefusal:
        """Return it with texts that are printable and within their bounds."""
        return WireRefusal(
            *(
                cut_text(printable(text), most)
                for text, most in zip(astuple(self), _FIELDS.values(), strict=True)
            )
        )


def encode_refusal(refusal: WireRefusal) -> bytes:
    """Return the payload of a refusal, with its texts cut to their bounds."""
    values = dict(zip(_FIELDS, astuple(refusal.bounded()), strict=True))
    raw: bytes = msgpack.packb(values)
    return raw


@Boundary("the refusal is malformed")
def decode_refusal(raw: Buffer) -> WireRefusal:
    """Return the refusal in a payload; raises DecodeError for anything else."""
    values = unpack(raw, max_bytes=MAX_REFUSAL_BYTES, max_values=7, max_depth=1)
    if not isinstance(values, dict) or values.keys() != _FIELDS.keys():
        raise DecodeError("it is not a map with exactly the fields of a refusal")
    return refusal_of(values["kind"], values["detail"], values["where"])


def refusal_of(*fields: Any) -> WireRefusal:
    """Return the refusal of untrusted kind, detail and where; raises DecodeError."""
    texts = [_text(name, value) for name, value in zip(_FIELDS, fields, strict=True)]
    if not _KIND.fullmatch(texts[0]):
        raise DecodeError(f"its kind is {shown(texts[0])}, not a name")
    return WireRefusal(*texts)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value.encode("utf-8", "replace")) > _FIELDS[name]:
        raise DecodeError(f"its {name} is {shown(value)}, not a text of at most {_FIELDS[name]} B")
    return printable(value)
