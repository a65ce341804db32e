"""The sources of a configuration, and their precedence.

Rule: `resolve` is the one place of precedence: defaults, then the file, then the environment, then
flags. Every fault is a `ConfigError` of one line that names the source, the key and what to write
instead.

Environment: `BBNODE_<SECTION>__<KEY>`, two underscores between section and key, as in
`BBNODE_NODE__LOG_LEVEL=debug`. Variables without the two underscores are not ours: container
managers add some themselves (`BBNODE_SERVICE_HOST`).
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from bbnode.daemon import paths
from bbnode.daemon.config import NodeConfig, keys, overrides, table_of
from bbnode.ir.caps import MAX_CONFIG_BYTES
from bbnode.ir.errors import DeploymentError
from bbnode.ir.texts import printable

ENVIRONMENT_PREFIX = "BBNODE_"
ENVIRONMENT_SEPARATOR = "__"


# Characters of a wrong value that an error shows.
MAX_SHOWN_CHARS = 80


class ConfigError(DeploymentError):
    """The configuration cannot be used; the message is one line that says what to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A configuration with the origin of each key that was set.

    `origins` maps a dotted key to "file", "environment" or "flags"; a key that is not in it has its
    default. `file` is absolute, or None when there was none.
    """

    config: NodeConfig
    file: Path | None
    origins: Mapping[str, str]
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def again(self) -> ResolvedConfig:
        """Return the configuration from the same sources, read again. Raises `ConfigError`."""
        return resolve(self.file, flags=self.flags)

    @property
    def state_dir(self) -> Path:
        """The state directory, absolute."""
        configured = self.config.node.state_dir
        if configured is None:
            system = paths.is_system_config(self.file)
            return paths.default_state_dir(self.config.node.name, system=system)
        return self.absolute(configured, "node.state_dir")

    @property
    def folder(self) -> Path:
        """The directory of the file, absolute; without a file, the current one."""
        return self.file.parent if self.file is not None else Path.cwd()

    def absolute(self, path: Path, key: str = "") -> Path:
        """Return the absolute path of a key: relative to the file, or, from a flag, to where it was
        typed.
        """
        base = Path.cwd() if self.origins.get(key) == "flags" else self.folder
        return base / path.expanduser()


def resolve(
    file: Path | None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> ResolvedConfig:
    """Read the configuration: defaults < file < environment < flags.

    `flags` maps a dotted key ("node.log_level") to a value, or to text that is read as the
    environment is. Raises `ConfigError`.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    sources: dict[str, str] = {}
    if file is not None:
        merged = _read_file(file)
        origins = dict.fromkeys((key.partition("[")[0] for key in _leaves(merged)), "file")
    for key, value, source in (*_environment(environ), *_flags(flags)):
        _assign(merged, key, value, source)
        origins[key] = "environment" if source.startswith("environment") else "flags"
        sources[key] = source
    where = str(file) if file is not None else "configuration"
    config = _validate(merged, where, sources)
    return ResolvedConfig(
        config=config,
        file=file.absolute() if file is not None else None,
        origins=origins,
        flags=dict(flags or {}),
    )


def shown(resolved: ResolvedConfig) -> Iterator[tuple[str, Any, str]]:
    """Yield every key that has a value: dotted name, value as TOML and JSON have it, and origin.

    Origins are "default", "file", "environment" and "flags"; the items of a list of tables
    are numbered from 0, as `invoke[0].target`.
    """
    config, origins = resolved.config, resolved.origins
    set_values = _leaves(overrides(config))
    for key, value in _leaves(config.model_dump(mode="json", by_alias=True)).items():
        # The items of a list of tables share one origin, except for their own defaults.
        source = origins.get(key) or (
            origins.get(key.partition("[")[0]) if key in set_values else None
        )
        yield key, value, source or "default"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return all values by dotted name; the items of a list of tables are numbered from 0."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            leaves |= _leaves(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            for index, item in enumerate(value):
                leaves |= _leaves(item, f"{key}[{index}].")
        else:
            leaves[key] = value
    return leaves


def write(file: Path, config: NodeConfig, *, comment: str = "") -> None:
    """Write the values that differ from the defaults; the file is complete or not there at all.

    Raises StorageError, and ConfigError for a value that a file of UTF-8 can't hold.
    """
    text = "".join(f"# {line}\n" for line in comment.splitlines())
    text += tomli_w.dumps(overrides(config))
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        line = text[: error.start].count("\n")
        raise ConfigError(
            f"{file}: {text.splitlines()[line]}: the name of a file or folder in it is not UTF-8; "
            "rename that"
        ) from error
    paths.write_atomically(file, data, mode=0o644)


