"""Work-around for libp2p's imports: load its core without the parts that a daemon never uses.

`import libp2p` loads QUIC, WebSocket, ACME clients, mDNS, relays and a DHT, used or not: a third of
its start-up time and 19 MB of memory. Rule: while libp2p's core is imported, the modules in
`UNUSED` are replaced by stubs, from which any name can be imported and nothing can be made. The
stubs are removed afterwards: a later import of such a module, in libp2p or outside, gets the real
one. Only a process that is a daemon and nothing else calls this.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from bbnode.ir.errors import EnvironmentFault

# Roots of what libp2p 0.8.1's core imports and a host of TCP, Noise and Yamux never calls.
UNUSED = (
    "aioquic",
    "httpx",
    "requests",
    "trio_websocket",
    "wsproto",
    "libp2p.bitswap",
    "libp2p.discovery",
    "libp2p.relay",
)
# The core has to be imported under the stand-ins. Anything else comes later, if at all.
CORE = "libp2p"


class LeftOutOfLibp2p(EnvironmentFault):
    """libp2p's core called something in a module that is replaced by a stub."""


class _StandIn(type):
    """A class with any attribute, that can be subclassed and caught but not called."""

    def __call__(cls, *_args: object, **_kwargs: object) -> NoReturn:
        raise LeftOutOfLibp2p(
            f"{cls.__module__}.{cls.__name__} is left out when a daemon imports libp2p; take it "
            f"out of UNUSED in {__name__}"
        )

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls.__module__}.{cls.__name__}", name)


def _stand_in(module: str, name: str) -> _StandIn:
    # An exception, so that it may be used in an `except` clause.
    return _StandIn(name, (Exception,), {"__module__": module})


class _StandInModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _stand_in(self.__name__, name)
        setattr(self, name, made)
        return made


class _StandInFinder(MetaPathFinder, Loader):
    """Provides a stub for each module under UNUSED that is not loaded yet."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if any(name == root or name.startswith(f"{root}.") for root in UNUSED):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


@contextmanager
def _stand_ins() -> Iterator[None]:
    finder = _StandInFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n, m in sys.modules.items() if isinstance(m, _StandInModule)]:
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if isinstance(vars(sys.modules.get(parent, sys)).get(child), _StandInModule):
                delattr(sys.modules[parent], child)


def import_core() -> None:
    """Import libp2p's core without UNUSED; does nothing if libp2p is already imported."""
    if CORE not in sys.modules:
        with _stand_ins():
            importlib.import_module(CORE)
