from __future__ import annotations

from pathlib import Path

import pytest

from bbnode.daemon.config.sources import ResolvedConfig, resolve
from bbnode.daemon.lifecycle.assembly import (
    _transport_limits,
    find_artifact,
    is_exposed,
    slot_settings,
)
from bbnode.ir.peer import PeerId
from bbnode.transport.limits import TransportLimits

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("envelope_bytes", "queue_bytes"),
    [(256 * KIB, 64 * MIB), (64 * MIB, 256 * MIB), (256 * MIB, GIB), (2 * GIB, GIB)],
)
def test_a_burst_of_the_largest_envelopes_fits(envelope_bytes: int, queue_bytes: int) -> None:
    limits = _transport_limits(envelope_bytes, guests=False)
    assert (limits.max_message_bytes, limits.queue_bytes) == (envelope_bytes, queue_bytes)


def test_without_a_limit_the_transports_own_hold() -> None:
    assert _transport_limits(None, guests=False) == TransportLimits()
    assert _transport_limits(None, guests=True) == TransportLimits(foreign_hosts=True)


def resolved(tmp_path: Path, **flags: object) -> ResolvedConfig:
    given = {
        "node.state_dir": str(tmp_path / "state"),
        "artifact.module": "bbnode.examples.federated_digits:FederatedRound",
        "artifact.targets": ["server"],
        **{key.replace("__", "."): value for key, value in flags.items()},
    }
    return resolve(None, environ={}, flags=given)


OUTSIDE = ["/ip4/127.0.0.1/tcp/0", "/ip4/0.0.0.0/tcp/4001"]


@pytest.mark.parametrize(
    ("listen", "announce", "exposed"),
    [
        (["/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"], [], False),
        ([], [], False),
        (OUTSIDE, [], True),
        (["/ip6/::/tcp/0"], [], True),
        (["/ip4/192.168.1.2/tcp/1"], [], True),
        (["/ip4/127.0.0.1/tcp/0"], ["/dns4/peer.example/tcp/1"], True),
    ],
)
def test_a_node_of_an_open_network_is_exposed_where_others_reach_it(
    tmp_path: Path, listen: list[str], announce: list[str], exposed: bool
) -> None:
    config = resolved(tmp_path, network__listen=listen, network__announce=announce).config
    assert is_exposed(config, None) is exposed
    assert not is_exposed(config, PeerId.from_seed(1))  # a private network


def test_an_exposed_node_runs_graphs_in_a_process_unless_it_says_otherwise(tmp_path: Path) -> None:
    node = resolved(tmp_path)
    artifact = find_artifact(node)
    assert "compute" not in slot_settings(node, artifact)
    assert slot_settings(node, artifact, exposed=True)["compute"] == {"isolation": "process"}
    said = resolved(tmp_path, slots__compute__isolation="none")
    assert slot_settings(said, artifact, exposed=True)["compute"] == {"isolation": "none"}
