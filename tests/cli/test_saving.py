"""`bbnode invoke --save`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import typer

from bbnode.cli import saving
from bbnode.daemon.invoke.exact import Encoder
from bbnode.daemon.paths import StorageError
from bbnode.ir.errors import DeploymentError
from bbnode.ir.values import Metadata


def told(**outputs: Any) -> dict[str, Any]:
    encode = Encoder()
    return {"values": {name: encode(value) for name, value in outputs.items()}}


def test_arrays_go_into_npy_and_npz_and_others_into_json(tmp_path: Path) -> None:
    files = saving.parse(
        [f"a={tmp_path}/a.npy", f"b={tmp_path}/all.npz", f"c={tmp_path}/all.npz",
         f"stats={tmp_path}/stats.json"]
    )  # fmt: skip
    weights = np.float32([[1, 2]])
    texts = np.array(["x", "yz"], object)
    files.write(told(a=weights, b=texts, c=np.array([1.5], ml_dtypes.bfloat16),
                     stats=Metadata(loss=float("nan"), n=3)))  # fmt: skip
    assert np.load(tmp_path / "a.npy", allow_pickle=False).tolist() == [[1, 2]]
    with np.load(tmp_path / "all.npz", allow_pickle=False) as found:
        assert (found["b"].tolist(), found["c"].tolist()) == (["x", "yz"], [1.5])
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert stats == {"type": "Metadata", "value": {"loss": {"float": "nan"}, "n": 3}}


def test_a_directory_takes_all_and_no_name_leads_out_of_it(tmp_path: Path) -> None:
    outputs = {"w": np.int64([1]), "../../evil": np.int64([2]), ".hidden/x": Metadata(n=1)}
    made = saving.parse([f"{tmp_path}/new/"]).write(told(**outputs))
    assert {path.name for path in made} == {
        "w.npy",
        "%2E.%2F..%2Fevil.npy",
        "%2Ehidden%2Fx.json",
    }
    assert {path.parent for path in made} == {tmp_path / "new"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new"]


@pytest.mark.parametrize(
    "texts",
    [
        *(["a"], ["a=/no/such/dir/a.npy"], ["a={tmp}/a.txt"], ["a={tmp}/a"]),
        *(["a={tmp}/x.npy", "b={tmp}/x.npy"], ["{tmp}/a/", "{tmp}/b/"], ["{tmp}/file/sub/"]),
    ],
)
def test_what_can_t_be_written_is_refused_before_anything_runs(
    tmp_path: Path, texts: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(typer.BadParameter):
        saving.parse([text.replace("{tmp}", str(tmp_path)) for text in texts])


def test_an_output_that_is_not_there_or_no_array_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="no output 'b'; there are: 'a'"):
        saving.parse([f"b={tmp_path}/b.npy"]).write(told(a=np.int64(1)))
    with pytest.raises(DeploymentError, match=r"save it in a \.json file"):
        saving.parse([f"a={tmp_path}/b.npy"]).write(told(a=Metadata(n=1)))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_gone_since_is_a_typed_error(tmp_path: Path) -> None:
    files = saving.parse([f"a={tmp_path}/a.npy"])
    tmp_path.rmdir()
    with pytest.raises(StorageError):
        files.write(told(a=np.int64(1)))
