"""What peers mean by their numbers: compared, mapped by name, refused with both lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.components import ArrayDataSource, IterableDataSource, TableDataSource, provide
from bbnode.components.data.images import ImageFolderDataSource
from bbnode.components.data.iterable import withdraw
from bbnode.components.data.schema import TensorSchema
from bbnode.components.data.shared_schema import (
    ColumnMeaning,
    Scaling,
    SchemaRefused,
    SharedSchema,
    compare,
    described,
    joined,
)
from bbnode.components.data.text import TextDataSource
from bbnode.components.errors import DataDiffers, DataUnavailable
from bbnode.components.registry import build_config
from bbnode.ir.caps import MAX_SCHEMA_BYTES

COLUMNS = ("age", "dose", "sex", "ward")
SEXES = ("f", "m")
WARDS = ("east", "north", "west")
CLASSES = ("ant", "bee", "cat")


def made(cls: Any, **settings: Any) -> Any:
    return cls(build_config(cls, "data", b"", settings))


def table(*names: str, **more: Any) -> SharedSchema:
    return SharedSchema(
        **{
            "features": TensorSchema((len(names),), "float32"),
            "labels": TensorSchema((), "int64"),
            "columns": tuple(ColumnMeaning(name=name) for name in names),
            "label": "y",
            "label_kind": "class",
            "classes": CLASSES,
            "scaling": Scaling(by="none"),
            "kind": "table",
            **more,
        }
    )


def line(reference: SharedSchema, own: SharedSchema) -> str:
    return compare(reference, own).line


def test_equal_sources_have_one_digest_and_the_form_goes_there_and_back() -> None:
    one = table("a", "b")
    assert one.digest == table("a", "b", kind="").digest
    assert one.digest != table("b", "a").digest
    assert SharedSchema.from_json(one.to_json()) == one
    assert compare(one, table("a", "b")).mapped == ()


@pytest.mark.parametrize(
    ("own", "refused"),
    [
        (table("b", "c"), "columns b, c; the federation has a, b"),
        (table("a"), "columns a; the federation has a, b"),
        (table("a", "b", "c"), "columns a, b, c; the federation has a, b"),
        (table("a", "b", label="z"), "label z; the federation has y"),
        (
            table("a", "b", classes=("ant", "dog")),
            "classes ant, dog; the federation has ant, bee, cat",
        ),
        (
            table("a", "b", classes=()),
            "classes without names; the federation has ant, bee, cat",
        ),
        (
            table("a", "b", features=TensorSchema((2,), "int64")),
            "features int64[2]; the federation has float32[2]",
        ),
        (
            table("a", "b", label_kind="number", labels=TensorSchema((), "float32"), classes=None),
            "labels are numbers, float32[]; the federation has classes, int64[]",
        ),
        (
            table("a", "b", scaling=Scaling(by="given", mean=(1.0, 2.0), std=(1.0, 1.0))),
            "features scaled by given numbers (mean 1, 2); the federation has nothing",
        ),
        (
            table("a", "b", columns=(ColumnMeaning(name="a"),
                  ColumnMeaning(name="b", kind="category", categories=("x",)))),
            "column b of categories x; the federation has numbers",
        ),
    ],
)  # fmt: skip
def test_what_no_mapping_mends_is_one_line_with_both_sides(own: SharedSchema, refused: str) -> None:
    assert line(table("a", "b"), own) == refused


def test_units_are_compared_where_both_say_them() -> None:
    pounds, kilos, silent = (
        table("w", columns=(ColumnMeaning(name="w", unit=unit),)) for unit in ("lb", "kg", "")
    )
    assert line(kilos, pounds) == "column w in lb; the federation has kg"
    assert not line(kilos, silent)
    assert joined(silent, kilos).columns == kilos.columns


def test_scaling_is_compared_by_name_not_by_place() -> None:
    given = table("a", "b", scaling=Scaling(by="given", mean=(1.0, 2.0), std=(1.0, 1.0)))
    turned = table("b", "a", scaling=Scaling(by="given", mean=(2.0, 1.0), std=(1.0, 1.0)))
    other = table("b", "a", scaling=Scaling(by="given", mean=(1.0, 2.0), std=(1.0, 1.0)))
    pending = table("a", "b", scaling=Scaling(by="federated"))
    there = table("a", "b", scaling=Scaling(by="federated", mean=(1.0, 2.0), std=(1.0, 1.0)))
    assert not line(given, turned)
    assert line(given, other) == "mean of a 2; the federation has 1"
    assert not line(pending, there)
    assert not line(there, pending)
    assert joined(pending, there).scaling == there.scaling


def test_a_scaling_is_taken_in_the_order_of_who_takes_it() -> None:
    silent = table("a", "b", scaling=None)
    pending = table("a", "b", scaling=Scaling(by="federated"))
    turned = table("b", "a", scaling=Scaling(by="federated", mean=(2.0, 1.0), std=(3.0,)))
    for reference in (silent, pending):
        assert joined(reference, turned).scaling == Scaling(
            by="federated", mean=(1.0, 2.0), std=(3.0,)
        )
    # One that lacks a place has no number for it.
    fewer = table("b", scaling=Scaling(by="federated", mean=(2.0,), std=(3.0,)))
    assert joined(silent, fewer).scaling == Scaling(by="federated")


def test_many_numbers_are_compared_in_any_order() -> None:
    names = [f"c{at}" for at in range(5000)]
    mean = [float(at) for at in range(5000)]
    one = Scaling.of("federated", mean, [1.0], names)
    assert one.sha256
    assert Scaling.of("federated", mean[::-1], [1.0] * 5000, names[::-1]) == one
    assert Scaling.of("federated", mean[::-1], [1.0], names) != one
    # As statistics that a later peer knows, it is taken; of other columns it says nothing.
    pending = table(*names, scaling=Scaling(by="federated"))
    assert joined(pending, table(*names[::-1], scaling=one)).scaling == one
    assert joined(pending, table(*names[1:], scaling=one)).scaling == pending.scaling


def test_long_lists_are_shown_where_they_differ() -> None:
    many = [f"c{at}" for at in range(1000)]
    found = line(table(*many), table(*many[3:], "extra", "e,2"))
    assert found == (
        "999 columns with extra, 'e,2' and without c0, c1, c2; the federation has 1000 columns"
    )
    assert len(line(table(*many), table(*(f"d{at}" for at in range(1000))))) < 200


def test_bare_arrays_are_compared_by_shape_and_type_and_named_by_who_comes_later() -> None:
    bare = SharedSchema(
        features=TensorSchema((2,), "float32"),
        labels=TensorSchema((), "int64"),
        label_kind="class",
    )
    assert not bare.is_named
    assert "unnamed" in str(bare)
    assert not line(table("a", "b"), bare)
    assert not line(bare, table("a", "b"))
    assert line(table("a", "b", "c"), bare) == "features float32[2]; the federation has float32[3]"
    assert joined(bare, table("b", "a")).places == ("b", "a")


def test_the_reference_grows_behind_its_own_numbers() -> None:
    first = table("a", classes=("bee", "cat"))
    assert joined(first, table("a"), grows=True).classes == ("bee", "cat", "ant")
    assert joined(first, table("a")).classes == ("bee", "cat")


def test_an_author_declares_a_schema_in_part_and_a_wrong_one_is_refused() -> None:
    declared = SharedSchema.declared(
        {"columns": ["a", {"name": "b", "kind": "one_hot", "categories": ["x", "y"]}],
         "classes": ["ant", "bee"]}
    )  # fmt: skip
    assert declared.places == ("a", "b=x", "b=y")
    for wrong, why in (
        ({"colums": []}, "no colums"),
        ({"columns": ["a", "a"]}, "twice"),
        ({"columns": [{"name": "a", "units": "kg"}]}, "no units"),
        ({"columns": [3]}, "no schema"),
        ({"classes": "ant"}, "no schema"),
    ):
        with pytest.raises(SchemaRefused, match=why):
            SharedSchema.declared(wrong)


def test_a_schema_of_a_peer_is_bounded_and_checked() -> None:
    bomb = "[" * 100_000
    for text in (bomb, "{" * 9, "null", '{"columns":[{"name":"a","width":-1}]}',
                 '{"columns":[{"name":"a","kind":"one_hot","categories":["x"],"width":7}]}',
                 '{"scaling":{"by":"given","mean":[1e999],"std":[1]}}',
                 " " * (MAX_SCHEMA_BYTES + 1)):  # fmt: skip
        with pytest.raises(SchemaRefused):
            SharedSchema.from_json(text)
    with pytest.raises(SchemaRefused, match="most"):
        table(*(f"{at}" * 200 for at in range(10_000))).to_json()
    odd = json.dumps({"columns": [{"name": "a\x1b[2J\n"}], "classes": None})
    assert "\x1b" not in line(table("b"), SharedSchema.from_json(odd))


# --- sources that adopt ---------------------------------------------------------------


def _write(path: Path, order: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    lines = [",".join(order), *(",".join(str(row[name]) for name in order) for row in rows)]
    path.write_text("\n".join(lines) + "\n")


def _rows(count: int, classes: tuple[str, ...], wards: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {
            "age": at * 3 % 50,
            "dose": at / 8,
            "sex": SEXES[at % 2],
            "ward": wards[at % len(wards)],
            "y": classes[at * 7 % len(classes)],
        }
        for at in range(count)
    ]


def _batches(source: Any) -> tuple[Any, Any]:
    pairs = list(source.epoch_batches(7))
    return tuple(np.concatenate([pair[which] for pair in pairs]) for which in (0, 1))


@settings(deadline=None, max_examples=25)
@given(
    order=st.permutations((*COLUMNS, "y")),
    classes=st.sets(st.sampled_from(CLASSES), min_size=1),
    wards=st.sets(st.sampled_from(WARDS), min_size=1),
    one_hot=st.booleans(),
    scaled=st.booleans(),
)
def test_any_order_and_any_subset_gives_the_batches_of_the_federation(
    tmp_path_factory: pytest.TempPathFactory,
    order: list[str], classes: set[str], wards: set[str], one_hot: bool, scaled: bool,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("tables")
    more: dict[str, Any] = {"label": "y", "one_hot": ("ward",) if one_hot else ()}
    if scaled:
        more |= {"standardize": "given", "mean": (3.0,), "std": (2.0,)}
    _write(folder / "whole.csv", (*COLUMNS, "y"), _rows(12, CLASSES, WARDS))
    all_words = {"categories": {"sex": SEXES, "ward": WARDS}}
    whole = made(TableDataSource, path=str(folder / "whole.csv"), **more, **all_words)
    reference = whole.own_schema()
    own_wards = tuple(sorted(wards, reverse=True))
    rows = _rows(30, tuple(sorted(classes)), own_wards)
    _write(folder / "right.csv", (*COLUMNS, "y"), rows)
    _write(folder / "own.csv", tuple(order), rows)
    told = {"categories": {"sex": SEXES, "ward": WARDS, "y": CLASSES}}
    wanted = _batches(made(TableDataSource, path=str(folder / "right.csv"), **more, **told))
    words = {"categories": {"sex": SEXES[::-1], "ward": own_wards}}
    source = made(TableDataSource, path=str(folder / "own.csv"), **more, **words)
    own = source.own_schema()
    assert not compare(reference, own).refused
    source.adopt(reference)
    found = _batches(source)
    assert np.array_equal(found[0], wanted[0])
    assert np.array_equal(found[1], wanted[1])
    assert source.own_schema() == own  # as it lies there, whatever was adopted
    assert source.schema().names == reference.places
    assert source.describe().columns == reference.places
    assert source.describe().classes == CLASSES


def test_given_scaling_goes_with_its_columns(tmp_path: Path) -> None:
    rows = _rows(20, CLASSES, WARDS)
    _write(tmp_path / "a.csv", ("age", "dose", "y"), rows)
    _write(tmp_path / "b.csv", ("dose", "age", "y"), rows)
    first = made(TableDataSource, path=str(tmp_path / "a.csv"), label="y",
                 standardize="given", mean=(20.0, 1.0), std=(9.0, 2.0))  # fmt: skip
    other = made(TableDataSource, path=str(tmp_path / "b.csv"), label="y",
                 standardize="given", mean=(1.0, 20.0), std=(2.0, 9.0))  # fmt: skip
    other.adopt(first.own_schema())
    assert np.array_equal(_batches(other)[0], _batches(first)[0])
    assert other.describe().settings["mean"] == [20.0, 1.0]


def test_statistics_of_a_file_go_with_their_columns_or_are_refused(tmp_path: Path) -> None:
    rows = _rows(20, CLASSES, WARDS)
    _write(tmp_path / "a.csv", ("age", "dose", "y"), rows)
    _write(tmp_path / "b.csv", ("dose", "age", "y"), rows)
    plain = made(TableDataSource, path=str(tmp_path / "a.csv"), label="y").own_schema()
    of = {"label": "y", "standardize": "federated", "path": str(tmp_path / "b.csv")}
    for content, good in (
        ({"mean": [20, 1], "std": [9, 2], "columns": ["age", "dose"]}, True),
        ({"mean": [20, 1], "std": [9, 2]}, False),
    ):
        (tmp_path / "statistics.json").write_text(json.dumps(content))
        source = made(TableDataSource, statistics=str(tmp_path / "statistics.json"), **of)
        reference = SharedSchema(columns=plain.columns, classes=plain.classes)
        source.adopt(reference)
        if good:
            batch, _ = source.epoch_batches(20)[0]
            assert float(batch[:, 0].min()) == pytest.approx((0 - 20) / 9)
        else:
            with pytest.raises(DataUnavailable, match="name no columns"):
                source.epoch_batches(20)


def test_the_split_does_not_move_when_a_reference_is_adopted(tmp_path: Path) -> None:
    _write(tmp_path / "own.csv", (*COLUMNS, "y"), _rows(60, ("bee", "cat"), WARDS))
    reference = SharedSchema(classes=CLASSES)
    parts = []
    for split in ("train", "test"):
        words = {"sex": SEXES, "ward": WARDS}
        path = str(tmp_path / "own.csv")
        source = made(TableDataSource, path=path, label="y", split=split, categories=words)
        before = {tuple(row) for row in _batches(source)[0]}
        source.adopt(reference)
        batch, labels = _batches(source)
        assert {tuple(row) for row in batch} == before
        assert {*labels.tolist()} == {1, 2}
        parts.append(before)


def test_data_that_differ_are_refused_at_their_use_until_they_are_mended(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    _write(path, ("dose", "y"), _rows(9, CLASSES, WARDS))
    source = made(TableDataSource, path=str(path), label="y")
    source.adopt(SharedSchema.declared({"columns": ["age", "dose"]}))
    with pytest.raises(DataDiffers, match="columns dose; the federation has age, dose"):
        source.epoch_batches(3)
    assert source.own_schema().places == ("dose",)
    _write(path, ("dose", "age", "y"), _rows(9, CLASSES, WARDS))
    source.forget()
    assert source.epoch_batches(9)[0][0].shape == (9, 2)


def test_whole_number_labels_become_those_of_a_regression(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("a,y\n1,2\n2,3\n")
    (tmp_path / "other.csv").write_text("a,y\n1,2.5\n2,3\n")
    reference = made(TableDataSource, path=str(tmp_path / "other.csv"), label="y").own_schema()
    source = made(TableDataSource, path=str(tmp_path / "own.csv"), label="y")
    assert compare(reference, source.own_schema()).mapped == ("labels become float32",)
    source.adopt(reference)
    assert source.epoch_batches(2)[0][1].dtype == np.float32


def test_arrays_by_name_and_inputs_are_brought_into_order(tmp_path: Path) -> None:
    parts = {"a": np.arange(6.0).reshape(6, 1), "b": np.arange(12.0).reshape(6, 2),
             "y": np.arange(6)}  # fmt: skip
    np.savez(tmp_path / "data.npz", **parts)
    path = str(tmp_path / "data.npz")
    first = made(ArrayDataSource, path=path, features=("a", "b"))
    other = made(ArrayDataSource, path=path, features=("b", "a"))
    other.adopt(first.own_schema())
    assert np.array_equal(_batches(other)[0], _batches(first)[0])
    assert other.describe().settings["features"] == ("a", "b")
    first = made(ArrayDataSource, path=path, inputs=("a", "b"))
    other = made(ArrayDataSource, path=path, inputs=("b", "a"))
    other.adopt(first.own_schema())
    batch, _ = other.epoch_batches(6)[0]
    assert [part.shape for part in batch] == [(6, 1), (6, 2)]
    assert not made(ArrayDataSource, path=path, features="b").own_schema().is_named


def test_python_sources_say_what_they_are_or_are_unnamed() -> None:
    class Named(list[Any]):
        columns = ("u", "v")
        classes = ("no", "yes")

    rows = [(np.array([1.0, 2.0]), 0), (np.array([3.0, 4.0]), 1)]
    try:
        provide("schema-named", Named(rows))
        provide("schema-bare", rows)
        named = made(IterableDataSource, provided="schema-named")
        assert named.own_schema().places == ("u", "v")
        named.adopt(SharedSchema.declared({"columns": ["v", "u"], "classes": ["yes", "no"]}))
        batch, labels = _batches(named)
        assert {tuple(row): int(label) for row, label in zip(batch, labels, strict=True)} == {
            (2.0, 1.0): 1,
            (4.0, 3.0): 0,
        }
        bare = made(IterableDataSource, provided="schema-bare")
        assert not bare.own_schema().is_named
        told = made(IterableDataSource, provided="schema-bare", columns=("v", "u"), label="z")
        assert told.own_schema().places == ("v", "u")
        wrong = made(IterableDataSource, provided="schema-bare", columns=("v", "u", "w"))
        with pytest.raises(DataUnavailable, match="one name for each place"):
            wrong.own_schema()
    finally:
        withdraw("schema-named")
        withdraw("schema-bare")


def test_images_and_texts_say_how_they_are_read(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("bee", "cat"):
        (tmp_path / name).mkdir()
        image.new("RGB", (4, 4)).save(tmp_path / name / "0.png")
    small = made(ImageFolderDataSource, path=str(tmp_path), size=(4, 4))
    gray = made(ImageFolderDataSource, path=str(tmp_path), size=(4, 4), channels=1)
    assert "image mode gray; the federation has RGB" in line(small.own_schema(), gray.own_schema())
    small.adopt(SharedSchema(classes=CLASSES))
    assert sorted(_batches(small)[1].tolist()) == [1, 2]
    assert small.describe().classes == CLASSES
    text = tmp_path / "lines.txt"
    text.write_text("no\tHello\nyes\tWorld\n")
    of = {"path": str(text), "length": 4}
    one = made(TextDataSource, classes=("no", "yes"), **of)
    other = made(TextDataSource, classes=("yes", "no"), **of)
    other.adopt(one.own_schema())
    assert np.array_equal(_batches(other)[1], _batches(one)[1])
    letters = made(TextDataSource, classes=("no", "yes"), tokenizer="characters", **of)
    assert "tokenizer characters; the federation has bytes" in line(
        one.own_schema(), letters.own_schema()
    )


def test_the_reference_is_what_a_model_carries(tmp_path: Path) -> None:
    _write(tmp_path / "own.csv", (*COLUMNS, "y"), _rows(12, CLASSES, WARDS))
    source = made(
        TableDataSource, path=str(tmp_path / "own.csv"), label="y", one_hot=("ward",),
        categories={"sex": SEXES, "ward": WARDS},
    )  # fmt: skip
    carried = described(source.own_schema())
    assert carried is not None
    own = source.describe()
    assert (carried.columns, carried.classes, carried.features) == (
        own.columns,
        own.classes,
        own.features,
    )
    again = made(TableDataSource, path=str(tmp_path / "own.csv"), **carried.settings)
    assert np.array_equal(again.examples({})[np.arange(12)], _in_order(source))


def _in_order(source: Any) -> Any:
    return source.next_batch(None)[0]
