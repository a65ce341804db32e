"""Discovery of peers on the local network by multicast DNS.

Rule: it follows libp2p's mDNS specification: a service of type `_p2p._udp.local.` under a random
name, whose TXT record holds one `dnsaddr=<multiaddr>/p2p/<id>` per address. Ours holds one more
string, `bbnode=<digest>`: peers with the same digest run the same program in the same network, and
are reported; all others are ignored. zeroconf has its own threads and blocking calls: it is used
from worker threads only, and its reports wait in one bounded table. A record proves nothing: the
peer at an address still has to prove its identity.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio
import zeroconf
from multiaddr import Multiaddr

from bbnode.ir.address import parse_address, peer_of_address
from bbnode.ir.caps import MAX_CLAIMED_ADDRESSES, MAX_LOCAL_NAMES
from bbnode.ir.errors import DecodeError, EnvironmentFault
from bbnode.ir.peer import PeerId

logger = logging.getLogger(__name__)

SERVICE_TYPE: Final = "_p2p._udp.local."
# The length of a string in a TXT record is one byte.
_MAX_STRING_BYTES: Final = 255
# The time-out of a query for a missing TXT record, in zeroconf's thread.
_ASK_MS: Final = 1000
# The goodbye is three packets in half a second.
_CLOSE_S: Final = 2.0
_PORT_UNUSED: Final = 1  # the addresses are in the TXT record; an SRV record needs some port

Found = Callable[[PeerId, tuple[Multiaddr, ...]], None]


class MdnsUnavailable(EnvironmentFault):
    """Multicast DNS can't be used on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MdnsRecord:
    """The content of a TXT record: a peer, its addresses, and the digest of network and program."""

    peer: PeerId
    addresses: tuple[Multiaddr, ...]
    digest: str


def network_digest(network: str, program: str) -> str:
    """Return the digest of a private network ("": none) and a program's name: 32 hex digits.

    All versions of a program share one digest, since they may work together.
    """
    return hashlib.sha256(f"{network}\0{program}".encode()).hexdigest()[:32]


def encode_txt(record: MdnsRecord) -> bytes:
    """Encode a TXT record; addresses that are too long for a string are left out."""
    strings = [f"bbnode={record.digest}".encode()]
    strings += [
        f"dnsaddr={address}".encode() for address in record.addresses[:MAX_CLAIMED_ADDRESSES]
    ]
    return b"".join(bytes([len(each)]) + each for each in strings if len(each) <= _MAX_STRING_BYTES)


def decode_txt(text: bytes) -> MdnsRecord | None:
    """Decode a TXT record; None unless it names exactly one peer."""
    peers: set[PeerId] = set()
    addresses: list[Multiaddr] = []
    digest = ""
    for string in _strings(text):
        key, _, value = string.partition("=")
        if key == "bbnode":
            digest = value
        elif key == "dnsaddr" and len(addresses) < MAX_CLAIMED_ADDRESSES:
            try:
                address = parse_address(value)
                peers.add(peer_of_address(address))
            except DecodeError:
                continue
            if is_local(address):
                addresses.append(address)
    if len(peers) != 1 or not addresses:
        return None
    return MdnsRecord(peer=peers.pop(), addresses=tuple(dict.fromkeys(addresses)), digest=digest)


def is_local(address: Multiaddr) -> bool:
    """Return True if an address belongs in multicast DNS: IP and TCP, and nothing in between."""
    names = [protocol.name for protocol in address.protocols()]
    return names in (["ip4", "tcp", "p2p"], ["ip6", "tcp", "p2p"])


