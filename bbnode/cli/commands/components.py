"""`bbnode components`: the installed components, and the settings of one.

Rule: a component that can't be imported is a line with the reason; the others are shown.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import JsonOption


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="TYPE_NAME of one, to see its settings; the part behind the dot is enough.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the installed components, or show the settings of one."""
    if name is None:
        _list(as_json)
    else:
        _show(name, as_json)


def _list(as_json: bool) -> None:
    from bbnode.components.registry import component_class, known_types, roles_of
    from bbnode.daemon.config.reference import summary
    from bbnode.ir.errors import BbnodeError

    rows_as_json = []
    for type_name in known_types():
        row: dict[str, Any] = {"name": type_name, "roles": [], "about": ""}
        try:
            cls = component_class(type_name)
        except BbnodeError as error:
            row["about"] = f"can't be used: {error}"
        else:
            row["roles"] = list(roles_of(cls))
            row["about"] = " ".join(summary(cls).split())
        rows_as_json.append(row)
    if as_json:
        output.json_object({"components": rows_as_json})
        return
    rows: list[list[object]] = [
        [row["name"], ", ".join(row["roles"]) or None, row["about"]] for row in rows_as_json
    ]
    output.table("components", ("name", "role", "about"), rows, out=output.console())


def _show(name: str, as_json: bool) -> None:
    from bbnode.components.registry import component_class, known_types, roles_of
    from bbnode.daemon.config.reference import component_settings, summary

    ends = [each for each in known_types() if each.rpartition(".")[2] == name]
    cls = component_class(ends[0] if len(ends) == 1 else name)
    settings = list(component_settings(cls.Config))
    if as_json:
        description: dict[str, Any] = {"name": cls.TYPE_NAME, "roles": list(roles_of(cls))}
        description |= {"about": " ".join(summary(cls).split()), "depends": dict(cls.depends)}
        description["settings"] = [
            {
                "name": each.name,
                "type": each.kind,
                "default": each.default,
                "required": each.default is None,
                "local": each.is_local,
                "meaning": each.meaning,
            }
            for each in settings
        ]
        output.json_object(description)
        return
    output.data(f"{cls.TYPE_NAME}  ({', '.join(roles_of(cls))})")
    output.data(f"  {' '.join(summary(cls).split())}")
    for role, slot in cls.depends.items():
        output.data(f"  needs a {role} in the slot {slot!r}")
    if not settings:
        output.data("  it has no settings")
        return
    output.data("\nkeys of [slots.NAME] in node.toml:")
    for each in settings:
        default = "(required)" if each.default is None else _default(each.default)
        local = ", from the node's own configuration alone" if each.is_local else ""
        output.data(f"  {each.name} = {default}    ({_in_toml(each.kind)}{local})")
        output.data(f"      {each.meaning}")


# Defaults as they would stand in node.toml; a text in single quotes is TOML already.
_TOML = {"None": "(not set)", "()": "[]", "True": "true", "False": "false"}
# Python types and their TOML names, the longer spelling first.
_KINDS = (
    (r"^(?:Mapping|dict)\[.*\]", "table"),
    (r"tuple\[(tuple\[[\w, ]+\]), \.\.\.\]", r"list of \1"),
    (r"tuple\[(\w+), \.\.\.\]", r"list of \1"),
    (r"tuple\[(\w+), \w+\]", r"pair of \1"),
    (r"tuple\[(\w+), \1, \1\]", r"three of \1"),
    (r"tuple\[(\w+), (\w+), (\w+)\]", r"\1, \2 and \3"),
    (r"Literal\['(\w+)'\]", r'"\1"'),
    (r" \| None$", ""),
    (r" \| ", " or "),
    (r"\bbytes or str or Path\b", "path"),
    (r"\bstr\b", "text"),
    (r"\bint\b", "integer"),
    (r"\bfloat\b", "number"),
    (r"\bbool\b", "true or false"),
    (r"^Lora$", "table"),
)


def _default(shown: str) -> str:
    """Return a default as it would stand in node.toml: a list for a tuple of numbers."""
    numbers = re.fullmatch(r"\(([\d., ]+)\)", shown)
    return f"[{numbers[1]}]" if numbers else _TOML.get(shown, shown)


def _in_toml(kind: str) -> str:
    """Return the TOML name of a setting's type: "list of text" for `tuple[str, ...]`."""
    if kind.startswith('"'):  # choices
        return kind
    for python, words in _KINDS:
        kind = re.sub(python, words, kind)
    return kind
