"""Limits of the engine, and of who may talk: each with what reaches it."""

from __future__ import annotations

from itertools import count, islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from bbnode.access.conduct import Conduct
from bbnode.access.errors import GrantError, Refusal, TicketRefused
from bbnode.access.ticket import Invitation, Ledger, Redeemed
from bbnode.components.errors import ComponentError
from bbnode.daemon.access.files import OwnedNetwork
from bbnode.engine import steps
from bbnode.engine.cells import ComponentCell
from bbnode.engine.messaging.pending import PendingCalls
from bbnode.engine.ops.context import CallContext, _check_key
from bbnode.engine.ops.graphs import GraphRunner, GraphSpec
from bbnode.engine.peers.backoff_table import BackoffTable, delay_for
from bbnode.engine.peers.governor import PeerGovernor
from bbnode.engine.scheduler import Scheduler
from bbnode.engine.wire import outbound
from bbnode.engine.wire.inbound import InboundDedup
from bbnode.engine.wire.refusals import PerSecond
from bbnode.ir import types
from bbnode.ir.caps import CLOCK_SKEW_S
from bbnode.ir.codec import cost_of
from bbnode.ir.envelope import CorrelationKind, SlotFill
from bbnode.ir.graph import OpNode, Subgraph
from bbnode.ir.peer import PeerId
from tests.access.strategies import DAY_S, NOW_S, member_of
from tests.access.test_ticket import ticket
from tests.daemon.limits_reach import Place, Reach, refusing
from tests.engine.builder import Partition, model
from tests.engine.envelopes import envelope
from tests.engine.support import bring_up, of, peer

# --- the engine ---------------------------------------------------------------------------------


def _answers(most: int) -> None:
    """Answers in one turn: of one more, the first requester is not told what comes of it."""
    p = Partition("server", inputs=["x"])
    p.output("y", "x")
    node = bring_up(model(p), "server")
    outbox = cast("Any", node)._rt.outbound
    node.peer_connected(peer(1), ["client"])
    kind, first = int(CorrelationKind.RESPONSE), outbox._tag + 1
    for wire_req_id in range(1, most + 2):
        fill = SlotFill(dest_suffix=b"x", payload=b"", type_hash=1)
        packed = outbound._pack(peer(1), 0, fill, 1, 10**9)
        outbox.packs[wire_req_id, peer(1).raw, kind] = [packed]
    outbox.flush()
    assert [outbox.take_answered(tag) for tag in (first, first + 1, first + most)] == [
        0,
        2,
        most + 1,
    ]


def _asked(most: int) -> None:
    ctx = CallContext.__new__(CallContext)
    ctx.asked = None
    for _ in range(most):
        ctx._ask(cast("Any", None))
    with pytest.raises(ComponentError, match=f"over {most} things"):
        ctx._ask(cast("Any", None))


def _key(count: int) -> None:
    _check_key("key", "k" * count)


def _ended(most: int) -> None:
    """Calls that were answered: of one more, the first is like one that was never made."""
    calls = PendingCalls(Scheduler())
    for number in range(most + 1):
        calls.open(number, until_ns=1, cell_at=0, tag="", peer=peer(1), suffix=b"", opened_ns=0)
        calls.answer(number, peer(1), b"")
    statuses = [cast("Any", calls.answer(n, peer(1), b"")).value for n in (0, 1, most)]
    assert statuses == ["unknown", "late", "late"]


def _facts(most: int) -> None:
    cell = ComponentCell.__new__(ComponentCell)
    cell.component = SimpleNamespace(facts=lambda: {f"f{n}": n for n in range(most + 1)})
    assert [*cell.facts()] == [f"f{n}" for n in range(most)]


def _counted(most: int) -> None:
    told = PerSecond(1)
    assert all(told.take(peer(n), 0) for n in range(most))
    assert not told.take(peer(most), 0)
    assert told.take(peer(most), 10**9)  # a second later


