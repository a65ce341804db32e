"""`bbnode compile`: a Module class to a compiled artifact on disk.

Rule: the file is written whole or not at all, and the same source gives the same bytes. Additional
output (times, an explanation, the program between passes) never changes the artifact; the program
between passes is written even when a later pass refuses it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bbnode.cli import output, stages
from bbnode.cli.common import CheckOption, JsonOption, pairs, show_dry_run_notes, toml_or_text

if TYPE_CHECKING:
    import onnx

    from bbnode.compiler import CompileReport
    from bbnode.components.contracts import CarriedOver
    from bbnode.daemon.artifacts.dry_run import ProgramDryRun

# Weights left out that are listed per slot; --json has all.
MAX_LEFT_SHOWN = 20


def command(
    module: Annotated[
        str,
        typer.Argument(
            help="The class: package.module:Class, or folder/file.py:Class.", metavar="PROGRAM"
        ),
    ],
    out: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write it.", metavar="FILE")
    ] = Path("artifact.onnx"),
    arg: Annotated[
        list[str] | None,
        typer.Option(
            help="Keyword argument of the class, as a TOML value (repeatable).", metavar="KEY=VALUE"
        ),
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(
            help="Begin with the weights of an exported model or a node's checkpoint, where name "
            "and shape agree.",
            metavar="FILE",
        ),
    ] = None,
    slot: Annotated[
        list[str] | None,
        typer.Option(
            help="With --init-from: only this slot of the program, from that one of the checkpoint "
            "(repeatable).",
            metavar="SLOT[=SLOT]",
        ),
    ] = None,
    stage: Annotated[list[str] | None, typer.Option(help=stages.HELP, metavar="PASS")] = None,
    timed: Annotated[
        bool, typer.Option("--time", help="Show time and counters of each pass.")
    ] = False,
    explain: Annotated[
        list[str] | None,
        typer.Option(help="Show type, class and history of a value (repeatable).", metavar="VALUE"),
    ] = None,
    dump_after: Annotated[
        list[str] | None,
        typer.Option(
            help="Write the program as this pass leaves it, as text and ONNX (repeatable).",
            metavar="PASS",
        ),
    ] = None,
    dump_dir: Annotated[Path, typer.Option(help="Folder for --dump-after.", metavar="DIR")] = Path(
        "dump"
    ),
    check: CheckOption = True,
    as_json: JsonOption = False,
) -> None:
    """Compile a Module class to an artifact that every peer loads."""
    arguments = {key: toml_or_text(text) for key, text in pairs(arg, "--arg").items()}
    added = [stages.parse_stage(text) for text in stage or ()]
    if slot and init_from is None:
        raise typer.BadParameter("--slot goes with --init-from FILE")
    from bbnode.daemon import paths
    from bbnode.daemon.artifacts import artifact
    from bbnode.daemon.artifacts.build import compiler_for, load_module, record
    from bbnode.daemon.artifacts.explain import explain as explain_value
    from bbnode.daemon.artifacts.listing import write_listings
    from bbnode.ir.onnx_file import program_of
    from bbnode.ops.custom import custom_ops_of

    program = load_module(module, arguments)
    compiler = compiler_for(program)
    for each in added:
        compiler = each.add_to(compiler)
    recorded = record(program)
    initialized = None
    if init_from is not None:
        recorded, initialized = _initialize(recorded, init_from, slot or ())
    snapshots: dict[str, onnx.ModelProto] = {}
    try:
        model, report = compiler.compile_with_report(
            recorded,
            explain=bool(explain),
            snapshot_after=dump_after or (),
            snapshots=snapshots,
        )
    finally:
        dumps = write_listings(snapshots, dump_dir)
        if not as_json:
            for path in dumps:
                output.note(f"wrote {path}")
    tried = None
    if check:
        from bbnode.daemon.artifacts.dry_run import check_compiled

        tried = check_compiled(model, own=True)
        show_dry_run_notes(tried)
    explained = [explain_value(value, model, report) for value in explain or ()]
    data = artifact.serialize(model)
    paths.write_atomically(out.absolute(), data, mode=0o644)
    sha256 = hashlib.sha256(data).hexdigest()
    custom_ops = custom_ops_of(program_of(model))
    if as_json:
        answer: dict[str, Any] = {"path": str(out), "bytes": len(data), "sha256": sha256}
        answer["targets"] = list(report.targets)
        answer["custom_ops"] = custom_ops
        if initialized is not None:
            answer["initialized"] = {
                name: {"taken": list(carried.taken), "left": dict(carried.left)}
                for name, carried in initialized.items()
            }
        if tried is not None:
            answer["warnings"] = tried.warnings
        if timed:
            answer["total_ms"] = round(report.total_ms, 3)
            answer["passes"] = [
                {"pass": p.name, "ms": round(p.ms, 3), "counters": dict(p.counters)}
                for p in report.passes
            ]
        if explained:
            answer["explained"] = explained
        if dumps:
            answer["dumps"] = dumps
        output.json_object(answer)
        return
    output.data(f"{out}  {len(data)} bytes  sha256 {sha256}")
    for name in report.targets:
        output.data(f"  {name}")
    for name, carried in (initialized or {}).items():
        _show_taken(name, carried)
    for row in custom_ops:
        output.data(f"  custom op {row['domain']}::{row['op']} (package {row['package']})")
    if timed:
        _show_times(report, tried)
    for value in explained:
        _show_value(value)


def _initialize(
    recorded: onnx.ModelProto, file: Path, slots: Sequence[str]
) -> tuple[onnx.ModelProto, dict[str, CarriedOver]]:
    from bbnode.daemon.artifacts import initial

    chosen = {slot: source or None for slot, _, source in (text.partition("=") for text in slots)}
    return initial.initialize(recorded, initial.read_weights(file.expanduser()), chosen)


def _show_taken(slot: str, carried: CarriedOver) -> None:
    output.data(f"  slot {slot}: {len(carried.taken)} initial weights taken")
    for name, why in itertools.islice(carried.left.items(), MAX_LEFT_SHOWN):
        what = f"left {name}: {why}" if name else why
        output.note(output.cell(f"  slot {slot}: {what}"))
    more = len(carried.left) - MAX_LEFT_SHOWN
    if more > 0:
        output.note(f"  slot {slot}: {more} more left; --json lists all")


def _show_times(report: CompileReport, tried: ProgramDryRun | None) -> None:
    rows: list[list[object]] = [[p.name, f"{p.ms:.2f}", dict(p.counters)] for p in report.passes]
    between = report.total_ms - sum(p.ms for p in report.passes)
    rows.append(["(between passes)", f"{between:.2f}", None])
    rows.append(["total", f"{report.total_ms:.2f}", None])
    if tried is not None:
        rows.append(["(dry run)", f"{tried.seconds * 1e3:.2f}", None])
    output.table("passes", ("pass", "ms", "counters"), rows, out=output.console())


def _show_value(value: Mapping[str, Any]) -> None:
    out = output.console()
    rows: list[list[object]] = []
    for place in value["places"]:
        rows.append(["in", place["target"]])
        rows.append(["type", place["type"] or None])
        rows.append(["lives on", place["class"]])
        maker = place["made_by"]
        if maker is None:
            rows.append(["made by", "an input"])
        else:
            slot = f" of slot {maker['slot']}" if maker["slot"] else ""
            line = f", at {maker['source_line']}" if maker["source_line"] else ""
            rows.append(["made by", f"{maker['name']} ({maker['op']}{slot}{line})"])
            rows.append(["that op is from", maker["made_in"]])
            rows.append(["and changed by", maker["changed_in"]])
        rows.append(["read by", place["read_by"]])
        rows.append(["an output", place["output"]])
    if not rows:
        rows.append(["", "in no compiled partition any more"])
    output.table(f"value {value['value']}", ("", ""), rows, out=out)
    events = [[event["pass"], event["what"]] for event in value["events"]]
    output.table(f"history of {value['value']}", ("pass", "what"), events, out=out)
