"""`bbnode up`: a testbed of any program, and its report.

Rule: the options of the command line and of `[tool.bbnode.up]` are combined here; the run itself
knows neither.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bbnode.daemon.artifacts.dry_run import check_compiled
from bbnode.daemon.testbed import view as views
from bbnode.daemon.testbed.plan import find_invocation, make_plan
from bbnode.daemon.testbed.program import find_program
from bbnode.daemon.testbed.report import SCHEMA, versions, write_report
from bbnode.daemon.testbed.run import RunOptions, RunOutcome, run_testbed

DEFAULT_OUT = Path("up-out")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The options of the command line."""

    program: str
    args: Mapping[str, Any] = field(default_factory=dict)
    nodes: str = ""
    settings: Sequence[str] = ()
    invoke: str | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    times: int | None = None
    # Further keys of [[invoke]].
    rounds: Mapping[str, Any] = field(default_factory=dict)
    runs_on: bool = False
    out: Path = DEFAULT_OUT
    keep: bool = False
    logs: Sequence[str] = ()
    check: bool = True  # make a dry run before the nodes start
    as_json: bool = False


def run_up(options: UpOptions) -> int:
    """Compile, run, report; 0 if all work was done.

    Raises RunFailed and the typed errors of program, plan, folder and ports.
    """
    console = views.console(stderr=options.as_json)
    program = find_program(options.program, options.args)
    if options.check:
        dry_run = check_compiled(program.artifact.model, own=not program.is_artifact)
        for line in dry_run.warnings:
            console.print(f"warning  {line}", soft_wrap=True, style="yellow")
        for line in dry_run.postponed:
            console.print(f"note     {line}", soft_wrap=True)
    plan = make_plan(
        program,
        nodes=options.nodes,
        settings=options.settings,
        invocation=find_invocation(
            program,
            target=options.invoke,
            inputs=options.inputs,
            times=options.times,
            options=options.rounds,
            runs_on=options.runs_on,
        ),
        base=Path.cwd(),
    )
    console.print(f"program  {options.program} ({program.artifact.size} bytes)", soft_wrap=True)
    names: dict[str, str] = {}

    def finish(outcome: RunOutcome) -> None:
        names.update({node.peer: node.name for node in outcome.nodes})
        report = write_report(
            outcome.folder,
            {
                "schema": SCHEMA,
                "program": options.program,
                "args": dict(options.args),
                "artifact_sha256": program.artifact.sha256,
                "invoke": None if plan.invocation is None else plan.invocation.target,
                "times": None if plan.invocation is None else plan.invocation.times,
                "nodes": [
                    {
                        "name": node.name,
                        "classes": list(node.planned.group.classes),
                        "peer": node.peer,
                        "pid": None if node.process is None else node.process.pid,
                        "config": str(node.config),
                        "log": str(node.log),
                    }
                    for node in outcome.nodes
                ],
                "rounds": list(outcome.rows),
                "ended": outcome.ended,
                "values": outcome.values,
                "versions": versions(),
                "seconds": round(outcome.seconds, 3),
                "ok": not outcome.failure,
                "failure": outcome.failure or None,
            },
        )
        if options.as_json:
            sys.stdout.write(report.read_text("utf-8"))
        else:
            views.print_summary(console, outcome.rows, names, named=len(plan.invokers) > 1)
        console.print(f"report   {report}", soft_wrap=True)
        console.print(f"{outcome.seconds:.1f} s in all")

    return run_testbed(
        plan,
        RunOptions(
            out=options.out,
            keep=options.keep,
            runs_on=options.runs_on,
            logs=tuple(options.logs),
        ),
        console=console,
        finish=finish,
    )
