"""Joining by asking others: the inviting peer is gone, and nobody says where a provider is."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from multiaddr import Multiaddr

from bbnode.access.statement import grant
from bbnode.compiler import Compiler
from bbnode.components.selectors.views import ConnectedView
from bbnode.daemon import paths
from bbnode.daemon.artifacts.artifact import serialize
from bbnode.daemon.config import RoutingSection
from bbnode.daemon.join.folder import folder
from bbnode.daemon.join.invitation import (
    InviterUnreachable,
    MembershipNeeded,
    NobodyProvides,
    NotAnInvitation,
    ViaNeeded,
    ViaUnreachable,
    read_source,
)
from bbnode.daemon.join.prepare import JoinOptions, Prepared, prepare
from bbnode.daemon.network.routing import PeerFinder
from bbnode.dsl import Graph, Module, PeerSelectorSlot, types
from bbnode.transport.identity import load_or_create_identity
from tests.daemon.inviting import HOUR_S, OWNER, Inviter, inviting
from tests.transport.test_routing import until

NOWHERE = f"/ip4/127.0.0.1/tcp/9/p2p/{OWNER.peer_id}"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


async def join(text: str, tmp_path: Path, *, via: list[str], **changes: str) -> Prepared:
    network = changes.pop("network", None)
    source = read_source(text, unix_s=time.time(), via=via, network=network)
    options = JoinOptions(
        source=source,
        folder=folder(source, name="laptop", directory=tmp_path / "laptop"),
        target="client",
        settings={},
    )
    return await prepare(replace(options, **changes))


def statement_for(tmp_path: Path) -> str:
    """A statement of the owner for the joining node, whose identity is made here."""
    state = tmp_path / "laptop" / "state"
    paths.make_state_dir(state)
    peer = load_or_create_identity(paths.identity_file(state)).peer_id
    now_s = int(time.time())
    made = grant(OWNER, member=peer, not_before_s=now_s, expires_s=now_s + HOUR_S, serial=7)
    return made.text


class Later(Module):
    """Another program."""

    home = "server"

    def body(self, g: Graph) -> None:
        question = g.input("question", types.TENSOR_FLOAT)
        peers = PeerSelectorSlot("who", peer_class="client").sample(g, n=2, after=question)
        r = g.request("later", peers, question, deadline=90.0)
        r.respond(r.received)
        g.output("answers", r.responses)


def other_program() -> Any:
    return Compiler().bind_peer_selector("who", ConnectedView).compile(Later().build())


@asynccontextmanager
async def routed(host: Inviter, *, program: bool) -> AsyncIterator[PeerFinder]:
    """The DHT of a running node."""
    finder = PeerFinder(
        host.backend,
        RoutingSection(dht="server"),
        network=host.access.network,
        authorizer=host.access.authorizer,
        on_fault=lambda _peer, _fault: None,
        program=bytes.fromhex(host.sha256) if program else b"",
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(finder.run)
        yield finder
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def row_of_three(tmp_path: Path, *, private: bool) -> AsyncIterator[list[Inviter]]:
    """Three nodes of which each knows the next; the last one alone has the program."""
    async with AsyncExitStack() as stack:
        other = tmp_path / "other.onnx"
        other.write_bytes(serialize(other_program()))
        hosts, finders = [], []
        for n in range(3):
            changes = {} if n == 2 else {"artifact.path": str(other)}
            host = await stack.enter_async_context(
                inviting(tmp_path / f"host{n}", private=private, name=f"host{n}", **changes)
            )
            hosts.append(host)
            finders.append(await stack.enter_async_context(routed(host, program=n == 2)))
        for here, there in itertools.pairwise(hosts):
            here.backend.keep_connected(there.identity.peer_id, there.backend.listen_addresses())
        await until(lambda: finders[2].routing.as_json()["providing"][hosts[2].sha256])
        yield hosts


async def test_by_digest_and_network_over_three_hops(tmp_path: Path) -> None:
    async with row_of_three(tmp_path, private=True) as (first, _, last):
        made = await join(
            last.sha256,
            tmp_path,
            via=[first.address],
            network=str(OWNER.peer_id),
            statement=statement_for(tmp_path),
        )
    assert made.options.source.inviter == last.identity.peer_id
    assert made.obtained.artifact.sha256 == last.sha256
    assert made.membership is not None
    config = made.resolved.config
    assert config.network.bootstrap == [last.address, first.address]
    assert config.routing.dht == "client"
    assert config.access.network == str(OWNER.peer_id)


async def test_an_open_network_needs_no_membership(tmp_path: Path) -> None:
    async with row_of_three(tmp_path, private=False) as (first, _, last):
        made = await join(last.sha256, tmp_path, via=[first.address])
    assert made.options.source.inviter == last.identity.peer_id


async def test_a_ticket_whose_inviter_is_offline(tmp_path: Path) -> None:
    async with inviting(tmp_path / "gone", private=False, name="gone") as gone:
        ticket = gone.ticket()
    async with row_of_three(tmp_path, private=False) as (first, _, last):
        with pytest.raises(InviterUnreachable):
            await join(ticket, tmp_path, via=[])
        made = await join(ticket, tmp_path, via=[first.address])
    assert made.options.source.inviter == last.identity.peer_id
    assert made.obtained.fetched


async def test_a_ticket_whose_inviter_has_moved(tmp_path: Path) -> None:
    async with row_of_three(tmp_path, private=False) as (first, _, last):
        ticket = last.ticket(addresses=[Multiaddr("/ip4/127.0.0.1/tcp/9")])
        made = await join(ticket, tmp_path, via=[first.address])
    assert made.options.source.inviter == last.identity.peer_id
    assert made.address.startswith(str(last.backend.listen_addresses()[0]).partition("/p2p/")[0])


async def test_nobody_has_it(tmp_path: Path) -> None:
    async with inviting(tmp_path / "host", private=False) as host, routed(host, program=False):
        with pytest.raises(NobodyProvides, match=r"routing\.dht"):
            await join("ab" * 32, tmp_path, via=[host.address])


async def test_nobody_to_ask_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bbnode.daemon.join.search.CONNECT_S", 0.2)
    with pytest.raises(ViaUnreachable):
        await join("ab" * 32, tmp_path, via=[NOWHERE])


async def test_who_is_no_member_is_told_what_to_ask_for(tmp_path: Path) -> None:
    with pytest.raises(MembershipNeeded, match="bbnode network grant 12D3"):
        await join("ab" * 32, tmp_path, via=[NOWHERE], network=str(OWNER.peer_id))


def test_a_digest_alone_asks_for_somebody_to_ask() -> None:
    with pytest.raises(ViaNeeded, match="--via"):
        read_source("ab" * 32, unix_s=0)


def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(NotAnInvitation, match="--network"):
        read_source("ab" * 32, unix_s=0, via=[NOWHERE], network="not one")
