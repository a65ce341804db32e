"""Commands and code of docs/results.md run, from top to bottom, beside a node that trained."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.daemon.artifacts.artifact import load_artifact
from bbnode.daemon.state import checkpoint
from bbnode.daemon.state.checkpoint import BestRound, Checkpoint
from bbnode.engine import install
from bbnode.ir.peer import PeerId
from tests.components.fakes import CTX

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A node.toml, an artifact and a state directory; the trained weights in its checkpoint."""
    monkeypatch.chdir(tmp_path)
    program = "bbnode.examples.federated_digits:FederatedRound"
    assert main(["compile", program, "-o", "program.onnx"]) == exits.OK
    (tmp_path / "node.toml").write_text(
        '[node]\nname = "server"\nstate_dir = "state"\n'
        '[artifact]\npath = "program.onnx"\ntargets = ["server"]\n'
    )
    artifact = load_artifact(tmp_path / "program.onnx")
    node = install(artifact.model, ["server"], peer_id=PeerId.from_seed("server"))
    model = node.component("global")
    trained = np.linspace(-1, 1, model.size, dtype=np.float32)
    model.load_parameters(CTX, trained)
    best = BestRound(target="server", round=3, output="accuracy", value=0.9)
    saved = Checkpoint(artifact_sha256=artifact.sha256, node=node.snapshot(0), rounds_done={})
    (tmp_path / "state").mkdir(mode=0o700)
    checkpoint.write(tmp_path / "state", saved)
    checkpoint.write_best(
        tmp_path / "state",
        Checkpoint(
            artifact_sha256=saved.artifact_sha256, node=saved.node, rounds_done={}, best=best
        ),
    )
    return trained


def test_the_page_runs(
    weights: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    commands = 0
    for kind, text in BLOCK.findall(PAGE.read_text("utf-8")):
        if kind == "python":
            exec(compile(text, str(PAGE), "exec"), names)
            continue
        for line in text.splitlines():
            name, *words = shlex.split(line)
            if name == "bbnode":  # curl is somebody else's
                assert main(words) == exits.OK, capsys.readouterr().err
                commands += 1
    assert commands == 6
    assert np.shape(names["logits"]) == (2, 10)
    artifact = load_artifact(tmp_path / "next.onnx")
    node = install(artifact.model, ["client"], peer_id=PeerId.from_seed("client"))
    np.testing.assert_array_equal(node.component("local").params(CTX), weights)
