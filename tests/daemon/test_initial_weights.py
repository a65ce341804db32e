"""A program's models begin with weights of an exported model or of a checkpoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.components import mlp_forward
from bbnode.components.contracts import Model
from bbnode.components.errors import WeightsNotFinite
from bbnode.daemon.artifacts.artifact import load_artifact, serialize
from bbnode.daemon.artifacts.build import compiler_for
from bbnode.daemon.artifacts.initial import InitialWeightsRefused, initialize, read_weights
from bbnode.daemon.paths import StorageError
from bbnode.daemon.state import checkpoint
from bbnode.daemon.state.checkpoint import Checkpoint, CheckpointRefused
from bbnode.daemon.state.weights import WeightsOrigin, exported
from bbnode.engine import Node
from bbnode.ir.caps import MAX_ARTIFACT_BYTES
from bbnode.ir.errors import BbnodeError
from tests.components.fakes import CTX
from tests.daemon.trainer import SIZES, SilentModel, Train, X, node_of, train, trainer
from tests.daemon.views import Relay

NAMES = ("layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias")


def exported_net(node: Node) -> bytes:
    make = node.copy_of("net")
    return exported("net", make, make, WeightsOrigin(program="ab" * 32))


def trained(folder: Path, slots: tuple[str, ...] = ("net",), **more: Any) -> Node:
    node = node_of(trainer(slots, **more), folder)
    train(node)
    return node


def exported_file(folder: Path, **more: Any) -> Path:
    file = folder / "model.onnx"
    file.write_bytes(exported_net(trained(folder, **more)))
    return file


def checkpoint_file(folder: Path, node: Node) -> Path:
    (folder / "state").mkdir(exist_ok=True)
    saved = Checkpoint(artifact_sha256="a" * 64, node=node.snapshot(0), rounds_done={})
    checkpoint.write(folder / "state", saved)
    return folder / "state" / "checkpoint"


def begun(program: Train, file: Path, slots: Mapping[str, str | None], folder: Path) -> Node:
    """A node of the program that begins with the weights in a file."""
    recorded, _ = initialize(program.build(), read_weights(file), slots)
    return node_of(compiler_for(program).compile(recorded), folder)


def params(node: Node, slot: str = "net") -> np.ndarray:
    return np.asarray(node.component(slot).params(CTX))


def test_a_program_begins_with_what_was_exported(tmp_path: Path) -> None:
    file = exported_file(tmp_path)
    program = Train(("net", "net2"), seed=7, learning_rate=0.5)
    expected = params(trained(tmp_path))
    node = begun(program, file, {}, tmp_path)
    for slot in ("net", "net2"):
        np.testing.assert_array_equal(params(node, slot), expected)
        assert node.component(slot).config.learning_rate == 0.5
    node = begun(program, file, {"net2": None}, tmp_path)
    np.testing.assert_array_equal(params(node, "net2"), expected)
    assert not np.array_equal(params(node, "net"), expected)


def test_only_the_weights_of_the_program_change(tmp_path: Path) -> None:
    """The program that was trained, begun with its own weights, is the program it was."""
    program = Train()
    fresh = node_of(trainer(), tmp_path)
    file = tmp_path / "fresh.onnx"
    file.write_bytes(exported_net(fresh))
    before = program.build()
    after, told = initialize(before, read_weights(file), {})
    assert told["net"].taken == NAMES
    compiler = compiler_for(program)
    assert serialize(compiler.compile(after)) == serialize(compiler.compile(before))


def test_a_program_begins_with_a_checkpoint(tmp_path: Path) -> None:
    source = trained(tmp_path, ("net", "net2"))
    source.component("net2").load_parameters(CTX, np.ones(params(source).size, np.float32))
    file = checkpoint_file(tmp_path, source)
    node = begun(Train(("net", "net2"), seed=7), file, {}, tmp_path)
    for slot in ("net", "net2"):
        np.testing.assert_array_equal(params(node, slot), params(source, slot))
    node = begun(Train(("net", "ne"), seed=7), file, {"ne": "net2"}, tmp_path)
    np.testing.assert_array_equal(params(node, "ne"), params(source, "net2"))
    with pytest.raises(InitialWeightsRefused, match="several models, and none in slot 'ne'"):
        begun(Train(("ne",)), file, {}, tmp_path)
    with pytest.raises(InitialWeightsRefused, match="no model in slot 'net3'; did you mean 'net"):
        begun(Train(("ne",)), file, {"ne": "net3"}, tmp_path)
    alone = checkpoint_file(tmp_path, trained(tmp_path))
    node = begun(Train(("other",), seed=7), alone, {}, tmp_path)
    np.testing.assert_array_equal(params(node, "other"), params(trained(tmp_path)))


def test_what_is_taken_and_left_is_told(tmp_path: Path) -> None:
    file = exported_file(tmp_path)
    recorded = Train(sizes=(4, 5, 7)).build()
    told = initialize(recorded, read_weights(file), {})[1]["net"]
    assert told.taken == ("layer0.weight", "layer0.bias")
    assert told.left["layer1.weight"] == "its shape is [5, 3] there and [5, 7] here"


def onnx_file(path: Path, *tensors: TensorProto) -> Path:
    graph = helper.make_graph([], "g", [], [], list(tensors))
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return path


def weight(name: str, value: Any = 0.0, shape: tuple[int, ...] = (3,)) -> TensorProto:
    return numpy_helper.from_array(np.full(shape, value, np.float32), name)


def test_a_file_that_holds_no_weights_for_it_is_refused(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"no model at all, only text" * 20)
    with pytest.raises(InitialWeightsRefused, match="neither an ONNX model nor a checkpoint"):
        read_weights(garbage)
    program = tmp_path / "program.onnx"
    program.write_bytes(serialize(trainer()))
    with pytest.raises(InitialWeightsRefused, match="is a compiled program"):
        read_weights(program)
    with pytest.raises(InitialWeightsRefused, match="without float initializers"):
        read_weights(onnx_file(tmp_path / "none.onnx"))
    for missing in (tmp_path / "no.onnx", tmp_path):
        with pytest.raises(StorageError, match="cannot be read"):
            read_weights(missing)
    other = read_weights(onnx_file(tmp_path / "other.onnx", weight("w1"), weight("w2")))
    for slots in ({}, {"net": None}):
        with pytest.raises(InitialWeightsRefused, match=r"nothing of .* fits.*'w1' \[3\]"):
            initialize(Train().build(), other, slots)
    with pytest.raises(InitialWeightsRefused, match="is an ONNX file, which has no slots"):
        initialize(Train().build(), other, {"net": "net"})
    with pytest.raises(InitialWeightsRefused, match="did you mean 'net'"):
        initialize(Train().build(), other, {"nett": None})


def test_a_checkpoint_that_is_torn_or_without_a_model_is_refused(tmp_path: Path) -> None:
    file = checkpoint_file(tmp_path, trained(tmp_path))
    data = file.read_bytes()
    for content in (data[:-1], data[:20], data[:8]):
        file.write_bytes(content)
        with pytest.raises(CheckpointRefused, match="checkpoint: "):
            read_weights(file)
    for node in (b"", b"garbage"):
        saved = Checkpoint(artifact_sha256="a" * 64, node=node, rounds_done={})
        checkpoint.write(tmp_path / "state", saved)
        with pytest.raises(CheckpointRefused, match="snapshot"):
            read_weights(file)


def test_another_model_altogether_is_refused(tmp_path: Path) -> None:
    file = exported_file(tmp_path)
    with pytest.raises(InitialWeightsRefused, match="nothing of"):
        initialize(Relay().build(), read_weights(file), {})


def test_a_model_of_a_package_may_take_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SilentModel, "initialized", Model.__dict__["initialized"])
    file = exported_file(tmp_path)
    recorded = Train(model=SilentModel).build()
    with pytest.raises(InitialWeightsRefused, match="takes no initial weights"):
        initialize(recorded, read_weights(file), {})


def test_files_that_a_model_names_are_not_read(tmp_path: Path) -> None:
    model = mlp_forward(SIZES)
    file = tmp_path / "model.onnx"
    onnx.save(model, file, save_as_external_data=True, location="w.bin", size_threshold=0)
    with pytest.raises(InitialWeightsRefused, match=r"onnx\.save\(onnx\.load"):
        read_weights(file)
    tensor = weight("layer0.bias", shape=(5,))
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    with pytest.raises(InitialWeightsRefused):
        read_weights(onnx_file(tmp_path / "evil.onnx", tensor))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    bad = onnx_file(tmp_path / "bad.onnx", weight("layer0.bias", value, (5,)))
    recorded = Train(("net", "net2")).build()
    with pytest.raises(WeightsNotFinite, match=r"'layer0\.bias' holds NaN or infinity"):
        initialize(recorded, read_weights(bad), {})
    unused = onnx_file(
        tmp_path / "mask.onnx", weight("mask", value), weight("layer0.bias", 1.0, (5,))
    )
    assert initialize(recorded, read_weights(unused), {})[1]["net"].taken == ("layer0.bias",)


@pytest.mark.parametrize(
    ("dims", "size"), [([1 << 40], 4), ([-1], 4), ([5], 16), ([1 << 62, 1 << 62], 0)]
)
def test_a_malformed_tensor_is_refused(tmp_path: Path, dims: list[int], size: int) -> None:
    tensor = TensorProto(name="layer0.bias", data_type=1, dims=dims, raw_data=b"\0" * size)
    file = onnx_file(tmp_path / "m.onnx", tensor)
    with pytest.raises(InitialWeightsRefused, match=r"'layer0\.bias' is malformed"):
        initialize(Train().build(), read_weights(file), {})


def test_a_gigantic_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "huge.onnx"
    with file.open("wb") as stream:
        stream.truncate(MAX_ARTIFACT_BYTES + 1)  # sparse: it takes no room
    with pytest.raises(InitialWeightsRefused, match="larger than the 2 GiB"):
        read_weights(file)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(noise=st.binary(max_size=60), at=st.integers(0, 10_000))
def test_a_damaged_model_is_a_typed_refusal_or_fits(tmp_path: Path, noise: bytes, at: int) -> None:
    file = tmp_path / "model.onnx"
    good = mlp_forward(SIZES).SerializeToString()
    at %= len(good)
    file.write_bytes(good[:at] + noise + good[at + len(noise) :])
    with contextlib.suppress(BbnodeError):
        initialize(Train().build(), read_weights(file), {})


# --- the command ------------------------------------------------------------------------------


def test_the_command_says_what_it_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = exported_file(tmp_path), tmp_path / "program.onnx"
    words = ["compile", "tests.daemon.trainer:Train", "-o", str(out), "--init-from", str(file)]
    assert main([*words, "--arg", "sizes=[4, 5, 7]"]) == exits.OK
    captured = capsys.readouterr()
    assert "slot net: 2 initial weights taken" in captured.out
    assert "slot net: left layer1.weight: its shape is [5, 3] there" in captured.err
    assert main([*words, "--json", "--arg", "seed=7"]) == exits.OK
    told = json.loads(capsys.readouterr().out)
    assert told["initialized"] == {"net": {"taken": list(NAMES), "left": {}}}
    node = node_of(load_artifact(out).model, tmp_path)
    np.testing.assert_array_equal(params(node), params(trained(tmp_path)))
    assert np.isfinite(node.component("net").forward(CTX, X)).all()


def test_the_command_refuses_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, out = onnx_file(tmp_path / "o.onnx", weight("w")), tmp_path / "program.onnx"
    words = ["compile", "tests.daemon.trainer:Train", "-o", str(out)]
    for more in (
        ["--init-from", str(other)],
        ["--init-from", str(tmp_path / "no")],
        ["--slot", "net"],
        ["--init-from", str(exported_file(tmp_path)), "--slot", "nett"],
    ):
        assert main([*words, *more]) in (exits.USAGE, exits.FAILURE)
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        assert not out.exists()
