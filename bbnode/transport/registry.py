"""The transports of installed packages: entry points of the group `bbnode.transports`.

Rule: an entry point names a factory, which is called with a TransportSetup and returns a Transport
that does not run yet. The transports of bbnode itself are found in the same way.
"""

from __future__ import annotations

from typing import Final

from bbnode.ir import plugins
from bbnode.transport.base import Transport, TransportSetup
from bbnode.transport.errors import UnknownTransport

GROUP: Final = "bbnode.transports"


def transport_names() -> list[str]:
    """Return the names of all installed transports, sorted."""
    return sorted(plugins.names(GROUP))


def make_transport(name: str, setup: TransportSetup) -> Transport:
    """Return a new transport, not yet running.

    Raises:
        UnknownTransport: no installed package brings one of this name.
        BrokenPlugin: it can't be imported, or what it brings makes no transport.
        BbnodeError: whatever the factory raises, such as ListenError.
    """
    if name not in plugins.names(GROUP):
        raise UnknownTransport(
            f"network.transport is {name!r}, which no installed package brings; there are: "
            f"{', '.join(transport_names()) or 'none'}"
        )
    factory = plugins.load(GROUP, name)
    made = factory(setup) if callable(factory) else factory
    if not isinstance(made, Transport):
        raise plugins.BrokenPlugin(
            GROUP,
            name,
            plugins.names(GROUP)[name],
            f"it has to return a Transport, and returns {type(made).__name__}",
        )
    return made
