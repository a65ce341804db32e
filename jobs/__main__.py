"""`./scripts/jobs [NAME …]`: real work through real daemons, checked by an independent run.

Rule: exit code 0 if every claim of every job holds, 1 if one does not or a command fails, 2 for a
name that there is not, or where something that was asked for is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from rich.console import Console

from bbnode.ir.errors import BbnodeError
from jobs import page
from jobs.job import RESULTS, Row, UnknownJob, load, names
from jobs.typed import MIB, Terminal


def main(argv: Sequence[str]) -> int:
    """Run jobs, or list them."""
    parser = argparse.ArgumentParser(prog="scripts/jobs", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--quick", action="store_true", help="the short form, in CI too")
    parser.add_argument("--list", action="store_true", help="what there is, and run nothing")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="keep data, logs and reports in DIR/NAME"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the rows as JSON")
    parser.add_argument(
        "--record",
        action="store_true",
        help="write the rows into jobs/results.json and docs/jobs.md",
    )
    arguments = parser.parse_args(argv)
    console = Console(
        width=None if sys.stdout.isatty() else 100, highlight=False, markup=False, emoji=False
    )
    if arguments.list:
        for name in names():
            console.print(f"{name:<16} {load(name).says}", soft_wrap=True)
        return 0
    try:
        jobs = {name: load(name) for name in arguments.names or names()}
    except UnknownJob as error:
        console.print(f"error: {error}", soft_wrap=True)
        return 2
    kept: Path | None = arguments.folder
    used = [
        name for name in jobs if kept and (kept / name).exists() and any((kept / name).iterdir())
    ]
    if used:
        console.print(
            f"error: {kept}/{used[0]} is not empty; name another --folder", soft_wrap=True
        )
        return 2
    absent = {name: job.missing for name, job in jobs.items() if job.missing}
    for name, missing in absent.items():
        console.print(f"{name}: left out, {', '.join(missing)} is not installed")
    if absent and arguments.names:
        return 2
    rows, failed = [], False
    for name in jobs.keys() - absent.keys():
        row = _run(name, arguments.quick, kept, console)
        failed |= row is None or row.held < row.claims
        rows += [row] if row else []
    rows.sort(key=lambda row: row.name)
    if arguments.json:
        _write(arguments.json, rows)
    if arguments.record:
        ours = {(row.name, row.quick) for row in rows}
        others = [row for row in page.recorded(RESULTS) if (row.name, row.quick) not in ours]
        rows = sorted((*others, *rows), key=lambda row: (row.quick, row.name))
        _write(RESULTS, rows)
        page.write(rows, page.PAGE)
    return int(failed)


def _run(name: str, quick: bool, kept: Path | None, console: Console) -> Row | None:
    job = load(name)
    console.print(f"== {name}: {job.says}", soft_wrap=True)
    with TemporaryDirectory(prefix=f"bbnode-{name}-") as scratch:
        folder = kept / name if kept else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        terminal = Terminal(folder.absolute(), lambda line: console.print(line, soft_wrap=True))
        begun_s = perf_counter()
        try:
            outcome = job.run(terminal, quick)
        except BbnodeError as error:
            console.print(f"FAILS: {error}", soft_wrap=True)
            return None
        row = Row(
            name=name,
            quick=quick,
            seconds=round(perf_counter() - begun_s, 1),
            memory_mib=round(terminal.memory_mib),
            moved_mib=round(terminal.moved_bytes / MIB, 1),
            result=outcome.result,
            reference=outcome.reference,
            held=sum(claim.holds for claim in outcome.claims),
            claims=len(outcome.claims),
        )
    for claim in outcome.claims:
        said = "holds" if claim.holds else "FAILS"
        console.print(f"{said}: {claim.text} ({claim.figures})", soft_wrap=True)
    console.print(
        f"{row.seconds:g} s, {row.memory_mib:g} MiB in one process, {row.moved_mib:g} MiB between "
        f"peers: {row.result}; {row.reference}",
        soft_wrap=True,
    )
    return row


def _write(path: Path, rows: Sequence[Row]) -> None:
    text = json.dumps([row.to_json() for row in rows], indent=1, ensure_ascii=False)
    path.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
