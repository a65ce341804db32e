"""References generated from the code: the keys of node.toml, and components' settings.

Rule: the pages add nothing to the models of the configuration and the Config dataclasses of
components. Bounds are in `limits`. docs/config.md and docs/components-reference.md are this output
(`bbnode config reference --markdown`), which a test compares.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from bbnode.daemon.config import LimitsSection, keys, table_of, tables
from bbnode.daemon.config.sources import toml_value


def as_toml() -> str:
    """Return every key with description, unit and default, as a commented TOML file."""
    lines: list[str] = []
    table = ""
    for path, field in keys():
        # Free tables are tables as well: their heading shows that a name goes there.
        heading = _heading(path[:-1]) or f"[{path[-1]}.NAME]"
        if heading != table:
            table = heading
            lines += ["", f"# {heading}"]
        unit = unit_of(field)
        lines.append(f"#   {path[-1]} = {_default(field)}{f'  ({unit})' if unit else ''}")
        lines.append(f"#       {field.description}")
    return "\n".join(lines).strip("\n") + "\n"


def config_markdown() -> str:
    """Return every key with type, default, unit and meaning, a Markdown table for each section."""
    lines = [
        "# Configuration",
        "",
        "Every key of `node.toml`, made by `bbnode config reference --markdown` from the models in",
        "`bbnode/daemon/config`. Unknown keys are errors, and a value has to be of the type that",
        'stands here: "3" is not 3. A key comes from the defaults, the file, the environment',
        "(`BBNODE_<SECTION>__<KEY>`) or a flag (`--set section.key=value`); the last one wins.",
        "`bbnode config show --origin` says where each value of a node came from; the bounds that",
        "are no keys, and the job that each allows, are in [limits.md](limits.md).",
        "",
        "Paths, settings of slots that are paths too, count from the folder of the file; those of",
        "flags from the current directory. Modules (`artifact.module`, `node.components`) are",
        "found beside the file, then in the current directory, then among what is installed.",
    ]
    edge = LimitsSection(preset="edge").effective()
    default = LimitsSection().effective()
    for path, model in sorted(tables(), key=lambda table: not table[0]):
        schema = model.model_json_schema()
        rows = []
        for name, field in model.model_fields.items():
            if table_of(field.annotation) is not None:
                continue
            shown = f"`{_default(field)}`" if not field.is_required() else "required"
            if shown == "`(unset)`":
                shown = "unset"
            if model is LimitsSection and name in default:
                shown = number(default[name])
                shown += f" (edge: {number(edge[name])})" if edge[name] != default[name] else ""
            key = field.alias or name
            kind = _kind(schema["properties"][key], schema.get("$defs", {}))
            rows.append((f"`{key}`", kind, shown, unit_of(field), field.description or ""))
        if rows:
            title, about = _heading(path), inspect.getdoc(model) or ""
            if not path:  # the free table beside the sections
                title, about = "[slots.NAME]", rows[0][4].capitalize() + "."
                rows = []
            lines += ["", f"## `{title}`", ""]
            lines += [about, ""]
            lines += table(("Key", "Type", "Default", "Unit", "Meaning"), rows) if rows else []
    return "\n".join(lines).rstrip("\n") + "\n"


def components_markdown() -> str:
    """Return the settings of every component that bbnode ships, as Markdown."""
    from bbnode.components.registry import component_class, known_types, roles_of

    lines = [
        "# Components",
        "",
        "The components that bbnode ships, with their settings: keys of `[slots.NAME]` in",
        "`node.toml`, or of the Config that a program gives to a slot. Made by `bbnode config",
        "reference --components --markdown` from the Config dataclasses. A *local* setting names",
        "something of this machine, and counts from the node's own configuration alone.",
    ]
    for name in known_types():
        if not name.startswith("bbnode."):
            continue
        cls = component_class(name)
        lines += ["", f"## `{name}`", "", f"Role: {', '.join(roles_of(cls))}."]
        lines += ["", *summary(cls).splitlines()]
        rows = [setting.row() for setting in component_settings(cls.Config)]
        lines += ["", *table(("Setting", "Type", "Default", "Meaning"), rows)] if rows else []
        if not rows:
            lines += ["", "It has no settings."]
    return "\n".join([*lines, *_gradient_ops()]) + "\n"


def _gradient_ops() -> list[str]:
    from bbnode.components.autodiff import supported_by_family

    rows = [(family, ", ".join(ops)) for family, ops in supported_by_family().items()]
    return [
        "",
        "## Ops with a gradient",
        "",
        "The ops of ONNX that a model may have between its parameters and its loss, by family of",
        "rules (`bbnode/components/autodiff/rules`).",
        "",
        *table(("Family", "Ops"), rows),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComponentSetting:
    """One setting of a component.

    Attributes:
        name, kind, meaning: those of its Config; `meaning` is empty without a docstring for it.
        default: in Python's notation; None if a node has to set it.
        is_local: only the node's own configuration may set it.
    """

    name: str
    kind: str
    default: str | None
    is_local: bool
    meaning: str

    def row(self) -> tuple[str, ...]:
        """Return the setting as a row in Markdown."""
        default = "required" if self.default is None else f"`{self.default}`"
        mark = "*local*; " if self.is_local else ""
        return f"`{self.name}`", f"`{self.kind}`", default, mark + self.meaning


def component_settings(config: type) -> Iterator[ComponentSetting]:
    """Yield the settings of a Config, a component's own before those that it shares with others."""
    from bbnode.components.settings import local_settings

    meanings, local = _attributes(config), local_settings(config)
    try:
        hints = get_type_hints(config)
    except (NameError, TypeError, AttributeError):
        hints = {}  # another package's Config, whose annotations can't be resolved
    own = inspect.get_annotations(config)
    for field in sorted(dataclasses.fields(config), key=lambda field: field.name not in own):
        kind = field.type if isinstance(field.type, str) else field.type.__name__
        if get_origin(hints.get(field.name)) is Literal:
            kind = " or ".join(f'"{choice}"' for choice in get_args(hints[field.name]))
        default = None
        if field.default is not dataclasses.MISSING:
            default = repr(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = repr(field.default_factory())
        yield ComponentSetting(
            name=field.name,
            kind=kind,
            default=default,
            is_local=field.name in local,
            meaning=meanings.get(field.name, ""),
        )


def _attributes(config: type) -> dict[str, str]:
    """Return the descriptions of fields in docstrings, below `Attributes:` or after a name."""
    described: dict[str, str] = {}
    for each in reversed(config.__mro__):
        described |= _told(inspect.cleandoc(vars(each).get("__doc__") or ""))
    return described


def _told(doc: str) -> dict[str, str]:
    text, _, section = doc.partition("Attributes:\n")
    entries = [each.partition(":") for each in re.split(r"\n(?=\S)", textwrap.dedent(section))]
    parts = re.split(r"((?:`\w+`, )*`\w+`): ", text)
    entries += [
        (names.replace("`", ""), "", about)
        for names, about in zip(parts[1::2], parts[2::2], strict=True)
    ]
    return {
        name.strip(): " ".join(about.split())
        for names, _, about in entries
        for name in names.split(",")
    }


def summary(cls: type) -> str:
    """Return the first paragraph of a class's docstring."""
    return (inspect.getdoc(cls) or "").partition("\n\n")[0]


def _kind(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return the type that a JSON schema allows, in words."""
    if "anyOf" in schema:
        kinds = [_kind(each, definitions) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        table = definitions[schema["$ref"].rpartition("/")[2]]
        return f"table of {', '.join(f'`{name}`' for name in table['properties'])}"
    if "const" in schema or "enum" in schema:
        return ", ".join(f'`"{each}"`' for each in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "array":
            return f"list of {_kind(schema['items'], definitions)}"
        case "object":
            inner = schema.get("additionalProperties")
            return f"table of {_kind(inner, definitions)}" if isinstance(inner, dict) else "table"
        case "string":
            return str(schema.get("format", "text"))
        case "integer" | "number" as kind:
            bounds = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"))
            limits = [f"{sign} {number(schema[key])}" for key, sign in bounds if key in schema]
            return ", ".join([kind, *limits])
        case "boolean":
            return "true or false"
    return "any"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    for row in (head, ("---",) * len(head), *rows):
        cells = (cell.replace("|", "\\|").replace("<", "&lt;") for cell in row)
        yield f"| {' | '.join(cells)} |"


def _heading(path: tuple[str, ...]) -> str:
    name = ".".join(part.removesuffix("[]") for part in path)
    if not name:
        return ""
    return f"[[{name}]]" if path[-1].endswith("[]") else f"[{name}]"


def _default(field: Any) -> str:
    if field.is_required():
        return "(required)"
    return "(unset)" if field.default is None else toml_value(field.default)


def unit_of(field: Any) -> str:
    """Return the unit of a key of the configuration; "" for one that counts nothing."""
    return str((field.json_schema_extra or {}).get("unit", ""))


def number(value: float | None) -> str:
    """Return a number with its thousands, "none" for no bound."""
    # Older releases of pydantic give integer bounds as floats.
    return "none" if value is None else f"{int(value) if value == int(value) else value:,}"
