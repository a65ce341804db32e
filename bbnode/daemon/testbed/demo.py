"""The demo: a testbed of federated averaging on digits, with a report and a picture of its own.

Rule: this module has only what is particular to the demo.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from bbnode.daemon.testbed import view as views
from bbnode.daemon.testbed.plan import LocalPlan, find_invocation, make_plan
from bbnode.daemon.testbed.program import find_program
from bbnode.daemon.testbed.report import versions, write_report
from bbnode.daemon.testbed.run import JOIN_TIMEOUT_S, RunOptions, RunOutcome, run_testbed
from bbnode.ir.errors import DeploymentError
from bbnode.ir.installation import install
from bbnode.programs.arguments import enough

PROGRAM = "bbnode.examples.federated_digits:FederatedRound"
# Packages that the demo needs beside bbnode, by the name that Python imports.
_PACKAGES = {"sklearn": "scikit-learn>=1.7.2", "matplotlib": "matplotlib>=3.9.2"}

# A cohort's deadline. A local training takes well under a second, more on a busy machine. A killed
# client costs one round this long and no more.
ROUND_DEADLINE_S = 10.0
# Beyond the rounds' own deadlines: evaluation, checkpoints, a busy machine.
SLACK_PER_ROUND_S = 5.0


class DemoExtraMissing(DeploymentError):
    """The demo needs packages that bbnode itself does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of the command line."""

    clients: int = 4
    rounds: int = 20
    split: str = "iid"
    seed: int = 0
    out: Path = Path("demo-out")
    port: int = 0
    as_json: bool = False


def demo_plan(
    options: DemoOptions, *, quorum: int | None = None, deadline_s: float = ROUND_DEADLINE_S
) -> LocalPlan:
    """Return the plan of the demo's testbed, in which not all clients have to answer."""
    if quorum is None:
        quorum = enough(options.clients)
    args = {
        "clients": options.clients,
        "quorum": quorum,
        "deadline_s": deadline_s,
        "seed": options.seed,
    }
    program = find_program(PROGRAM, args)
    return make_plan(
        program,
        nodes=f"server=1,client={options.clients}",
        settings=[
            "slots.data.dataset=digits",
            f"slots.data.partition={options.split}",
            f"slots.data.seed={options.seed}",
            "server.slots.data.split=test",
            "client.slots.data.split=train",
            "client.slots.data.shards={n}",
            "client.slots.data.shard={i}",
        ],
        invocation=find_invocation(
            program,
            target="server",
            inputs={},
            times=options.rounds,
            options={},
            enough={"client": quorum},
        ),
        base=Path.cwd(),
    )


def run_demo(options: DemoOptions) -> int:
    """Run the demo; 0 if all rounds were run. Raises RunFailed and the like otherwise."""
    missing = [package for name, package in _PACKAGES.items() if find_spec(name) is None]
    if missing:
        raise DemoExtraMissing(f"the demo needs more packages: {install(*missing)}")
    console = views.console(stderr=options.as_json)
    plan = demo_plan(options)
    console.print(f"compiled {PROGRAM} ({plan.program.artifact.size} bytes)")

    def finish(outcome: RunOutcome) -> None:
        _finish(options, plan, outcome, console)

    return run_testbed(
        plan,
        RunOptions(
            out=options.out,
            port=options.port,
            wait_s=JOIN_TIMEOUT_S,
            round_limit_s=ROUND_DEADLINE_S + SLACK_PER_ROUND_S,
        ),
        console=console,
        finish=finish,
    )


def _finish(options: DemoOptions, plan: LocalPlan, outcome: RunOutcome, console: Console) -> None:
    out = outcome.folder
    rows = [demo_row(row) for row in outcome.rows]
    done = [row for row in rows if row["ok"]]
    report = write_report(
        out,
        {
            "schema": "bbnode/demo-report/1",
            "options": {**asdict(options), "out": str(options.out)},
            "rounds": rows,
            "peers": [
                {
                    "name": node.name,
                    "class": node.planned.group.classes[0],
                    "peer": node.peer,
                    "pid": node.process.pid if node.process is not None else None,
                }
                for node in outcome.nodes
            ],
            "versions": versions(),
            "artifact_sha256": plan.program.artifact.sha256,
            "model_sha256": done[-1]["model_sha256"] if done else None,
            "final_accuracy": done[-1]["accuracy"] if done else None,
            "seconds": round(outcome.seconds, 3),
        },
    )
    if options.as_json:
        sys.stdout.write(report.read_text("utf-8"))
    else:
        names = {node.peer: node.name for node in outcome.nodes}
        views.print_summary(console, outcome.rows, names)
    if done:
        console.print(f"picture  {draw_accuracy(out, rows)}", soft_wrap=True)
    console.print(f"report   {report}", soft_wrap=True)
    console.print(f"{outcome.seconds:.1f} s in all")


def demo_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a round as a row of the demo's report."""
    outputs = row["outputs"]
    model = outputs.get("model")
    return {
        "round": row["round"],
        "ok": row["ok"],
        "accuracy": outputs.get("accuracy"),
        "loss": outputs.get("loss"),
        **{key: row[key] for key in ("seconds", "bytes", "responded", "missing", "missing_why")},
        "failures": row["failures"],
        "model_sha256": model.get("sha256") if isinstance(model, dict) else None,
    }


def draw_accuracy(out: Path, rounds: Sequence[Mapping[str, Any]]) -> Path:
    """Draw accuracy above loss, over the rounds, into accuracy.png; returns its path.

    Rounds with a missing client are marked.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    done = [row for row in rounds if row["ok"]]
    numbers = [row["round"] for row in done]
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(8, 6), layout="constrained")
    above.plot(numbers, [100 * row["accuracy"] for row in done], "o-", color="tab:blue")
    above.set_ylabel("test accuracy (%)")
    below.plot(numbers, [row["loss"] for row in done], "o-", color="tab:orange")
    below.set_ylabel("test loss")
    below.set_xlabel("round")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in (above, below):
        axis.grid(alpha=0.3)
        for row in done:
            if row["missing"]:
                axis.axvline(row["round"], color="tab:red", alpha=0.3)
    above.set_title("Federated averaging of digits, one daemon a peer")
    path = out / "accuracy.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
