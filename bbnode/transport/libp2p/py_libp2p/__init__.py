"""py-libp2p's own host on our connections: `BasicHost` and `Swarm`, with our transport as plug-in.

Rule: only this folder imports libp2p, and it is imported only for such a transport. Our host has
the sockets, the handshake, the muxer, admission and our own protocols, with or without it;
py-libp2p gets a connection once its peer is admitted, and the streams of its own protocols. A
failure there ends no more than a stream.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Final

# Modules that `import libp2p` loads for web certificates alone, which no transport here uses: they
# cost a tenth of a second, and 10 MB.
_UNUSED: Final = ("httpx", "requests")


class _LaterModule(ModuleType):
    """A module that is loaded at the first access to an attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


@contextmanager
def _put_off(*names: str) -> Iterator[None]:
    """Make the named modules, if imported in the block, load lazily."""
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
