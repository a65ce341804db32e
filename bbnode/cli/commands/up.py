"""`bbnode up`: a program as a local testbed, with a process for each node.

Rule: the options are checked here, and override those of `[tool.bbnode.up]`; the testbed itself is
`bbnode.daemon.testbed`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bbnode.cli import values
from bbnode.cli.common import CheckOption, JsonOption, pairs, toml_or_text

PROJECT = Path("pyproject.toml")
TABLE = "tool.bbnode.up"
# Numbers of one input that is written into node.toml.
MAX_INPUT_NUMBERS = 4096
# The keys of the table, and the TOML types of each.
KEYS: Mapping[str, tuple[type, ...]] = {
    "program": (str,),
    "args": (dict,),
    "nodes": (str, dict),
    "set": (list, dict),
    "invoke": (str,),
    "inputs": (dict,),
    "times": (int,),
    "best": (str,),
    "patience": (int,),
    "mode": (str,),
    "out": (str,),
}


def command(
    program: Annotated[
        str | None,
        typer.Argument(
            help="package.module:Class, file.py:Class, file.py with one Module, or a compiled "
            "artifact (.onnx); default: that of pyproject.toml.",
            metavar="PROGRAM",
            show_default=False,
        ),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            help="Keyword argument of the class, as a TOML value (repeatable).", metavar="KEY=VALUE"
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            help="Nodes of each class; a+b=1 plays both. Default: 1 of the home class, 2 of "
            "each other.",
            metavar="CLASS=COUNT,…",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A key of node.toml, as in client.slots.data.path=data/{i}.npz, for all nodes or "
            "those of a class; {i} is the node's number, {n} how many there are, {name} its name "
            "(repeatable).",
            metavar="[CLASS[.INDEX].]KEY=VALUE",
        ),
    ] = None,
    invoke: Annotated[
        str | None,
        typer.Option(
            help="Target to invoke; default: the one that needs nothing but triggers.",
            metavar="CLASS",
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", "-i", help="Of --invoke (repeatable). " + values.HELP, metavar="NAME=VALUE"
        ),
    ] = None,
    times: Annotated[
        int | None,
        typer.Option(
            help="Rounds, with those of earlier runs; 0: for ever. Default: 20, or 1 of a target "
            "with inputs.",
            min=0,
            show_default=False,
        ),
    ] = None,
    best: Annotated[
        str | None,
        typer.Option(help="Output by which the best round is kept.", metavar="OUTPUT"),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(help="Of --best: stop after so many rounds without a better one.", min=1),
    ] = None,
    mode: Annotated[
        Literal["max", "min"] | None, typer.Option(help="Of --best: what is better.")
    ] = None,
    until_ctrl_c: Annotated[
        bool, typer.Option("--until-ctrl-c", help="Let the nodes run when all rounds are made.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the report and of the nodes' state. Default: up-out.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Go on from the state that the last run left there.")
    ] = False,
    logs: Annotated[
        list[str] | None,
        typer.Option(help="Show the log of a node (repeatable).", metavar="NODE"),
    ] = None,
    check: CheckOption = True,
    as_json: JsonOption = False,
) -> int:
    """Run a program as a local testbed, a process for each node."""
    table = _project(PROJECT)
    program = program or table.get("program")
    if program is None:
        raise typer.BadParameter(
            f"say what to run, or write program = … into [{TABLE}] of {PROJECT}",
            param_hint="PROGRAM",
        )
    typed = values.parse_inputs(inputs or [])
    if best is not None and best != table.get("best"):
        table.pop("mode", None)  # belongs to another output
    rounds = {
        key: value if value is not None else table.get(key)
        for key, value in {"best": best, "patience": patience, "mode": mode}.items()
    }
    if rounds["best"] is None and any(rounds.values()):
        raise typer.BadParameter("they go with --best OUTPUT", param_hint="--patience, --mode")
    from bbnode.daemon.testbed.up import DEFAULT_OUT, UpOptions, run_up

    own_invoke = invoke is not None and invoke != table.get("invoke")
    return run_up(
        UpOptions(
            program=program,
            args={
                **table.get("args", {}),
                **{key: toml_or_text(text) for key, text in pairs(arg, "--arg").items()},
            },
            nodes=nodes if nodes is not None else _nodes(table.get("nodes", "")),
            # Later ones override: those of the command line come last.
            settings=[*_settings(table.get("set", [])), *(settings or [])],
            invoke=invoke or table.get("invoke"),
            # The table's inputs belong to the table's target.
            inputs={
                name: _numbers(name, value)
                for name, value in {**({} if own_invoke else _inputs(table)), **typed}.items()
            },
            times=times if times is not None else table.get("times"),
            rounds={key: value for key, value in rounds.items() if value is not None},
            runs_on=until_ctrl_c,
            out=out or Path(table.get("out", DEFAULT_OUT)),
            keep=keep,
            logs=logs or [],
            check=check,
            as_json=as_json,
        )
    )


def _project(file: Path) -> dict[str, Any]:
    """Return the table `[tool.bbnode.up]` of the working directory's pyproject.toml, if any."""
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"{file}: {error}", param_hint=TABLE) from error
    table: Any = tables
    for name in TABLE.split("."):
        table = table.get(name, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict):
        raise typer.BadParameter(f"{file}: [{TABLE}] is not a table", param_hint=TABLE)
    for key, value in table.items():
        if key not in KEYS:
            raise typer.BadParameter(
                f"{file}: [{TABLE}] has no key {key!r}; keys: {', '.join(KEYS)}", param_hint=TABLE
            )
        if not isinstance(value, KEYS[key]) or isinstance(value, bool):
            kinds = " or ".join(kind.__name__ for kind in KEYS[key])
            raise typer.BadParameter(
                f"{file}: [{TABLE}] {key} has to be a {kinds}, not {value!r}", param_hint=TABLE
            )
    return table


def _inputs(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of the table; texts are parsed as those of `--input`."""
    return {
        name: values.parse_value(value) if isinstance(value, str) else value
        for name, value in table.get("inputs", {}).items()
    }


def _numbers(name: str, value: Any) -> Any:
    """Return an input as a configuration can hold it: a small array as lists of numbers."""
    if not isinstance(value, dict) or "text" in value:
        return value
    import base64
    import io

    import numpy as np

    why = "bytes are no numbers"
    if "npy" in value:
        try:
            array = np.load(io.BytesIO(base64.b64decode(value["npy"])), allow_pickle=False)
            if array.size <= MAX_INPUT_NUMBERS:
                return array.tolist()
            why = f"an array of {array.size} numbers is more than {MAX_INPUT_NUMBERS}"
        except (ValueError, EOFError) as error:
            why = f"it is no .npy file ({error})"
    raise typer.BadParameter(
        f"{name}: {why}, and node.toml is to hold it; let the nodes run with --until-ctrl-c, and "
        "send it with `bbnode invoke`",
        param_hint="--input",
    )


def _nodes(nodes: str | Mapping[str, Any]) -> str:
    if isinstance(nodes, str):
        return nodes
    return ",".join(f"{name}={count}" for name, count in nodes.items())


def _settings(settings: list[Any] | Mapping[str, Any]) -> list[str]:
    """Return settings in the form of the command line, from a list of texts or a table by key."""
    if isinstance(settings, list):
        return [str(each) for each in settings]
    return [f"{key}={_toml(value)}" for key, value in settings.items()]


def _toml(value: Any) -> str:
    from bbnode.daemon.config.sources import toml_value

    return value if isinstance(value, str) else toml_value(value)