def _tracked(most: int) -> None:
    """Peers that failed: of one more, the first is as before."""
    table, governor = BackoffTable(), PeerGovernor(1)
    for number in range(most + 1):
        table.record_failure(peer(number), 0)
        governor.record_failure(peer(number))
    assert list(table.peers) == [peer(n) for n in range(1, most + 1)]
    assert len(cast("Any", governor)._records) == most


def _delay(most: int) -> None:
    assert delay_for(1_000) == most
    assert delay_for(1) < most


class _Prepares:
    """A backend that counts what it prepares."""

    def __init__(self) -> None:
        self.count = 0

    def prepare(self, _: Any) -> Any:
        self.count += 1
        return SimpleNamespace(run=lambda inputs: inputs)


def _spec(nodes: int, inputs: int) -> GraphSpec:
    names = [f"x{n}" for n in range(inputs)]
    graph = Subgraph(name="g", inputs=names, outputs=[f"y{n}" for n in range(nodes)])
    for name in graph.outputs:
        graph.append(OpNode("Identity", inputs=names[:1], outputs=[name]))
    return GraphSpec(
        slot="s", where="g", place=cast("Any", None), graph=graph, opsets={"": 21}, types={}
    )


def _variants(most: int) -> None:
    """Pairs of dtypes: of one more, the graph is prepared anew for the first."""
    backend = _Prepares()
    runner = GraphRunner(_spec(1, 2), cast("Any", backend))
    kinds = ("f4", "f8", "i4", "i8", "u1")
    pairs = [[np.zeros(1, a), np.zeros(1, b)] for a, b in islice(product(kinds, kinds), most + 1)]
    for pair in (*pairs[:most], pairs[0]):
        runner.run(pair)
    assert backend.count == most
    for pair in (pairs[most], pairs[0]):
        runner.run(pair)
    assert backend.count == most + 2


def _singles(most: int) -> None:
    """Ops of a graph that failed: of one more, the first is prepared anew."""
    backend = _Prepares()
    runner = GraphRunner(_spec(most + 1, 1), cast("Any", backend))
    first = runner._single(0)
    for number in range(most):
        runner._single(number)
    assert runner._single(0) is first
    runner._single(most)
    assert runner._single(0) is not first


