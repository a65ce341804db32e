"""`bbnode snapshot`: write a running node's state to disk now, or export it as an ONNX model.

Rule: when it returns, the state is on disk. The newest intact checkpoint is exported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bbnode.cli import output
from bbnode.cli.common import RunningNode


def command(
    node: RunningNode = RunningNode(timeout_s=60.0),
    export: Annotated[
        Path | None,
        typer.Option(
            help="Write artifact and state as one ONNX model, for ONNX's tools.",
            metavar="OUT.onnx",
        ),
    ] = None,
    artifact: Annotated[
        Path | None,
        typer.Option(help="With --export: the artifact that the node runs.", metavar="FILE"),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="With --export: the state directory to read, of a node that need not run.",
            metavar="DIR",
        ),
    ] = None,
) -> None:
    """Write the state of a running node to its state directory."""
    if export is None and (artifact is not None or source is not None):
        raise typer.BadParameter("--artifact and --from go with --export OUT.onnx")
    if export is not None and artifact is None:
        raise typer.BadParameter("--export needs --artifact FILE: what the node runs")
    if source is None:
        with node.ask() as client:
            answer = client.post("/v1/snapshot")
        if export is None:
            node.show(answer, f"{answer['bytes']} bytes of state in {answer['state_dir']}")
            return
        source = Path(answer["state_dir"])
    if export is not None and artifact is not None:
        size = _export(source, artifact, export)
        answer = {"schema": "bbnode/snapshot-model/1", "path": str(export), "bytes": size}
        if node.as_json:
            output.json_object(answer)
        else:
            output.data(str(export))


def _export(state_dir: Path, file: Path, out: Path) -> int:
    from bbnode.daemon.artifacts.artifact import load_artifact, serialize
    from bbnode.daemon.paths import write_atomically
    from bbnode.daemon.state import checkpoint
    from bbnode.engine.snapshot.as_model import snapshot_model

    artifact = load_artifact(file)
    newest = next(checkpoint.usable(state_dir, artifact.sha256), None)
    if newest is None:
        raise checkpoint.CheckpointRefused(
            f"{state_dir} holds no checkpoint of {file}; give the artifact that the node runs, and "
            "the state directory of a node on this machine"
        )
    data = serialize(snapshot_model(artifact.model, newest.node))
    write_atomically(out.absolute(), data, mode=0o600)
    return len(data)
