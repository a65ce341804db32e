"""The packets of the Noise transport phase: length-prefixed ciphertext.

Rule: after the handshake each direction is a ChaCha20-Poly1305 key and a counter (Noise, revision
34, sections 5.1 and 12; libp2p's Noise specification: each message has a length of two bytes,
big-endian, and at most 65,535 bytes). Nothing here waits; buffers belong to the caller.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

_TAG_BYTES: Final = 16
_LENGTH: Final = struct.Struct(">H")
# Four zeros and the counter, little-endian.
_NONCE: Final = struct.Struct("<4xQ")
PACKET_BYTES: Final = 0xFFFF
PLAIN_BYTES: Final = PACKET_BYTES - _TAG_BYTES
# Bytes of a packet beyond its plaintext.
OVERHEAD_BYTES: Final = _LENGTH.size + _TAG_BYTES

# Packets that are decrypted in one call: at most a millisecond.
OPENED_AT_ONCE: Final = 512


class PacketError(Exception):
    """The peer has sent an invalid packet."""


class NoiseChannel:
    """Both directions of a secured connection."""

    __slots__ = ("_open", "_seal", "_sealed", "empty", "opened")

    def __init__(self, seal_key: bytes, open_key: bytes) -> None:
        """Create a channel with the keys from the handshake, one for each direction."""
        # Packets sealed, packets opened, and opened packets that were empty.
        self._sealed = self.opened = self.empty = 0
        self._seal = ChaCha20Poly1305(seal_key).encrypt_into
        self._open = ChaCha20Poly1305(open_key).decrypt_into

    def seal(self, plain: bytes | bytearray | memoryview, into: memoryview, at: int) -> int:
        """Encrypt `plain` into packets, from offset `at` on; return their end."""
        total = len(plain)
        for start in range(0, total, PLAIN_BYTES):
            part = plain if total <= PLAIN_BYTES else plain[start : start + PLAIN_BYTES]
            size = len(part) + _TAG_BYTES
            _LENGTH.pack_into(into, at, size)
            at += _LENGTH.size
            self._seal(_NONCE.pack(self._sealed), part, None, into[at : at + size])
            self._sealed += 1
            at += size
        return at

    def open(
        self, packets: memoryview, scratch: memoryview, take: Callable[[memoryview], bool]
    ) -> int:
        """Pass the plaintext of all complete packets to `take`, in `scratch`; return their end.

        At most OPENED_AT_ONCE are opened. `scratch` is as large as `packets`. Raises PacketError,
        after the plaintext of the packets before.
        """
        at, end, filled, fault = 0, len(packets), 0, ""
        last = self.opened + OPENED_AT_ONCE
        while end - at >= _LENGTH.size and self.opened < last:
            size = packets[at] << 8 | packets[at + 1]
            first = at + _LENGTH.size
            if size < _TAG_BYTES:
                fault = f"a packet of {size} bytes, which has no room for its tag"
                break
            if end - first < size:
                break
            at, start = first + size, filled
            filled += size - _TAG_BYTES
            try:
                self._open(_NONCE.pack(self.opened), packets[first:at], None, scratch[start:filled])
            except InvalidTag:
                fault, filled = "a packet that the peer did not encrypt", start
                break
            self.opened += 1
            if filled == start:
                self.empty += 1
        if filled:
            take(scratch[:filled])
        if fault:
            raise PacketError(fault)
        return at
