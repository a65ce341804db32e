"""Signatures and random bytes of components: as the node, in offloaded methods, off the record."""

from __future__ import annotations

from typing import Any

import pytest

from bbnode.access.errors import IdentityError
from bbnode.access.keys import SigningKey, verifies
from bbnode.access.secrets import NodeSecrets, signed_as
from bbnode.compiler import Compiler
from bbnode.components import ProtocolComponent, offload, register_component, types, values
from bbnode.dsl import Graph, Module, ProtocolSlot, protocol_op
from bbnode.sim import Network

protocol_op("tests_secrets", "Sealed", {"go": types.TRIGGER}, {"sealed": types.BYTES})
protocol_op("tests_secrets", "InTheOpen", {"go": types.TRIGGER}, {"sealed": types.BYTES})


@register_component
class Notary(ProtocolComponent):
    TYPE_NAME = "tests.Notary"

    @offload
    def sealed(self, ctx: Any, go: Any) -> bytes:
        drawn = ctx.random_bytes(16)
        return drawn + ctx.sign(drawn)

    def in_the_open(self, ctx: Any, go: Any) -> bytes:
        return ctx.random_bytes(16)


class Sealing(Module):
    home = "notary"

    def __init__(self, op: str) -> None:
        self.op = op

    def body(self, g: Graph) -> None:
        slot = ProtocolSlot("notary", "tests_secrets")
        g.output("sealed", getattr(slot, self.op)(g, g.input("go", types.TRIGGER)))


def sealed(network: Network, op: str = "sealed") -> Any:
    compiled = Compiler().bind_protocol("notary", Notary).compile(Sealing(op).build())
    node = network.add("notary", compiled, ["notary"])
    node.invoke("notary", {"go": values.TRIGGER})
    network.run_until_idle()
    return node


def test_a_component_signs_as_its_node_and_type() -> None:
    node = sealed(Network(1, keys=True))
    (found,) = node.values("sealed")
    body, signature = found[:16], found[16:]
    assert signed_as("tests.Notary", node.peer_id, body, signature)
    assert not signed_as("tests.Other", node.peer_id, body, signature)
    assert not signed_as("tests.Notary", node.peer_id, body + b"!", signature)
    assert not verifies(node.peer_id, b"", body, signature)


def test_random_bytes_follow_from_the_seed_and_the_life() -> None:
    first, again, other = (sealed(Network(seed, keys=True)) for seed in (1, 1, 2))
    assert first.values("sealed") == again.values("sealed") != other.values("sealed")
    network = Network(1, keys=True)
    node = sealed(network)
    network.crash(node)
    network.restart(node)
    node.invoke("notary", {"go": values.TRIGGER})
    network.run_until_idle()
    assert len(set(node.values("sealed"))) == 2


def test_secrets_are_for_offloaded_methods_alone() -> None:
    (failure,) = sealed(Network(1, keys=True), "in_the_open").failures()
    assert "mark it @offload" in str(failure)


def test_without_a_key_there_is_no_signature() -> None:
    (failure,) = sealed(Network(1)).failures()
    assert "Network(keys=True)" in str(failure)
    with pytest.raises(IdentityError, match="no Ed25519 key"):
        NodeSecrets(None).sign("a.Type", b"")


def test_a_node_draws_from_the_operating_system() -> None:
    key = SigningKey.generate()
    secrets = NodeSecrets(key)
    assert secrets.random_bytes(32) != secrets.random_bytes(32)
    assert signed_as("a.Type", key.peer_id, b"x", secrets.sign("a.Type", b"x"))
    assert key.seed.hex() not in repr(secrets)
    assert repr(key.seed) not in repr(secrets)
