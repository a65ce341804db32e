"""Exported models that say what they take, and predictions by that: those of the node itself."""

from __future__ import annotations

import csv
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tokenizers
from onnx import TensorProto, helper, numpy_helper

from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.compiler import Compiler
from bbnode.components import (
    ArrayDataSource,
    ImageFolderDataSource,
    OnnxModelConfig,
    OrtBackend,
    SklearnDataSource,
    TableDataSource,
    TextDataSource,
    mlp_forward,
)
from bbnode.components.data.description import DataDescription, DescriptionRefused
from bbnode.components.data.schema import TensorSchema
from bbnode.components.errors import DataUnavailable
from bbnode.daemon.predicting.inputs import ExamplesRefused, Given, TokenizerDiffers
from bbnode.daemon.predicting.meaning import Meaning, meaning_of
from bbnode.daemon.predicting.predict import ModelUnusable, Predictions, predict
from bbnode.daemon.state.weights import WeightsOrigin, exported, initial_component
from bbnode.engine import Node, install, plan_program
from bbnode.engine.planning.feeds import feeds_of
from bbnode.ir.errors import DeploymentError
from bbnode.programs import FederatedTraining
from tests.components.fakes import CTX
from tests.daemon.trainer import ME, Train, train
from tests.programs.files import compiled

RNG = np.random.default_rng(7)
EXPORT = "ai.bytesandbrains.export."


class Learning(Train):
    """`Train` with a source, a forward graph and a loss of the test's."""

    def __init__(self, source: type, forward: onnx.ModelProto, loss: str) -> None:
        super().__init__()
        self.source = source
        content = forward.SerializeToString(deterministic=True)
        self.config = OnnxModelConfig(model=content, loss=loss)

    def bindings(self) -> dict[str, Any]:
        return {"data": self.source, "compute": OrtBackend}


class Trained:
    """A node that has trained on files of its own, and its export."""

    def __init__(
        self,
        folder: Path,
        source: type,
        settings: dict[str, Any],
        forward: onnx.ModelProto,
        loss: str = "softmax_cross_entropy",
    ) -> None:
        program = Learning(source, forward, loss)
        compiler = Compiler().bind_data_source("data", source).bind_backend("compute", OrtBackend)
        self.artifact = compiler.compile(program.build())
        self.node: Node = install(self.artifact, ["trainer"], peer_id=ME, config={"data": settings})
        train(self.node)
        self.file = folder / "trained.onnx"
        plans = {each.name: each for each in plan_program(self.artifact, ["trainer"]).slots}
        self.file.write_bytes(
            exported(
                "net",
                self.node.copy_of("net"),
                partial(initial_component, plans["net"], {}, own_artifact=True),
                WeightsOrigin(program="ab" * 32),
                partial(meaning_of, self.artifact, ["trainer"], "net", self.node.component),
            )
        )

    def batch(self) -> Any:
        return self.node.component("data").next_batch(CTX)[0]

    def forward(self, batch: Any) -> np.ndarray:
        return np.asarray(self.node.component("net").forward(CTX, batch), np.float64)

    def probabilities(self, batch: Any) -> np.ndarray:
        powers = np.exp(self.forward(batch))
        return powers / powers.sum(axis=1, keepdims=True)

    def predict(self, path: object, **more: Any) -> Predictions:
        return predict(self.file, Given(path=str(path), **more))

    @property
    def metadata(self) -> dict[str, str]:
        return {entry.key: entry.value for entry in onnx.load(self.file).metadata_props}


def probabilities_of(found: Predictions) -> np.ndarray:
    return np.array([[*each.probabilities.values()] for each in found.rows])


def rows_of(count: int) -> list[dict[str, str]]:
    return [
        {
            "area": f"{RNG.uniform(20, 200):.2f}",
            "town": str(RNG.choice(["Bonn", "Köln", "Aachen"])),
            "floor": str(RNG.choice(["ground", "top"])),
            "age": str(RNG.integers(0, 90)),
            "kind": str(RNG.choice(["flat", "house"])),
        }
        for _ in range(count)
    ]