def toml_value(value: Any) -> str:
    """Return a value as TOML writes it, on one line."""
    if isinstance(value, dict):
        inner = ", ".join(f"{name} = {toml_value(item)}" for name, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    text: str = tomli_w.dumps({"x": value})
    # tomli-w breaks lists into lines.
    return " ".join(text.partition("=")[2].split()).replace("[ ", "[").replace(", ]", "]")


def _read_file(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError as error:
        # A mere name was also looked for in these directories.
        dirs = paths.config_dirs() if len(file.parts) == 1 else ()
        where = f", nor in {' or '.join(map(str, dirs))}" if dirs else ""
        raise ConfigError(f"{file}: no such file{where}; make one with `bbnode init`") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{file}: larger than {MAX_CONFIG_BYTES} bytes: not a configuration")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: not valid TOML: nested too deeply") from error


def _environment(environ: Mapping[str, str] | None) -> list[tuple[str, Any, str]]:
    environ = os.environ if environ is None else environ
    variables = []
    for name in sorted(environ):
        rest = name.removeprefix(ENVIRONMENT_PREFIX)
        if rest == name or ENVIRONMENT_SEPARATOR not in rest:
            continue
        key = rest.lower().replace(ENVIRONMENT_SEPARATOR, ".")
        variables.append((key, _from_text(key, environ[name]), f"environment {name}"))
    return variables


def _flags(flags: Mapping[str, Any] | None) -> list[tuple[str, Any, str]]:
    return [
        (key, _from_text(key, value) if isinstance(value, str) else value, f"flag {key}")
        for key, value in (flags or {}).items()
        if value is not None
    ]


def _from_text(key: str, text: str) -> Any:
    """Convert the text of a variable or flag to the type of its key.

    Text stays text; a list is TOML or separated by commas; anything else is a TOML value.
    """
    field = {".".join(path): field for path, field in keys()}.get(key)
    annotation = getattr(field, "annotation", None)
    is_list = getattr(annotation, "__origin__", None) is list
    if is_list and not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    if not is_list and _is_text(annotation):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError, KeyError):
        return text  # the model reports what it wants instead


def _is_text(annotation: Any) -> bool:
    if isinstance(annotation, str) or annotation in (str, Path):
        return True  # text is an alternative of a Literal
    if hasattr(annotation, "__metadata__"):
        return _is_text(annotation.__origin__)
    if getattr(annotation, "__origin__", None) in (list, dict):
        return False
    return any(_is_text(inner) for inner in getattr(annotation, "__args__", ()))


def _assign(tree: dict[str, Any], key: str, value: Any, source: str) -> None:
    *parents, last = key.split(".")
    for name in parents:
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{source}: {key}: [{name}] is a list or a value, not a table")
        tree = below
    tree[last] = value


def _validate(data: dict[str, Any], where: str, sources: Mapping[str, str]) -> NodeConfig:
    try:
        return NodeConfig.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        # An unknown key explains a missing one (a typo causes both), so it comes first.
        faults.sort(key=lambda fault: fault["type"] != "extra_forbidden")
        line = _describe(faults[0], where, sources)
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        # Keys and values may contain anything; the message stays on one line.
        raise ConfigError(printable(line) + more) from error


def _describe(fault: Any, where: str, sources: Mapping[str, str]) -> str:
    location = tuple(fault["loc"])
    dotted = ".".join(str(part) for part in location)
    where = next((s for key, s in sources.items() if f"{dotted}.".startswith(f"{key}.")), where)
    section, place = _locate(location)
    valid = [field.alias or name for name, field in section.model_fields.items()]
    name = str(location[-1]) if location else ""
    match fault["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(name, valid, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}"
            return f"{where}: {place}: unknown key {name!r}; {hint}"
        case "missing":
            description = next(
                (f.description for n, f in section.model_fields.items() if name in (n, f.alias)), ""
            )
            return f"{where}: {place}: missing key {name!r}: {description}"
        case _:
            message = str(fault["msg"]).removeprefix("Value error, ")
            current = (
                "" if isinstance(fault["input"], dict) else f" (it is {_short(fault['input'])})"
            )
            if fault["type"] == "value_error":
                current = ""
            return f"{where}: {dotted or 'file'}: {message}{current}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


def _locate(location: Sequence[Any]) -> tuple[type[BaseModel], str]:
    """Return the section that a faulty key is in, and its name in the file."""
    section: type[BaseModel] = NodeConfig
    shown = ""
    for part in location[:-1]:
        if isinstance(part, int):
            shown += f" number {part + 1}"
            continue
        field = next(
            (f for name, f in section.model_fields.items() if part in (name, f.alias)), None
        )
        below = table_of(field.annotation) if field is not None else None
        if below is None:
            break
        section = below
        shown += f".{part}" if shown else str(part)
    return section, f"[{shown}]" if shown else "top level"
