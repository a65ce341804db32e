"""A node finds peers that nobody told it of: the daemon's part, its commands, and whole daemons."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.host.autonat import AutoNATService
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from bbnode.access.conduct import OFFENCES, Offence
from bbnode.cli.main import main
from bbnode.daemon.config import NetworkSection, RoutingSection
from bbnode.daemon.lifecycle.app import Daemon
from bbnode.daemon.network.autonat import AutonatStatus
from bbnode.daemon.network.conduct import OFFENCE_OF_FAULT
from bbnode.daemon.network.dial_back import DialBack, DialBackRefused, DialResult, Tried
from bbnode.daemon.network.reachability import Reachability
from bbnode.daemon.network.routing import PeerFinder, WayOutcome
from bbnode.daemon.observing import doctor
from bbnode.daemon.observing.doctor import CheckResult
from bbnode.engine import steps
from bbnode.ir.caps import (
    FOUND_EVERY_S,
    MAX_FIND_WAITING,
    MAX_FINDS,
    MAX_ROUTED_ADDRESSES,
    REACHABILITY_EVERY_S,
)
from bbnode.ir.peer import PeerId
from bbnode.transport.errors import OTHER_KEY, DialError, NotSupportedError
from bbnode.transport.routing import Located, NotFound, RoutingFault
from tests.daemon.live import in_thread
from tests.daemon.test_transports import configured
from tests.patience import PATIENCE_S
from tests.transport.plain import plain_dial
from tests.transport.test_routing import plain_dht, until

PEER, TELLER = PeerId.from_seed("wanted"), PeerId.from_seed("teller")
WAYS = [Multiaddr(f"/ip4/192.0.2.{n}/tcp/4001") for n in range(1, 5)]
RELAYED = Multiaddr(f"/ip4/192.0.2.9/tcp/4001/p2p/{TELLER}/p2p-circuit")


class FakeRouting:
    """Answers as a DHT would."""

    def __init__(self, found: dict[PeerId, Located]) -> None:
        self.found = found
        self.asked: list[PeerId] = []

    async def run(self) -> None:
        await trio.sleep_forever()

    async def find_peer(self, peer: PeerId) -> Located:
        await trio.lowlevel.checkpoint()
        self.asked.append(peer)
        if peer not in self.found:
            raise NotFound(f"3 peers were asked where {peer} is, and none knows")
        return self.found[peer]

    def provide(self, keys: Any) -> None:
        self.keys = keys

    def counters(self) -> dict[str, int]:
        return {"asked": len(self.asked)}

    def as_json(self) -> dict[str, Any]:
        return {"peers": 1}


class FakeTransport:
    """A transport of which each address answers as it was said to."""

    def __init__(self, found: dict[PeerId, Located], answers: dict[Multiaddr, str]) -> None:
        self.made = FakeRouting(found)
        self.answers = answers
        self.connected: set[PeerId] = set()

    def routing(self, setup: Any) -> FakeRouting:
        self.setup = setup
        return self.made

    def peer_info(self, peer: PeerId) -> Any:
        return None

    async def probe(self, address: Multiaddr, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        if self.answers[address]:
            raise DialError(self.answers[address])


def finder(
    found: dict[PeerId, Located], answers: dict[Multiaddr, str], **settings: Any
) -> tuple[PeerFinder, FakeTransport, list[tuple[PeerId, RoutingFault]]]:
    faults: list[tuple[PeerId, RoutingFault]] = []
    backend: Any = FakeTransport(found, answers)
    made = PeerFinder(
        backend,
        RoutingSection(**{"dht": "server", **settings}),
        network=None,
        authorizer=None,
        on_fault=lambda *fault: faults.append(fault),
        program=b"p" * 32,
    )
    return made, backend, faults


def located(*addresses: Multiaddr, signed: bool = False) -> Located:
    told = {} if signed else dict.fromkeys(addresses, TELLER)
    return Located(peer=PEER, addresses=addresses, signed=signed, told_by=told)


ANSWERS = {
    WAYS[0]: "",
    WAYS[1]: "connection refused",
    WAYS[2]: f"cannot dial: {OTHER_KEY}",
}


async def test_each_address_is_tried_and_who_gave_a_strangers_is_charged() -> None:
    made, _, faults = finder({PEER: located(*WAYS[:3], RELAYED)}, ANSWERS)
    found = await made.find(PEER)
    assert [way.outcome for way in found.ways] == [
        WayOutcome.REACHED,
        WayOutcome.FAILED,
        WayOutcome.ANOTHER,
        WayOutcome.UNTRIED,
    ]
    assert found.addresses == (WAYS[0], RELAYED)
    assert {way.told_by for way in found.ways} == {TELLER}
    assert faults == [(TELLER, RoutingFault.MISLED)]
    assert made.counters()["routing.misled"] == 1
    assert json.dumps(found.as_json())


async def test_what_the_peer_has_signed_itself_is_nobody_elses_fault() -> None:
    made, _, faults = finder({PEER: located(WAYS[2], signed=True)}, ANSWERS)
    assert not (await made.find(PEER)).addresses
    assert not faults


async def test_a_peer_that_nobody_knows_is_an_error_that_says_how_many_were_asked() -> None:
    made, _, _ = finder({}, {})
    with pytest.raises(NotFound, match="3 peers were asked"):
        await made.find(PEER)


async def test_without_a_dht_nobody_is_asked() -> None:
    made, backend, _ = finder({}, {}, dht="off")
    with pytest.raises(NotSupportedError, match=r"routing\.dht"):
        await made.find(PEER)
    assert not hasattr(backend, "setup")
    assert made.counters() == made.as_json() == {}


@pytest.mark.parametrize(
    ("settings", "keys"),
    [({}, [b"p" * 32]), ({"provide": False}, None), ({"dht": "client"}, None)],
)
def test_a_server_provides_its_program(settings: dict[str, Any], keys: list[bytes] | None) -> None:
    _, backend, _ = finder({}, {}, **settings)
    assert getattr(backend.made, "keys", None) == keys
    assert backend.setup.serves == (settings.get("dht") != "client")


class Dialling:
    """The part of discovery that takes what was found."""

    def __init__(self) -> None:
        self.found_peers: list[tuple[PeerId, tuple[Multiaddr, ...]]] = []

    def found(self, peer: PeerId, addresses: tuple[Multiaddr, ...]) -> bool:
        self.found_peers.append((peer, addresses))
        return True


def missed(peer: PeerId) -> steps.PeerResolveFailed:
    return steps.PeerResolveFailed(peer=peer, op="send", execution=1, reason="no address")


async def test_the_peer_of_a_message_without_an_address_is_looked_for(autojump_clock) -> None:
    made, backend, _ = finder({PEER: located(WAYS[0])}, ANSWERS)
    dialling: Any = Dialling()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run, dialling)
        for _ in range(3):
            made.observe(missed(PEER))
        made.observe(missed(TELLER))
        await trio.sleep(1)
        assert dialling.found_peers == [(PEER, (WAYS[0],))]
        # Once in a while, whoever it is.
        assert sorted(backend.made.asked) == sorted([PEER, TELLER])
        await trio.sleep(FOUND_EVERY_S)
        made.observe(missed(PEER))
        await trio.sleep(1)
        assert len(dialling.found_peers) == 2
        assert made.counters()["routing.resolved"] == 2
        nursery.cancel_scope.cancel()


async def test_no_more_searches_wait_than_there_is_room_for() -> None:
    made, _, _ = finder({}, {})
    for n in range(2 * MAX_FIND_WAITING):
        made.observe(missed(PeerId.from_seed(f"{n}")))
    assert made._asked.statistics().current_buffer_used == MAX_FIND_WAITING


async def test_a_dht_that_fails_ends_alone(caplog) -> None:
    made, backend, _ = finder({}, {})

    async def fail() -> None:
        raise ValueError("on purpose")

    backend.made.run = fail
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await until(lambda: made.counters()["routing.failed"])
        nursery.cancel_scope.cancel()
    assert "goes on without" in caplog.text


def test_each_fault_is_an_offence_and_an_honest_mistake_cuts_nobody_off() -> None:
    assert set(OFFENCE_OF_FAULT) == set(RoutingFault)
    assert OFFENCES[Offence.MISLED].ceiling < OFFENCES[Offence.FORGED].ceiling


async def test_so_many_searches_run_at_once() -> None:
    made, backend, _ = finder({}, {})

    async def find_peer(peer: PeerId) -> Located:
        backend.made.asked.append(peer)
        await trio.sleep_forever()
        raise AssertionError

    backend.made.find_peer = find_peer
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        for n in range(2 * MAX_FINDS):
            made.observe(missed(PeerId.from_seed(f"{n}")))
        await trio.testing.wait_all_tasks_blocked()
        assert len(backend.made.asked) == MAX_FINDS
        nursery.cancel_scope.cancel()


async def test_so_many_addresses_of_a_peer_are_tried() -> None:
    ways = [Multiaddr(f"/ip4/192.0.2.1/tcp/{n}") for n in range(1, 2 * MAX_ROUTED_ADDRESSES)]
    made, _, _ = finder({PEER: located(*ways)}, dict.fromkeys(ways, ""))
    assert len((await made.find(PEER)).ways) == MAX_ROUTED_ADDRESSES


# -- can it be dialled ---------------------------------------------------------------------------


class Asked:
    """Peers that dial back as they are said to."""

    def __init__(self, answers: dict[PeerId, DialResult | None], listen: str) -> None:
        self._answers = answers
        self._listen = Multiaddr(listen)
        self.asked: list[PeerId] = []

    def listen_addresses(self) -> list[Multiaddr]:
        return [self._listen]

    def peers(self) -> list[Any]:
        class Info:
            def __init__(self, peer: PeerId) -> None:
                self.peer, self.address = peer, WAYS[0]

        return [Info(peer) for peer in self._answers]

    async def ask(self, peer: PeerId | None) -> DialBack:
        await trio.lowlevel.checkpoint()
        assert peer is not None
        self.asked.append(peer)
        outcome = self._answers[peer]
        if outcome is None:
            raise DialBackRefused("asked again too soon")
        tried = Tried(address=self._listen, outcome=outcome, detail="")
        return DialBack(peer=peer, seen_at="/ip4/192.0.2.7/tcp/5", tried=(tried,))


REACHED, FAILED, SKIPPED = DialResult.REACHED, DialResult.FAILED, DialResult.SKIPPED


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([REACHED], True),
        ([FAILED], False),
        # One liar among three decides nothing.
        ([FAILED, REACHED, REACHED], True),
        ([REACHED, FAILED, FAILED], False),
        ([SKIPPED, None], None),
        ([], None),
    ],
)
async def test_what_most_peers_find_counts(
    outcomes: list[DialResult | None], verdict: bool | None
) -> None:
    peers = {PeerId.from_seed(f"{n}"): each for n, each in enumerate(outcomes)}
    asked: Any = Asked(peers, "/ip4/192.0.2.1/tcp/4001")
    published: list[Any] = []
    made = Reachability(asked, asked.ask, published.append)
    assert await made.check() == (verdict is not None)
    told = made.as_json()
    assert told["can_be_dialled"] is verdict
    assert bool(told["addresses"]) == (REACHED in outcomes and verdict is not None)
    assert [each["can_be_dialled"] for each in published] == ([] if verdict is None else [verdict])


async def test_who_listens_on_this_machine_alone_asks_nobody() -> None:
    asked: Any = Asked({PEER: REACHED}, "/ip4/127.0.0.1/tcp/4001")
    assert not await Reachability(asked, asked.ask, lambda _event: None).check()
    assert not asked.asked


async def test_peers_are_asked_now_and_then(autojump_clock) -> None:
    asked: Any = Asked({PEER: REACHED}, "/ip4/192.0.2.1/tcp/4001")
    made = Reachability(asked, asked.ask, lambda _event: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await trio.sleep(2.5 * REACHABILITY_EVERY_S)
        assert len(asked.asked) == 3
        nursery.cancel_scope.cancel()


# -- doctor --------------------------------------------------------------------------------------

SOUND = {"mode": "server", "peers": 2, "protocol": "/ipfs/kad/1.0.0", "providing": {"ab" * 32: 1}}


@pytest.mark.parametrize(
    ("changes", "verdict", "says"),
    [
        ({}, CheckResult.PASSED, "2 peers"),
        ({"routing": {}}, CheckResult.WARNING, "no DHT"),
        ({"peers": []}, CheckResult.SKIPPED, "nobody is connected"),
        ({"routing": {**SOUND, "peers": 0}}, CheckResult.WARNING, "/ipfs/kad/1.0.0"),
        (
            {"routing": {**SOUND, "providing": {"ab" * 32: 0}}},
            CheckResult.WARNING,
            "nobody was told",
        ),
        ({"counters": {"routing.failed": 1}}, CheckResult.FAILED, "has failed"),
    ],
)
def test_doctor_judges_the_dht(changes: dict[str, Any], verdict: CheckResult, says: str) -> None:
    found = doctor.judge_routing({"routing": SOUND, "peers": [1], "counters": {}, **changes})
    assert found.verdict is verdict
    assert says in found.detail
    assert bool(found.remedy) is (verdict in (CheckResult.FAILED, CheckResult.WARNING))


# -- daemons -------------------------------------------------------------------------------------


async def test_daemons_find_and_connect_over_three_hops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four daemons in a row; the first is asked for the last, of whom it never heard."""
    names = [f"n{n}" for n in range(4)]
    peers: list[str] = []
    daemons: list[Daemon] = []
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.enter_context(trio.fail_after(PATIENCE_S))
        before: list[Multiaddr] = []
        for name in reversed(names):
            (tmp_path / name).mkdir()
            network = f"bootstrap = {json.dumps([str(each) for each in before])}\n"
            resolved = configured(
                tmp_path / name, "client", network + '[routing]\ndht = "server"\n'
            )
            daemon = Daemon(resolved)
            await nursery.start(daemon.run)
            before = daemon.host.backend.listen_addresses()
            daemons.insert(0, daemon)
            peers.insert(0, str(daemon.host.node.peer_id))
        first, last = daemons[0], daemons[-1]
        await until(lambda: first.host.routing()["peers"] and last.host.routing()["peers"])
        await until(lambda: any(last.host.routing()["providing"].values()))
        config = str(tmp_path / "n0" / "client.toml")
        code = await in_thread(main, ["peers", "find", peers[-1], "-c", config, "--json"])
        told = json.loads(capsys.readouterr().out)
        assert code == 0
        assert told["peer"] == peers[-1]
        assert "reached" in [row["outcome"] for row in told["addresses"]]
        code = await in_thread(main, ["peers", "find", peers[-1], "--connect", "-c", config])
        assert code == 0
        await until(lambda: first.host.backend.peer_info(PeerId.parse(peers[-1])))
        status = await in_thread(main, ["status", "-c", config])
        assert status == 0
        out = capsys.readouterr().out
        assert "routing" in out
        nobody = str(PeerId.from_seed("nobody"))
        assert await in_thread(main, ["peers", "find", nobody, "-c", config]) == 1
        assert "none knows" in capsys.readouterr().err
        own = await in_thread(main, ["peers", "find", peers[0], "-c", config])
        assert own == 2
        for daemon in daemons:
            daemon.stop()