def write_csv(path: Path, rows: list[dict[str, str]], columns: list[str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


COLUMNS = ["area", "town", "floor", "age", "kind"]


def table(folder: Path, rows: list[dict[str, str]], **settings: Any) -> Trained:
    path = write_csv(folder / "train.csv", rows, COLUMNS)
    own = {"path": str(path), "label": "kind", "one_hot": ("town",), **settings}
    own.setdefault("categories", {"floor": ("ground", "top")})
    return Trained(folder, TableDataSource, own, mlp_forward((6, 8, 2), seed=1))


# --- tables -----------------------------------------------------------------------------------


def test_a_table_in_another_order_is_read_as_in_training(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rows = rows_of(40)
    scaling = {"standardize": "given", "mean": (80, 0.3, 0.3, 0.3, 0.5, 40), "std": (50,) * 6}
    node = table(tmp_path, rows, **scaling)
    shuffled = ["extra", "age", "floor", "town", "area"]
    given = write_csv(tmp_path / "new.csv", [{**row, "extra": "x"} for row in rows], shuffled)
    found = node.predict(given)
    np.testing.assert_allclose(probabilities_of(found), node.probabilities(node.batch()), atol=1e-6)
    assert found.columns == ("class", "probability")
    assert {each.values["class"] for each in found.rows} <= {"flat", "house"}
    # Rows of one category, in words of which all are known.
    few = [row for row in rows if row["town"] == "Köln"]
    places = [at for at, row in enumerate(rows) if row["town"] == "Köln"]
    part = node.predict(write_csv(tmp_path / "few.csv", few, shuffled[1:]))
    np.testing.assert_array_equal(probabilities_of(part), probabilities_of(found)[places])


def test_the_metadata_name_columns_categories_classes_and_scaling(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    node = table(tmp_path, rows_of(30))
    told = json.loads(node.metadata[EXPORT + "data"])
    towns = [f"town={town}" for town in ("Aachen", "Bonn", "Köln")]
    assert told["columns"] == ["area", *towns, "floor", "age"]
    assert told["settings"]["categories"]["floor"] == ["ground", "top"]
    assert (told["label"], told["classes"]) == ("kind", ["flat", "house"])
    assert str(tmp_path) not in node.metadata[EXPORT + "data"]
    outputs = json.loads(node.metadata[EXPORT + "outputs"])
    assert outputs == [{"name": "logits", "kind": "logits"}]
    output = onnx.load(node.file).graph.output[0]
    assert (output.name, output.doc_string) == (
        "logits", "logits of the classes flat, house of kind",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "columns", "words"),
    [
        ({}, ["age", "floor", "area"], "no column 'town'"),
        ({"town": "Ulm"}, COLUMNS, "'Ulm', which is none of its `categories`"),
        ({"area": "large"}, COLUMNS, "it holds text, its first values are 'large'"),
        ({"area": ""}, COLUMNS, "row 0 has no value"),
        ({"floor": ""}, COLUMNS, "row 0 has no value"),
    ],
)
def test_another_table_is_refused(
    tmp_path: Path, change: dict[str, str], columns: list[str], words: str
) -> None:
    pytest.importorskip("pyarrow")
    rows = rows_of(30)
    node = table(tmp_path, rows)
    every = [{**row, **change} for row in rows[: 1 if "" in change.values() else 30]]
    more = rows[:2] if "" in change.values() else []
    given = write_csv(tmp_path / "new.csv", [*every, *more], columns)
    with pytest.raises(DataUnavailable, match=words):
        node.predict(given)


def test_what_was_missing_is_filled_as_in_training(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rows = rows_of(30)
    rows[3]["area"] = ""
    node = table(tmp_path, rows, missing="mean", split="train")
    source = node.node.component("data")
    given = write_csv(tmp_path / "new.csv", rows, COLUMNS)
    found = probabilities_of(node.predict(given))
    # The node's own: all rows of the same table, filled with the mean of the part "train".
    whole, _ = source.load()
    np.testing.assert_allclose(found, node.probabilities(np.asarray(whole)), atol=1e-6)
    # A column in which the training missed nothing, and a whole column.
    gaps = [{**row, "age": "", "area": ""} for row in rows[:3]]
    gappy = node.predict(write_csv(tmp_path / "gaps.csv", gaps, COLUMNS))
    data = DataDescription.from_json(node.metadata[EXPORT + "data"])
    filled = [
        {**row, "age": repr(data.fills["age"]), "area": repr(data.fills["area"])} for row in gaps
    ]
    whole_rows = node.predict(write_csv(tmp_path / "filled.csv", filled, COLUMNS))
    np.testing.assert_array_equal(probabilities_of(gappy), probabilities_of(whole_rows))


def test_categories_that_look_like_numbers_stay_categories(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    lines = [f"{code},{at % 7},{at % 2}" for at, code in enumerate(["1", "2", "x"] * 8)]
    (tmp_path / "train.csv").write_text("\n".join(["code,size,y", *lines]))
    settings = {
        "path": str(tmp_path / "train.csv"), "label": "y", "categories": {"code": ("x", "2", "1")},
    }  # fmt: skip
    node = Trained(tmp_path, TableDataSource, settings, mlp_forward((2, 4, 2)))
    (tmp_path / "new.csv").write_text("size,code\n3,1\n4,2\n")
    found = probabilities_of(node.predict(tmp_path / "new.csv"))
    wanted = node.probabilities(np.array([[2, 3], [1, 4]], np.float32))
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_values_have_the_name_of_their_column(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    lines = [f"{a:.3f},{b:.3f},{a - b:.3f}" for a, b in RNG.uniform(size=(30, 2))]
    (tmp_path / "train.csv").write_text("\n".join(["a,b,price", *lines]))
    settings = {"path": str(tmp_path / "train.csv"), "label": "price"}
    node = Trained(tmp_path, TableDataSource, settings, mlp_forward((2, 4, 1)), loss="mse")
    found = node.predict(tmp_path / "train.csv")
    assert found.columns == ("price",)
    made = [each.values["price"] for each in found.rows]
    np.testing.assert_allclose(made, node.forward(node.batch())[:, 0], rtol=1e-6)


# --- images, text, arrays -----------------------------------------------------------------------


def test_a_folder_of_images(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for label in ("lying", "standing"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for at in range(4):
            pixels = RNG.integers(0, 255, size=(9, 7, 3)).astype(np.uint8)
            pillow.fromarray(pixels).save(tmp_path / "images" / label / f"{at}.png")
    forward = helper.make_graph(
        [helper.make_node("Flatten", ["x"], ["flat"]),
         helper.make_node("Gemm", ["flat", "w", "b"], ["logits"])], "images",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, 4, 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(RNG.normal(size=(16, 2)).astype(np.float32), "w"),
         numpy_helper.from_array(np.zeros(2, np.float32), "b")],
    )  # fmt: skip
    model = helper.make_model(forward, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    settings = {
        "path": str(tmp_path / "images"), "size": (4, 4), "channels": 1,
        "standardize": "given", "mean": (0.5,), "std": (0.25,),
    }  # fmt: skip
    node = Trained(tmp_path, ImageFolderDataSource, settings, model)
    found = node.predict(tmp_path / "images")  # class folders are folders
    np.testing.assert_allclose(probabilities_of(found), node.probabilities(node.batch()), atol=1e-6)
    single = tmp_path / "images" / "standing" / "1.png"
    (row,) = node.predict(single).rows
    assert row.example == str(single)
    assert [*row.probabilities] == ["lying", "standing"]
    assert row.probabilities == found.rows[5].probabilities
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataUnavailable, match="no images"):
        node.predict(tmp_path / "empty")


def embedding(vocabulary: int, length: int) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["each"]),
         helper.make_node("ReduceMean", ["each", "axis"], ["mean"], keepdims=0),
         helper.make_node("Gemm", ["mean", "w", "b"], ["logits"])], "text",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", length])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(RNG.normal(size=(vocabulary, 4)).astype(np.float32), "table"),
         numpy_helper.from_array(RNG.normal(size=(4, 2)).astype(np.float32), "w"),
         numpy_helper.from_array(np.zeros(2, np.float32), "b"),
         numpy_helper.from_array(np.array([1]), "axis")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


TEXTS = ["a fine film", "dull and long", "fine, fine", "so long\tso dull"]
LABELS = ["good", "bad", "good", "bad"]


def test_lines_of_text(tmp_path: Path) -> None:
    lines = [f"{label}\t{text}" for label, text in zip(LABELS, TEXTS, strict=True)]
    (tmp_path / "train.txt").write_text("\n".join(lines))
    settings = {"path": str(tmp_path / "train.txt"), "classes": ("bad", "good"), "length": 12}
    node = Trained(tmp_path, TextDataSource, settings, embedding(257, 12))
    wanted = node.probabilities(node.batch())
    (tmp_path / "new.txt").write_text("\n\n".join(TEXTS) + "\r\n")
    found = node.predict(tmp_path / "new.txt")
    np.testing.assert_allclose(probabilities_of(found), wanted, atol=1e-6)
    assert [each.example for each in found.rows] == [1, 3, 5, 7]
    assert found.noun == "line"
    labelled = node.predict(tmp_path / "train.txt")
    np.testing.assert_array_equal(probabilities_of(labelled), probabilities_of(found))
    assert "4 line(s)" in labelled.notes[0]
    (tmp_path / "new.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TEXTS))
    as_json = node.predict(tmp_path / "new.jsonl")
    np.testing.assert_array_equal(probabilities_of(as_json), probabilities_of(found))
    content = "\n".join(TEXTS).encode()
    piped = node.predict("-", read_stdin=lambda most: content[:most])
    np.testing.assert_array_equal(probabilities_of(piped), probabilities_of(found))
    (tmp_path / "bad.jsonl").write_text('{"words": "x"}')
    with pytest.raises(ExamplesRefused, match="line 1 is no JSON object"):
        node.predict(tmp_path / "bad.jsonl")
    with pytest.raises(TokenizerDiffers, match="leave --tokenizer out"):
        node.predict("-", tokenizer=tmp_path / "t.json", read_stdin=lambda _: b"x")


def test_a_tokenizer_of_the_users_own_has_to_be_the_same(tmp_path: Path) -> None:
    def made(name: str, words: list[str]) -> Path:
        library = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({w: at for at, w in enumerate(words)}, unk_token="[UNK]")
        )
        library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        library.save(str(tmp_path / name))
        return tmp_path / name

    words = ["[PAD]", "[UNK]", "fine", "dull", "long", "film"]
    mine, other = made("mine.json", words), made("other.json", words[::-1])
    (tmp_path / "train.jsonl").write_text(
        "\n".join(
            json.dumps({"text": text, "label": label})
            for text, label in zip(TEXTS, LABELS, strict=True)
        )
    )
    settings = {
        "path": str(tmp_path / "train.jsonl"), "format": "jsonl", "classes": ("bad", "good"),
        "length": 5, "tokenizer": "file", "tokenizer_file": str(mine),
    }  # fmt: skip
    node = Trained(tmp_path, TextDataSource, settings, embedding(6, 5))
    found = node.predict(tmp_path / "train.jsonl", tokenizer=mine)
    np.testing.assert_allclose(probabilities_of(found), node.probabilities(node.batch()), atol=1e-6)
    with pytest.raises(TokenizerDiffers, match="give that file with --tokenizer"):
        node.predict(tmp_path / "train.jsonl")
    with pytest.raises(TokenizerDiffers, match="is not the tokenizer of the training"):
        node.predict(tmp_path / "train.jsonl", tokenizer=other)


def test_arrays_with_and_without_scaling(tmp_path: Path) -> None:
    x = RNG.normal(loc=5, size=(12, 4))
    np.savez(tmp_path / "data.npz", x=x, y=RNG.integers(0, 3, size=12))
    for scaling in ({}, {"standardize": "given", "mean": (5.0,), "std": (2.0,)}):
        settings = {"path": str(tmp_path / "data.npz"), **scaling}
        node = Trained(tmp_path, ArrayDataSource, settings, mlp_forward((4, 5, 3)))
        wanted = node.probabilities(node.batch())
        np.save(tmp_path / "new.npy", x)
        np.savez(tmp_path / "new.npz", x=x)
        np.savetxt(
            tmp_path / "new.csv", x, delimiter=",", header="a,b,c,d", comments="", fmt="%.17g"
        )
        for name in ("new.npy", "new.npz", "new.csv"):
            found = node.predict(tmp_path / name)
            np.testing.assert_allclose(probabilities_of(found), wanted, atol=1e-6)
            assert {each.values["class"] for each in found.rows} <= {"0", "1", "2"}
    np.save(tmp_path / "wide.npy", RNG.normal(size=(2, 5)))
    with pytest.raises(DeploymentError, match="5"):
        node.predict(tmp_path / "wide.npy")


def test_one_logit_is_a_class_and_several_are_probabilities(tmp_path: Path) -> None:
    x = RNG.normal(size=(12, 4)).astype(np.float32)
    for outputs in (1, 2):
        y = RNG.integers(0, 2, size=(12, outputs)).astype(np.float32)
        np.savez(tmp_path / "data.npz", x=x, y=y)
        forward = mlp_forward((4, 5, outputs))
        settings = {"path": str(tmp_path / "data.npz")}
        node = Trained(tmp_path, ArrayDataSource, settings, forward, "bce_with_logits")
        found = node.predict(tmp_path / "data.npz")
        yes = 1 / (1 + np.exp(-node.forward(node.batch())))
        if outputs == 1:
            np.testing.assert_allclose(probabilities_of(found)[:, 1], yes[:, 0], atol=1e-6)
        else:
            assert found.columns == ("probability of y[0]", "probability of y[1]")
            made = [[*each.values.values()] for each in found.rows]
            np.testing.assert_allclose(np.array(made, float), yes, atol=1e-6)


def test_several_inputs_are_found_by_their_names(tmp_path: Path) -> None:
    parts = {"left": RNG.normal(size=(6, 3)), "right": RNG.normal(size=(6, 2))}
    np.savez(tmp_path / "data.npz", y=RNG.integers(0, 2, size=6), **parts)
    np.savez(tmp_path / "new.npz", **dict(reversed(parts.items())))
    graph = helper.make_graph(
        [helper.make_node("Concat", ["a", "b"], ["both"], axis=1),
         helper.make_node("Gemm", ["both", "w", "c"], ["logits"])], "two",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, ["batch", 3]),
         helper.make_tensor_value_info("b", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(RNG.normal(size=(5, 2)).astype(np.float32), "w"),
         numpy_helper.from_array(np.zeros(2, np.float32), "c")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    settings = {"path": str(tmp_path / "data.npz"), "inputs": ("left", "right")}
    node = Trained(tmp_path, ArrayDataSource, settings, model)
    found = probabilities_of(node.predict(tmp_path / "new.npz"))
    np.testing.assert_allclose(found, node.probabilities(node.batch()), atol=1e-6)


def test_names_of_too_few_classes_are_not_used(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "train.csv").write_text("a,b,y\n1,2,cat\n2,1,dog\n3,3,cat\n")
    settings = {"path": str(tmp_path / "train.csv"), "label": "y"}
    node = Trained(tmp_path, TableDataSource, settings, mlp_forward((2, 4, 3)))
    found = node.predict(tmp_path / "train.csv")
    assert [*found.rows[0].probabilities] == ["0", "1", "2"]
    assert "its data name 2" in found.notes[0]
    assert "cat" not in onnx.load(node.file).graph.output[0].doc_string


def test_numbers_of_a_known_data_set_are_scaled_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    from sklearn.datasets import load_iris

    node = Trained(tmp_path, SklearnDataSource, {"dataset": "iris", "split": "all"},
                   mlp_forward((4, 5, 3)))  # fmt: skip
    np.save(tmp_path / "iris.npy", load_iris().data)
    found = probabilities_of(node.predict(tmp_path / "iris.npy"))
    np.testing.assert_allclose(found, node.probabilities(node.batch()), atol=1e-6)


# --- what the program says ---------------------------------------------------------------------


class Prices(FederatedTraining):
    model = (3, 4, 1)
    data = "bbnode.TableDataSource"
    loss = "mse"
    clients = 3


class Unmeasured(Prices):
    evaluate = "none"


def test_the_source_of_a_model_is_what_the_program_says() -> None:
    artifact = compiled(Prices())
    assert feeds_of(artifact, ["server"], "global") == (("test",), True)
    assert feeds_of(artifact, ["client"], "local") == (("data",), True)
    unmeasured = compiled(Unmeasured())
    assert feeds_of(unmeasured, ["server"], "global") == ((), False)
    found = meaning_of(unmeasured, ["server"], "global", lambda _: pytest.fail("asked"))
    assert found.data is None
    assert "no data source of this node" in found.why


def test_what_can_not_be_described_says_why(tmp_path: Path) -> None:
    artifact = compiled(Prices())

    def broken(_: str) -> Any:
        raise DataUnavailable(f"{tmp_path}/secret.csv is gone")

    found = meaning_of(artifact, ["client"], "local", broken)
    assert (found.data, found.why) == (
        None, "the data source of slot 'data' could not be read (DataUnavailable)",
    )  # fmt: skip
    model = mlp_forward((3, 4, 1))
    found.stamp(model, "value")
    assert Meaning.of_model(model) == Meaning(
        why=found.why, uses_loss=True, output="logits", kind="value"
    )


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"kind":"pickle","features":{"shape":[1],"dtype":"float32"}}',
     '{"kind":"table","features":{"shape":[1],"dtype":"float32"},"settings":{"path":"/etc/x"}}',
     '{"kind":"text","features":{"shape":[1],"dtype":"int64"},"settings":{"tokenizer_file":"x"}}',
     " " * (1 << 20) + "{}"],
)  # fmt: skip
def test_a_description_of_somebody_else_is_refused(text: str) -> None:
    with pytest.raises(DescriptionRefused):
        DataDescription.from_json(text)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("table", {"one_hot": 5}), ("table", {"encoding": "none such"}), ("images", {"size": [0, 4]}),
     ("images", {"mean": ["x"]}), ("text", {"task": "classification", "length": -1}),
     ("arrays", {"dtype": "object"})],
)  # fmt: skip
def test_settings_of_somebody_else_are_refused_by_their_source(
    tmp_path: Path, kind: Any, settings: dict[str, Any]
) -> None:
    (tmp_path / "new.csv").write_text("a,b\n1,2\n")
    data = DataDescription(kind=kind, features=TensorSchema((2,), "float32"), settings=settings)
    model = mlp_forward((2, 4, 1))
    Meaning(data=data).stamp(model, "")
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(DeploymentError):
        predict(tmp_path / "model.onnx", Given(path=str(tmp_path / "new.csv")))


def test_what_is_too_long_is_left_out_and_said() -> None:
    names = tuple(f"{at:0100}" for at in range(11_000))
    data = DataDescription(kind="table", features=TensorSchema((2,), "float32"), columns=names)
    model = mlp_forward((2, 4, 1))
    Meaning(data=data).stamp(model, "")
    found = Meaning.of_model(model)
    assert found is not None
    assert found.data is None
    assert "use fewer columns" in found.why


def test_a_tokenizer_is_for_text_alone(tmp_path: Path) -> None:
    np.save(tmp_path / "new.npy", np.ones((1, 2), np.float32))
    onnx.save(mlp_forward((2, 4, 1)), tmp_path / "model.onnx")
    given = Given(path=str(tmp_path / "new.npy"), tokenizer=tmp_path / "t.json")
    with pytest.raises(TokenizerDiffers, match="leave --tokenizer out"):
        predict(tmp_path / "model.onnx", given)


# --- the command -------------------------------------------------------------------------------


def test_a_model_that_says_nothing_takes_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    onnx.save(mlp_forward((2, 4, 1)), tmp_path / "plain.onnx")
    (tmp_path / "new.csv").write_text("a,b\n1,2\n3,4\n")
    (tmp_path / "words.txt").write_text("hello")
    words = ["predict", str(tmp_path / "plain.onnx")]
    assert main([*words, str(tmp_path / "new.csv"), "--json"]) == exits.OK
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["schema"] == "bbnode/predict/1"
    assert [each["row"] for each in told["predictions"]] == [0, 1]
    assert "does not say what it takes" in captured.err
    assert main([*words, str(tmp_path / "words.txt")]) == exits.USAGE
    assert "only arrays" in capsys.readouterr().err
    (tmp_path / "plain.onnx").write_bytes(b"no model")
    assert main([*words, str(tmp_path / "new.csv")]) == exits.USAGE
    assert "is no ONNX model" in capsys.readouterr().err


def test_the_command_prints_lines_and_writes_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    node = table(tmp_path, rows_of(20))
    words = ["predict", str(node.file), str(tmp_path / "train.csv")]
    assert main(words) == exits.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["row", "class", "probability"]
    assert len(lines) == 21
    out = tmp_path / "out.csv"
    assert main([*words, "--out", str(out)]) == exits.OK
    written = [*csv.DictReader(io.StringIO(out.read_text()))]
    found = predict(node.file, Given(path=str(tmp_path / "train.csv")))
    assert [row["class"] for row in written] == [each.values["class"] for each in found.rows]
    assert [float(row["probability"]) for row in written] == [
        each.values["probability"] for each in found.rows
    ]


def test_a_program_is_no_model(tmp_path: Path) -> None:
    artifact = compiled(Prices())
    onnx.save(artifact, tmp_path / "program.onnx")
    with pytest.raises(ModelUnusable):
        predict(tmp_path / "program.onnx", Given(path="x.csv"))
