"""Snapshots as ONNX models: open to ONNX's tools, and back without a loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.compiler import Compiler
from bbnode.components import OrtBackend
from bbnode.daemon.artifacts.artifact import load_artifact, serialize
from bbnode.daemon.state import checkpoint
from bbnode.dsl import BackendSlot, Graph, Module, syscalls, types
from bbnode.engine import install
from bbnode.engine.errors import SnapshotRefused
from bbnode.engine.snapshot.as_model import opened_snapshot, snapshot_model
from bbnode.engine.steps import AppEvent
from bbnode.ir import keys
from bbnode.ir.peer import PeerId
from bbnode.ir.seal import is_intact
from bbnode.ir.values import TRIGGER

S = 1_000_000_000


class Later(Module):
    """Doubles a value, a second later."""

    def body(self, g: Graph) -> None:
        x, tick = g.input("x", types.TENSOR_FLOAT), g.input("tick", types.TRIGGER)
        later = syscalls.sleep(g, tick, duration_ns=S)
        g.output("y", BackendSlot("compute").add(g, syscalls.gate(g, x, later), x))


def artifact_and_snapshot() -> tuple[ModelProto, bytes]:
    artifact = Compiler().bind_backend("compute", OrtBackend).compile(Later().build())
    node = install(artifact, ["@self"], peer_id=PeerId.from_seed(1))
    node.invoke("@self", {"x": np.array([4], np.float32), "tick": TRIGGER})
    node.poll(0)
    return artifact, node.snapshot(0)


def test_a_snapshot_goes_into_a_model_and_comes_back() -> None:
    artifact, snapshot = artifact_and_snapshot()
    model = snapshot_model(artifact, snapshot)
    assert is_intact(model)
    onnx.checker.check_model(onnx.load_from_string(model.SerializeToString()), full_check=True)
    assert onnx.printer.to_text(model)
    names = [tensor.name for tensor in model.graph.initializer]
    assert names == [keys.STATE_PREFIX + "compute", keys.TRANSIENT_STATE]
    again, data = opened_snapshot(model)
    assert serialize(again) == serialize(artifact)
    assert data == snapshot
    node = install(again, ["@self"], peer_id=PeerId.from_seed(1))
    node.restore(data, 0)
    made = [step for at in (0, 2 * S) for step in node.poll(at)]
    assert [step.value.tolist() for step in made if isinstance(step, AppEvent)] == [[8]]


def test_what_is_no_snapshot_is_refused() -> None:
    artifact, snapshot = artifact_and_snapshot()
    with pytest.raises(SnapshotRefused, match="no snapshot"):
        opened_snapshot(artifact)
    with pytest.raises(SnapshotRefused):
        snapshot_model(artifact, snapshot[:-1])
    changed = snapshot_model(artifact, snapshot)
    changed.graph.initializer[1].raw_data = b"other"
    with pytest.raises(SnapshotRefused, match="changed since"):
        opened_snapshot(changed)


def test_the_command_exports_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact, snapshot = artifact_and_snapshot()
    file, out = tmp_path / "a.onnx", tmp_path / "s.onnx"
    file.write_bytes(serialize(artifact))
    digest = load_artifact(file).sha256
    asked = ["snapshot", "--from", str(tmp_path), "--export", str(out)]
    assert main([*asked, "--artifact", str(file)]) != exits.OK
    assert "holds no checkpoint" in capsys.readouterr().err
    checkpoint.write(
        tmp_path, checkpoint.Checkpoint(artifact_sha256=digest, node=snapshot, rounds_done={})
    )
    assert main([*asked, "--artifact", str(file)]) == exits.OK
    assert capsys.readouterr().out == f"{out}\n"
    assert opened_snapshot(onnx.load(out))[1] == snapshot
    assert main(asked) == exits.USAGE
    assert main(["snapshot", "--artifact", str(file)]) == exits.USAGE
