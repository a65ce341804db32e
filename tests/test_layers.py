"""The layer table of the design, held by reading every import of the package with `ast`.

Rule: a layer imports only what its row names. Imports inside functions and under
`TYPE_CHECKING` count as well: a type is a dependency.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.sources import PACKAGE, modules, read, source_of

ALL_LAYERS = frozenset(
    {
        *("ir", "access", "dsl", "compiler", "components", "engine", "transport", "sim"),
        *(
            "daemon",
            "api",
            "cli",
            "examples",
            "ops",
            "programs",
            "templates",
            "torch",
            "sklearn",
            "verify",
        ),
    }
)

# Layer -> modules of bbnode that it may import (prefixes; its own layer is always allowed).
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "ir": (),
    "access": ("bbnode.ir",),
    "ops": ("bbnode.ir",),
    "dsl": ("bbnode.ir",),
    "compiler": ("bbnode.ir", "bbnode.components.contracts", "bbnode.components.registry"),
    # Signatures of other nodes' components, which secure aggregation checks.
    "components": ("bbnode.ir", "bbnode.access.secrets"),
    "engine": ("bbnode.ir", "bbnode.ops", "bbnode.components"),
    "transport": ("bbnode.ir", "bbnode.access", "bbnode.engine"),
    # The registry: which modules define the component types of a program, for other processes.
    "sim": (
        *("bbnode.ir", "bbnode.access", "bbnode.engine", "bbnode.components.registry"),
        "bbnode.transport.memory",
    ),
    "daemon": tuple(f"bbnode.{layer}" for layer in sorted(ALL_LAYERS - {"api"})),
    "api": tuple(f"bbnode.{layer}" for layer in sorted(ALL_LAYERS - {"cli"})),
    "cli": tuple(f"bbnode.{layer}" for layer in sorted(ALL_LAYERS)),
    "examples": ("bbnode.dsl", "bbnode.ops", "bbnode.compiler", "bbnode.components", "bbnode.sim"),
    "templates": ("bbnode.__version__", "bbnode.ir.errors"),
    "torch": ("bbnode.components.models.torch_export",),
    "sklearn": ("bbnode.components.models.sklearn_export",),
    "programs": ("bbnode.ir.errors", "bbnode.ir.intake", "bbnode.dsl", "bbnode.components"),
    "verify": (
        *("bbnode.ir.errors", "bbnode.compiler", "bbnode.components", "bbnode.programs"),
        "bbnode.sim",
    ),
}

# Layer -> third-party packages that it may import. A layer without a row may import any.
# `google.protobuf` is what the package `protobuf` is called in an import.
ONNX_AND_NUMPY = frozenset({"onnx", "numpy"})
THIRD_PARTY: dict[str, frozenset[str]] = {
    "ir": ONNX_AND_NUMPY | {"msgpack", "multiaddr", "base58", "google"},
    # cryptography: Ed25519. Not the engine's nor libp2p's: keys are used without either.
    "access": frozenset({"cryptography", "msgpack", "multiaddr"}),
    "ops": ONNX_AND_NUMPY,
    "dsl": ONNX_AND_NUMPY,
    # opentelemetry: spans are emitted where that package is installed.
    "compiler": ONNX_AND_NUMPY | {"opentelemetry"},
    "engine": ONNX_AND_NUMPY | {"msgpack", "multiaddr"},
    "examples": ONNX_AND_NUMPY,
    "programs": ONNX_AND_NUMPY | {"google", "pydantic"},
    "templates": frozenset(),
}

# The one room that imports py-libp2p.
PY_LIBP2P = PACKAGE / "transport" / "libp2p" / "py_libp2p"

# No layer loads code from bytes.
NOWHERE = frozenset({"pickle", "marshal", "shelve", "dill", "cloudpickle"})

# The engine does no I/O, reads no clock and draws no randomness: now, ids and seeds are
# arguments. (`threading` is not in the list: the ingress is the one thread-safe seam and
# needs a lock; the table below names the files that may have it.)
ENGINE_NEVER = frozenset(
    {
        *("trio", "libp2p", "asyncio", "anyio", "socket", "ssl", "select", "selectors"),
        *("time", "datetime", "random", "secrets", "uuid", "sched"),
        *("os", "io", "pathlib", "shutil", "tempfile", "subprocess", "multiprocessing"),
        *("concurrent", "queue", "urllib", "http", "logging"),
    }
)
ENGINE_THREADING_FILES = frozenset({"ingress.py", "completion.py", "completions.py"})


def _layer(path: Path) -> str:
    """The layer of a file; `bbnode` itself for the file at the root of the package."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "bbnode"


def _within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _verdict(path: Path, name: str) -> str | None:
    """Why the file may not import that name, or None when it may."""
    layer, top = _layer(path), name.partition(".")[0]
    if top in NOWHERE:
        return "it loads code from bytes; the design forbids it"
    if top == "libp2p" and PY_LIBP2P not in path.parents:
        return "py-libp2p is imported in one room, where its host is made"
    if _within(name, ("bbnode.transport.libp2p.py_libp2p",)) and not (
        PY_LIBP2P in path.parents or path == PACKAGE / "transport" / "libp2p" / "transport.py"
    ):
        return "this room imports py-libp2p: only who makes such a transport imports it"
    if layer == "engine":
        if top in ENGINE_NEVER:
            return "the engine does no I/O, reads no clock and draws no randomness"
        if top == "threading" and path.name not in ENGINE_THREADING_FILES:
            return f"in the engine only {sorted(ENGINE_THREADING_FILES)} may use threads"
    if top == "bbnode":
        return _verdict_inside(path, name)
    allowed = THIRD_PARTY.get(layer)
    if allowed is not None and top not in allowed and top not in sys.stdlib_module_names:
        return f"{layer} may import only {sorted(allowed)} and the standard library"
    return None


