"""PeerIds and addresses round-trip."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.ir import address, ids
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId

U64 = st.integers(0, 2**64 - 1)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_peer_id_or_a_decode_error(raw: bytes) -> None:
    try:
        peer = PeerId.from_bytes(raw)
    except DecodeError:
        return
    assert peer.to_bytes() == raw
    assert PeerId.parse(str(peer)) == peer


def test_peer_id_text_that_is_no_base58_is_quoted() -> None:
    with pytest.raises(DecodeError, match="0OIl"):
        PeerId.parse("0OIl")


@given(U64)
def test_site_suffix_is_the_multiaddr(site: int) -> None:
    assert address.site_suffix(site) == Multiaddr(f"/site/{site}").to_bytes()
    assert address.parse_site_suffix(address.site_suffix(site)) == site


@given(
    st.integers(0, 2**32 - 1), st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_.]{0,30}\Z", fullmatch=True)
)
def test_component_suffix_round_trips(ref: int, op: str) -> None:
    suffix = address.component_suffix(ref, op)
    assert str(Multiaddr(suffix)) == f"/component/{ref}/op/{op}"
    assert address.parse_site_suffix(suffix) is None


def test_a_full_address_with_a_site_round_trips() -> None:
    peer = PeerId.from_seed(1)
    parsed = address.parse_address(f"/ip4/10.0.0.1/tcp/4001/p2p/{peer}/site/17")
    assert Multiaddr(parsed.to_bytes()) == parsed
    assert address.peer_of_address(parsed) == peer


@given(st.binary(max_size=300))
def test_any_bytes_are_an_address_or_a_decode_error(raw: bytes) -> None:
    try:
        parsed = address.address_from_bytes(raw)
    except DecodeError:
        return
    assert Multiaddr(str(parsed)).to_bytes() == raw


@pytest.mark.parametrize("text", ["", "nonsense", "/ip4/300.0.0.1/tcp/1", "/site/x", "/site/-1"])
def test_bad_address_text_is_a_decode_error(text: str) -> None:
    with pytest.raises(DecodeError):
        address.peer_of_address(address.parse_address(text))


def test_fnv1a_64_matches_its_published_vectors() -> None:
    # draft-eastlake-fnv-17, appendix C, 64-bit FNV-1a
    assert ids.fnv1a_64(b"") == 0xCBF29CE484222325
    assert ids.fnv1a_64(b"a") == 0xAF63DC4C8601EC8C
    assert ids.fnv1a_64(b"foobar") == 0x85944171F73967E8
