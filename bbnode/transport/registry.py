"""The transports of installed packages: entry points of the group `bbnode.transports`.

Rule: an entry point names a factory, which is called with a TransportSetup and returns a Transport
that does not run yet. The transports of bbnode itself are registered in the same way.
"""

from __future__ import annotations

import difflib
from typing import Final

from bbnode.ir import plugins
from bbnode.ir.errors import BbnodeError
from bbnode.transport.base import Transport, TransportSetup
from bbnode.transport.errors import UnknownTransport

GROUP: Final = "bbnode.transports"
# Transports that listen on IP and TCP addresses, and dial them.
OVER_TCP: Final = ("lean", "libp2p")
_SHIPPED: Final = (*OVER_TCP, "memory")


def transport_names() -> list[str]:
    """Return the names of all installed transports, sorted."""
    return sorted(plugins.names(GROUP))


def make_transport(name: str, setup: TransportSetup) -> Transport:
    """Return a new transport, not yet running.

    Raises:
        UnknownTransport: no installed package has a transport of this name.
        BrokenPlugin: it can't be imported, or its factory returns no transport.
        BbnodeError: raised by the factory, such as ListenError.
    """
    known = transport_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if name in _SHIPPED:
            hint = "; bbnode's installed metadata is older than its code: install it again"
        raise UnknownTransport(
            f"no installed package brings the transport {name!r}; there are: "
            f"{', '.join(known) or 'none'}{hint}"
        )
    factory = plugins.load(GROUP, name)
    try:
        transport = factory(setup) if callable(factory) else factory
    except BbnodeError:
        raise
    except Exception as error:
        # Third-party code may raise anything; the error names the package.
        raise _broken(name, f"making it raised {type(error).__name__}: {error}") from error
    if not isinstance(transport, Transport):
        kind = type(transport).__name__
        raise _broken(name, f"the entry point has to name what makes a Transport, and gives {kind}")
    return transport


def _broken(name: str, problem: str) -> plugins.BrokenPlugin:
    return plugins.BrokenPlugin(GROUP, name, plugins.names(GROUP)[name], problem)
