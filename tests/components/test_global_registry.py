"""The registry: who is in it and for how long, what readers are told, and what it survives."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import dataclass, field

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.components.contracts import ComponentError
from bbnode.components.errors import ExchangeRefused, InvalidComponentConfig, NotEnoughPeers
from bbnode.components.peer_registry import messages
from bbnode.components.peer_registry import server as server_module
from bbnode.components.peer_registry.client import (
    GlobalRegistryClient,
    GlobalRegistryClientConfig,
    TooManyRegistries,
)
from bbnode.components.peer_registry.messages import Announcement, Cookie
from bbnode.components.peer_registry.server import (
    GlobalRegistryServer,
    GlobalRegistryServerConfig,
    S,
)
from bbnode.components.wire_records import UnusableMessage
from bbnode.engine import steps
from bbnode.examples import registry as program
from bbnode.ir.caps import MAX_PAGE_BYTES
from bbnode.ir.envelope import CorrelationKind, WireCorrelation
from bbnode.ir.peer import PeerId
from bbnode.ir.values import PeerIdVec
from bbnode.sim import Network
from tests.components.fakes import Peers
from tests.patience import PATIENCE_S

SERVER = PeerId.from_seed("the registry")


def peer(i: int) -> PeerId:
    return PeerId.from_seed(i)


def address(i: int, port: int = 4001) -> Multiaddr:
    return Multiaddr(f"/ip4/10.0.0.{i % 250}/tcp/{port}")


@dataclass
class Context:
    """A context that keeps what is asked of it."""

    now_ns: int = 0
    self_peer: PeerId = SERVER
    source_peer: PeerId | None = None
    peer_class: str | None = None
    source_classes: tuple[str, ...] = ("client", "edge")
    source_seen_at: Multiaddr | None = None
    plays_peer_class: bool = False
    include_self: bool = False
    execution: int = 1
    peers: Peers = field(default_factory=Peers)
    addresses: tuple[Multiaddr, ...] = ()
    correlation: WireCorrelation | None = None
    learned: dict[PeerId, tuple[Multiaddr, ...]] = field(default_factory=dict)
    requests: list[tuple[PeerId, str, str, bytes, str]] = field(default_factory=list)

    def learn_addresses(self, who: PeerId, addresses: tuple[Multiaddr, ...]) -> None:
        self.learned[who] = addresses

    def request(self, who, slot, op, payload, *, tag, deadline_ns) -> int:
        self.requests.append((who, slot, op, payload, tag))
        return len(self.requests)


def reads(cookie: Cookie | None, n: int) -> bytes:
    return messages.ReadRequest(cookie=cookie, n=n).encode()


def server(**config) -> GlobalRegistryServer:
    return GlobalRegistryServer(GlobalRegistryServerConfig(**config))


def asking(i: int, now_s: float = 0, wire_req_id: int = 1, ip: str | None = None) -> Context:
    return Context(
        source_seen_at=None if ip is None else Multiaddr(f"/ip4/{ip}/tcp/50000"),
        now_ns=int(now_s * S),
        source_peer=peer(i),
        correlation=WireCorrelation(kind=CorrelationKind.REQUEST, wire_req_id=wire_req_id),
    )


def announce(
    registry: GlobalRegistryServer, i: int, now_s: float = 0, as_class: str = "", port=1, ip=None
):
    said = Announcement(as_class=as_class, addresses=(address(i, port),))
    answer = registry.announce(asking(i, now_s, ip=ip), said.encode())
    assert answer is not None
    return messages.Handshake.decode(answer)


def read(registry: GlobalRegistryServer, cookie: Cookie | None, now_s: float = 0):
    answer = registry.read_view(asking(99, now_s), reads(cookie, 0))
    assert answer is not None
    return messages.Page.decode(answer)


def in_view(registry: GlobalRegistryServer, now_s: float, peer_class: str | None = None):
    return registry.current_view(Context(now_ns=int(now_s * S), peer_class=peer_class))


# --- who is in it --------------------------------------------------------------------------


def test_a_peer_is_there_for_a_ttl_from_its_last_announcement() -> None:
    registry = server()
    shake = announce(registry, 1)
    assert (shake.ttl_ns, shake.heartbeat_ns) == (90 * S, 30 * S)
    announce(registry, 2)
    announce(registry, 1, now_s=60)
    assert in_view(registry, 89.9) == PeerIdVec(sorted([peer(1), peer(2)]))
    assert in_view(registry, 90) == PeerIdVec([peer(1)])
    assert in_view(registry, 150) == PeerIdVec()
    with pytest.raises(NotEnoughPeers):
        registry.sample(Context(now_ns=150 * S), n=1)


def test_nobody_is_entered_as_a_class_that_it_does_not_play() -> None:
    registry = server()
    refused: dict[PeerId, str] = {}
    ctx = asking(1)
    ctx.refuse = lambda who, reason: refused.update({who: reason})  # type: ignore[attr-defined]
    said = Announcement(as_class="server", addresses=())
    with pytest.raises(ExchangeRefused, match="'server', which it does not play"):
        registry.announce(ctx, said.encode())
    assert list(refused) == [peer(1)]
    assert not len(registry)


def test_one_subnet_does_not_fill_the_registry_whatever_it_claims() -> None:
    registry = server(max_peers=40)
    for i in range(30):  # each of them claims an address of its own
        announce(registry, i, ip="8.8.8.8")
    assert len(registry) == 10
    assert announce(registry, 3, ip="8.8.8.8").ttl_ns  # who is in it renews
    for i in range(30, 45):
        announce(registry, i, ip=f"9.{i}.0.1")
    assert len(registry) == 25
    for i in range(45, 70):
        announce(registry, i, ip="192.168.0.7")  # of no public subnet
    assert len(registry) == 40
    in_view(registry, 90)  # all have expired
    assert not registry._of_subnet
    announce(registry, 1, now_s=91, ip="8.8.8.8")
    restored = server(max_peers=40)
    restored.restore(registry.serialize())
    assert len(restored) == 1
    announce(restored, 1, now_s=92, ip="8.8.8.8")
    assert restored._of_subnet == {"8.8.8.0/24": 1}


def test_classes_are_kept_apart_and_none_is_of_all() -> None:
    registry = server()
    for i, as_class in enumerate(("client", "edge", "")):
        announce(registry, i, as_class=as_class)
    assert in_view(registry, 0, "client") == PeerIdVec(sorted([peer(0), peer(2)]))
    assert len(in_view(registry, 0)) == 3


@pytest.mark.parametrize(
    "config", [{"ttl_s": 29.9}, {"ttl_s": 300.1}, {"max_peers": 0}, {"max_peers": 16_385}]
)
def test_settings_have_bounds(config) -> None:
    with pytest.raises(InvalidComponentConfig, match="ttl_s has to be in 30"):
        server(**config)


def test_a_flood_of_announcers_stays_bounded_and_costs_those_who_were_there_nothing() -> None:
    registry = server(max_peers=10)
    for i in range(10):
        assert announce(registry, i).ttl_ns == 90 * S
    for i in range(10, 5000):
        assert announce(registry, i, now_s=10).ttl_ns == 0
    assert announce(registry, 3, now_s=10).ttl_ns == 90 * S
    assert in_view(registry, 20) == PeerIdVec(sorted(peer(i) for i in range(10)))
    # Room is made by those who expire, and what is remembered of them is bounded as well.
    for i in range(100, 5000):
        announce(registry, i, now_s=10 + i)
    assert len(registry) <= 10
    assert len(registry._changes) <= 20


def test_what_is_no_message_is_refused_and_changes_nothing() -> None:
    registry = server()
    for payload in (
        b"",
        b"\xc1",
        b"\x80",
        reads(None, 0) + b"x",
        bytes(100_000),
        msgpack.packb(["c", [b"\x00\x01"]]),
        msgpack.packb(["c" * 65, []]),
        msgpack.packb(["c", [b""] * 9]),
        msgpack.packb([3, []]),
    ):
        with pytest.raises(UnusableMessage):
            registry.announce(asking(1), payload)
    with pytest.raises(UnusableMessage):
        registry.read_view(asking(1), msgpack.packb([[1, 2, -3], 0]))
    assert len(registry) == 0


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_with_the_one_error(payload: bytes) -> None:
    for decode in (
        messages.Announcement.decode,
        messages.Handshake.decode,
        messages.ReadRequest.decode,
        messages.Page.decode,
    ):
        with contextlib.suppress(UnusableMessage):
            decode(payload)


# --- incremental reads ---------------------------------------------------------------------


def test_a_cookie_reads_what_changed_alone() -> None:
    registry = server()
    announce(registry, 1)
    announce(registry, 2)
    first = read(registry, None)
    assert first.reset
    assert {row.peer for row in first.rows} == {peer(1), peer(2)}
    announce(registry, 1, now_s=30)  # a heartbeat is no change
    assert read(registry, first.cookie, 30).rows == ()
    announce(registry, 2, now_s=31, port=2)
    announce(registry, 3, now_s=31)
    second = read(registry, first.cookie, 31)
    assert not second.reset
    assert [row.peer for row in second.rows] == [peer(2), peer(3)]
    third = read(registry, second.cookie, 120.5)
    assert [(row.peer, row.gone) for row in third.rows] == [(peer(1), True)]


def test_a_cookie_of_another_life_reads_everything_anew() -> None:
    registry = server()
    announce(registry, 1)
    cookie = read(registry, None).cookie
    saved = registry.serialize()
    risen = server()
    risen.restore(saved)
    page = messages.Page.decode(
        risen.read_view(asking(99, 1, wire_req_id=2), reads(cookie, 0)) or b""
    )
    assert page.reset
    assert [row.peer for row in page.rows] == [peer(1)]


# What happens between two reads: (peer, announces anew with another port) or time passing.
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 40), st.integers(1, 3)),
        st.tuples(st.just(-1), st.integers(1, 60)),  # seconds
        st.tuples(st.just(-2), st.just(0)),  # the reader reads a page
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, page=st.integers(1, 5), room=st.integers(3, 30))
def test_a_reader_that_reads_on_ends_with_what_is_there(events, page: int, room: int) -> None:
    registry = server(max_peers=room)
    known: dict[PeerId, tuple[Multiaddr, ...]] = {}
    cookie, now_s = None, 0.0

    def turn_page() -> bool:
        nonlocal cookie
        said = read(registry, cookie, now_s)
        if said.reset:
            known.clear()
        for row in said.rows:
            if row.gone:
                known.pop(row.peer, None)
            else:
                known[row.peer] = row.addresses
        cookie = said.cookie
        return said.more

    with pytest.MonkeyPatch.context() as patch:
        for module in (messages, server_module):
            patch.setattr(module, "MAX_PAGE_ROWS", page)
        for who, number in events:
            if who >= 0:
                announce(registry, who, now_s, port=number)
            elif who == -1:
                now_s += number
            else:
                turn_page()
        pages = 1
        while turn_page():
            pages += 1
            assert pages <= 2 * room + 2
    assert known == {p: e.row.addresses for p, e in registry._entries.items()}


def test_a_page_fits_an_envelope_however_long_the_addresses() -> None:
    registry = server()
    long = Multiaddr("/dns4/" + ".".join(["a" * 60] * 3) + ".example/tcp/4001")
    for i in range(600):
        said = Announcement(as_class="client", addresses=(long,) * 8)
        registry.announce(asking(i), said.encode())
    answer = registry.read_view(asking(1), reads(None, 0)) or b""
    assert len(answer) <= MAX_PAGE_BYTES + 4096
    assert messages.Page.decode(answer).more


# --- draws and snapshots -------------------------------------------------------------------


def test_draws_and_times_go_on_after_a_restart_with_the_saved_seed() -> None:
    whole = server(seed=5)
    for i in range(20):
        announce(whole, i, now_s=i)
    ctx = Context(now_ns=20 * S)
    expected = [whole.sample(ctx, n=3) for _ in range(8)]
    other = server(seed=5)
    for i in range(20):
        announce(other, i, now_s=i)
    assert [other.sample(ctx, n=3) for _ in range(4)] == expected[:4]
    risen = server(seed=77)
    risen.restore(other.serialize())
    assert [risen.sample(ctx, n=3) for _ in range(4)] == expected[4:]
    assert in_view(risen, 100) == PeerIdVec(sorted(peer(i) for i in range(11, 20)))


def test_the_registry_draws_for_others_and_leaves_them_out() -> None:
    registry = server(seed=1)
    for i in range(5):
        announce(registry, i)
    answer = registry.read_sample(asking(2), reads(None, 100)) or b""
    page = messages.Page.decode(answer)
    assert {row.peer for row in page.rows} == {peer(i) for i in (0, 1, 3, 4)}
    two = messages.Page.decode(registry.read_sample(asking(2), reads(None, 2)) or b"")
    assert len(two.rows) == 2


@pytest.mark.parametrize("data", [b"x", b"\x91\x01", b"\x94\x01\x02\x03\x91\x93\x01\x02\x03"])
@pytest.mark.parametrize(
    "make", [server, lambda: GlobalRegistryClient(GlobalRegistryClientConfig())]
)
def test_a_state_of_somebody_else_is_refused(make, data: bytes) -> None:
    with pytest.raises(ComponentError, match="not ours"):
        make().restore(data)


# --- the client ----------------------------------------------------------------------------


def client() -> GlobalRegistryClient:
    return GlobalRegistryClient(GlobalRegistryClientConfig())


def test_announcements_are_silent_within_the_heartbeat_unless_something_changed() -> None:
    one = client()
    ctx = Context(self_peer=peer(1), addresses=(address(1),))

    def said(now_s: float) -> int:
        before = len(ctx.requests)
        ctx.now_ns = int(now_s * S)
        one.announce(ctx, SERVER, as_class="client")
        return len(ctx.requests) - before

    assert [said(0), said(1), said(9.9)] == [1, 0, 0]
    ctx.source_peer = SERVER
    shake = messages.Handshake(ttl_ns=90 * S, heartbeat_ns=30 * S, addresses=(address(9),))
    one.on_answer(ctx, "announce", shake.encode())
    assert ctx.learned == {SERVER: (address(9),)}
    assert [said(12), said(39.8), said(39.9), said(40)] == [0, 0, 1, 0]
    ctx.addresses = (address(1, 5000),)
    assert [said(41), said(41)] == [1, 0]
    one.on_no_answer(ctx, "announce", SERVER)
    assert said(41) == 1


def test_a_client_uses_so_many_registries_and_no_more() -> None:
    one = client()
    for i in range(16):
        one.announce(Context(), peer(i), as_class="")
    with pytest.raises(TooManyRegistries):
        one.announce(Context(), peer(16), as_class="")


def test_a_view_is_believed_for_its_ttl_and_survives_a_restart() -> None:
    one = client()
    ctx = Context(self_peer=peer(1), source_peer=SERVER)
    registry = server()
    for i in range(1, 4):
        announce(registry, i, as_class="client")
    one.discover(ctx, SERVER, n=0)
    one.discover(ctx, SERVER, n=0)  # it is being read
    assert len(ctx.requests) == 1
    payload = registry.read_view(asking(1), ctx.requests[0][3]) or b""
    one.on_answer(ctx, "read", payload)
    expected = sorted([peer(2), peer(3)])
    assert one.view(ctx, "client") == expected
    assert one.view(ctx, "edge") == []
    assert ctx.learned == {peer(2): (address(2, 1),), peer(3): (address(3, 1),)}
    risen = client()
    risen.restore(one.serialize())
    assert risen.view(Context(now_ns=89 * S, self_peer=peer(1)), None) == expected
    assert risen.view(Context(now_ns=90 * S, self_peer=peer(1)), None) == []
    # The answer to a question from before the restart is a page without those before it.
    announce(registry, 4)
    late = registry.read_view(asking(1), ctx.requests[0][3]) or b""
    risen.on_answer(ctx, "read", late)
    assert risen.view(ctx, None) == expected


def test_a_view_of_many_pages_is_read_to_its_end(monkeypatch) -> None:
    for module in (messages, server_module):
        monkeypatch.setattr(module, "MAX_PAGE_ROWS", 3)
    one, registry = client(), server()
    for i in range(10):
        announce(registry, i)
    ctx = Context(self_peer=peer(99), source_peer=SERVER)
    one.discover(ctx, SERVER, n=0)
    answered = 0
    while answered < len(ctx.requests):
        assert one.view(ctx, None) == []  # nothing is shown by halves
        answer = registry.read_view(asking(99), ctx.requests[answered][3]) or b""
        answered += 1
        one.on_answer(ctx, "read", answer)
    assert answered == 4
    assert len(one.view(ctx, None)) == 10
    # Without an answer, what was read stands, and the next read is a whole one.
    one.discover(ctx, SERVER, n=0)
    one.on_no_answer(ctx, "read", SERVER)
    assert len(one.view(ctx, None)) == 10
    one.discover(ctx, SERVER, n=2)
    assert [r[2] for r in ctx.requests[-2:]] == ["CurrentView", "Sample"]
    drawn = registry.read_sample(asking(99), ctx.requests[-1][3]) or b""
    one.on_answer(ctx, "sample", drawn)
    assert len(one.view(ctx, None)) == 2


# --- in a network --------------------------------------------------------------------------


def meeting(seed: int, clients: int = 30) -> Network:
    """A registry and its clients, each connected with it alone."""
    network = Network(seed, mesh=False)
    compiled = program.compile_program()
    network.add("registry", compiled, ["registry"])
    for i in range(clients):
        network.connect("registry", program.add_peer(network, compiled, i))
    return network


def test_thirty_clients_a_crash_and_a_restart() -> None:
    network = meeting(7)
    registry = network["registry"]
    network.run(until=10 * S)
    assert len(registry.component("registry")) == 30
    # One announcement of each so far: the other nine calls were silent.
    assert registry.node.counters()["envelopes.in"] < 30 * (1 + 12)
    network.run(until=20 * S)
    network.crash("peer-3")
    network.run(until=110 * S)
    gone = network["peer-3"].peer_id
    held = registry.component("registry")
    assert len(held) == 29
    others = [network[f"peer-{i}"] for i in range(30) if i != 3]
    network.run(until=112 * S)
    for node in others:
        found = node.component("directory").view(
            Context(now_ns=node.node._rt.clock.now_ns, self_peer=node.peer_id), "peer"
        )
        assert len(found) == 28
        assert gone not in found
        # Where the others are is known without ever having been connected with them.
        other = others[0] if node is not others[0] else others[1]
        assert node.node.peer_standing(other.peer_id).addresses == (other.address,)
    registry.checkpoint()
    network.crash(registry)
    network.run(until=125 * S)
    network.restart(registry)
    back = registry.component("registry")
    assert back is not held
    assert len(back) == 29
    network.run(until=300 * S)
    assert len(registry.component("registry")) == 29
    views = [n.component("others").candidates(_at(n, "peer")) for n in others]
    assert {len(view) for view in views} == {28}
    # Only while there was no registry to be chosen.
    failed = {f.kind for node in [registry, *others] for f in node.failures()}
    assert failed == {"NotEnoughPeers"}


def test_the_example_says_what_happened(capsys) -> None:
    program.main()
    known = [int(line.split()[3]) for line in capsys.readouterr().out.splitlines()]
    assert known == [6, 6, 6, 5, 5]


def _at(node, peer_class: str) -> Context:
    return Context(now_ns=node.node._rt.clock.now_ns, self_peer=node.peer_id, peer_class=peer_class)


def test_the_same_seed_draws_the_same() -> None:
    one, two = meeting(3, clients=6), meeting(3, clients=6)
    for network in (one, two):
        network.run(until=30 * S)
    resolved = [
        [step.peer for node in network.nodes for step in node.seen(steps.PeerResolveFailed)]
        for network in (one, two)
    ]
    assert resolved[0] == resolved[1]
    assert one.trace.digest == two.trace.digest
    draws = [
        n.component("registry").sample(_at(n, "peer"), n=3)
        for n in (one["registry"], two["registry"])
    ]
    assert draws[0] == draws[1]


def test_an_artifact_is_installed_where_nobody_imported_the_protocol(tmp_path) -> None:
    path = tmp_path / "meeting.onnx"
    path.write_bytes(program.compile_program().SerializeToString())
    code = (
        "import sys, onnx; from bbnode.engine import install; from bbnode.ir.peer import PeerId\n"
        "install(onnx.load(sys.argv[1]), ['peer'], peer_id=PeerId.from_seed(1))"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=PATIENCE_S)
