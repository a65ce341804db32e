"""The configuration and the program that the arguments of `open` stand for.

Rule: arguments are keys of `node.toml` under shorter names, and checked by the same models;
`settings` takes every other key. A program that is passed as an object is compiled here and written
into the state directory, so that commands find it like a program in a file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np

from bbnode.daemon import paths
from bbnode.daemon.artifacts.artifact import Artifact, parse_artifact, serialize
from bbnode.daemon.artifacts.build import argument_fault, compile_program
from bbnode.daemon.config import sources
from bbnode.daemon.config.sources import ConfigError, ResolvedConfig
from bbnode.dsl import Module

if TYPE_CHECKING:
    import onnx

ARTIFACT_NAME: Final = "artifact.onnx"


class HasAddresses(Protocol):
    """A node that others can dial: one of the API's own."""

    @property
    def addresses(self) -> Sequence[str]:
        """Its multiaddrs, each with `/p2p/ID`."""
        ...


Program: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto | Module | type[Module]"


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """The arguments of `open`, as they were passed."""

    program: Any
    targets: str | Sequence[str] | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    state_dir: str | os.PathLike[str] | None = None
    peers: str | Sequence[str | HasAddresses] = ()
    listen: str | Sequence[str] | None = None
    transport: str | None = None
    slots: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OpenPlan:
    """A configuration to run, and the program if it was passed as an object."""

    resolved: ResolvedConfig
    artifact: Artifact | None


@contextmanager
def prepared(asked: OpenRequest) -> Iterator[OpenPlan]:
    """Create the configuration of a node, and lock its state directory while the block runs.

    Blocks while a program compiles. A temporary state directory is removed at the end. Raises
    ConfigError and other errors of the configuration, of the compiler and of the artifact, and
    StateDirInUse.
    """
    file, flags, model = _sources(asked)
    with contextlib.ExitStack() as stack:
        if asked.state_dir is not None:
            flags["node.state_dir"] = str(Path(asked.state_dir).expanduser().absolute())
        elif file is None and "node.state_dir" not in flags:
            temporary = tempfile.mkdtemp(prefix="bbnode-")
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            flags["node.state_dir"] = temporary
        artifact = None
        if model is not None:
            artifact = parse_artifact(
                serialize(model), _called(asked.program), own=not _is_model(asked.program)
            )
            flags["artifact.targets"] = _targets(asked, artifact)
            flags["artifact.path"] = str(Path(flags["node.state_dir"]) / ARTIFACT_NAME)
        resolved = sources.resolve(file, flags=flags)
        stack.enter_context(_locked(resolved.state_dir))
        if artifact is not None:
            path = resolved.state_dir / ARTIFACT_NAME
            paths.write_atomically(path, serialize(artifact.model), mode=0o644)
        yield OpenPlan(resolved=resolved, artifact=artifact)


def _sources(asked: OpenRequest) -> tuple[Path | None, dict[str, Any], onnx.ModelProto | None]:
    """Return the configuration file, the keys on top of it, and the compiled program, if any."""
    flags = _flags(asked)
    program = asked.program
    if isinstance(program, type) and issubclass(program, Module):
        return None, flags, compile_program(_made(program, asked.args))
    if asked.args and not (isinstance(program, str) and ":" in program):
        raise ConfigError("args are for a Module class, or for its name as package.module:Class")
    if isinstance(program, Module):
        return None, flags, compile_program(program)
    if _is_model(program):
        return None, flags, program
    if not isinstance(program, str | os.PathLike):
        raise ConfigError(
            f"a {type(program).__name__} is no program: give a node.toml, a compiled .onnx file, "
            "'package.module:Class', a Module, or a compiled ModelProto"
        )
    path = Path(program)
    if path.suffix == ".toml" or path.is_dir():
        file = paths.find_config(path / "node.toml" if path.is_dir() else path)
        return file.expanduser().absolute(), flags, None
    if asked.targets is None:
        raise ConfigError(f"say which part of {program} the node plays, as in targets='client'")
    if path.suffix == ".onnx":
        return None, {**flags, "artifact.path": str(path.expanduser().absolute())}, None
    if ":" not in str(program):
        raise ConfigError(
            f"{str(program)!r} is neither a .toml nor an .onnx file, nor package.module:Class"
        )
    return None, {**flags, "artifact.module": str(program), "artifact.args": dict(asked.args)}, None


