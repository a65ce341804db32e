"""Models by path: read piece by piece, the same bits as from bytes, and refused by name."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from bbnode.components.autodiff import InvalidForwardModel
from bbnode.components.errors import InvalidComponentConfig
from bbnode.components.models import onnx_model as onnx_models
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.models.onnx_model import OnnxModel, OnnxModelConfig, read_model
from bbnode.components.registry import ConfigTypeMismatch, build_config, concrete
from bbnode.components.settings import LocalSettingRefused, local_settings, path_settings
from tests.components.fakes import CTX, ort

SIZES = (130, 140, 150, 3)
MLP = mlp_forward(SIZES, seed=2)
NAMES = [tensor.name for tensor in MLP.graph.initializer]
X = np.ones((2, 130), np.float32)


def seen(content: bytes | str | Path, **settings: Any) -> tuple[bytes, ...]:
    """Return all that a model of these settings shows of its weights."""
    made = OnnxModel(OnnxModelConfig(model=content, **settings))
    made.bind({"backend": ort()})
    out = np.asarray(made.forward(CTX, X))
    model = made.config.model
    assert isinstance(model, bytes)
    return made.serialize(), model, made.export().SerializeToString(), out.tobytes()


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(MLP.SerializeToString())
    return path


@pytest.fixture
def split(tmp_path) -> Path:
    """A model with all of its tensors in another file."""
    path = tmp_path / "split.onnx"
    (tmp_path / "more").mkdir()
    copy = ModelProto()
    copy.CopyFrom(MLP)
    onnx.save(copy, path, save_as_external_data=True, location="more/w.bin", size_threshold=0)
    return path


@pytest.mark.parametrize("trainable", [(), (NAMES[0],), ("!" + NAMES[2],)])
def test_a_path_gives_the_same_bits_as_bytes(trainable, path, split) -> None:
    expected = seen(MLP.SerializeToString(), trainable=trainable)
    assert seen(path, trainable=trainable) == expected
    assert seen(str(path), trainable=trainable) == expected
    assert seen(split, trainable=trainable) == expected


def test_a_path_is_parsed_whole_where_adapters_change_the_weights(path) -> None:
    lora = onnx_models.Lora(targets=("*",), rank=2)
    assert seen(path, lora=lora) == seen(MLP.SerializeToString(), lora=lora)


def test_no_array_of_a_bytes_model_is_a_copy() -> None:
    content = MLP.SerializeToString()
    with onnx_models.intake.opened_model(content) as (light, apart):
        assert set(apart) == {NAMES[0], NAMES[2]}
        assert len(light.SerializeToString()) < len(content) // 10
        for tensor in apart.values():
            assert np.shares_memory(tensor.array(), np.frombuffer(content, np.uint8))


def test_half_precision_weights_are_read_as_they_are(tmp_path) -> None:
    """A frozen float16 table, which is cast before it is used."""
    half = numpy_helper.from_array(np.ones((300, 130), np.float16) / 3, "half")
    model = ModelProto()
    model.CopyFrom(MLP)
    model.graph.initializer.append(half)
    path = tmp_path / "half.onnx"
    path.write_bytes(model.SerializeToString())
    with onnx_models.intake.opened_model(path) as (_, apart):
        np.testing.assert_array_equal(apart["half"].array(), numpy_helper.to_array(half))
        assert apart["half"].whole() == half


def shrink(path: Path) -> None:
    os.truncate(path, 1000)


def write(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"\0" * 100)
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("change", "told"), [(shrink, "ends before its byte"), (write, "changed while it was read")]
)
@pytest.mark.parametrize("which", ["model.onnx", "more/w.bin"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    change: Callable[[Path], None], told: str, which: str, path, split, monkeypatch
) -> None:
    derive = onnx_models._derive
    file = path.parent / which

    def derived(*given: Any) -> Any:
        found = derive(*given)
        change(file)
        return found

    monkeypatch.setattr(onnx_models, "_derive", derived)
    model = path if which == "model.onnx" else split
    with pytest.raises(InvalidForwardModel, match=f"{file.name}.*{told}.*nobody write"):
        OnnxModel(OnnxModelConfig(model=model))
    assert not [link for link in Path("/proc/self/fd").iterdir() if link.exists()
                and link.resolve() == file]  # fmt: skip


def test_a_file_that_is_replaced_meanwhile_is_read_as_it_was(path, monkeypatch) -> None:
    expected = seen(path)
    derive = onnx_models._derive

    def derived(*given: Any) -> Any:
        path.unlink()
        path.write_bytes(mlp_forward(SIZES, seed=9).SerializeToString())
        return derive(*given)

    monkeypatch.setattr(onnx_models, "_derive", derived)
    assert seen(path) == expected


def test_what_is_no_file_with_a_model_is_refused(path, tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    content = path.read_bytes()
    cases = {"absent.onnx": "No such file", ".": "not a file", "pipe": "not a file"}
    for junk in (b"", b"junk", content[:-7], content[: len(content) // 2]):
        (tmp_path / f"junk{len(junk)}").write_bytes(junk)
        cases[f"junk{len(junk)}"] = "graph|not an ONNX model"
        with pytest.raises(InvalidForwardModel):
            OnnxModel(OnnxModelConfig(model=junk))
    for name, told in cases.items():
        with pytest.raises(InvalidForwardModel, match=told):
            OnnxModel(OnnxModelConfig(model=tmp_path / name))
    with pytest.raises(InvalidForwardModel, match="null"):
        OnnxModel(OnnxModelConfig(model="a\0b"))


def moved(split: Path, **entries: str) -> None:
    model = onnx.load(split, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = entries.get(entry.key, entry.value)
    split.write_bytes(model.SerializeToString())


@pytest.mark.parametrize(
    "entries",
    [
        {"location": "../w.bin"},
        {"location": "/etc/passwd"},
        {"location": "more"},
        {"location": "link/w.bin"},
        {"location": "linked.bin"},
        {"location": "more/absent.bin"},
        {"offset": "-4"},
        {"offset": "99999999"},
        {"offset": "many"},
        {"length": "12"},
        {"length": "99999999999"},
    ],
)
def test_data_files_elsewhere_or_of_another_size_are_refused(entries, split) -> None:
    folder = split.parent
    (folder.parent / "w.bin").write_bytes((folder / "more/w.bin").read_bytes())
    (folder / "link").symlink_to(folder / "more")
    (folder / "linked.bin").symlink_to(folder / "more/w.bin")
    moved(split, **entries)
    with pytest.raises(InvalidForwardModel):
        OnnxModel(OnnxModelConfig(model=split))


def test_an_artifact_holds_bytes_and_may_not_name_a_path(path, split) -> None:
    config = OnnxModelConfig(model=split)
    for spec in (concrete(OnnxModel, config), concrete(OnnxModel, model=str(split))):
        assert msgpack.unpackb(spec.config)["model"] == read_model(MLP)
    for value in (str(path), ["x"], None, 3):
        stored = msgpack.packb({"model": value})
        with pytest.raises(LocalSettingRefused, match="model = … under"):
            build_config(OnnxModel, "model", stored, {})
        built = build_config(OnnxModel, "model", stored, {"model": str(path)})
        assert seen(built.model) == seen(path)
    stored = msgpack.packb({"model": MLP.SerializeToString()})
    assert build_config(OnnxModel, "model", stored, {}).model == MLP.SerializeToString()


def test_a_path_of_a_node_is_made_absolute_and_is_no_setting_of_the_node_alone() -> None:
    assert path_settings(OnnxModelConfig) == ("model",)
    assert local_settings(OnnxModelConfig) == ("check",)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model": 3}, "'model.*it is 3"),
        ({"learning_rate": "quick"}, "'learning_rate'.*number.*'quick'"),
        ({"trainable": "head"}, "'trainable'.*tuple"),
        ({"trainable": (1,)}, "'trainable.0'.*string"),
        ({"mode": "training"}, "'mode'.*'as_written' or 'train'"),
        ({"betas": (0.9,)}, "'betas"),
        ({"accumulate": 1.5}, "'accumulate'.*integer"),
        ({"lora": 3}, "'lora'"),
    ],
)
def test_settings_of_another_type_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidComponentConfig, match=told):
        OnnxModel(OnnxModelConfig(**{"model": MLP.SerializeToString(), **settings}))
    given = {**settings}
    with pytest.raises((ConfigTypeMismatch, LocalSettingRefused)):
        build_config(OnnxModel, "m", msgpack.packb({"model": b"", **given}), {})


def test_settings_of_another_component_are_refused() -> None:
    with pytest.raises(InvalidComponentConfig, match="takes a OnnxModelConfig, got dict"):
        OnnxModel({"model": MLP.SerializeToString()})  # type: ignore[arg-type]


def test_loading_takes_the_memory_of_the_weights(tmp_path) -> None:
    content = mlp_forward((1400, 1400, 3), seed=1).SerializeToString()
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    small = len(content) // 4
    for given in (path, content):  # and not what the caller holds, which is there before
        OnnxModel(OnnxModelConfig(model=given))
        tracemalloc.start()
        made = OnnxModel(OnnxModelConfig(model=given))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert made.size * 4 <= peak < made.size * 4 + small