def _poll(most: int) -> None:
    """Of many envelopes a poll takes those that it has time for, by what one is reckoned at."""
    p = Partition("server")
    site = p.site("update")
    p.recv("update", node=types.TENSOR_FLOAT)
    p.output("y", "update")
    node = cast("Any", bring_up(model(p), p.name))
    node.peer_connected(peer(1), ["client"])
    node.poll(0)

    ids = count(1)

    def took(envelopes: int) -> int:
        """Return how many of so many a poll takes."""
        for wire_req_id in islice(ids, envelopes):
            raw = envelope(peer(1), site, np.zeros(1, np.float32), wire_req_id=wire_req_id)
            node.deliver_inbound(peer(1), raw)
        return len(of(steps.AppEvent, node.poll(1)))

    assert took(1) == 1
    cost = most - node._rt.decoder.left_us
    assert cost > 0
    assert took(most // cost + 100) == -(-most // cost)


def _window(most: int) -> None:
    """Messages that were taken: of one more, the first would be taken again."""
    known = InboundDedup()
    for wire_req_id in range(most + 1):
        assert not known.record(peer(1), wire_req_id, 1)
    assert [known.has(peer(1), n, 1) for n in (0, 1, most)] == [False, True, True]


def _inline(most: int) -> None:
    """Peer ids are reckoned at a microsecond for 16 bytes: decoded in the poll, or by a thread."""
    for more in (0, 16):
        p = Partition("server")
        p.recv("peers", node=types.PEER_ID_VEC)
        p.output("y", "peers")
        node = cast("Any", bring_up(model(p), p.name))
        node.peer_connected(peer(1), ["client"])
        payload = bytes(16 * (most - 1) + more)
        assert cost_of(types.PEER_ID_VEC, payload, most) == most + bool(more)
        raw = envelope(
            peer(1), p.site("peers"), None, payload=payload, type_hash=types.PEER_ID_VEC.wire_hash
        )
        node.deliver_inbound(peer(1), raw)
        assert len(of(steps.RunTask, node.poll(1))) == bool(more)


# --- who may talk, and tickets ------------------------------------------------------------------


def _of_use(most: int) -> None:
    conduct = Conduct()
    peers = [peer(n) for n in range(most + 1)]
    for each in peers:
        conduct.make_known(each)
    assert list(conduct.known) == peers[1:]


def _redeemers(most: int) -> None:
    """Tickets that are as good as used up: one more user is refused, with what to do."""
    peers = tuple(PeerId.from_seed(n) for n in range(1024))
    rows = {
        bytes([n] * 16): Redeemed(expires_s=NOW_S + 3600, peers=peers) for n in range(most // 1024)
    }
    made = ticket(invitation=Invitation(uses=1024, classes=None, member_s=DAY_S))
    with pytest.raises(TicketRefused, match="try again when some have expired") as caught:
        Ledger(tickets=rows).with_use(made, 1024, PeerId.from_seed("one more"), NOW_S)
    assert caught.value.reason is Refusal.LEDGER_FULL
    last = {**rows, b"\0" * 16: Redeemed(expires_s=NOW_S + 3600, peers=peers[1:])}
    ledger = Ledger(tickets=last).with_use(made, 1024, PeerId.from_seed("one more"), NOW_S)
    assert sum(len(row.peers) for row in ledger.tickets.values()) == most
    assert CLOCK_SKEW_S


def _classes(count: int) -> None:
    ticket(
        invitation=Invitation(uses=1, classes=tuple(f"c{n}" for n in range(count)), member_s=DAY_S)
    )


def _granted(most: int, place: Place) -> None:
    """The file of what was granted is full: a new network is what is left."""
    owned = cast("Any", OwnedNetwork.__new__(OwnedNetwork))
    owned._members = Path(place.folder / "members")
    one = member_of()
    for held in (most - 1, most):
        place.patch.setattr(OwnedNetwork, "granted", lambda _, held=held: [one] * held)
        if held < most:
            owned.add_granted(one)
            assert owned._members.read_text().count("\n") == most
            continue
        with pytest.raises(GrantError, match=f"holds {most} statements; make a new network"):
            owned.add_granted(one)


REACHED: dict[str, Reach] = {
    "max_answers_remembered": _answers,
    "max_asked": _asked,
    "max_key_chars": refusing(ComponentError, _key, "text of up to"),
    "max_ended_remembered": _ended,
    "max_facts": _facts,
    "max_refused_peers": _counted,
    "max_tracked_peers": _tracked,
    "engine.peers.backoff_table.MAX_DELAY_NS": _delay,
    "engine.ops.graphs.MAX_VARIANTS": _variants,
    "engine.ops.graphs.MAX_SINGLES": _singles,
    "max_poll_decode_us": _poll,
    "dedup_window": _window,
    "max_inline_decode_us": _inline,
    "max_of_use": _of_use,
    "max_redeemers": _redeemers,
    "max_uses": refusing(
        GrantError,
        lambda n: ticket(invitation=Invitation(uses=n, classes=None, member_s=DAY_S)),
        "make several, or grant",
    ),
    "max_member_days": refusing(
        GrantError,
        lambda n: ticket(invitation=Invitation(uses=1, classes=None, member_s=n * DAY_S)),
        "make it shorter, and renew it",
    ),
    "max_target_bytes": refusing(GrantError, lambda n: ticket(target="t" * n), "shorter names"),
    "max_classes": refusing(GrantError, _classes, "leave them out for all"),
    "max_granted": _granted,
}
