"""`bbnode export`: from a running node, from its checkpoint, and what it refuses."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import trio

from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.components import mlp_forward
from bbnode.daemon import paths
from bbnode.daemon.artifacts.artifact import load_artifact, serialize
from bbnode.daemon.history.store import RoundStore, rounds_file
from bbnode.daemon.invoke.rounds import Round
from bbnode.daemon.paths import lock_file
from bbnode.daemon.state import checkpoint
from bbnode.daemon.state.checkpoint import BestRound, Checkpoint
from bbnode.engine import Node
from tests.components.fakes import CTX
from tests.daemon.live import in_thread, running
from tests.daemon.trainer import X, node_of, train, trainer
from tests.patience import PATIENCE_S, patiently


def run(file: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(file.read_bytes())
    return np.asarray(session.run(["logits"], {"x": X})[0])


def forward(node: Node, slot: str = "net") -> np.ndarray:
    return np.asarray(node.component(slot).forward(CTX, X))


@dataclass
class Stopped:
    """A node that does not run: its configuration, its artifact and its last checkpoint."""

    folder: Path
    node: Node

    @property
    def config(self) -> Path:
        return self.folder / "node.toml"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def checkpoint(self, **more: Any) -> Checkpoint:
        sha256 = load_artifact(self.folder / "program.onnx").sha256
        saved = self.node.snapshot(0)
        return Checkpoint(**{"artifact_sha256": sha256, "node": saved, "rounds_done": {}, **more})


def stopped(folder: Path, model: Any = None) -> Stopped:
    model = trainer() if model is None else model
    (folder / "program.onnx").write_bytes(serialize(model))
    (folder / "state").mkdir(mode=0o700)
    (folder / "node.toml").write_text(
        '[node]\nname = "t"\nstate_dir = "state"\n'
        '[artifact]\npath = "program.onnx"\ntargets = ["trainer"]\n'
        f'[slots.data]\npath = "{folder}/data.npz"\n'
    )
    made = Stopped(folder, node_of(model, folder))
    train(made.node)
    checkpoint.write(made.state, made.checkpoint())
    return made


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    capsys.readouterr()  # of the calls before
    assert main([str(word) for word in words]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


async def test_of_a_running_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = node_of(trainer(("net", "net2")), tmp_path)
    train(node)
    out = tmp_path / "model.onnx"
    async with running(tmp_path, client=False, node=node) as live:

        async def export(*more: str) -> int:
            words = ("export", "-o", out, *more, "--state-dir", live.state_dir)
            with trio.fail_after(PATIENCE_S):
                return await in_thread(main, patiently(*words))

        assert await export("--slot", "net2", "--json") == exits.OK
        told = json.loads(capsys.readouterr().out)
        assert told == {
            "schema": "bbnode/export/1", "path": str(out), "slot": "net2",
            "bytes": out.stat().st_size, "from": "the running node",
            "origin": {
                "program": "0" * 64, "target": "", "round": 0, "metrics": {}, "is_trained": True,
            },
            "data": None, "output": None,
        }  # fmt: skip
        np.testing.assert_allclose(run(out), forward(node, "net2"), atol=1e-6)
        assert await export("--slot", "net") == exits.OK  # an exported model gives way
        shown = capsys.readouterr()
        assert "slot net" in shown.out
        assert "the running node" in shown.err
        np.testing.assert_allclose(run(out), forward(node), atol=1e-6)
        before = out.read_bytes()
        for more in ((), ("--slot", "ne")):
            assert await export(*more) == exits.USAGE
            assert "net, net2" in capsys.readouterr().err
        assert out.read_bytes() == before
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]  # noqa: PTH208


def test_of_a_node_that_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = stopped(tmp_path)
    out = tmp_path / "model.onnx"
    assert main(["export", "-o", str(out), "-c", str(node.config)]) == exits.OK
    captured = capsys.readouterr()
    assert "slot net" in captured.out
    assert str(node.state / "checkpoint") in captured.err
    np.testing.assert_allclose(run(out), forward(node.node), atol=1e-6)
    words = ["export", "-o", str(out), "-c", str(node.config), "--json"]
    assert main(words) == exits.OK
    told = json.loads(capsys.readouterr().out)
    assert (told["data"], told["output"]) == ("arrays", "logits")
    assert "does not say" not in captured.err
    words = ["export", "-o", str(out), "--state-dir", str(node.state)]
    assert main([*words, "--artifact", str(tmp_path / "program.onnx"), "--json"]) == exits.OK
    told = json.loads(capsys.readouterr().out)
    assert (told["slot"], told["data"]) == ("net", None)  # where the data are, nobody said
    assert main([*words, "--artifact", str(tmp_path / "program.onnx")]) == exits.OK
    assert "slot 'data' could not be read" in capsys.readouterr().err
    assert "--artifact" in refused(capsys, exits.USAGE, *words)


def test_the_best_and_any_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = stopped(tmp_path)
    out = tmp_path / "model.onnx"
    words = ("export", "-o", out, "-c", node.config)
    assert "there is no such checkpoint" in refused(capsys, exits.USAGE, *words, "--best")
    best = BestRound(target="trainer", round=3, output="accuracy", value=0.5)
    checkpoint.write_best(node.state, node.checkpoint(best=best))
    at_best = forward(node.node)
    train(node.node, 10)
    checkpoint.write(node.state, node.checkpoint())
    assert main([*map(str, words), "--best", "--json"]) == exits.OK
    told = json.loads(capsys.readouterr().out)
    assert told["best"] == {"target": "trainer", "round": 3, "output": "accuracy", "value": 0.5}
    np.testing.assert_allclose(run(out), at_best, atol=1e-6)
    assert main([*map(str, words), "--checkpoint", str(node.state / "checkpoint.previous")]) == 0
    np.testing.assert_allclose(run(out), at_best, atol=1e-6)
    assert main([*map(str, words)]) == exits.OK
    np.testing.assert_allclose(run(out), forward(node.node), atol=1e-6)
    assert "give one" in refused(capsys, exits.USAGE, *words, "--best", "--checkpoint", "x")


def untrained(folder: Path) -> Stopped:
    node = stopped(folder)
    node.node = node_of(trainer(), folder)
    for _ in range(2):
        checkpoint.write(node.state, node.checkpoint())
    return node


def test_untrained_weights_are_refused_unless_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = untrained(tmp_path)
    out = tmp_path / "model.onnx"
    out.write_bytes(mlp_forward((4, 3), seed=1).SerializeToString())
    before = out.read_bytes()
    words = ("export", "-o", out, "-c", node.config)
    assert "--untrained" in refused(capsys, exits.USAGE, *words)
    assert out.read_bytes() == before
    assert main([*map(str, words), "--untrained"]) == exits.OK
    assert "untrained" in capsys.readouterr().err
    np.testing.assert_allclose(run(out), forward(node.node), atol=1e-6)


def test_an_export_names_its_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = stopped(tmp_path)
    store = RoundStore(rounds_file(node.state), keep=10)
    for number in (1, 2):
        ended = Round(number=number, target="trainer", execution=number, ok=True)
        ended.metrics["loss"] = 1.0 / number
        store.add(ended.as_json(), 1)
    store.close()
    checkpoint.write(node.state, node.checkpoint(rounds_done={"trainer": 2}))
    out = tmp_path / "model.onnx"
    assert main(["export", "-o", str(out), "-c", str(node.config)]) == exits.OK
    assert "after round 2, loss 0.5" in capsys.readouterr().err
    checkpoint.write(node.state, node.checkpoint(rounds_done={"trainer": 3}))
    assert main(["export", "-o", str(out), "-c", str(node.config)]) == exits.OK
    assert "after round 3\n" in capsys.readouterr().err  # whose numbers are not on disk


def test_a_node_that_stopped_before_its_first_round_ended_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = stopped(tmp_path)
    words = ("rounds", "-c", str(node.config))
    assert "no daemon is running" in refused(capsys, exits.UNREACHABLE, *words)
    lock_file(node.state).touch()
    assert main([*words]) == exits.OK
    assert "no round has ended yet" in capsys.readouterr().err


def test_damaged_checkpoints_are_named_with_what_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = stopped(tmp_path)
    best = BestRound(target="trainer", round=3, output="accuracy", value=0.5)
    checkpoint.write_best(node.state, node.checkpoint(best=best))
    checkpoint.write(node.state, node.checkpoint())
    for name in ("checkpoint", "checkpoint.previous"):
        damaged = node.state / name
        damaged.write_bytes(damaged.read_bytes()[:-1])
    told = refused(capsys, exits.USAGE, "export", "-o", tmp_path / "m.onnx", "-c", node.config)
    assert told.count("checksum does not fit") == 2
    assert "best round is whole (round 3, accuracy 0.5): take it with --best" in told


def test_a_checkpoint_that_can_not_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = stopped(tmp_path)
    out = tmp_path / "model.onnx"
    words = ("export", "-o", out, "-c", node.config)
    file = tmp_path / "c"
    for content in (b"", b"garbage", checkpoint.checkpoint_file(node.state).read_bytes()[:-9]):
        file.write_bytes(content)
        assert str(file) in refused(capsys, exits.USAGE, *words, "--checkpoint", file)
        checkpoint.checkpoint_file(node.state).write_bytes(content)
        assert "checkpoint: " in refused(capsys, exits.USAGE, *words)
    other = tmp_path / "other"
    other.mkdir()
    deeper = stopped(other, trainer(sizes=(4, 5, 5, 3)))
    kept = deeper.state / "checkpoint"
    err = refused(capsys, exits.USAGE, *words, "--checkpoint", kept)
    assert "another version" in err
    assert "--artifact" in err
    more = ("--checkpoint", kept, "--artifact", other / "program.onnx")
    assert main([str(word) for word in (*words, *more)]) == exits.OK
    np.testing.assert_allclose(run(out), forward(deeper.node), atol=1e-6)
    assert "no such state directory" in refused(
        capsys, exits.USAGE, "export", "-o", out, "--state-dir", tmp_path / "no",
        "--artifact", tmp_path / "program.onnx",
    )  # fmt: skip


def test_the_lock_of_the_state_directory_is_respected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a daemon that starts or stops, and does not answer."""
    node = stopped(tmp_path)
    words = ("export", "-o", tmp_path / "m.onnx", "-c", node.config)
    with paths.lock_state_dir(node.state):
        assert "in use by process" in refused(capsys, exits.FAILURE, *words)
    assert main([*map(str, words)]) == exits.OK


def test_no_other_file_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = stopped(tmp_path)
    words = ["export", "-c", str(node.config), "-o"]
    for name in ("node.toml", "program.onnx"):
        before = (tmp_path / name).read_bytes()
        assert "--force" in refused(capsys, exits.USAGE, *words, tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    assert main([*words, str(tmp_path / "data.npz"), "--force"]) == exits.OK
    np.testing.assert_allclose(run(tmp_path / "data.npz"), forward(node.node), atol=1e-6)
    link = tmp_path / "link.onnx"
    link.symlink_to(tmp_path / "program.onnx")
    assert "a compiled program" in refused(capsys, exits.USAGE, *words, link)
