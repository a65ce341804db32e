"""Tables as people have them: each kind is read as it was meant, or refused with what reads it."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bbnode.components import errors
from bbnode.components.data import number_text
from bbnode.components.data.description import SETTINGS
from bbnode.components.data.number_text import NumberFormat
from bbnode.components.data.tables import TableDataSource, TableDataSourceConfig
from tests.components.fakes import CTX


def source(path: Path, **config) -> TableDataSource:
    return TableDataSource(TableDataSourceConfig(path=str(path), **{"label": "y", **config}))


def told(path: Path, **config) -> str:
    with pytest.raises(errors.DataUnavailable) as caught:
        source(path, **config).next_batch(CTX)
    message = str(caught.value)
    assert message.isprintable()
    return message.partition(f"{path.name}")[2] or message


# Two values of column `a`, settings, and what they are; or a part of the refusal.
VALUES = [
    ("1,5", "12,25", {}, "line 2: row 0: it holds decimal commas ('1,5'); set decimal = \",\""),
    ("1,5", "12,25", {"decimal": ","}, [1.5, 12.25]),
    ("1,5", "7", {}, 'set decimal = ","'),
    ("1,500", "12,000", {}, 'set thousands = "," if the comma stands between thousands, and dec'),
    ("1,500", "12,000", {"thousands": ","}, [1500, 12000]),
    ("1,500", "12,000", {"decimal": ","}, [1.5, 12]),
    ("1,234.5", "7", {}, 'set thousands = ","'),
    ("1,234.5", "7", {"thousands": ","}, [1234.5, 7]),
    ("1.234,5", "7", {}, 'thousands (\'1.234,5\'); set thousands = ".", decimal = ","'),
    ("1.234,5", "7", {"thousands": ".", "decimal": ","}, [1234.5, 7]),
    ("1'234", "7", {}, "thousands = \"'\""),
    ("1\u2019234.5", "7", {"thousands": "'"}, [1234.5, 7]),
    ("1 234,5", "7", {"thousands": " ", "decimal": ","}, [1234.5, 7]),
    ("1\u202f234", "1\u00a0234", {"thousands": " "}, [1234, 1234]),
    ("1\u202f234", "7", {}, 'thousands = " "'),
    ("1,23", "1,234", {"thousands": ","}, "1,23"),
    ("12,34,567", "1,234", {"thousands": ","}, "12,34,567"),
    ("12.5%", "3 %", {}, 'units = { a = "%" }'),
    ("12.5%", "3 %", {"units": {"a": "%"}}, [12.5, 3]),
    ("$1,200.50", "-$3", {}, 'units = { a = "$" }, and thousands = ","'),
    ("$1,200.50", "-$3", {"units": {"a": "$"}, "thousands": ","}, [1200.5, -3]),
    ("12,50 €", "3,00 €", {}, 'units = { a = "€" }, and decimal = ","'),
    ("12,50 €", "3,00€", {"units": {"a": "€"}, "decimal": ","}, [12.5, 3]),
    ("1.5 m", "12.5 m", {}, "with the unit 'm' ('1.5 m'); set units = { a = \"m\" }"),
    ("1.5 m", "12.5 m", {"units": {"a": "m"}}, [1.5, 12.5]),
    ("1.5 m", "20 cm", {}, "several units ('m', 'cm')"),
    ("1.5 m", "20 cm", {"units": {"a": "m"}}, "line 3: row 1 has '20 cm', which is not a number"),
    ("1.5 m", "20", {"units": {"a": "m"}}, "row 1 has '20', which is not a number with the unit"),
    ("(1.50)", "2", {}, "set parentheses = true"),
    ("(1.50)", "2", {"parentheses": True}, [-1.5, 2]),
    ("($1.50)", "$2", {"parentheses": True, "units": {"a": "$"}}, [-1.5, 2]),
    ("(-1)", "2", {"parentheses": True}, "(-1)"),
    ("1.5-", "2", {}, "minus behind"),
    ("\u22121.5", "\u00a02 ", {}, [-1.5, 2]),
    ("1,5e3", "2", {"decimal": ","}, [1500, 2]),
    ("0x1F", "2", {}, [31, 2]),
    ("1_000", "2", {}, 'thousands = "_"'),
    ("inf", "2", {}, "line 2, row 0: inf is no float32 number"),
    ("01234", "99999", {}, "line 2: row 0 has '01234': it holds whole numbers that begin with 0"),
    ("01234", "99999", {"numbers": ("a",)}, [1234, 99999]),
    ("01234", "99999", {"categories": {"a": ("99999", "01234")}}, [1, 0]),
    ("0", "0.5", {}, [0, 0.5]),
    ("16777217", "1", {}, "line 2, row 0: 16777217 is no float32 number; whole numbers beyond"),
    ("16777217", "", {"missing": "mean"}, "row 0: 16777217 is no float32 number"),
    ("16777218", "1", {}, [16777218, 1]),
    ("16777217", "1", {"numbers": ("a",)}, [16777216, 1]),
    ("16777217", "1", {"dtype": "float64"}, [16777217, 1]),
    ("9007199254740993", "1.5", {"dtype": "float64"}, "row 0 has '9007199254740993': whole"),
    ("18446744073709551617", "1", {"dtype": "float64"}, "row 0 has '18446744073709551617'"),
    ("ja", "nein", {}, 'categories = { a = ["ja", "nein"] }'),
    ("nein", "ja", {"categories": {"a": ("nein", "ja")}}, [0, 1]),
    ("TRUE", "False", {}, [1, 0]),
    ("05.01.2024", "31.01.2024", {}, 'dates = { a = "%d.%m.%Y" }'),
    ("05.01.2024", "31.01.2024", {"dates": {"a": "%d.%m.%Y"}}, [19727, 19753]),
    ("05.01.2024", "31.02.2024", {"dates": {"a": "%d.%m.%Y"}}, "line 3: row 1 has '31.02.2024'"),
    ("1/25/2024", "2/1/2024", {}, 'dates = { a = "%m/%d/%Y" }'),
    ("2024-01-05", "2024-01-06", {}, 'dates = { a = "" }'),
    ("2024-01-05", "2024-01-06", {"dates": {"a": ""}}, [19727, 19728]),
    ("2024-01-05T12:00:00Z", "2024-01-06T02:00:00+02:00", {"dates": {"a": ""}}, [19727.5, 19728]),
    ("2024-01-05 12:00", "2024-01-06T00:00:00Z", {"dates": {"a": ""}}, "no date of ISO 8601"),
    ("12:00", "13:30", {"dates": {"a": ""}}, [0.5, 0.5625]),
    ("1:30", "13:30", {}, "it holds times"),
    ("<5", "7", {}, "words among numbers ('<5'): '<5' is a bound"),
    ("n.d.", "7", {}, 'missing_words = ["n.d."]'),
    ("  ", "7", {}, "line 2: row 0 has no value"),
    ("  ", "7", {"missing": "mean"}, [7, 7]),
    ("\u0661\u0662", "7", {}, "words among numbers"),
    ("A1", "B2", {}, "it holds text, its first values are 'A1', 'B2'"),
    ("5 kg", "6 KG", {"units": {"a": "kg"}}, "line 3: row 1 has '6 KG'"),
    ("-", "7", {"missing_words": ("-",), "missing": "mean"}, [7, 7]),
    ("a", "7", {}, "line 2: row 0: it has words among numbers ('a'): the heading is repeated"),
    ("Total", "7", {}, "a line of totals"),
    ("red", "blue", {}, "it holds text, its first values are 'red', 'blue'; name its values"),
    ("\x1b[31mred", "x", {}, "'·[31mred'"),
    ('"x\ny"', "z", {}, "line 2: row 0: a value goes over several lines ('x·y')"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "config", "wanted"), VALUES)
def test_a_column_is_read_as_it_was_meant_or_refused(tmp_path, one, other, config, wanted) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"a;y\n{one};1\n{other};0\n", encoding="utf-8")
    config = {"delimiter": ";", **config}
    if isinstance(wanted, str):
        assert wanted in told(path, **config)
    else:
        assert source(path, **config).next_batch(CTX)[0][:, 0].tolist() == wanted


# A file, settings, and the features; or a part of the refusal.
FILES = [
    ("a,y\n1,2\n".encode("utf-16"), {}, 'it is UTF-16, not utf8; set encoding = "utf-16"'),
    ("a,y\n1,2\n".encode("utf-16"), {"encoding": "utf-16"}, [[1]]),
    ("a,y\n1,2\n2,3\n".encode("utf-16-le"), {}, 'set encoding = "utf-16-le"'),
    ("a,y\n1,2\n2,3\n".encode("utf-16-be"), {"encoding": "utf-16-be"}, [[1], [2]]),
    (b"a,y\n1,2\n2\x00,3\n", {}, "NUL bytes (line 3"),
    ("größe,y\n1,2\n".encode("latin-1"), {}, "encoding 'utf8' (byte 3); set `encoding`"),
    (b"a,y\n1,2\n\xe4,3\n", {}, "line 3: row 1 has 1 bytes e4, text that is not in the encoding"),
    (b"sep=;\r\na;y\r\n1;2\r\n", {}, [[1]]),
    (b"sep=;\na;y\n1;2\n", {"delimiter": ";"}, [[1]]),
    (b"sep=;\na;y\n1;2\n", {"delimiter": ","}, "says sep=';', and `delimiter` is ','"),
    (b"# made\na,y\n1,2\n", {}, 'set comment = "#"'),
    (b"# made\na,y\n1,2\n# more\n2,1\n", {"comment": "#"}, [[1], [2]]),
    (b"# made\na,y\n1,2\n# more\n2,x,1\n", {"comment": "#"}, "line 5 has 3 value(s)"),
    (b"Report;;\n\na;y\n1;2\n", {"skip_lines": 2, "delimiter": ";"}, [[1]]),
    (b"Report of May\na;y\n1;2\n", {"delimiter": ";"}, "set skip_lines"),
    (b"a,y\nm,s\n1,1\n2,0\n", {}, "skip_rows = 1"),
    (b"a,y\nm,s\n1,1\n2,0\n", {"skip_rows": 1}, [[1], [2]]),
    (b"a,b,y\n" + b"1,2,3\n" * 500 + b"0,3\n", {}, "line 502 has 2 value(s) ('0', '3'), and"),
    (b"a,b,y\n1,5,2,3\n", {}, "decimal commas without quotes"),
    (b"a,y\n1,2,\n", {}, "ends with a delimiter, and the heading does not"),
    (b"a,y,\n1,2,\n", {}, "the last column of"),
    (b'a,y\n1,"x\n2,y\n3,z\n', {}, "line 2: a quote begins there and never closes"),
    (b'y,a\n1,"2\n', {}, "line 2: a quote begins there and never closes"),
    (b'y,b,a\n1,5" pipe,2\n', {"features": "a"}, [[2]]),
    (b"\xef\xbb\xbfa,y\n1,2\n", {}, [[1]]),
    (b"a,y\r1,2\r3,4\r", {}, [[1], [3]]),
    (b"a,y\r\n1,2\n3,4\r5,6", {}, [[1], [3], [5]]),
    (b"a,y\n" + b"1" + b" " * 3_000_000 + b",2\n", {}, [[1]]),
    (b"", {}, "it is empty, and a table has a heading"),
    (b"a,y\n", {}, "it has no rows"),
    (b"a,y\n1,2\n,\n", {}, "line 3: row 1 has no value"),
    (b"Report,,,\na,b,c,y\n1,2,3,4\n", {}, "set skip_lines if the table begins below"),
    (b"a,y\nNA,2\nDE,3\n,3\n", {"categories": {"a": ("DE", "NA")}, "missing": "drop"}, [[1], [0]]),
    (b"a,y,,\n1,2,,\n", {"ignore": ("",)}, [[1]]),
    (b"a,b,y\n1,,2\n", {}, "all of its values are missing"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "config", "wanted"), FILES)
def test_a_file_is_read_as_it_was_meant_or_its_line_is_named(tmp_path, raw, config, wanted) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(raw)
    if isinstance(wanted, str):
        message = told(path, **config)
        assert wanted in message or wanted in f"the last column of {path.name}{message}"
        assert "set `path`" not in message
    else:
        assert source(path, **config).next_batch(CTX)[0].tolist() == wanted


# The files of January and February, settings, and the features; or parts of the refusal.
MONTHS = [
    ("a,y\n1,0\n", "a,y\n2.5,1\n", {}, [[1], [2.5]]),
    ("a,b,y\n1,1,0\n", "a,b,y\n2,,1\n", {"missing": "mean"}, [[1, 1], [2, 1]]),
    ("a,b,y\n1,,0\n", "a,b,y\n2,5,1\n", {"missing": "mean"}, [[1, 5], [2, 5]]),
    ("a,b,y\n1,2,0\n", "b,a,y\n4,3,1\n", {}, [[1, 2], [3, 4]]),
    ("a,y\n1,0\n", "a,y\n", {}, [[1]]),
    ("a,y\n1,0\n", "a,c,y\n2,x,1\n", {"features": "a"}, [[1], [2]]),
    ("a,y\n1,0\n", "a,c,y\n2,x,1\n", {"ignore": ("c",)}, [[1], [2]]),
    ("a,y\n1,0\n", "a,y\n2,1\n", {"ignore": ("d",)}, "has no column 'd'; it has 'a', 'y'"),
    ("a,y\n1,0\n", "b,y\n2,1\n", {"features": "a"}, "2.csv has no column 'a'"),
    ("a,y\n1,0\n", "a,c,y\n2,1,1\n", {}, "2.csv has the column 'c', and "),
    ('a,y\n"1,000",0\n', "a,y\n7,1\n", {"thousands": ","}, [[1000], [7]]),
    ("a,y\n1,0\n", 'a,y\n"2,5",1\n', {}, "2.csv, line 2: row 0: it holds decimal commas"),
    ("a,y\n1,0\n", "a,y\n2,x\n", {}, "column 'y' is text in "),
    ("a,y\n1,true\n", "a,y\n1,2\n", {}, "column 'y' is whole numbers in "),
    ("a,y\n2024-01-01,0\n", "a,y\n2024-01-02 12:00,1\n", {"dates": {"a": ""}},
     [[19723], [19724.5]]),
]  # fmt: skip


@pytest.mark.parametrize(("january", "february", "config", "wanted"), MONTHS)
def test_files_of_a_folder_are_one_table(tmp_path, january, february, config, wanted) -> None:
    (tmp_path / "1.csv").write_text(january)
    (tmp_path / "2.csv").write_text(february)
    if isinstance(wanted, str):
        with pytest.raises(errors.DataUnavailable) as caught:
            source(tmp_path, **config).next_batch(CTX)
        assert wanted in str(caught.value)
    else:
        assert source(tmp_path, **config).next_batch(CTX)[0].tolist() == wanted


def test_rows_of_a_folder_are_those_of_their_file(tmp_path) -> None:
    (tmp_path / "1.csv").write_text("a,y\n1,0\n")
    (tmp_path / "2.csv").write_text("a,y\n\n2,1\n,0\n")
    with pytest.raises(errors.DataUnavailable, match=r"2\.csv, line 4: row 2 has no value"):
        source(tmp_path).next_batch(CTX)


LEVELS = pa.DictionaryArray.from_arrays(pa.array([1, 2, 1]), ["low", "mid", "high", "never"])
CLASSES = {"huggingface": json.dumps({"info": {"features": {
    "a": {"_type": "ClassLabel", "names": ["u", "v"]}}}})}  # fmt: skip
INDEX = {"pandas": json.dumps({"index_columns": ["id"]})}


def typed(a, **more) -> pa.Table:
    return pa.table({"a": a, "y": list(range(len(a))), **more})


# A table with types, settings, and the features; or a part of the refusal.
TYPED = [
    (typed(LEVELS), {}, [[1], [2], [1]]),
    (typed(LEVELS), {"categories": {"a": ("high", "mid")}}, [[1], [0], [1]]),
    (typed(["x", "y"]), {}, "row 0: it holds text, its first values are 'x', 'y'"),
    (typed(["1", "2"]), {}, "it holds numbers as text ('1', '2'); if they are quantities, set"),
    (typed(["01", "2"]), {}, "begin with 0"),
    (typed(["1", "2,5"]), {"numbers": ("a",), "decimal": ","}, [[1], [2.5]]),
    (typed(["5.1.2024"]), {"dates": {"a": "%d.%m.%Y"}}, [[19727]]),
    (typed([1.5]), {"units": {"a": "m"}}, "`units` says 'm', and it holds double without it"),
    (typed([1, 0, -1]).replace_schema_metadata(CLASSES), {"missing": "drop"}, [[1], [0]]),
    (typed([1, 0]).replace_schema_metadata(CLASSES), {"one_hot": ("a",)}, [[0, 1], [1, 0]]),
    (typed([1, 0]).replace_schema_metadata(CLASSES), {"categories": {"a": ("v", "w", "u")}},
     [[0], [2]]),
    (typed([1, 5]).replace_schema_metadata(CLASSES), {}, "row 1 has 5, and the file names 2"),
    (typed([1, 2], id=[7, 8]).replace_schema_metadata(INDEX), {}, [[1], [2]]),
    (typed([1, 2], id=[7, 8]).replace_schema_metadata(INDEX), {"features": ("id",)}, [[7], [8]]),
    (typed(pa.array([9007199254740993, None])), {"missing": "mean", "dtype": "float64"},
     "9007199254740993 is no float64 number"),
    (typed(pa.array([12345678901234567], pa.decimal128(20, 0))), {}, "is no float32 number"),
    (typed(pa.array([1, 2], pa.decimal128(5, 2))), {}, [[1], [2]]),
    (typed(np.array([1, 2], np.float16)), {}, [[1], [2]]),
    (typed(pa.array([19727], pa.date32())), {}, 'dates = { a = "" }'),
    (typed(pa.array([19727], pa.date32())), {"dates": {"a": ""}}, [[19727]]),
    (typed(pa.array([86400, 43200], pa.duration("s"))), {"dates": {"a": ""}}, [[1], [0.5]]),
    (typed(pa.array([43200 * 10**9], pa.timestamp("ns", "Europe/Berlin"))), {"dates": {"a": ""}},
     [[0.5]]),
    (typed([b"x", b"y"]), {}, "it holds bytes"),
    (typed([1.5]), {"dates": {"a": ""}}, "`dates` names it, and it holds double, no dates"),
    (typed(pa.array([2**64 - 1], pa.uint64())), {"dtype": "float64"},
     "18446744073709551615 is no float64 number"),
    (typed(pa.array([-(2**63)])), {}, [[-(2.0**63)]]),
    (typed([[1], [2, 3]]), {}, "row 1: its lists differ in length (1, 2)"),
    (typed([[1, 2], None]), {}, "row 1: a list is missing"),
]  # fmt: skip


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize(("table", "config", "wanted"), TYPED)
def test_what_a_file_says_of_its_columns_is_kept(tmp_path, ending, table, config, wanted) -> None:
    path = tmp_path / f"t.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    else:
        pyarrow.feather.write_feather(table, path, compression="uncompressed")
    if isinstance(wanted, str):
        assert wanted in told(path, **config)
    else:
        assert source(path, **config).next_batch(CTX)[0].tolist() == wanted


def test_classes_that_a_file_lists_are_classes_also_where_no_row_has_them(tmp_path) -> None:
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pa.table({"a": [1, 2, 3], "y": LEVELS}), path)
    made = source(path)
    assert made.schema().classes == ("low", "mid", "high", "never")
    assert made.next_batch(CTX)[1].tolist() == [1, 2, 1]


def test_units_of_the_file_and_of_the_setting_are_kept(tmp_path) -> None:
    kinds = pa.schema([
        pa.field("a", pa.int64(), metadata={"unit": "kg"}), ("b", pa.string()), ("y", pa.int64())
    ])  # fmt: skip
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pa.table({"a": [1], "b": ["2 m"], "y": [0]}, schema=kinds), path)
    made = source(path, units={"b": "m"})
    assert made.next_batch(CTX)[0].tolist() == [[1, 2]]
    assert made.column_units() == {"a": "kg", "b": "m"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a,y\n1,1.5 m\n", "with the unit 'm'.*; if these are classes, name them in `categories`"),
        ('a,y\n1,"1,5"\n2,"2,5"\n', "decimal commas"),
        ("a,y\n1,<5\n2,6\n", "words among numbers"),
    ],
)
def test_labels_that_are_numbers_with_marks_are_no_classes(tmp_path, text, wanted) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(errors.DataUnavailable, match=rf"column 'y' .*line 2: .*{wanted}"):
        source(tmp_path / "t.csv").next_batch(CTX)


def test_what_is_read_of_words_and_totals_is_logged(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "t.csv"
    path.write_text("n,a,y\nx,1,good\nTotal,3,b\x1bd\n", encoding="utf-8")
    source(path, ignore=("n",)).next_batch(CTX)
    assert "words of column 'y'" in caplog.text
    assert "they are sorted: 'b·d', 'good'; set `categories` alike" in caplog.text
    assert "has 'Total' and is taken as an example" in caplog.text


def test_an_export_carries_the_settings_that_read_its_columns(tmp_path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("# x\na;d;y\n1.234,5 €;05.01.2024;1\n", encoding="utf-8")
    own = {
        "delimiter": ";", "decimal": ",", "thousands": ".", "units": {"a": "€"}, "comment": "#",
        "dates": {"d": "%d.%m.%Y"}, "numbers": ("a",), "parentheses": True,
    }  # fmt: skip
    made = source(path, **own).describe()
    assert {name: made.settings[name] for name in own} == own
    again = TableDataSource(TableDataSourceConfig(path=str(path), **made.settings))
    assert again.examples({}).tolist() == [[1234.5, 19727]]
    assert own.keys() < set(SETTINGS["table"])


@pytest.mark.parametrize(
    "config",
    [
        {"decimal": ";"}, {"thousands": "x"}, {"decimal": ",", "thousands": ","},
        {"units": {"a": " "}}, {"units": {"a": "m2"}}, {"skip_lines": -1}, {"comment": "\n"},
        {"dates": {"a": ""}, "categories": {"a": ("x",)}}, {"dates": {"a": ""}, "numbers": ("a",)},
    ],
)  # fmt: skip
def test_settings_that_contradict_are_refused(config) -> None:
    with pytest.raises(errors.InvalidComponentConfig):
        source(Path("t.csv"), **config)


def grouped(digits: str, mark: str) -> str:
    parts = [digits[max(0, at - 3) : at] for at in range(len(digits), 0, -3)]
    return mark.join(reversed(parts))


@st.composite
def written(draw) -> tuple[str, float, NumberFormat, str]:
    """A number, and how it may be written."""
    decimal = draw(st.sampled_from(number_text.DECIMALS))
    thousands = draw(st.sampled_from([m for m in number_text.THOUSANDS if m != decimal]))
    whole = str(draw(st.integers(0, 10**12)))
    fraction = draw(st.text("0123456789", max_size=6))
    exponent = draw(st.sampled_from(["", "e3", "E-2"]))
    value = float(f"{whole}.{fraction or '0'}{exponent}")
    text = grouped(whole, thousands) if thousands else whole
    text += (decimal + fraction if fraction else "") + exponent
    unit = draw(st.sampled_from(["", "€", "kg", "m²", "%"]))
    minus = draw(st.sampled_from(["", "-", "\u2212"]))
    if unit and draw(st.booleans()):
        text = f"{minus}{unit} {text}"
    else:
        text = f"{minus}{text}" + (f"\u00a0{unit}" if unit else "")
    how = NumberFormat(decimal=decimal, thousands=thousands)
    return f" {text} ", -value if minus else value, how, unit


@given(written(), st.sampled_from(number_text.DECIMALS), st.sampled_from(number_text.THOUSANDS))
def test_a_number_is_read_as_it_was_written_or_not_at_all(made, decimal, thousands) -> None:
    text, value, how, unit = made
    found, _ = number_text.parsed(pa, pa.array([text]), how, unit)
    assert found[0].as_py() == value
    # With the other marks it is the same number, another one that a person reads there, or none.
    if decimal != thousands:
        other = NumberFormat(decimal=decimal, thousands=thousands)
        (read,) = number_text.parsed(pa, pa.array([text]), other, unit)[0].to_pylist()
        if decimal == how.decimal and thousands != how.thousands:
            assert read in (None, value)


@given(st.text(max_size=12), st.sampled_from(["", "%"]))
def test_any_text_is_a_number_or_none(text, unit) -> None:
    found, _ = number_text.parsed(pa, pa.array([text]), NumberFormat(parentheses=True), unit)
    (value,) = found.to_pylist()
    if value is not None and not unit:
        plain = text.strip().replace("\u2212", "-")
        plain = f"-{plain[1:-1].strip()}" if plain.startswith("(") else plain
        assert value == float(plain) or math.isinf(value)
    number_text.why_text("a", [text, "x1"], NumberFormat())


@given(written())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_without_settings_a_number_is_read_as_it_is_or_refused(tmp_path, made) -> None:
    text, value, how, _ = made
    (tmp_path / "t.csv").write_text(f'a;y\n"{text}";0\n"{text}";1\n', encoding="utf-8")
    try:
        x, _ = source(tmp_path / "t.csv", delimiter=";", dtype="float64").next_batch(CTX)
    except errors.DataUnavailable as error:
        why = str(error)
    else:  # 1.234 is a fraction here, whatever its writer meant
        why = ""
        assert x[0, 0] == value or how.thousands == "."
    assert not why or ("column 'a'" in why and "line 2" in why)


def test_names_of_files_that_cannot_be_printed_are_never_printed(tmp_path) -> None:
    for name in (b"1\xff.csv", b"2\x1b[2J.csv"):
        (tmp_path / os.fsdecode(name)).write_text("a,y\nx,1\n")
    with pytest.raises(errors.DataUnavailable) as caught:
        source(tmp_path).next_batch(CTX)
    assert str(caught.value).isprintable()
    assert "1·.csv, line 2: row 0: it holds text" in str(caught.value)


def test_hidden_files_of_a_folder_are_left_out_and_named(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "1.csv").write_text("a,y\n1,0\n")
    (tmp_path / "._1.csv").write_bytes(b"\0\5\x16\7")
    assert source(tmp_path).next_batch(CTX)[0].tolist() == [[1]]
    assert "left out: '._1.csv'" in caplog.text
