"""Round trips: the estimator by RFC 6298, what travels, and what it is used for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bbnode.engine.peers import round_trips
from bbnode.engine.peers.round_trips import MAX_ESTIMATE_NS, MIN_ESTIMATE_NS, RoundTrips
from bbnode.ir.caps import MAX_EDGES, MAX_REPORTED
from bbnode.ir.envelope import EdgeRttReport, decode_envelope
from bbnode.ir.values import PeerIdVec
from tests.engine.builder import Partition, model
from tests.engine.support import MS, Pump, S, bring_up, peer


def test_the_first_sample_and_the_next_are_those_of_the_rfc() -> None:
    table = RoundTrips()
    table.sample(7, 800)
    (edge,) = table.all()
    assert (edge.srtt_ns, edge.rttvar_ns, edge.samples) == (800, 400, 1)
    table.sample(7, 1600)
    (edge,) = table.all()
    # rttvar = 3/4 * 400 + 1/4 * |800 - 1600|; srtt = 7/8 * 800 + 1/8 * 1600
    assert (edge.srtt_ns, edge.rttvar_ns, edge.samples) == (900, 500, 2)


def test_an_estimate_is_srtt_and_four_deviations_within_bounds() -> None:
    table = RoundTrips()
    table.sample(1, 10 * S)
    assert table.estimate_ns(1) == 10 * S + 4 * 5 * S
    table.sample(2, 1)
    assert table.estimate_ns(2) == MIN_ESTIMATE_NS
    table.sample(3, 10**15)
    assert table.estimate_ns(3) == MAX_ESTIMATE_NS
    assert table.estimate_ns(4) == 0


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=60))
def test_an_estimate_stays_within_what_was_seen(samples) -> None:
    table = RoundTrips()
    for took in samples:
        table.sample(1, took)
    (edge,) = table.all()
    assert min(samples) - len(samples) <= edge.srtt_ns <= max(samples) + len(samples)
    assert edge.rttvar_ns + len(samples) >= 0
    assert MIN_ESTIMATE_NS <= edge.estimate_ns <= MAX_ESTIMATE_NS


def test_what_was_measured_outweighs_what_is_reported() -> None:
    table = RoundTrips()
    table.learn([EdgeRttReport(site=1, srtt_ns=5 * S, rttvar_ns=0)])
    assert table.estimate_ns(1) == 5 * S
    table.sample(1, 2 * S)
    table.learn([EdgeRttReport(site=1, srtt_ns=9 * S, rttvar_ns=0)])
    assert table.estimate_ns(1) == 2 * S + 4 * S
    table.learn([EdgeRttReport(site=0, srtt_ns=1, rttvar_ns=1)])
    table.learn([EdgeRttReport(site=2, srtt_ns=1 << 63, rttvar_ns=1 << 63)])
    assert table.estimate_ns(2) == MAX_ESTIMATE_NS
    assert len(table) == 2


def test_the_table_is_bounded_and_strangers_push_out_no_measurement() -> None:
    table = RoundTrips()
    for site in range(1, MAX_EDGES):
        table.sample(site, S)
    table.learn([EdgeRttReport(site=10**6 + n, srtt_ns=1, rttvar_ns=1) for n in range(50)])
    assert len(table) == MAX_EDGES
    assert sum(not edge.samples for edge in table.all()) == 1
    table.sample(MAX_EDGES, S)
    table.learn([EdgeRttReport(site=10**7, srtt_ns=1, rttvar_ns=1)])
    assert len(table) == MAX_EDGES
    assert all(edge.samples for edge in table.all())
    table.sample(10**8, S)
    assert len(table) == MAX_EDGES
    assert table.estimate_ns(1) == 0  # measured longest ago
    assert len(table.reports()) == MAX_REPORTED
    assert table.reports()[-1].site == 10**8


def asker_and_answerer(middle_asks: int | None = None, *, one_way_ns: int = 0):
    """`server` asks `client`; with `middle_asks` the client asks `far` before it answers."""
    asker = Partition("server", inputs=["x", "peers"])
    client, far = Partition("client"), Partition("far")
    asker.request("x", "peers", client.site("q"), "answers")
    asker.output("got", "answers")
    client.recv("q", request="rid", sender="who")
    if middle_asks is None:
        client.respond("q", "who", "rid", asker.site("answers"))
    else:
        client.constant("far_peers", PeerIdVec([peer(middle_asks)]))
        client.request("q", "far_peers", far.site("fq"), "far_answers")
        client.respond("q", "who", "rid", asker.site("answers"), after=["far_answers"])
    far.recv("fq", request="frid", sender="fwho")
    far.respond("fq", "fwho", "frid", client.site("far_answers"))
    return asker, client, far


def slowly(pump: Pump, took_ns: int):
    """Let time pass whenever an envelope travels."""

    def keep(_source, _step) -> int:
        pump.now_ns += took_ns
        return 1

    pump.keep = keep


def test_answers_are_measured_and_reports_of_edges_further_down_ride_back() -> None:
    parts = asker_and_answerer(middle_asks=2)
    made = model(*parts)
    server, client, far = (bring_up(made, p.name, me=n) for n, p in enumerate(parts))
    pump = Pump(server, client, far)
    pump.settle()
    slowly(pump, 100 * MS)
    value = np.ones(1, np.float32)
    server.invoke("server", {"x": value, "peers": PeerIdVec([peer(1)])})
    pump.settle()
    (own,) = client.round_trips()
    assert (own.site, own.samples) == (parts[2].site("fq"), 1)
    assert own.srtt_ns == 200 * MS
    measured = {edge.site: edge for edge in server.round_trips()}
    assert measured[parts[1].site("q")].srtt_ns == 400 * MS
    learned = measured[parts[2].site("fq")]
    assert (learned.samples, learned.srtt_ns) == (0, 200 * MS)
    assert far.round_trips() == []


def test_only_responses_carry_reports() -> None:
    parts = asker_and_answerer(middle_asks=2)
    made = model(*parts)
    nodes = [bring_up(made, p.name, me=n) for n, p in enumerate(parts)]
    pump = Pump(*nodes)
    seen = []

    def keep(source, step) -> int:
        envelope = decode_envelope(b"".join(step.parts))
        seen.append((envelope.correlation.kind.name, len(envelope.edge_rtt_reports)))
        return 1

    pump.keep = keep
    for _ in range(2):
        nodes[0].invoke("server", {"x": np.ones(1, np.float32), "peers": PeerIdVec([peer(1)])})
        pump.settle()
    assert seen == [("REQUEST", 0), ("REQUEST", 0), ("RESPONSE", 0), ("RESPONSE", 1)] * 2


def sending(**more):
    p, q = Partition("a", inputs=["x", "peers"]), Partition("b")
    p.send("x", "peers", q.site("v"), **more)
    q.recv("v")
    node = bring_up(model(p, q), "a")
    node.peer_connected(peer(1))
    return node, q.site("v")


def remaining(node, at_ns=0) -> int:
    node.invoke("a", {"x": np.ones(1, np.float32), "peers": PeerIdVec([peer(1)])})
    (step,) = [s for s in node.poll(at_ns) if hasattr(s, "parts")]
    return decode_envelope(b"".join(step.parts)).remaining_deadline_ns


def test_a_send_without_a_deadline_takes_the_estimate_and_a_static_one_stands() -> None:
    node, site = sending(stamp_ns=0)
    assert remaining(node) == 0
    node._rt.round_trips.sample(site, 2 * S)
    assert remaining(node) == 2 * S + 4 * S
    node, site = sending(stamp_ns=7 * S)
    node._rt.round_trips.sample(site, 2 * S)
    assert remaining(node) == 7 * S


def test_what_came_with_less_time_goes_on_with_what_is_left_of_it() -> None:
    from tests.engine.envelopes import envelope

    p, q = Partition("relay"), Partition("b")
    p.recv("in", sender="who")
    p.sys("Sleep", ["in"], "later", duration_ns=S)
    p.send("in", "who", q.site("v"), after=["later"], stamp_ns=90 * S)
    q.recv("v")
    node = bring_up(model(p, q), "relay")
    node.peer_connected(peer(1), ["client"])
    node.deliver_inbound(
        peer(1), envelope(peer(1), p.site("in"), np.ones(1, np.float32), remaining_ns=5 * S)
    )
    node.poll(0)
    (step,) = [s for s in node.poll(S) if hasattr(s, "parts")]
    assert decode_envelope(b"".join(step.parts)).remaining_deadline_ns == 4 * S


def test_the_constants_are_those_of_the_rfc() -> None:
    assert (round_trips.ALPHA_DIVISOR, round_trips.BETA_DIVISOR, round_trips.K) == (8, 4, 4)
    assert MIN_ESTIMATE_NS == S
