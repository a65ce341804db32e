"""The negotiation of the protocol of a connection or a stream: multistream-select 1.0.

Rule: each message is a length-prefixed text that ends with a newline; the first one of each side is
the name of this protocol. The side that dialled, or opened the stream, proposes; the other answers
with the same text, or `na`. Messages are short and few, whatever a peer announces
(MAX_NEGOTIATION_BYTES, MAX_NEGOTIATION_MESSAGES). Nothing here waits. The proposing side sends both
of its messages at once, and may send data right after them (the specification's "lazy" mode).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from bbnode.ir.caps import MAX_NEGOTIATION_BYTES, MAX_NEGOTIATION_MESSAGES
from bbnode.ir.decoding import clip
from bbnode.ir.envelope import varint
from bbnode.transport.errors import NegotiationError

MULTISTREAM_ID: Final = "/multistream/1.0.0"
_NOT_AVAILABLE: Final = "na"
_LIST: Final = "ls"
# Bytes of the varint of a length up to MAX_NEGOTIATION_BYTES.
_LENGTH_BYTES: Final = 2


def encode_message(text: str) -> bytes:
    """Return one message of a negotiation."""
    body = text.encode() + b"\n"
    return varint(len(body)) + body


_HEADER: Final = encode_message(MULTISTREAM_ID)
_NA: Final = encode_message(_NOT_AVAILABLE)


class _Messages:
    """The messages of the other side, parsed from received bytes."""

    __slots__ = ("_data", "_left", "_seen_header")

    def __init__(self) -> None:
        self._data = bytearray()
        self._left = MAX_NEGOTIATION_MESSAGES
        self._seen_header = False

    def next(self) -> str | None:
        """Return the next message after the header, None until it is complete.

        Raises NegotiationError.
        """
        while (body := self._cut()) is not None:
            self._left -= 1
            if self._left < 0:
                raise NegotiationError("the negotiation does not come to an end")
            try:
                text = body.decode()
            except UnicodeDecodeError:
                raise NegotiationError("a message that is no text") from None
            if self._seen_header:
                return text
            if text != MULTISTREAM_ID:
                raise NegotiationError(f"the peer begins with '{clip(text)}'")
            self._seen_header = True
        return None

    def _cut(self) -> bytes | None:
        """Remove and return the next message, without its newline."""
        length = 0
        for at, byte in enumerate(self._data[:_LENGTH_BYTES]):
            length |= (byte & 0x7F) << 7 * at
            if byte < 0x80:
                break
        else:
            if len(self._data) < _LENGTH_BYTES:
                return None
            raise NegotiationError("a message of a length that no message has")
        if not 0 < length <= MAX_NEGOTIATION_BYTES:
            raise NegotiationError(f"a message of {length} bytes")
        body = bytes(self._data[at + 1 : at + 1 + length])
        if len(body) < length:
            return None
        if body[-1:] != b"\n":
            raise NegotiationError("a message without its end of line")
        del self._data[: at + 1 + length]
        return body[:-1]


class Proposal(_Messages):
    """The side that proposes one protocol; `opening` are the bytes to send."""

    __slots__ = ("_protocol", "agreed", "opening")

    def __init__(self, protocol: str) -> None:
        super().__init__()
        self._protocol = protocol
        self.opening = _HEADER + encode_message(protocol)
        self.agreed = False

    def take(self, data: bytes | memoryview) -> None:
        """Process received bytes; raises NegotiationError."""
        self._data += data
        if not self.agreed and (answer := self.next()) is not None:
            if answer != self._protocol:
                detail = "" if answer == _NOT_AVAILABLE else f", it says '{clip(answer)}'"
                raise NegotiationError(f"the peer does not speak {self._protocol}{detail}")
            self.agreed = True

    def rest(self) -> bytes:
        """Return the bytes received after the answer."""
        return bytes(self._data)


class Choice(_Messages):
    """The side that is offered protocols, and accepts the first that it speaks."""

    __slots__ = ("_protocols", "_welcomed", "chosen")

    def __init__(self, protocols: Collection[str]) -> None:
        super().__init__()
        self._protocols = protocols
        self._welcomed = False
        # The accepted protocol; "" before.
        self.chosen = ""

    def take(self, data: bytes | memoryview) -> bytes:
        """Process received bytes and return the answer to send. Raises NegotiationError."""
        self._data += data
        answers = b""
        while not self.chosen and (asked := self.next()) is not None:
            if asked == _LIST:
                answers += self._list()
            elif asked in self._protocols:
                self.chosen = asked
                answers += encode_message(asked)
            else:
                answers += _NA
        if self._seen_header and not self._welcomed:
            self._welcomed = True
            answers = _HEADER + answers
        return answers

    def rest(self) -> bytes:
        """Return the bytes received after the choice."""
        return bytes(self._data)

    def _list(self) -> bytes:
        names = b"".join(map(encode_message, self._protocols)) + b"\n"
        return varint(len(names)) + names