class Mdns:
    """Announces one peer and listens for others, until cancelled."""

    def __init__(
        self,
        own: PeerId,
        *,
        digest: str,
        found: Found,
        lost: Callable[[PeerId], None],
        interfaces: Sequence[str] = (),
    ) -> None:
        """Create an instance; nothing is sent before `run`.

        Args:
            own: our PeerId.
            digest: digest of the peers to discover (`network_digest`).
            found: called in the trio thread with a peer and its addresses, again when they change.
            lost: called in the trio thread with a peer that said goodbye or was silent too long.
            interfaces: addresses of the interfaces to use; empty for all.
        """
        self._own = own
        self._digest = digest
        self._found = found
        self._lost = lost
        self._interfaces = list(interfaces)
        # The specification requires random names.
        self._name = f"{secrets.token_hex(16)}.{SERVICE_TYPE}"
        self._peers: dict[str, MdnsRecord] = {}
        # The latest news of each name: filled by zeroconf's threads, emptied in the trio thread.
        self._lock = threading.Lock()
        self._news: dict[str, MdnsRecord | None] = {}
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def dropped(self) -> int:
        """The number of names for which there was no room."""
        return self._dropped

    async def run(
        self,
        addresses: Sequence[Multiaddr],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Announce `addresses` until cancelled, then say goodbye. Raises MdnsUnavailable."""
        token = trio.lowlevel.current_trio_token()
        try:
            zc = await trio.to_thread.run_sync(self._open)
        except (OSError, RuntimeError, zeroconf.Error) as error:
            raise MdnsUnavailable(
                f"multicast DNS can't be used here: {error}; set discovery.mdns to false, or "
                "discovery.mdns_interfaces to the addresses of interfaces that have multicast"
            ) from error
        try:
            info = zeroconf.ServiceInfo(
                SERVICE_TYPE,
                self._name,
                port=_PORT_UNUSED,
                properties=encode_txt(
                    MdnsRecord(
                        peer=self._own,
                        addresses=tuple(a for a in addresses if is_local(a)),
                        digest=self._digest,
                    )
                ),
                server=f"{self._name.partition('.')[0]}.local.",
            )
            await trio.to_thread.run_sync(self._register, zc, info, token)
            task_status.started()
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(_CLOSE_S, shield=True):
                await trio.to_thread.run_sync(zc.close, abandon_on_cancel=True)

    # -- in worker threads -------------------------------------------------------------------

    def _open(self) -> zeroconf.Zeroconf:
        for interface in self._interfaces:
            # Checked first, since zeroconf leaks its sockets if one interface does not exist.
            family = socket.AF_INET6 if ":" in interface else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((interface, 0))
        if self._interfaces:
            return zeroconf.Zeroconf(interfaces=self._interfaces)
        return zeroconf.Zeroconf()

    def _register(
        self, zc: zeroconf.Zeroconf, info: zeroconf.ServiceInfo, token: trio.lowlevel.TrioToken
    ) -> None:
        # The name is random, hence unique, and a probe for it would take half a second.
        zc.register_service(info, cooperating_responders=True)

        def changed(
            zeroconf: zeroconf.Zeroconf,
            service_type: str,
            name: str,
            state_change: zeroconf.ServiceStateChange,
        ) -> None:
            self._changed(zeroconf, service_type, name, state_change, token)

        zeroconf.ServiceBrowser(zc, SERVICE_TYPE, handlers=[changed])

    def _changed(
        self,
        zc: Any,
        service_type: str,
        name: str,
        change: zeroconf.ServiceStateChange,
        token: trio.lowlevel.TrioToken,
    ) -> None:
        """Record that a name appeared, vanished or changed; called in a thread of zeroconf."""
        if name == self._name:
            return
        record = None
        if change is not zeroconf.ServiceStateChange.Removed:
            info = zeroconf.ServiceInfo(service_type, name)
            # zeroconf's own check for completeness wants host addresses, which are not needed here.
            if not (info.load_from_cache(zc) or info.text):
                info.request(zc, _ASK_MS)
            record = decode_txt(info.text or b"")
            if record is None or record.digest != self._digest or record.peer == self._own:
                record = None
        with self._lock:
            if name not in self._news and len(self._news) >= MAX_LOCAL_NAMES:
                self._dropped += 1
                return
            self._news[name] = record
        # The node may have stopped while this was on its way.
        try:
            token.run_sync_soon(self._take_news, idempotent=True)
        except trio.RunFinishedError:
            return

    # -- in the trio thread ------------------------------------------------------------------

    def _take_news(self) -> None:
        with self._lock:
            news, self._news = self._news, {}
        for name, record in news.items():
            known = self._peers.get(name)
            if record == known:
                continue
            if record is None:
                self._forget(name)
            elif known is None and len(self._peers) >= MAX_LOCAL_NAMES:
                self._dropped += 1
            else:
                if known is not None and known.peer != record.peer:
                    self._forget(name)
                self._peers[name] = record
                self._found(record.peer, record.addresses)

    def _forget(self, name: str) -> None:
        gone = self._peers.pop(name, None)
        # A peer that restarted has a new name, and the old one expires later.
        if gone is not None and all(each.peer != gone.peer for each in self._peers.values()):
            self._lost(gone.peer)


def _strings(text: bytes) -> list[str]:
    strings = []
    at = 0
    while at < len(text):
        end = at + 1 + text[at]
        strings.append(text[at + 1 : end].decode("utf-8", "replace"))
        at = end
    return strings
