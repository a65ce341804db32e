"""py-libp2p's own host on our connections: `BasicHost` and `Swarm`, with our transport as plug-in.

Rule: only this folder imports libp2p, and it is imported where such a transport is made. Our
host has the sockets, the handshake, the muxer, admission and our own protocols, whether this is
there or not; py-libp2p has a connection once its peer is admitted, and the streams of its own
protocols. Nothing that fails there ends more than a stream.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Final

# What `import libp2p` loads for certificates of the web alone, which no transport here uses: a
# tenth of a second, and 10 MB.
_UNUSED: Final = ("httpx", "requests")


class _LaterModule(ModuleType):
    """A module that is loaded when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


@contextmanager
def _put_off(*names: str) -> Iterator[None]:
    """Put off the loading of modules that are imported meanwhile, until one of them is used."""
    later = {name: _LaterModule(name) for name in names if name not in sys.modules}
    sys.modules.update(later)
    try:
        yield
    finally:
        for name, module in later.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


with _put_off(*_UNUSED):
    import libp2p  # noqa: F401
