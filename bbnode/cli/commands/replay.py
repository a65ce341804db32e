"""`bbnode replay`: run a recorded node again, step by step.

Rule: everything stays in this process: no envelope is sent. The exit code says whether every poll
gave the same steps as in the record.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bbnode.cli import exits, output
from bbnode.cli.common import JsonOption

if TYPE_CHECKING:
    from bbnode.engine import steps
    from bbnode.engine.record.replay import RecordReader, Replayed


def command(
    log: Annotated[Path, typer.Argument(help="The record of a node.", metavar="LOG")],
    artifact: Annotated[
        Path | None,
        typer.Option("--artifact", help="The artifact, where the record lacks it.", metavar="FILE"),
    ] = None,
    until: Annotated[
        int | None, typer.Option("--until", help="Stop after this many polls.", min=1, metavar="N")
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print every step, one JSON object per line.")
    ] = False,
    components: Annotated[
        list[str] | None,
        typer.Option("--components", help="Import a module of components.", metavar="MODULE"),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Run a node's record again and compare its steps, poll by poll."""
    from bbnode.daemon.artifacts.artifact import load_artifact
    from bbnode.engine.record.replay import RecordReader, Replay

    _import_components(components or [])
    model = None if artifact is None else load_artifact(artifact).model
    last: Replayed | None = None
    try:
        with log.open("rb") as stream:
            reader = RecordReader(stream.read)
            entries = iter(reader)
            replay = Replay(next(entries), model)
            for entry in entries:
                poll = replay.feed(entry)
                if poll is None:
                    continue
                last = poll
                if show:
                    _print(poll)
                if not poll.same or poll.number == until:
                    break
    except OSError as error:
        raise typer.BadParameter(f"{log}: {error.strerror}", param_hint="LOG") from error
    return _finish(last, reader, as_json=as_json)


def _import_components(modules: list[str]) -> None:
    from bbnode.ir.class_names import ClassNotLoaded, load_module_named

    # The components that come with bbnode register themselves.
    importlib.import_module("bbnode.components")
    for name in modules:
        try:
            load_module_named(name)
        except ClassNotLoaded as error:
            raise typer.BadParameter(str(error), param_hint="--components") from error


def _print(poll: Replayed) -> None:
    for step in poll.steps:
        shown = {"poll": poll.number, "now_ns": poll.now_ns, **_event(step)}
        output.json_object(shown, indent=None, name="replay-step")


def _event(step: steps.Step) -> dict[str, Any]:
    from bbnode.daemon.observing.events import step_to_event
    from bbnode.engine import steps

    if isinstance(step, steps.SendEnvelope):
        sent = {"peer": str(step.peer), "bytes": step.size, "tag": step.tag}
        return {"type": "send_envelope", **sent}
    if isinstance(step, steps.RunTask):
        return {"type": "run_task", "op": step.op, "token": step.token}
    return step_to_event(step) or {"type": type(step).__name__}


def _finish(last: Replayed | None, reader: RecordReader, *, as_json: bool) -> int:
    polls = 0 if last is None else last.number
    differs = last is not None and not last.same
    if as_json:
        differing = polls if differs else None
        output.json_object({"polls": polls, "differs_at": differing, "torn": reader.torn or None})
    elif not differs:
        output.data(f"{polls} polls, all as recorded")
    if reader.torn:
        output.note(f"the record ends early: {reader.torn}; all before it was run again")
    if last is not None and differs:
        output.error(
            f"poll {last.number} (at {last.now_ns} ns) differs: {len(last.steps)} steps now, "
            f"{last.recorded} then; --print shows them"
        )
        return exits.FAILURE
    return exits.OK