def _verdict_inside(path: Path, name: str) -> str | None:
    layer = _layer(path)
    target = name.split(".")[1] if "." in name else ""
    if target not in ALL_LAYERS:
        return None  # the root of the package, which holds the version and nothing else
    if layer == "bbnode":
        # `python -m bbnode` is the command; importing the package itself has to be free: it names
        # its public face for type checkers alone (tests/api/test_face.py).
        free = f"bbnode/{path.name} is imported with the package and may import none of it"
        if path.name == "__init__.py" and target in {"api", "daemon", "ir"}:
            return None
        return None if path.name == "__main__.py" and target == "cli" else free
    if target == layer or _within(name, MAY_IMPORT.get(layer, ())):
        return None
    return f"{layer} may import only {MAY_IMPORT.get(layer, ())} of bbnode"


def test_every_directory_is_a_layer_of_the_table() -> None:
    found = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/**/*.py")}
    assert found <= ALL_LAYERS
    assert set(MAY_IMPORT) == ALL_LAYERS


@pytest.mark.parametrize("layer", sorted(ALL_LAYERS | {"bbnode"}))
def test_a_layer_imports_only_what_its_row_names(layer: str) -> None:
    faults = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: imports {name}: {reason}"
        for path in modules().values()
        if _layer(path) == layer
        for line, name in source_of(path).imports
        if (reason := _verdict(path, name)) is not None
    ]
    assert not faults, "\n".join(faults)


def test_every_module_states_its_rule_and_postpones_annotations() -> None:
    faults = []
    for path in modules().values():
        source = source_of(path)
        if path.name.endswith("_pb2.py") or not source.statements:
            continue
        where = str(path.relative_to(PACKAGE.parent))
        if not source.has_docstring:
            faults.append(f"{where}: no module docstring")
        only_docstring = source.statements == 1 and source.has_docstring
        if not only_docstring and "__future__.annotations" not in {n for _, n in source.imports}:
            faults.append(f"{where}: no `from __future__ import annotations`")
    assert not faults, "\n".join(faults)


# The test has to be able to fail: these are sources that it must refuse, and may not.
REFUSED = [
    ("engine/poll.py", "import time"),
    ("engine/poll.py", "def f():\n    import trio"),
    ("engine/poll.py", "from bbnode.compiler import Compiler"),
    ("engine/poll.py", "import threading"),
    ("engine/plan.py", "import libp2p.host"),
    ("ir/keys.py", "from bbnode import dsl"),
    ("ir/keys.py", "from ..dsl import graph"),
    ("ir/keys.py", "import onnxruntime"),
    ("dsl/graph.py", "from bbnode.engine.node import Node"),
    ("access/policy.py", "from bbnode.transport.base import Direction"),
    ("access/policy.py", "import trio"),
    ("engine/plan.py", "from bbnode.access.policy import Policy"),
    ("compiler/driver.py", "from bbnode.components.models.onnx_model import OnnxModel"),
    (
        "components/aggregators/fedavg.py",
        "import importlib\nimportlib.import_module('bbnode.engine')",
    ),
    ("transport/driver.py", "import libp2p"),
    ("daemon/app.py", "from bbnode.transport.libp2p.py_libp2p.host import NodeHost"),
    ("transport/libp2p/host.py", "from libp2p import new_host"),
    ("sim/world.py", "from bbnode.transport.libp2p.transport import Libp2pTransport"),
    ("examples/digits.py", "from bbnode.ir import keys"),
    ("daemon/app.py", "import pickle"),
    ("__init__.py", "from bbnode.dsl import Module"),
]
ACCEPTED = [
    ("engine/ingress.py", "import threading"),
    ("engine/poll.py", "from . import frames"),
    ("compiler/driver.py", "from bbnode.components.registry import Registry"),
    ("sim/world.py", "from bbnode.transport.memory import MemoryNetwork"),
    ("transport/libp2p/py_libp2p/host.py", "from libp2p.host.basic_host import BasicHost"),
    ("transport/identity.py", "from bbnode.access.keys import read_key_file"),
    ("examples/digits.py", "from bbnode.dsl import Module"),
    ("daemon/app.py", "from bbnode import __version__"),
    ("__main__.py", "from bbnode.cli.main import main"),
]


@pytest.mark.parametrize(("file", "source"), REFUSED)
def test_a_forbidden_import_is_found(file: str, source: str) -> None:
    path = PACKAGE / file
    assert any(_verdict(path, name) for _, name in read(source, path).imports)


@pytest.mark.parametrize(("file", "source"), ACCEPTED)
def test_an_allowed_import_is_not_refused(file: str, source: str) -> None:
    path = PACKAGE / file
    assert not [name for _, name in read(source, path).imports if _verdict(path, name)]
