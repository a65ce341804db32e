"""bbnode: a node daemon that runs one ONNX program across many peers.

The names below run nodes in this process (`open`, `aio.open`, `on_trio.open`) and ask running
daemons (`connect`, `aio.connect`); docs/python.md shows them. Authors of programs import
`bbnode.dsl`, `bbnode.compiler` and `bbnode.components`.

Rule of this file: importing `bbnode` is free. Each name is loaded when it is first asked for, so
that the command line starts quickly.
"""

from __future__ import annotations

import os

# As `typing` has it, whose import would take longer than all else before the command line runs
# (`bbnode.__main__`); type checkers know the name.
TYPE_CHECKING = False

# A node talks to nobody but its peers. From version 1.29 on, ONNX Runtime sends usage data to its
# maker and keeps a device id in the home directory, unless this variable is set before its import;
# this file runs before any module of bbnode can import it. A user may set it to "0" to send that
# data. An empty value counts as unset.
if not os.environ.get("ORT_DISABLE_TELEMETRY"):
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"

__version__ = "0.2.0"

if TYPE_CHECKING:
    from bbnode.api import aio as aio
    from bbnode.api import on_trio as on_trio
    from bbnode.api.aio import AioNode as AioNode
    from bbnode.api.aio import AioRemoteNode as AioRemoteNode
    from bbnode.api.aio import AioStream as AioStream
    from bbnode.api.blocking import BlockingNode as BlockingNode
    from bbnode.api.blocking import BlockingStream as BlockingStream
    from bbnode.api.blocking import connect as connect
    from bbnode.api.blocking import open as open  # noqa: A004 - as Python opens a file
    from bbnode.api.blocking_methods import BlockingMethods as BlockingMethods
    from bbnode.api.blocking_remote import RemoteNode as RemoteNode
    from bbnode.api.errors import ForkedProcess as ForkedProcess
    from bbnode.api.errors import InputRefused as InputRefused
    from bbnode.api.errors import LoopBlocked as LoopBlocked
    from bbnode.api.errors import NodeNotReady as NodeNotReady
    from bbnode.api.errors import NodeStopped as NodeStopped
    from bbnode.api.errors import WaitTimeout as WaitTimeout
    from bbnode.api.indexes import Collection as Collection
    from bbnode.api.indexes import NodeIndex as NodeIndex
    from bbnode.api.indexes import NoSuchIndex as NoSuchIndex
    from bbnode.api.indexes import index_of as index_of
    from bbnode.api.indexes import open_index as open_index
    from bbnode.api.methods import AsyncMethods as AsyncMethods
    from bbnode.api.on_trio import TrioNode as TrioNode
    from bbnode.api.outcome import ExecutionFailed as ExecutionFailed
    from bbnode.api.outcome import InvokeResult as InvokeResult
    from bbnode.api.outcome import InvokeTimeout as InvokeTimeout
    from bbnode.api.outcome import OutputValue as OutputValue
    from bbnode.api.training import RoundsFailed as RoundsFailed
    from bbnode.api.training import TrainResult as TrainResult
    from bbnode.daemon.config.sources import ConfigError as ConfigError
    from bbnode.daemon.control.errors import ControlError as ControlError
    from bbnode.daemon.control.errors import NotRunning as NotRunning
    from bbnode.daemon.paths import StateDirInUse as StateDirInUse
    from bbnode.ir.errors import BbnodeError as BbnodeError
else:
    # Hidden from type checkers, which would take any name for a good one.

    def _exports() -> dict[str, str]:
        """Return the module of each public name, as the imports above say."""
        import ast

        tree = ast.parse(__spec__.loader.get_source(__name__))
        lists = next(n for n in tree.body if isinstance(n, ast.If) and n.orelse)
        return {alias.asname: node.module for node in lists.body for alias in node.names}

    def __getattr__(name: str) -> object:
        if name == "__all__":
            return ["__version__", *_exports()]
        module = None if name.startswith("__") else _exports().get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        found = getattr(import_module(module), name, None)
        # A public name may be a module itself.
        value = import_module(f"{module}.{name}") if found is None else found
        return globals().setdefault(name, value)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_exports()})
