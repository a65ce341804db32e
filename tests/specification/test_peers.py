"""Peers and addresses: bbnode's side of each difference."""

from __future__ import annotations

import numpy as np
from multiaddr import Multiaddr

from bbnode.dsl import Graph, types
from bbnode.engine import Node, steps
from bbnode.ir import keys
from bbnode.ir.values import TRIGGER
from tests.engine.builder import Partition, model
from tests.engine.envelopes import envelope
from tests.engine.support import address, bring_up, of, peer
from tests.specification import programs
from tests.specification.programs import WORKERS, compiled, meta
from tests.specification.rows import Rows, sections

ROWS = Rows("Peers and addresses")


def listening() -> tuple[Node, int]:
    """Return a node that takes triggers, and where."""
    p = Partition("worker")
    p.output("y", p.recv("go", node=types.TRIGGER))
    return bring_up(model(p), "worker"), p.site("go")


@ROWS.probe("claimed addresses are merged")
def test_a_peer_speaks_of_its_own_addresses_alone() -> None:
    node, site = listening()
    node.add_addresses(peer(2), [address(2)])
    node.peer_connected(peer(1), ["client"])
    claimed = (bytes(address(1).to_bytes()), b"rubbish")
    node.deliver_inbound(peer(1), envelope(peer(1), site, TRIGGER, claimed=claimed))
    node.poll(0)
    forged = envelope(peer(2), site, TRIGGER, claimed=(bytes(address(9).to_bytes()),))
    node.deliver_inbound(peer(1), forged)
    node.poll(0)
    book: dict[object, tuple[Multiaddr, ...]] = dict(node.address_book())
    assert address(1) in book[peer(1)]
    assert book[peer(2)] == (address(2),)
    assert node.counters()["addresses.refused"] == 1


def samples(g: Graph) -> None:
    g.output("peers", WORKERS.sample(g, n=3, after=g.input("go", types.TRIGGER)))


@ROWS.probe("`Sample` gives any")
def test_two_runs_draw_the_same_peers_in_order() -> None:
    def drawn() -> list[list[object]]:
        node = bring_up(compiled(samples), "asker", config={"workers": {"seed": 4}})
        for n in range(10, 1, -1):
            node.peer_connected(peer(n), ["worker"])
        made = []
        for _ in range(4):
            node.invoke("asker", {"go": TRIGGER})
            made += [list(s.value) for s in of(steps.AppEvent, node.poll(0))]
        return made

    draws = drawn()
    assert draws == drawn()
    assert all(draw == sorted(draw) for draw in draws)
    assert len({tuple(draw) for draw in draws}) > 1


@ROWS.probe("the class of an authenticated sender")
def test_who_plays_another_class_is_refused_at_the_site() -> None:
    made = compiled(programs.echo)
    (recv,) = (n for n in programs.main_of(made, "worker").node if n.op_type == keys.OP_RECV)
    site = int(meta(recv, keys.SITE_ID_KEY))
    node = bring_up(made, "worker")
    node.peer_connected(peer(1), ["asker"])
    node.peer_connected(peer(2), ["worker"])
    for sender, failures in ((1, 0), (2, 1)):
        value = np.ones(1, np.float32)
        node.deliver_inbound(peer(sender), envelope(peer(sender), site, value))
        assert len(of(steps.WireReceiveFailed, node.poll(0))) == failures


def test_each_row_has_one_probe() -> None:
    ROWS.check()


def test_each_table_has_its_probes() -> None:
    assert set(sections()) == {
        "Where the texts contradict each other",
        "IR and language",
        "Compiler",
        "Engine",
        "Peers and addresses",
    }
