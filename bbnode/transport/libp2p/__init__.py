"""The transport that speaks libp2p, `network.transport = "libp2p"`."""

from __future__ import annotations

from bbnode.ir.errors import DeploymentError
from bbnode.transport.base import Transport, TransportSetup


def from_setup(setup: TransportSetup) -> Transport:
    """Return the libp2p transport of a node; raises ListenError and DeploymentError."""
    if setup.settings:
        raise DeploymentError(
            f"the libp2p transport has no settings: remove {', '.join(setup.settings)} from "
            "[network.settings]"
        )
    from bbnode.transport.libp2p.transport import Libp2pTransport

    transport = Libp2pTransport(
        setup.identity,
        listen=setup.listen,
        announce=setup.announce,
        hello=setup.hello,
        limits=setup.limits,
        authorizer=setup.authorizer,
        relay=setup.relay,
    )
    transport.on_addresses = setup.on_addresses
    return transport