async def test_a_transport_without_a_dht_says_so_at_the_start(tmp_path: Path) -> None:
    text = 'transport = "lean"\n[routing]\ndht = "client"\n'
    with pytest.raises(NotSupportedError, match=r"routing\.dht needs network\.transport"):
        Daemon(configured(tmp_path, "client", text))


@pytest.mark.skipif("guests" not in NetworkSection.model_fields, reason="hosts have to say hello")
async def test_an_unpatched_dht_is_a_guest_of_a_daemon(tmp_path: Path) -> None:
    """py-libp2p as it comes knows one daemon, asks it for another one, and is found itself."""
    daemons: list[Daemon] = []
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.enter_context(trio.fail_after(PATIENCE_S))
        known = "[]"
        for name in ("far", "near"):
            (tmp_path / name).mkdir()
            text = f'bootstrap = {known}\n[routing]\ndht = "server"\n'
            daemon = Daemon(configured(tmp_path / name, "client", text))
            await nursery.start(daemon.run)
            known = json.dumps([str(each) for each in daemon.host.backend.listen_addresses()])
            daemons.append(daemon)
        far, near = (daemon.host for daemon in daemons)
        await until(lambda: any(far.routing()["providing"].values()))
        async with plain_dht(b"p" * 32) as plain:
            await plain_dial(plain.host, near.backend.listen_addresses()[0], near.node.peer_id)
            await until(lambda: near.routing()["peers"] == 2)
            await plain.refresh_routing_table()
            assert await plain.find_peer(ID(far.node.peer_id.to_bytes())) is not None
            key = b"\x12\x20" + bytes.fromhex(far.artifact_sha256)
            providers = {each.peer_id.to_bytes() for each in await plain.find_providers(key.hex())}
            assert far.node.peer_id.to_bytes() in providers
            found = await far.find_peer(PeerId.from_bytes(plain.host.get_id().to_bytes()))
            assert found.addresses
            # A connection says nothing of whether its peer can be dialled; ours does dial.
            asking = AutoNATService(plain.host, serve=False)
            status, _ = await asking.query_server(ID(near.node.peer_id.to_bytes()))
            assert status == AutonatStatus.OK
        for daemon in daemons:
            daemon.stop()
