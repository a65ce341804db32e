"""Schemas of data: of a node's own sources, of its peers, and in an author's pyproject.toml.

Rule: in a project's file only the tables `[tool.bbnode.schema.SLOT]` are changed, whole or not at
all, and the new content is parsed before it replaces anything.
"""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bbnode.components.contracts import DataSource
from bbnode.components.data.shared_schema import Scaling, SchemaRefused, SharedSchema, compare
from bbnode.daemon import paths
from bbnode.daemon.access import files as access_files
from bbnode.daemon.artifacts.build import SCHEMA_TABLE
from bbnode.daemon.config.sources import ResolvedConfig
from bbnode.daemon.lifecycle import assembly
from bbnode.daemon.network.agreeing import FILE_NAME
from bbnode.engine.peers.references import schemas_from_json
from bbnode.engine.planning.data_slots import data_slots_of, declared_schemas
from bbnode.ir.caps import MAX_SCHEMAS_BYTES
from bbnode.ir.decoding import clip, shown
from bbnode.ir.errors import DeploymentError
from bbnode.transport.identity import create_identity

_MOST_LEVELS: Final = 16  # levels of a schema: columns, and their categories
_HEADER = re.compile(r"^\s*\[+\s*(?P<name>[^\]]*?)\s*\]+\s*(#.*)?$")


