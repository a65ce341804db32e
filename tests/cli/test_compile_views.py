"""`bbnode compile --time --explain --dump-after`, and the benchmark of the compiler."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import onnx
import pytest

from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.compiler import all_pass_names
from bbnode.ir import keys
from tests import protos

SPEC = "bbnode.examples.federated_digits:FederatedRound"
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    def call(*args: object) -> tuple[int, str, str]:
        code = main(["compile", SPEC, "-o", str(tmp_path / "a.onnx"), *(str(a) for a in args)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_what_is_asked_for_beside_it_changes_nothing_in_the_artifact(run, tmp_path: Path) -> None:
    assert run()[0] == exits.OK
    plain = (tmp_path / "a.onnx").read_bytes()
    code, _, _ = run(
        "--time", "--explain", "tick", "--dump-after", "validate", "--dump-dir", tmp_path / "d"
    )
    assert code == exits.OK
    assert (tmp_path / "a.onnx").read_bytes() == plain


def test_time_shows_every_pass_with_its_counters(run) -> None:
    code, out, _ = run("--time")
    assert code == exits.OK
    for name in all_pass_names():
        assert f"\n {name} " in out
    assert "wire_recvs_synthesized=2" in out
    assert "\n total " in out
    found = json.loads(run("--time", "--json")[1])
    assert [p["pass"] for p in found["passes"]] == list(all_pass_names())
    assert sum(p["ms"] for p in found["passes"]) <= found["total_ms"] + 0.1
    assert "passes" not in json.loads(run("--json")[1])


def test_explain_shows_type_class_and_passes(run) -> None:
    code, out, _ = run("--explain", "Params_0.params", "--explain", "ArgMax_0.reduced")
    assert code == exits.OK
    for shown in (
        "value Params_0.params",
        "Tensor.FLOAT",
        "Params_0 (Params of slot global, at federated_digits.py:",
        "refine_polymorphic_value_info",
        "lives on server",
        "in no compiled partition any more",
    ):
        assert shown in out
    (found,) = json.loads(run("--explain", "tick", "--json")[1])["explained"]
    assert found["places"][0]["type"] == "Trigger"


def test_explain_of_a_value_that_never_was_is_one_line(run) -> None:
    code, out, err = run("--explain", "Param_0.params")
    assert (code, out) == (exits.USAGE, "")
    assert err.count("\n") == 1
    assert "did you mean" in err


def test_dump_after_writes_text_and_onnx_in_the_order_of_passes(run, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "dump"
    code, out, err = run(
        "--dump-after", "validate", "--dump-after", "partition_by_wire_ops",
        "--dump-dir", folder, "--json",
    )  # fmt: skip
    assert (code, err) == (exits.OK, "")
    names = sorted(path.name for path in folder.iterdir())
    at = {name: all_pass_names().index(name) + 1 for name in all_pass_names()}
    assert names == sorted(
        f"{at[name]:02d}_{name}.{suffix}"
        for name in ("validate", "partition_by_wire_ops")
        for suffix in ("onnx", "txt")
    )
    assert sorted(json.loads(out)["dumps"]) == [str(folder / name) for name in names]
    before = onnx.load(folder / f"{at['validate']:02d}_validate.onnx")
    assert protos.get_meta(before.functions[0], keys.ROOT_KEY) == "true"
    text = (folder / f"{at['partition_by_wire_ops']:02d}_partition_by_wire_ops.txt").read_text()
    assert "= RecvReq(" in text
    assert "Train[local](epochs=5, batch=32) @ client" in text


def test_dump_is_written_when_a_later_pass_refuses_the_program(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bbnode.examples.federated_digits import FederatedRound

    bound = dict(FederatedRound().bindings())
    del bound["fedavg"]
    monkeypatch.setattr(FederatedRound, "bindings", lambda _self: bound)
    code, out, err = run("--dump-after", "resolve_slots", "--dump-dir", tmp_path / "d")
    assert (code, out) == (exits.USAGE, "") or code == exits.REFUSED
    assert "fedavg" in err
    assert [path.suffix for path in sorted((tmp_path / "d").iterdir())] == [".onnx", ".txt"]
    assert not (tmp_path / "a.onnx").exists()


def test_dump_after_a_pass_that_is_not_there_is_one_line(run, tmp_path: Path) -> None:
    code, _, err = run("--dump-after", "nonsense")
    assert code != exits.OK
    assert "nonsense" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "a.onnx").exists()


# --- the benchmark -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_compiler", ROOT / "bench" / "compiler.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("size", [23, 50, 500])
def test_programs_of_the_benchmark_have_the_size_they_say(bench: ModuleType, size: int) -> None:
    for family in bench.FAMILIES.values():
        assert len(family(size).build().functions[0].node) == size


def test_benchmark_prints_one_object_of_numbers(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "TURNS", 1)
    monkeypatch.setattr(bench, "BASE", 60)
    monkeypatch.setattr(bench, "LARGE", 120)
    monkeypatch.setattr(bench, "WEIGHT_SHAPE", (8, 4))
    bench.main(["--json", "--sizes", "60", "120"])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found = json.loads(out)
    assert set(found) == {
        "chain_ms_60", "chain_ms_120", "federated_ms_60", "federated_ms_120",
        "ms_500_ops", "per_op_ratio_20000_vs_500",
        "weights_200mb_s", "weights_200mb_read_s", "weights_200mb_vs_hash",
    }  # fmt: skip
    assert found["ms_500_ops"] == max(found["chain_ms_60"], found["federated_ms_60"])
    assert all(number > 0 for number in found.values())
