"""`bbnode verify`: each method compared with plain numpy, on this machine.

Rule: one line per method, with its largest difference; exit code 1 when a method differs or failed.
A method whose library is not installed is reported as missing, and is no failure.
"""

from __future__ import annotations

from typing import Annotated

import typer

from bbnode.cli import exits, output
from bbnode.cli.common import JsonOption


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Methods, or parts of their names; without any: all.",
            show_default=False,
            metavar="METHOD",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Compare rounds of real nodes with plain numpy, for every method."""
    from bbnode.ir.errors import DeploymentError
    from bbnode.verify import all_checks, judged

    wanted = [name.lower() for name in names or ()]
    known = all_checks()
    chosen = [
        check
        for check in known
        if not wanted or any(name in check.name.lower() or name == check.page for name in wanted)
    ]
    for name in wanted:
        if not any(name in check.name.lower() or name == check.page for check in known):
            raise DeploymentError(f"no method fits {name!r}; `bbnode verify` alone lists all")
    outcomes = []
    width = max(len(check.name) for check in chosen)
    for check in chosen:
        outcome = judged(check)
        outcomes.append(outcome)
        if not as_json:
            verdict = "missing" if outcome.missing else "right" if outcome.ok else "WRONG"
            result = outcome.error or (
                f"{outcome.deviation:.0e} of {check.tolerance:.0e}, {outcome.numbers:,} numbers"
                + ("" if outcome.ok or not outcome.at else f", worst: {outcome.at}")
            )
            output.data(f"{verdict:<7}  {check.name:<{width}}  {output.cell(result)}")
    missing = sum(each.missing for each in outcomes)
    right = sum(each.ok for each in outcomes)
    failed = len(outcomes) - right - missing
    if as_json:
        checks = [each.to_json() for each in outcomes]
        output.json_object({"ok": not failed, "checks": checks})
    else:
        numbers = sum(each.numbers for each in outcomes)
        lacking = f", {missing} missing" if missing else ""
        output.note(
            f"{right} of {len(outcomes)} as numpy says, {failed} wrong{lacking}: {numbers:,} "
            "numbers of real nodes in the simulator"
        )
    return exits.FAILURE if failed else exits.OK