class NothingAgreed(DeploymentError):
    """A node keeps no reference of its peers' data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnData:
    """The meaning of the examples of a slot; None if its source does not know it.

    `refused` is the contradiction to the program's schema, on one line.
    """

    schema: SharedSchema | None
    refused: str = ""


def own_schemas(resolved: ResolvedConfig) -> dict[str, OwnData]:
    """Return the meaning of a node's data, by slot.

    The node need not run: its data are loaded for it. Raises the errors of installing it, and
    DataUnavailable.
    """
    assembly.import_components(resolved)
    artifact = assembly.find_artifact(resolved)
    with tempfile.TemporaryDirectory() as scratch:
        identity = create_identity(
            Path(scratch) / "key"
        )  # any identity will do to install the program
    network = access_files.load_node(resolved.state_dir, identity.peer_id).network
    node = assembly.install_node(resolved, artifact, identity, incarnation=0, network=network)
    slots = data_slots_of(artifact.model)
    declared = declared_schemas(node.schemas, slots)
    own_data: dict[str, OwnData] = {}
    for slot, group in slots.of(node.classes).items():
        source = node.component(slot)
        if isinstance(source, DataSource):
            own = source.own_schema()
            refused = compare(declared[group], own).line if own and group in declared else ""
            own_data[slot] = OwnData(schema=own, refused=refused)
    return own_data


def agreed_schemas(resolved: ResolvedConfig) -> dict[str, SharedSchema]:
    """Return the references that a node keeps, by each slot that follows one.

    The node may run. Raises NothingAgreed, and the errors of finding its program.
    """
    file = resolved.state_dir / FILE_NAME
    try:
        if file.stat().st_size > 4 * MAX_SCHEMAS_BYTES:
            raise SchemaRefused(f"{file} is too large")
        kept = schemas_from_json(json.loads(file.read_bytes())["references"])
    except FileNotFoundError as error:
        raise NothingAgreed(
            f"{file} is not there: no peer has said what its data mean; start the node and its "
            "peers, and ask the node that sends them their requests"
        ) from error
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise SchemaRefused(f"{file}: {clip(str(error))}") from error
    slots = data_slots_of(assembly.find_artifact(resolved).model)
    references = {
        slot: kept[group]
        for each in slots.groups.values()
        for slot, group in each.items()
        if group in kept
    }
    if not references:
        raise NothingAgreed(f"{file}: nothing in it is of the node's program")
    return references


def forget(resolved: ResolvedConfig) -> bool:
    """Remove the references that a stopped node keeps; return False if there were none.

    Raises StateDirInUse.
    """
    with paths.lock_state_dir(resolved.state_dir):
        file = resolved.state_dir / FILE_NAME
        was_there = file.exists()
        file.unlink(missing_ok=True)
        return was_there


def with_statistics(schema: SharedSchema, file: Path) -> SharedSchema:
    """Return a schema whose features are scaled by a file of statistics. Raises SchemaRefused.

    The file is JSON as data sources write it: `mean`, `std` and the `columns` that these are of.
    """
    try:
        statistics = json.loads(file.read_bytes())
        names, mean, std = (list(statistics[name]) for name in ("columns", "mean", "std"))
        at = [names.index(name) for name in schema.places]
        if len(names) != len(mean) or len(mean) != len(std) or not at:
            raise ValueError("its columns are not one for each mean")
        scaling = Scaling.of("given", [mean[i] for i in at], [std[i] or 1.0 for i in at])
        return replace(schema, scaling=scaling)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise SchemaRefused(f"{file}: {clip(str(error))}") from error


def write_project(file: Path, schemas: Mapping[str, SharedSchema]) -> None:
    """Write schemas into a pyproject.toml, replacing its own.

    `bbnode compile` and `bbnode up` record them in the program from then on. Raises SchemaRefused,
    StorageError.
    """
    try:
        text = file.read_text("utf-8") if file.exists() else ""
        tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SchemaRefused(f"{file}: {clip(str(error))}") from error
    kept = "\n".join(_without_schemas(text.split("\n"))).rstrip()
    tables = [
        "\n".join((f"[{SCHEMA_TABLE}.{_key(slot)}]", *_lines(plain(schema))))
        for slot, schema in sorted(schemas.items())
    ]
    written = "\n\n".join((*([kept] if kept else []), *tables)) + "\n"
    try:
        read: Any = tomllib.loads(written)
        for name in SCHEMA_TABLE.split("."):
            read = read[name]
        for slot, schema in schemas.items():
            if SharedSchema.declared(read[slot]) != schema:
                raise SchemaRefused(
                    f"the schema of slot {shown(slot)} does not come back as it was"
                )
    except (tomllib.TOMLDecodeError, LookupError) as error:
        raise SchemaRefused(f"{file}: the schema can't be written: {error}") from error
    paths.write_atomically(file, written.encode("utf-8"), mode=0o644)


def plain(schema: SharedSchema) -> dict[str, Any]:
    """Return a schema as the plain values that an author would write."""
    values: dict[str, Any] = json.loads(schema.to_json())
    if "columns" in values:
        values["columns"] = [
            each["name"] if each.keys() == {"name"} else each for each in values["columns"]
        ]
    return values


def _without_schemas(lines: Iterable[str]) -> Iterable[str]:
    inside = False
    for line in lines:
        header = _HEADER.match(line)
        if header is not None:
            name = header["name"].replace(" ", "")
            inside = name == SCHEMA_TABLE or name.startswith(f"{SCHEMA_TABLE}.")
        if not inside:
            yield line


def _lines(table: Mapping[str, Any]) -> Iterable[str]:
    for name, value in table.items():
        if isinstance(value, list) and any(isinstance(each, dict) for each in value):
            rows = "".join(f"    {_toml(each)},\n" for each in value)
            yield f"{_key(name)} = [\n{rows}]"
        else:
            yield f"{_key(name)} = {_toml(value)}"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any, depth: int = _MOST_LEVELS) -> str:
    if not depth:
        raise SchemaRefused(f"a schema has at most {_MOST_LEVELS} levels")
    if isinstance(value, str):
        # JSON's escapes are those of TOML, except for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        inner = (f"{_key(name)} = {_toml(each, depth - 1)}" for name, each in value.items())
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(each, depth - 1) for each in value)}]"
    if isinstance(value, int | float):
        return str(value)
    raise SchemaRefused(f"{shown(value)} can't be written as TOML")
