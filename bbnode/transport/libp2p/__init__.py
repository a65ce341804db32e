"""The transports that speak libp2p: `network.transport = "libp2p"`, and `"lean"`.

Both are one class; the first also runs py-libp2p's host on the same connections, for its services.
"""

from __future__ import annotations

from bbnode.ir.errors import DeploymentError
from bbnode.transport.base import Transport, TransportSetup


def from_setup(setup: TransportSetup) -> Transport:
    """Return the libp2p transport of a node; raises Libp2pMissing, ListenError, DeploymentError."""
    return _made(setup, "libp2p", py_libp2p=True)


def lean_from_setup(setup: TransportSetup) -> Transport:
    """Return the same transport without py-libp2p; raises ListenError and DeploymentError."""
    return _made(setup, "lean", py_libp2p=False)


def _made(setup: TransportSetup, name: str, *, py_libp2p: bool) -> Transport:
    if setup.settings:
        raise DeploymentError(
            f"the transport {name} has no settings: remove {', '.join(setup.settings)} from "
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
        py_libp2p=py_libp2p,
    )
    transport.on_addresses = setup.on_addresses
    return transport
