"""Which steps and events are offences, which are not, and what the daemon does about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from multiaddr import Multiaddr

from bbnode import transport as seam
from bbnode.access.conduct import Offence
from bbnode.daemon.access.control import AccessControl
from bbnode.daemon.config import AccessSection
from bbnode.daemon.network.conduct import OFFENCE_OF_FAULT, OFFENCE_OF_KIND, ConductWatch
from bbnode.engine import steps
from bbnode.ir.peer import PeerId
from bbnode.transport.routing import RoutingFault

OWN, PEER, FRIEND = (PeerId.from_seed(name) for name in ("own", "peer", "friend"))
ADDRESS = Multiaddr("/ip4/127.0.0.1/tcp/1")


class Watched:
    """A watch on an access control of its own, on a clock that stands."""

    def __init__(self, folder: Path) -> None:
        self.now_ns = 0
        self.events: list[Any] = []
        self.changes = 0
        self.access = AccessControl(folder, OWN, AccessSection(), monotonic_ns=lambda: self.now_ns)
        self.access.on_change = self._changed
        friend = f"/ip4/127.0.0.1/tcp/1/p2p/{FRIEND}"
        self.watch = ConductWatch(self.access, self.events.append, [friend])

    def _changed(self) -> None:
        self.changes += 1

    def says(self, peer: PeerId = PEER) -> str:
        (detail,) = (d.detail for d in self.access.explain(peer) if d.rule == "conduct")
        return detail


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def failed(kind: str) -> steps.WireReceiveFailed:
    return steps.WireReceiveFailed(
        peer=PEER, fill=0, type_hash=0, payload_size=1, kind=kind, detail=""
    )


@pytest.mark.parametrize("kind", OFFENCE_OF_KIND)
def test_what_the_engine_refuses_for_the_peers_fault(watched: Watched, kind: str) -> None:
    watched.watch.observe(failed(kind))
    assert OFFENCE_OF_KIND[kind].value in watched.says()


@pytest.mark.parametrize("fault", RoutingFault)
def test_what_a_peer_says_wrongly_of_others(watched: Watched, fault: RoutingFault) -> None:
    watched.watch.misrouted(PEER, fault)
    assert OFFENCE_OF_FAULT[fault].value in watched.says()


def test_a_forger_of_records_is_cut_off_and_a_misleading_peer_is_not(watched: Watched) -> None:
    for _ in range(100):
        watched.watch.misrouted(FRIEND, RoutingFault.MISLED)
        watched.watch.misrouted(PEER, RoutingFault.FORGED)
    assert {each["peer"] for each in watched.events} == {str(PEER)}
    assert "throttled" in watched.says(FRIEND)


@pytest.mark.parametrize(
    "step",
    [
        failed("BudgetExceeded"),
        failed("AllocationFailed"),
        failed("BackendMaterializeFailed"),
        steps.Telemetry(name="response.late", attributes={"peer": PEER}),
        steps.PeerDown(peer=PEER, reason=""),
    ],
)
def test_what_is_no_fault_of_a_peer(watched: Watched, step: steps.Step) -> None:
    watched.watch.observe(step)
    assert watched.says() == "it has done nothing wrong"


def test_events_of_the_transport(watched: Watched) -> None:
    watch = watched.watch
    watch.heard(seam.HelloRefused(peer=PEER, address=ADDRESS, reason="not allowed: blocklisted"))
    watch.heard(seam.ConnectionClosed(peer=PEER, reason="the peer was silent"))
    assert watched.says() == "it has done nothing wrong"
    watch.heard(seam.HelloRefused(peer=PEER, address=ADDRESS, reason="no hello within 10 s"))
    watch.observe(steps.Telemetry(name="receive.forged", attributes={"peer": PEER}))
    for kind in (seam.Violation.FRAME, seam.Violation.SLOW):
        watch.heard(seam.ProtocolViolation(peer=PEER, reason="", kind=kind))
    said = watched.says()
    for offence in (Offence.HELLO, Offence.FORGED, Offence.PROTOCOL, Offence.SLOW):
        assert f"{offence.value} 1" in said


def test_a_cut_closes_connections_is_told_once_and_can_be_lifted(watched: Watched) -> None:
    for _ in range(100):
        watched.watch.observe(failed("DecodeFailed"))
    assert watched.changes == 1
    (event,) = watched.events
    assert (event["type"], event["peer"]) == ("peer_cut_off", str(PEER))
    ask = watched.access.authorizer
    assert ask.connection(PEER, seam.Direction.INBOUND).reason == "misconduct"
    assert ask.connection(FRIEND, seam.Direction.INBOUND).allowed
    watched.access.allow(PEER)
    assert ask.connection(PEER, seam.Direction.INBOUND).allowed
    assert watched.says() == "it has done nothing wrong"


def test_who_answers_or_is_configured_is_known(watched: Watched) -> None:
    ask = watched.access.authorizer
    assert (ask.is_known(FRIEND), ask.is_known(PEER)) == (True, False)
    watched.watch.observe(
        steps.Telemetry(name="request.response", attributes={"peer": PEER, "answered": 1})
    )
    assert ask.is_known(PEER)
