"""An artifact is what it says it is, or a typed error says why not."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx
import pytest

from bbnode.daemon.artifacts.artifact import (
    ArtifactRejected,
    load_artifact,
    parse_artifact,
    serialize,
)
from bbnode.ir import keys
from bbnode.ir.errors import MissingFile
from bbnode.ir.seal import seal
from tests import protos


def compiled() -> onnx.ModelProto:
    model = onnx.ModelProto(ir_version=keys.FRAMEWORK_IR_VERSION)
    protos.set_meta(model, keys.COMPILED_KEY, keys.COMPILED_CURRENT_VERSION)
    seal(model)
    return model


def test_a_compiled_model_is_loaded_with_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    path.write_bytes(serialize(compiled()))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    artifact = load_artifact(path, expected_sha256=digest.upper())
    assert artifact.sha256 == digest
    assert artifact.model == compiled()


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    path.write_bytes(serialize(compiled()))
    with pytest.raises(ArtifactRejected, match="changed"):
        load_artifact(path, expected_sha256="0" * 64)


@pytest.mark.parametrize("change", ["edit", "strip"])
def test_a_model_that_was_edited_is_refused_without_a_digest_too(change: str) -> None:
    model = compiled()
    if change == "edit":
        model.doc_string = "better"
    else:
        protos.del_meta(model, keys.SEAL_KEY)
    with pytest.raises(ArtifactRejected, match="changed after it was compiled"):
        parse_artifact(serialize(model), "x")


def test_a_missing_file_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=r"nowhere\.onnx.*bbnode compile"):
        load_artifact(tmp_path / "nowhere.onnx")


def test_a_model_that_was_not_compiled_is_refused() -> None:
    with pytest.raises(ArtifactRejected, match="not compiled"):
        parse_artifact(serialize(onnx.ModelProto(ir_version=10)), "x")


def test_a_newer_passport_is_refused() -> None:
    model = compiled()
    protos.set_meta(model, keys.COMPILED_KEY, "v2")
    with pytest.raises(ArtifactRejected, match="'v2'"):
        parse_artifact(serialize(model), "x")


@pytest.mark.parametrize("data", [b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f" + b"x" * 20])
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ArtifactRejected, match="not an ONNX model"):
        parse_artifact(data, "x")
