"""Lines of text and of JSON: tokenised per batch, checked line by line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from bbnode.components import DataUnavailable, InvalidComponentConfig
from bbnode.components.data import text
from bbnode.components.data.text import PRINTABLE, TextDataSource, TextDataSourceConfig
from tests.components.fakes import CTX

POEM = "To be, or not to be,\n\nthat is the question.\n"


def source(path: Path, **config) -> TextDataSource:
    return TextDataSource(TextDataSourceConfig(path=str(path), **config))


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=60, special_tokens=["[UNK]", "[PAD]"], show_progress=False
    )
    made.train_from_iterator([POEM], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_lines_are_padded_and_cut(tmp_path) -> None:
    path = written(tmp_path / "a.txt", "0\thi\r\n\n2\twörld\n1\t\tx")
    batch, labels = source(path, length=4).next_batch(CTX)
    assert (batch.dtype, labels.dtype) == (np.int64, np.int64)
    assert labels.tolist() == [0, 2, 1]
    assert batch.tolist() == [
        [ord("h") + 1, ord("i") + 1, 0, 0],
        [b + 1 for b in "wör".encode()],
        [ord("\t") + 1, ord("x") + 1, 0, 0],
    ]
    schema = source(path, length=4).schema()
    assert (schema.features.shape, schema.features.dtype) == ((4,), "int64")
    assert (schema.label_range, schema.num_samples) == ((0, 2), 3)


def test_json_lines_with_named_classes(tmp_path) -> None:
    rows = [{"body": "so so", "mood": "meh"}, {"body": "yes!", "mood": "good", "id": 7}]
    lines = "\n".join(json.dumps(row) for row in rows)
    path = written(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + lines.encode())
    data = source(
        path, format="jsonl", text="body", label="mood", classes=("bad", "meh", "good"), length=3,
        tokenizer="characters", alphabet="eso",
    )  # fmt: skip
    batch, labels = data.next_batch(CTX)
    assert labels.tolist() == [1, 2]
    assert batch.tolist() == [[3, 4, 1], [1, 2, 3]]
    assert data.vocabulary == 5
    assert data.schema().classes == ("bad", "meh", "good")
    assert data.schema().label_name == "mood"


def test_a_language_model_gets_blocks_and_what_follows(tmp_path) -> None:
    path = written(tmp_path / "a.txt", POEM * 5)
    data = source(path, task="language_model", tokenizer="characters", length=8)
    batch, following = data.next_batch(CTX)
    assert "".join(PRINTABLE[i - 2] for i in batch.ravel()) == (POEM * 5)[: batch.size]
    np.testing.assert_array_equal(batch.ravel()[1:], following.ravel()[:-1])
    assert data.schema().label_range == (2, following.max())
    assert len(batch) == data.num_samples == (len(POEM) * 5 - 1) // 8
    assert batch.flags.c_contiguous
    shuffled = [x for x, _ in data.epoch_batches(4)]
    assert sorted(map(tuple, np.concatenate(shuffled))) == sorted(map(tuple, batch))


def test_documents_of_json_lines_follow_each_other(tmp_path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "ab"}\n\n{"text": "cd"}\n')
    batch, following = source(
        path, format="jsonl", task="language_model", length=2, tokenizer="characters",
        alphabet="\nabcd",
    ).next_batch(CTX)  # fmt: skip
    assert batch.tolist() == [[3, 4], [2, 5]]
    assert following.tolist() == [[4, 2], [5, 6]]


def test_a_tokenizer_of_a_file(tmp_path, tokenizer) -> None:
    path = written(tmp_path / "a.txt", "1\tto be\n0\tthat question")
    data = source(path, tokenizer="file", tokenizer_file=str(tokenizer), length=9)
    batch, _ = data.next_batch(CTX)
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    wanted = library.encode("to be").ids
    assert batch[0].tolist() == wanted + [1] * (9 - len(wanted))  # 1 is [PAD]
    assert data.vocabulary == library.get_vocab_size()
    padded = source(path, tokenizer="file", tokenizer_file=str(tokenizer), length=9, pad_id=0)
    assert padded.next_batch(CTX)[0][0, -1] == 0
    stream = source(
        written(tmp_path / "b.txt", POEM), tokenizer="file", tokenizer_file=str(tokenizer),
        task="language_model", length=3,
    )  # fmt: skip
    ids = library.encode(POEM).ids
    assert stream.next_batch(CTX)[0].ravel().tolist() == ids[: (len(ids) - 1) // 3 * 3]


@pytest.mark.parametrize(
    "content",
    [b'{"a": 1}', b"\x00\xff", b"", b"[" * 100_000, b'{"model": {"type": "BPE", "vocab": {}}}'],
)
def test_a_tokenizer_file_of_garbage_is_refused(tmp_path, content) -> None:
    path = written(tmp_path / "a.txt", "1\tx")
    bad = written(tmp_path / "bad.json", content)
    with pytest.raises(DataUnavailable, match=r"bad\.json is no tokenizer\.json"):
        source(path, tokenizer="file", tokenizer_file=str(bad)).next_batch(CTX)


def test_a_tokenizer_that_pads_with_nothing_or_is_huge_is_refused(tmp_path, monkeypatch) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    made.save(str(tmp_path / "t.json"))
    path = written(tmp_path / "a.txt", "1\ta")
    config = {"tokenizer": "file", "tokenizer_file": str(tmp_path / "t.json")}
    with pytest.raises(DataUnavailable, match="set `pad_id`"):
        source(path, **config).next_batch(CTX)
    with pytest.raises(DataUnavailable, match="pad_id 1 is no token"):
        source(path, **config, pad_id=1).next_batch(CTX)
    monkeypatch.setattr(text, "_MAX_TOKENIZER_BYTES", 10)
    with pytest.raises(DataUnavailable, match="more than 10"):
        source(path, **config).next_batch(CTX)


def test_without_the_library_it_is_named(tmp_path, monkeypatch, tokenizer) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    path = written(tmp_path / "a.txt", "1\tx")
    with pytest.raises(DataUnavailable, match=r"pip install 'tokenizers>=0\.20"):
        source(path, tokenizer="file", tokenizer_file=str(tokenizer)).next_batch(CTX)


@pytest.mark.parametrize(
    ("config", "content", "match"),
    [
        ({}, b"", "no line with an example"),
        ({}, b"\n\n  \n", "no line with an example"),
        ({}, b"0\tok\nno tab", "line 2: no tab"),
        ({}, b"0\tok\n\n1\tb\xffd", r"line 3: no UTF-8 \(byte 4\)"),
        ({}, b"spam\tok", "line 1: label 'spam' is no integer from 0; name the labels"),
        ({}, b"-1\tok", "label '-1'"),
        ({}, b"99999999999999999999\tok", "label '9999"),
        ({"classes": ("ham",)}, b"spam\tok", "label 'spam' is none of `classes`"),
        ({"max_line_bytes": 5}, b"0\tok\n0\tlonger", "line 2: longer than 5 bytes"),
        ({"task": "language_model"}, b"short", "6 token.s., and one block takes 129"),
        ({"format": "jsonl"}, b'{"text": "a", "label": 0}\n{"text"', "line 2: no JSON"),
        ({"format": "jsonl"}, b"[" * 100_000, "line 1: no JSON"),
        ({"format": "jsonl"}, b'{"label": ' + b"9" * 5000 + b"}", "too deep or too large"),
        ({"format": "jsonl"}, b'["text"]', "no JSON object"),
        ({"format": "jsonl"}, b'{"label": 0, "body": ""}', "no field 'text'; it has 'label', 'bod"),
        ({"format": "jsonl"}, b'{"label": 0, "text": 5}', "field 'text' is 5, no text"),
        ({"format": "jsonl"}, b'{"label": 0.5, "text": ""}', "label 0.5 is no integer"),
        ({"format": "jsonl"}, b'{"label": null, "text": ""}', "label None is no integer"),
        ({"format": "jsonl"}, b'{"label": 0, "text": "\\ud800"}', "half a surrogate pair"),
    ],
)
def test_lines_that_cannot_be_used_are_named(tmp_path, config, content, match) -> None:
    path = written(tmp_path / "a.txt", content)
    with pytest.raises(DataUnavailable, match=match):
        source(path, **config).next_batch(CTX)


def test_paths_that_are_no_files_are_refused_at_once(tmp_path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    for name, match in {
        "": "is a folder", "fifo": "is a FIFO", "one": "symbolic links", "none": "No such file",
        "nul\0": "null",
    }.items():  # fmt: skip
        with pytest.raises(DataUnavailable, match=match):
            source(tmp_path / name).next_batch(CTX)
    with pytest.raises(DataUnavailable, match="is a device"):
        source(Path("/dev/zero")).next_batch(CTX)


def test_a_file_that_changes_is_not_half_read(tmp_path) -> None:
    path = written(tmp_path / "a.txt", "0\tone\n1\ttwo\n")
    data = source(path)
    data.on_data_loaded(CTX)
    batches = data.epoch_batches(1)
    os.truncate(path, 8)
    with pytest.raises(DataUnavailable, match="changed while it was in use"):
        list(batches)


@pytest.mark.parametrize(
    "config",
    [
        {"format": "xml"}, {"task": "x"}, {"tokenizer": "words"}, {"tokenizer": "file"},
        {"tokenizer_file": "x"}, {"length": 0}, {"length": 1 << 21}, {"alphabet": "aa"},
        {"classes": ("a", "a")}, {"pad_id": 3}, {"max_line_bytes": 0},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(tmp_path, config) -> None:
    with pytest.raises(InvalidComponentConfig):
        source(tmp_path / "a", **config)


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"))),
    st.integers(1, 5),
    st.integers(1, 40),
)
def test_blocks_are_the_text_whatever_the_chunks(tmp_path_factory, lines, length, chunk) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    content = "".join(f"{line}\n" for line in ["", *lines])
    path.write_bytes(content.encode())
    wanted = np.frombuffer(content.encode(), np.uint8).astype(np.int64) + 1
    data = source(path, task="language_model", length=length)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(text, "_CHUNK_BYTES", chunk)
        if len(wanted) <= length:
            with pytest.raises(DataUnavailable, match="one block takes"):
                data.num_samples  # noqa: B018
            return
        batch, following = data.next_batch(CTX)
    stream = wanted[: batch.size + 1]
    if not content.startswith("\ufeff"):
        np.testing.assert_array_equal(batch.ravel(), stream[:-1])
        np.testing.assert_array_equal(following.ravel(), stream[1:])


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("0\tabc\n".encode("utf-16"), "line 1: it is UTF-16, no UTF-8; convert the file to UTF-8"),
        ("0\tabc\n1\tdef\n".encode("utf-16-le"), "line 1: it has NUL bytes, as UTF-16 has"),
        (b"0\tabc\r1\tdef\r", r"line 1: its lines end with a carriage return alone"),
    ],
)
def test_text_of_other_machines_is_named(tmp_path, content, match) -> None:
    with pytest.raises(DataUnavailable, match=match):
        source(written(tmp_path / "t.txt", content)).next_batch(CTX)
