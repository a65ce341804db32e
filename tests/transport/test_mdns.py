"""mDNS: what a record says, and two peers that find each other on the loopback interface."""

from __future__ import annotations

import threading

import pytest
import trio
import zeroconf
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.ir.caps import MAX_CLAIMED_ADDRESSES, MAX_LOCAL_NAMES
from bbnode.ir.peer import PeerId
from bbnode.transport.mdns import (
    Mdns,
    MdnsRecord,
    MdnsUnavailable,
    decode_txt,
    encode_txt,
    network_digest,
)
from tests.patience import PATIENCE_S
from tests.transport.multicast import needs_multicast

ONE, TWO, THREE = (PeerId.from_seed(name) for name in ("one", "two", "three"))


def at(peer: PeerId, port: int = 4001) -> Multiaddr:
    return Multiaddr(f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}")


def strings(*texts: str) -> bytes:
    return b"".join(bytes([len(t)]) + t.encode() for t in texts)


# --- records -------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written() -> None:
    record = MdnsRecord(peer=ONE, addresses=(at(ONE), at(ONE, 5000)), digest="abc")
    text = encode_txt(record)
    assert decode_txt(text) == record
    assert text.count(b"dnsaddr=") == 2  # one string each, as the specification says


def test_another_implementations_record_is_read_and_has_no_digest() -> None:
    found = decode_txt(strings(f"dnsaddr={at(TWO)}", "something=else", "flag"))
    assert found == MdnsRecord(peer=TWO, addresses=(at(TWO),), digest="")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x00",
        b"\xff",
        strings("dnsaddr=/ip4/127.0.0.1/tcp/1"),  # of nobody
        strings("dnsaddr=nonsense"),
        strings(f"dnsaddr={at(ONE)}", f"dnsaddr={at(TWO)}"),  # of two
        strings(f"dnsaddr=/dns4/example.org/tcp/1/p2p/{ONE}"),  # not of this network
        strings(f"dnsaddr=/ip4/1.2.3.4/tcp/1/p2p/{ONE}/p2p-circuit/p2p/{ONE}"),
    ],
)
def test_what_names_no_one_peer_nearby_is_no_record(text: bytes) -> None:
    assert decode_txt(text) is None


@given(st.binary(max_size=400))
def test_random_bytes_are_a_record_or_none(text: bytes) -> None:
    decode_txt(text)


def test_addresses_of_a_record_are_bounded() -> None:
    many = tuple(at(ONE, port) for port in range(1, 50))
    found = decode_txt(encode_txt(MdnsRecord(peer=ONE, addresses=many, digest="")))
    assert found is not None
    assert found.addresses == many[:MAX_CLAIMED_ADDRESSES]
    found = decode_txt(strings(*(f"dnsaddr={a}" for a in many)))
    assert found is not None
    assert len(found.addresses) == MAX_CLAIMED_ADDRESSES


def test_network_and_artifact_make_the_digest() -> None:
    digests = {network_digest(n, a) for n in ("", "n") for a in ("a", "b")}
    assert len(digests) == 4
    assert network_digest("", "a") == network_digest("", "a")


# --- the table -----------------------------------------------------------------------------


class Heard:
    """What an Mdns hands on."""

    def __init__(self) -> None:
        self.there: dict[PeerId, tuple[Multiaddr, ...]] = {}
        self.calls = 0
        self.news = trio.Event()

    def found(self, peer: PeerId, addresses: tuple[Multiaddr, ...]) -> None:
        self.there[peer] = addresses
        self._tell()

    def lost(self, peer: PeerId) -> None:
        self.there.pop(peer, None)
        self._tell()

    def _tell(self) -> None:
        self.calls += 1
        self.news.set()

    async def until(self, *peers: PeerId) -> None:
        with trio.fail_after(PATIENCE_S):
            while self.there.keys() != set(peers):
                self.news = trio.Event()
                await self.news.wait()


def listener(own: PeerId, heard: Heard, digest: str = "d") -> Mdns:
    return Mdns(own, digest=digest, found=heard.found, lost=heard.lost, interfaces=["127.0.0.1"])


def test_a_flood_of_names_is_bounded() -> None:
    heard = Heard()
    table = listener(ONE, heard)
    for i in range(1000):
        peer = PeerId.from_seed(f"flood {i}")
        table._news = {f"n{i}": MdnsRecord(peer=peer, addresses=(at(peer),), digest="d")}
        table._take_news()
    assert len(table) == MAX_LOCAL_NAMES
    assert table.dropped == 1000 - MAX_LOCAL_NAMES


def test_a_peer_under_two_names_is_lost_with_the_last_of_them() -> None:
    heard = Heard()
    table = listener(ONE, heard)
    record = MdnsRecord(peer=TWO, addresses=(at(TWO),), digest="d")
    moved = MdnsRecord(peer=TWO, addresses=(at(TWO, 5),), digest="d")
    for news in ({"a": record}, {"a": record}, {"b": moved}, {"a": None}, {"never": None}):
        table._news = news
        table._take_news()
    assert heard.there == {TWO: (at(TWO, 5),)}
    assert heard.calls == 2
    table._news = {"b": MdnsRecord(peer=THREE, addresses=(at(THREE),), digest="d")}
    table._take_news()
    assert heard.there.keys() == {THREE}
    table._news = {"b": None}
    table._take_news()
    assert heard.there == {}


# --- on the network ------------------------------------------------------------------------


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was called of zeroconf that waits for the network, and in which thread."""
    calls: list[tuple[str, int]] = []

    def noted(owner: type, name: str) -> None:
        inner = getattr(owner, name)

        def method(self: object, *args: object, **more: object) -> object:
            calls.append((f"{owner.__name__}.{name}", threading.get_ident()))
            return inner(self, *args, **more)

        monkeypatch.setattr(owner, name, method)

    for name in ("__init__", "register_service", "close"):
        noted(zeroconf.Zeroconf, name)
    noted(zeroconf.ServiceBrowser, "__init__")
    return calls


@needs_multicast
async def test_two_find_each_other_and_part(called: list[tuple[str, int]]) -> None:
    one, two, other = Heard(), Heard(), Heard()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(listener(ONE, one).run, [at(ONE)])
            await nursery.start(listener(THREE, other, "another program").run, [at(THREE)])
            async with trio.open_nursery() as second:
                await second.start(listener(TWO, two).run, [at(TWO)])
                await one.until(TWO)
                await two.until(ONE)
                assert one.there == {TWO: (at(TWO),)}
                assert two.there == {ONE: (at(ONE),)}
                second.cancel_scope.cancel()
            # By its goodbye, long before its records expire.
            await one.until()
            nursery.cancel_scope.cancel()
    assert other.calls == 0
    # zeroconf stops for seconds at its start: here the loop waits for none of it.
    assert len({name for name, _ in called}) == 4
    assert threading.get_ident() not in {thread for _, thread in called}


async def test_without_such_an_interface_there_is_a_typed_error() -> None:
    gone = Mdns(ONE, digest="d", found=Heard().found, lost=Heard().lost, interfaces=["192.0.2.77"])
    with pytest.raises((MdnsUnavailable, trio.TooSlowError)) as caught:
        with trio.fail_after(PATIENCE_S):
            await gone.run([at(ONE)])
    assert caught.type is MdnsUnavailable