def _flags(asked: OpenRequest) -> dict[str, Any]:
    """Return all given arguments as keys of the configuration."""
    _check(asked)
    flags = {
        "node.name": asked.name,
        "artifact.targets": _listed(asked.targets),
        "network.listen": _listed(asked.listen),
        "network.transport": asked.transport,
        "network.bootstrap": [
            address
            for peer in ([asked.peers] if isinstance(asked.peers, str) else asked.peers)
            for address in ([peer] if isinstance(peer, str) else _addresses(peer))
        ]
        or None,
        **{
            f"slots.{slot}.{key}": _plain(value)
            for slot, settings in asked.slots.items()
            for key, value in settings.items()
        },
        **asked.settings,
    }
    return {key: value for key, value in flags.items() if value is not None}


def _check(asked: OpenRequest) -> None:
    """Check the arguments that are read before the configuration's models check them."""
    slots: Any = asked.slots
    tables = {"args": asked.args, "slots": slots, "settings": asked.settings}
    if isinstance(slots, Mapping):
        tables |= {f"slots[{slot!r}]": table for slot, table in slots.items()}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name} is {table!r:.80}; give a dict")
    if not isinstance(asked.state_dir, str | os.PathLike | None):
        raise ConfigError(f"state_dir is {asked.state_dir!r:.80}; give a path")


def _addresses(peer: HasAddresses) -> Sequence[str]:
    addresses = getattr(peer, "addresses", None)
    if not addresses or isinstance(addresses, str):
        raise ConfigError(
            f"peers has {peer!r:.80}, which has no addresses: give multiaddrs, or nodes that listen"
        )
    return list(addresses)[:1]


def _plain(value: Any) -> Any:
    """Return a setting as the configuration takes it: text is quoted, so that "1" stays text."""
    if isinstance(value, str | os.PathLike):
        return sources.toml_value(os.fspath(value))
    return value.item() if isinstance(value, np.generic) else value


def _listed(texts: str | Sequence[str] | None) -> list[str] | None:
    return texts if texts is None else [texts] if isinstance(texts, str) else list(texts)


def _is_model(program: Any) -> bool:
    import onnx

    return isinstance(program, onnx.ModelProto)


def _made(program: type[Module], args: Mapping[str, Any]) -> Module:
    fault = argument_fault(program, args)
    if fault:
        raise ConfigError(f"{program.__name__}: {fault}")
    return program(**args)


def _called(program: Any) -> str:
    if _is_model(program):
        return "the given model"
    return program.__name__ if isinstance(program, type) else type(program).__name__


def _targets(asked: OpenRequest, artifact: Artifact) -> list[str]:
    """Return the targets to install: those that were asked for, or the only one."""
    classes = sorted({name.partition("#")[0] for name in artifact.targets})
    wanted = _listed(asked.targets)
    if wanted is None and len(classes) == 1:
        return classes
    if not wanted:
        raise ConfigError(
            f"say which part of the program the node plays: targets={classes[0]!r}; it has "
            f"{', '.join(classes)}"
        )
    return wanted


@contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(paths.lock_state_dir(state_dir))
        except paths.StateDirInUse as error:
            holder = paths.lock_file(state_dir).read_text("ascii", "replace").strip()
            if holder != str(os.getpid()):
                raise
            raise paths.StateDirInUse(
                f"state directory {state_dir} is in use by a node of this process: stop that one "
                "first, or give another state_dir"
            ) from error
        yield
