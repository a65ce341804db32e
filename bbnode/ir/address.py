"""Addresses: multiaddrs, extended by three protocols.

Rule: `/site/<id>` (0xE2, 8 bytes big-endian), `/component/<ref>` (0xE3, 4 bytes big-endian)
and `/op/<name>` (0xE4, length-prefixed UTF-8) are registered with the multiaddr package
when this module is imported, so that every multiaddr parses, prints and round-trips.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from multiaddr import Multiaddr
from multiaddr import codecs as multiaddr_codecs
from multiaddr import protocols as multiaddr_protocols
from multiaddr.protocols import Protocol

from bbnode.ir.caps import MAX_ADDRESS_BYTES, MAX_ADDRESS_CHARS
from bbnode.ir.decoding import clip, refused
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId

P_SITE = 0xE2
P_COMPONENT = 0xE3
P_OP = 0xE4

# Cached addresses: parsing one takes 200 us, peers repeat the same ones, and one takes 1 KB.
_KEPT = 4096

# Separates the address of a relay from the peer behind it (multiaddr's protocol table).
CIRCUIT = "p2p-circuit"

_OP_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")


class _UintCodec(multiaddr_codecs.CodecBase):  # type: ignore[misc]  # untyped package
    """A big-endian unsigned integer of a fixed number of bytes."""

    IS_PATH = False

    def __init__(self, n_bytes: int) -> None:
        self.SIZE = n_bytes * 8
        self._n_bytes = n_bytes

    def to_bytes(self, _proto: Any, string: str) -> bytes:
        if not string.isascii() or not string.isdigit():
            raise ValueError(f"'{clip(string)}' is not a decimal integer")
        number = int(string)
        if number >> self.SIZE:
            raise ValueError(f"{number} does not fit {self.SIZE} bits")
        return number.to_bytes(self._n_bytes, "big")

    def to_string(self, _proto: Any, buf: bytes) -> str:
        if len(buf) != self._n_bytes:
            raise ValueError(f"expected {self._n_bytes} bytes, got {len(buf)}")
        return str(int.from_bytes(buf, "big"))


class _OpNameCodec(multiaddr_codecs.CodecBase):  # type: ignore[misc]  # untyped package
    """An op name: UTF-8, length-prefixed by the multiaddr framework."""

    SIZE = multiaddr_codecs.LENGTH_PREFIXED_VAR_SIZE
    IS_PATH = False

    def to_bytes(self, _proto: Any, string: str) -> bytes:
        if not _OP_NAME.match(string):
            raise ValueError(f"'{clip(string)}' is not an op name")
        return string.encode()

    def to_string(self, _proto: Any, buf: bytes) -> str:
        text = bytes(buf).decode()
        if not _OP_NAME.match(text):
            raise ValueError(f"'{clip(text)}' is not an op name")
        return text


def _register() -> None:
    # The package's registry is locked, so an unlocked copy replaces it for all lookups of the
    # package.
    registry = multiaddr_protocols.REGISTRY.copy(unlock=True)
    for name, code, codec in (
        ("site", P_SITE, _UintCodec(8)),
        ("component", P_COMPONENT, _UintCodec(4)),
        ("op", P_OP, _OpNameCodec()),
    ):
        multiaddr_codecs.CODEC_CACHE[f"bbnode_{name}"] = codec
        registry.add(Protocol(code, name, f"bbnode_{name}"))
    registry.lock()
    multiaddr_protocols.REGISTRY = registry


_register()


def parse_address(text: str) -> Multiaddr:
    """Parse multiaddr text; raises DecodeError, which quotes it, for anything else."""
    if len(text) > MAX_ADDRESS_CHARS:
        raise DecodeError(f"not a multiaddr: {len(text)} characters; at most {MAX_ADDRESS_CHARS}")
    try:
        return Multiaddr(text)
    except Exception as error:
        raise refused(f"not a multiaddr: '{clip(text)}'", error) from error


def address_from_bytes(raw: bytes) -> Multiaddr:
    """Parse canonical multiaddr bytes, 1 to MAX_ADDRESS_BYTES; raise DecodeError otherwise."""
    if not 0 < len(raw) <= MAX_ADDRESS_BYTES:
        raise DecodeError(f"an address of {len(raw)} bytes; 1 to {MAX_ADDRESS_BYTES} are taken")
    return _parsed(bytes(raw))


def forget_parsed() -> None:
    """Clear the cache of parsed addresses."""
    _parsed.cache_clear()


@lru_cache(maxsize=_KEPT)
def _parsed(raw: bytes) -> Multiaddr:
    try:
        address = Multiaddr(raw)
        # The package decodes lazily, and reads a truncated part as zeros: accept only bytes that it
        # would write itself.
        canonical = Multiaddr(str(address)).to_bytes() == raw
    except Exception as error:
        raise refused(f"not multiaddr bytes: {raw[:16].hex()}…", error) from error
    if not canonical:
        raise DecodeError(f"multiaddr bytes that are cut short or not canonical: {raw[:16].hex()}…")
    return address


def site_suffix(site: int) -> bytes:
    """Return the bytes of `/site/<site>`, the destination of a fill in a node (data plane)."""
    return _SITE_HEADER + site.to_bytes(8, "big")


def component_suffix(component_ref: int, op: str) -> bytes:
    """Return the bytes of `/component/<ref>/op/<name>` (control plane)."""
    return bytes(Multiaddr(f"/component/{component_ref}/op/{op}").to_bytes())


def parse_component_suffix(suffix: bytes) -> tuple[int, str] | None:
    """Return (ref, op) of a `/component/<ref>/op/<name>` suffix; None for another address."""
    if not suffix.startswith(_COMPONENT_HEADER):
        return None
    at = len(_COMPONENT_HEADER) + 4
    end = at + len(_OP_HEADER)
    # A name is shorter than 128 bytes, so its length is one byte.
    name = suffix[end + 1 :]
    if suffix[at:end] != _OP_HEADER or len(suffix) <= end or suffix[end] != len(name):
        return None
    text = name.decode("ascii", "replace")
    if suffix[end] > 0x7F or not _OP_NAME.match(text):
        return None
    return int.from_bytes(suffix[at - 4 : at], "big"), text


_SITE_HEADER = bytes(Multiaddr("/site/0").to_bytes())[:-8]
_COMPONENT_HEADER = bytes(Multiaddr("/component/0").to_bytes())[:-4]
_OP_HEADER = bytes(Multiaddr("/op/x").to_bytes())[:-2]
# The destination of refusals: the same on every node, independent of the program there.
REFUSED_SUFFIX = bytes(Multiaddr("/op/refused").to_bytes())


def parse_site_suffix(suffix: bytes) -> int | None:
    """Return the site id of a `/site/<id>` suffix, or None for another address."""
    header = len(_SITE_HEADER)
    if len(suffix) != header + 8 or suffix[:header] != _SITE_HEADER:
        return None
    return int.from_bytes(suffix[header:], "big")


def is_relayed(address: Multiaddr) -> bool:
    """Return True if the address leads through a relay, whose own address is its first part."""
    return CIRCUIT in str(address).split("/")


def peer_of_address(address: Multiaddr) -> PeerId:
    """Return the PeerId in the `/p2p/<id>` part, which follows the relay's in a relayed address.

    Raises DecodeError if there is none.
    """
    parts = str(address).split("/")
    if CIRCUIT in parts:
        parts = parts[parts.index(CIRCUIT) :]
    if "p2p" not in parts:
        raise DecodeError(f"{address} names no peer; append /p2p/<peer id>")
    return PeerId.parse(parts[parts.index("p2p") + 1])


def named_peer(address: Multiaddr) -> PeerId | None:
    """Return the PeerId that an address leads to, or None if it names none."""
    try:
        return peer_of_address(address)
    except DecodeError:
        return None


def split_circuit(address: Multiaddr) -> tuple[Multiaddr, PeerId]:
    """Return the address of the relay, without its PeerId, and that PeerId.

    Raises DecodeError for an address that is not relayed, or through more than one relay.
    """
    relay, _, behind = str(address).partition(f"/{CIRCUIT}")
    way, marker, peer = relay.rpartition("/p2p/")
    if not marker or "/" in peer or CIRCUIT in behind.split("/"):
        raise DecodeError(
            f"{address} is not through one relay: expected "
            f"/ip4/…/tcp/…/p2p/<relay>/{CIRCUIT}/p2p/<peer>"
        )
    return parse_address(way), PeerId.parse(peer)
