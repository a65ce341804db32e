"""`bbnode export`: the trained model of a node as a plain ONNX file.

Rule: the file is written whole or not at all, and never over a file of another kind. The node is
not changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import RunningNode, load_config

if TYPE_CHECKING:
    from bbnode.daemon.artifacts.artifact import Artifact
    from bbnode.daemon.config.sources import ResolvedConfig
    from bbnode.daemon.predicting.meaning import Meaning
    from bbnode.daemon.state.checkpoint import BestRound
    from bbnode.daemon.state.weights import WeightsOrigin


def command(
    out: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write it.", metavar="MODEL.onnx")
    ],
    node: RunningNode = RunningNode(timeout_s=60.0),
    slot: Annotated[
        str | None, typer.Option(help="The slot of the model, where a node has several.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Take the weights of this checkpoint.", metavar="FILE"),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Take the weights after the best round.")
    ] = False,
    artifact: Annotated[
        Path | None,
        typer.Option(
            help="The artifact that made the checkpoint, instead of the configuration's.",
            metavar="FILE",
        ),
    ] = None,
    untrained: Annotated[
        bool,
        typer.Option("--untrained", help="Also take weights that no training has changed."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a file that is no exported model.")
    ] = False,
) -> None:
    """Write the trained model of a node as a plain ONNX file.

    A running node is asked. Of one that does not run, the last checkpoint is read. The file's
    metadata say from which round the weights are, and what goes in and comes out, so that
    `bbnode predict` can use it.
    """
    if best and checkpoint is not None:
        raise typer.BadParameter("--best and --checkpoint are two checkpoints; give one")
    from bbnode.daemon.paths import write_atomically
    from bbnode.daemon.state import weights

    # A symbolic link is followed: its target is replaced, and not the link.
    out = out.expanduser().resolve()
    weights.check_output(out, force=force)
    export = None
    if not best and checkpoint is None:
        export = _from_running(node, slot)
    if export is None:
        export = _from_disk(node, slot, checkpoint=checkpoint, best=best, artifact=artifact)
    origin, meaning = _metadata(export.data)
    if not (origin.is_trained or untrained):
        raise weights.Untrained(
            f"{export.source}: slot {export.slot!r} has the weights that the program began with; "
            "let the node make a round, or add --untrained"
        )
    write_atomically(out, export.data, mode=0o644)
    if node.as_json:
        output.json_object(
            {
                "schema": "bbnode/export/1",
                "path": str(out),
                "slot": export.slot,
                "bytes": len(export.data),
                "from": export.source,
                "origin": dataclasses.asdict(origin),
                "data": None if meaning.data is None else meaning.data.kind,
                "output": meaning.kind or None,
                **({} if export.best is None else {"best": _best_json(export.best)}),
            }
        )
        return
    output.data(f"{out}  {len(export.data)} bytes  slot {export.slot}")
    output.note(f"weights of {export.source}: {origin}")
    if meaning.data is None:
        output.note(f"note: the file does not say what its inputs mean: {meaning.why}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Export:
    """An exported model; `source` names its origin for people."""

    slot: str
    data: bytes
    source: str
    best: BestRound | None = None


def _best_json(best: BestRound) -> dict[str, Any]:
    return {
        "target": best.target,
        "round": best.round,
        "output": best.output,
        "value": best.value,
    }


def _metadata(data: bytes) -> tuple[WeightsOrigin, Meaning]:
    """Return the origin of the weights, and the meaning of inputs and outputs."""
    import onnx

    from bbnode.daemon.predicting.meaning import Meaning
    from bbnode.daemon.state.weights import WeightsOrigin

    model = onnx.load_model_from_string(data)
    origin, meaning = WeightsOrigin.of_model(model), Meaning.of_model(model)
    # A node of an earlier release sends neither.
    return origin or WeightsOrigin(program=""), meaning or Meaning()


def _from_running(node: RunningNode, slot: str | None) -> _Export | None:
    """Return the model of a running node; None if none runs there."""
    from bbnode.daemon.control.errors import NotRunning
    from bbnode.daemon.state import weights

    with contextlib.ExitStack() as stack:
        try:
            client = stack.enter_context(node.ask())
        except NotRunning as error:
            if isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
                return None
            raise
        models = [each["slot"] for each in client.get("/v1/models")["models"]]
        name = weights.chosen(models, slot, where="the node")
        data = b"".join(client.download(f"/v1/models/{name}"))
    return _Export(slot=name, data=data, source="the running node")


def _from_disk(
    node: RunningNode,
    slot: str | None,
    *,
    checkpoint: Path | None,
    best: bool,
    artifact: Path | None,
) -> _Export:
    """Return the model of a checkpoint."""
    from bbnode.daemon.history.store import read_rounds, rounds_file
    from bbnode.daemon.lifecycle.assembly import slot_settings
    from bbnode.daemon.paths import StorageError
    from bbnode.daemon.state import checkpoint as checkpoints
    from bbnode.daemon.state import weights

    resolved = None
    if node.state_dir is None and (artifact is None or checkpoint is None):
        resolved = load_config(node.config)
    made_by = _artifact(resolved, artifact)
    if checkpoint is not None:
        path, saved = checkpoints.found(checkpoint.expanduser())
    elif best:
        path, saved = checkpoints.found(checkpoints.best_file(node.directory))
    else:
        path, saved = checkpoints.newest(node.directory)
    config = None if resolved is None else resolved.config
    rounds: list[dict[str, Any]] = []
    with contextlib.suppress(StorageError):  # the weights are complete without their round
        rounds = read_rounds(rounds_file(path.parent))
    name, data = weights.from_checkpoint(
        saved,
        made_by,
        slot,
        rounds=rounds,
        targets=() if config is None or artifact is not None else config.artifact.targets,
        settings={} if resolved is None else slot_settings(resolved, made_by),
        own_artifact=config is not None and config.artifact.path is None,
    )
    return _Export(slot=name, data=data, source=str(path), best=saved.best)


def _artifact(resolved: ResolvedConfig | None, file: Path | None) -> Artifact:
    from bbnode.daemon.artifacts.artifact import load_artifact

    if resolved is not None:
        from bbnode.daemon.lifecycle import assembly

        assembly.import_components(resolved)
        if file is None:
            return assembly.find_artifact(resolved)
    if file is None:
        raise typer.BadParameter(
            "no node runs there, and a checkpoint holds no program: give the artifact that made "
            "it (--artifact FILE), or the node's configuration (-c) in place of --state-dir"
        )
    return load_artifact(file)
