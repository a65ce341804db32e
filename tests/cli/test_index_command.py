"""`bbnode index` on a directory: what it reads and finds, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import bbnode
from bbnode.cli import conditions, exits
from bbnode.cli.main import main
from bbnode.programs import EmbedAndSearch, VectorStore
from tests.components.encoders import tiny_encoder
from tests.patience import PATIENCE_S

VECTORS = np.array([[1, 0], [0, 1], [3, 4], [-1, 0]], np.float32)
TITLES = ["east", "nörth", "far", "west"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"id": 10 + n, "title": title, "year": 2000 + n, "vector": VECTORS[n].tolist()}
        for n, title in enumerate(TITLES)
    ]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    np.save("v.npy", VECTORS)


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = exits.OK) -> tuple[str, str]:
    """Run `bbnode index …`; returns what it printed to stdout and stderr."""
    assert main(["index", *words]) == code
    said = capsys.readouterr()
    return said.out, said.err


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = exits.OK) -> Any:
    return json.loads(run(capsys, *words, "--json", code=code)[0])


def refused(capsys: pytest.CaptureFixture[str], match: str, *words: str, code: int = 2) -> None:
    _, err = run(capsys, *words, code=code)
    last = err.strip().splitlines()[-1]
    assert re.search(match, last), last
    assert last.startswith("error: ")


def test_items_are_added_found_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "add", "ü", "a.jsonl", "--metric", "l2")[0] == "ü: 4 added\n"
    made = told(capsys, "stats", "ü")
    assert (made["schema"], made["index"]) == ("bbnode/index-stats/1", "ü")
    assert (made["items"], made["dimensions"], made["metric"]) == (4, 2, "l2")
    (hits,) = told(capsys, "search", "ü", "--vector", "[0.9, 0]", "-k", "2")["queries"]
    assert [(hit["id"], hit["metadata"]["title"]) for hit in hits] == [(10, "east"), (11, "nörth")]
    assert hits[0]["distance"] == pytest.approx(0.1)
    out, _ = run(capsys, "search", "ü", "--vector", "[0.9, 0]", "--where", "year >= 2002")
    assert "far" in out
    assert "east" not in out
    gone = told(capsys, "remove", "ü", "10", "99")
    assert (gone["removed"], gone["items"]) == (1, 3)
    assert told(capsys, "remove", "ü", "--where", "title in nörth, west")["removed"] == 2
    assert told(capsys, "stats", "ü")["items"] == 1
    _, err = run(capsys, "search", "ü", "--vector", "[0, 0]", "--where", "title=nobody")
    assert "nothing found" in err


def test_the_same_files_again_add_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "add", "i", "a.jsonl")
    again = told(capsys, "add", "i", "a.jsonl")
    assert (again["added"], again["present"], again["replaced"]) == (0, 4, 0)
    text = Path("a.jsonl").read_text(encoding="utf-8").replace("[3.0, 4.0]", "[3.0, 5.0]")
    Path("a.jsonl").write_text(text + '{"id": 99, "vector": [7, 7]}\n', encoding="utf-8")
    again = told(capsys, "add", "i", "a.jsonl")
    assert (again["added"], again["present"], again["replaced"]) == (1, 3, 1)
    with bbnode.open_index("i") as index:
        assert sorted(index.ids.tolist()) == [10, 11, 12, 13, 99]
        assert index.vectors_of([12]).tolist() == [[3, 5]]


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_rows_without_ids_are_numbered(metric: str, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("w.npy", VECTORS[::-1])
    run(capsys, "add", "i", "v.npy", "w.npy", "--metric", metric)
    assert told(capsys, "add", "i", "v.npy", "w.npy")["present"] == 8
    assert told(capsys, "add", "i", "w.npy", "--first-id", "4")["present"] == 4
    # Another file has the same numbers: its items are others, and replace nothing unasked.
    refused(capsys, r"w.npy, row 0: the id 0 .*\(--first-id 8\)", "add", "i", "w.npy")
    with bbnode.open_index("i") as index:
        assert len(index) == 8
    assert told(capsys, "add", "i", "w.npy", "--replace")["replaced"] == 4


def test_a_bad_row_ends_it_or_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Path("a.jsonl").read_text(encoding="utf-8").splitlines()
    lines[2] = lines[2].replace("3.0", "NaN")
    Path("b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    _, err = run(capsys, "add", "i", "b.jsonl", code=exits.USAGE)
    assert err.splitlines()[0] == "i: before that, 2 added"
    assert "b.jsonl: line 3: number 0 of the vector (from 0) is NaN" in err
    made = told(capsys, "add", "i", "b.jsonl", "--skip-bad")
    assert (made["added"], made["present"], made["skipped"]) == (1, 2, 1)
    _, err = run(capsys, "add", "i", "b.jsonl", "--skip-bad")
    assert "skipped: b.jsonl, line 3: number 0" in err


def test_what_the_index_refuses_is_named_by_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("z.npy", np.array([[1, 0], [0, 0], [0, 1]]))
    words = ("add", "i", "z.npy", "--metric", "cosine")
    refused(capsys, "z.npy: row 1: .*no direction", *words)
    made = told(capsys, *words, "--skip-bad")
    assert (made["added"], made["present"], made["skipped"]) == (1, 1, 1)
    assert told(capsys, "stats", "i")["items"] == 2


@pytest.mark.parametrize(
    ("match", "words"),
    [
        ("is a file; give the index's directory first", ["add", "a.jsonl", "v.npy"]),
        ("give files of items", ["add", "i"]),
        ("No such file", ["add", "i", "none.npy"]),
        ("files of items end with", ["add", "i", "a.doc"]),
        ("vectors of 3 numbers; this index holds vectors of 2", ["add", "i", "three.npy"]),
        ("metric l2, not 'cosine'", ["add", "i", "v.npy", "--metric", "cosine"]),
        ("'cos'; choose l2, ip, cosine", ["add", "i", "v.npy", "--metric", "cos"]),
        ("'tree'; choose flat", ["add", "i", "v.npy", "--kind", "tree"]),
        ("is no index", ["add", "other", "v.npy"]),
        ("need --encoder DIR", ["add", "i", "a.jsonl", "--text", "title"]),
        ("goes without --metadata", ["add", "i", "v.npy", "--no-metadata", "--metadata", "x"]),
        ("goes without --id-column", ["add", "i", "v.npy", "--row-ids", "--id-column", "x"]),
        ("is not there; `bbnode index add", ["search", "none", "--vector", "[1, 2]"]),
        ("is no index", ["stats", "other"]),
        ("give one of them", ["search", "i"]),
        ("give one of them", ["search", "i", "--query", "v.npy", "--vector", "[1, 2]"]),
        ("needs --encoder DIR", ["search", "i", "--text", "words"]),
        ("goes with --text", ["search", "i", "--vector", "[1, 2]", "--encoder", "x"]),
        (r'give numbers, as "\[0.1, 0.2\]"', ["search", "i", "--vector", "[1, two]"]),
        ("queries of 3 numbers", ["search", "i", "--query", "three.npy"]),
        ("a.jsonl is no .npy file", ["search", "i", "--query", "a.jsonl"]),
        ("is no condition", ["search", "i", "--vector", "[1, 2]", "--where", "year"]),
        ("'x' is no id", ["remove", "i", "1", "x"]),
        ("is no id", ["remove", "i", "9" * 5000]),
        ("is no id", ["remove", "i", str(1 << 63)]),
        ("give ids or --where", ["remove", "i"]),
        ("give the index's directory, or the configuration", ["stats"]),
    ],
)
def test_what_is_mistyped_is_said(
    match: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "add", "i", "v.npy")
    np.save("three.npy", np.ones((2, 3)))
    Path("other").mkdir()
    Path("other/notes.txt").write_text("mine")
    before = sorted(Path("other").iterdir())
    refused(capsys, match, *words)
    assert sorted(Path("other").iterdir()) == before


def test_a_directory_belongs_to_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "add", "i", "v.npy")
    with bbnode.open_index("i"):
        _, err = run(capsys, "search", "i", "--vector", "[1, 2]", code=exits.FAILURE)
        assert "-c FILE in place of i" in err
        assert "is open in" in err


@pytest.mark.parametrize(
    ("texts", "filtered"),
    [
        (["language=en"], {"language": "en"}),
        (["year >= 2020", "year<2024"], {"year >=": 2020, "year <": 2024}),
        (["kind != draft"], {"kind !=": "draft"}),
        (["of sale == true"], {"of sale": True}),
        (["zip=01234", 'code="7"'], {"zip": "01234", "code": "7"}),
        (["tag in a, b"], {"tag in": '["a", "b"]'}),
        (["n not  in [1, 2]"], {"n not in": "[1, 2]"}),
        (["title=a=b"], {"title": "a=b"}),
        (["begin=3"], {"begin": 3}),
    ],
)
def test_conditions(texts: list[str], filtered: dict[str, Any]) -> None:
    assert conditions.parse(texts) == filtered


@pytest.mark.parametrize("texts", [["year"], ["=3"], ["year=>3"], ["a=1", "a=2"], [""]])
def test_conditions_that_are_none(texts: list[str]) -> None:
    with pytest.raises(typer.BadParameter):
        conditions.parse(texts)


def started(*words: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bbnode", "index", *words],
        env={**os.environ, "PYTHONPATH": str(Path(bbnode.__file__).parents[1])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more,
    )  # fmt: skip


def many(count: int) -> None:
    """A pipe cannot be a file of items; a large file leaves the time to interrupt it."""
    np.save("many.npy", np.random.default_rng(0).normal(size=(count, 32)).astype(np.float32))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_add_goes_on(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    many(60_000)
    with started("add", "i", "many.npy") as adding:
        while adding.poll() is None:
            log = [path.stat().st_size for path in Path().glob("i/items.*")]
            if log and log[0] > 40_000:
                adding.send_signal(number)
                break
        out, err = adding.communicate(timeout=PATIENCE_S)
    kept = told(capsys, "stats", "i")["items"]
    if number == signal.SIGINT and adding.returncode:
        assert adding.returncode == exits.INTERRUPTED
        assert int(out.split()[1]) == kept
        assert "the same command again goes on" in err
    made = told(capsys, "add", "i", "many.npy")
    assert (made["added"], made["present"]) == (60_000 - kept, kept)
    with bbnode.open_index("i") as index:
        assert np.array_equal(index.vectors_of([0, 59_999]), np.load("many.npy")[[0, -1]])


def test_a_full_disk_loses_nothing_that_was_added(capsys: pytest.CaptureFixture[str]) -> None:
    resource = pytest.importorskip("resource")
    many(50_000)

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))

    with started("add", "i", "many.npy", preexec_fn=small_files) as adding:
        _, err = adding.communicate(timeout=PATIENCE_S)
    assert adding.returncode == exits.FAILURE
    before, last = err.splitlines()
    assert "can't be written: File too large" in last
    kept = int(before.split()[3])
    assert 0 < kept < 50_000
    assert told(capsys, "stats", "i")["items"] == kept
    assert told(capsys, "add", "i", "many.npy")["added"] == 50_000 - kept


def test_texts_are_found_by_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = str(tiny_encoder(tmp_path / "encoder"))
    Path("t.txt").write_text("the cat sat on the mat\n\nthe market fell\n")
    words = ("t.txt", "--encoder", encoder, "--metric", "cosine")
    assert told(capsys, "add", "t", *words)["added"] == 2
    assert told(capsys, "add", "t", *words)["present"] == 2
    asked = ("search", "t", "--text", "the market fell", "--encoder", encoder, "-k", "1")
    ((hit,),) = told(capsys, *asked)["queries"]
    assert (hit["id"], hit["metadata"]) == (1, {"text": "the market fell"})
    refused(capsys, "name the folder of an encoder", *asked[:-3], str(tmp_path), "-k", "1")
    run(capsys, "add", "named", "a.jsonl", "--encoder", encoder, "--text", "title",
        "--metadata", "title", "--metadata", "year")  # fmt: skip
    assert told(capsys, "stats", "named")["items"] == 4


def test_a_running_node_is_asked_through_its_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = VectorStore(k=2, filtered=True, numbered=True)
    with bbnode.open(program, transport="memory", state_dir=tmp_path / "state"):
        node = ("--state-dir", str(tmp_path / "state"))
        assert run(capsys, "add", "a.jsonl", *node)[0] == "the node's index: 4 added\n"
        (shown,) = told(capsys, "stats", *node)["indexes"]
        assert (shown["items"], shown["dimensions"]) == (4, 2)
        asked = ("search", *node, "--vector", "[0.9, 0]", "--where", "year>2000")
        (hits,) = told(capsys, *asked)["queries"]
        assert [hit["id"] for hit in hits] == [11, 13]
        assert [len(each) for each in told(capsys, *asked, "-k", "1")["queries"]] == [1]
        assert told(capsys, "remove", *node, "10", "11")["asked"] == 2
        assert told(capsys, "stats", *node)["indexes"][0]["items"] == 2
        refused(capsys, "takes items with ids alone", "add", "v.npy", *node)
        run(capsys, "add", "v.npy", "--first-id", "0", *node)
        refused(capsys, "are settings of the node", "add", "v.npy", "--metric", "l2", *node)
        refused(capsys, "a node takes ids", "remove", "--where", "year=1", *node)
        refused(capsys, "this node takes vectors",
                "add", "a.jsonl", "--text", "title", *node)  # fmt: skip
    refused(capsys, "no daemon is running", "stats", *node, code=exits.UNREACHABLE)


def test_a_node_that_encodes_takes_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = tiny_encoder(tmp_path / "encoder")
    program = EmbedAndSearch(asker="peer", encoder="", k=1)
    slots = {"encoder": {"model": str(encoder)}}
    Path("t.txt").write_text("the cat sat on the mat\nthe market fell\n")
    node = ("--state-dir", str(tmp_path / "state"))
    with bbnode.open(
        program, targets=["peer", "shard"], transport="memory", state_dir=tmp_path / "state",
        slots=slots,
    ):  # fmt: skip
        assert told(capsys, "add", "t.txt", "--row-ids", *node)["added"] == 2
        found = told(capsys, "search", "--text", "the market fell", *node)
        assert [hit["metadata"]["text"] for hit in found["queries"][0]] == ["the market fell"]
        refused(capsys, "is a text, not a vector", "search", "--vector", "[1, 2]", *node)
        refused(capsys, "v.npy: --text 'text': there is 'vectors'", "add", "v.npy", *node)


def on_disk(folder: str, what: bytes) -> bool:
    return any(what in file.read_bytes() for file in Path(folder).rglob("*") if file.is_file())


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf-pq"])
def test_what_is_removed_is_wiped_from_the_files(
    capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    if kind != "flat":
        pytest.importorskip("faiss")
    run(capsys, "add", "i", "a.jsonl", "--kind", kind)
    far, north = VECTORS[2].tobytes(), "nörth".encode()
    assert on_disk("i", far)
    out, _ = run(capsys, "remove", "i", "12")
    still = "1 removed or replaced are still in its files (bbnode index compact)"
    assert out == f"i: 1 removed, 3 left; {still}\n"
    assert on_disk("i", far)  # as the line says
    out, _ = run(capsys, "compact", "i")
    assert out == "i: 1 removed or replaced wiped, 3 left\n"
    assert not on_disk("i", far)
    assert on_disk("i", north)
    assert run(capsys, "remove", "i", "11", "--wipe")[0] == "i: 1 removed, 2 left\n"
    assert not on_disk("i", north)
    # Replaced, and all of them gone.
    rows = {"id": 10, "title": "new", "vector": [5, 6]}
    Path("b.jsonl").write_text(json.dumps(rows) + "\n", encoding="utf-8")
    run(capsys, "add", "i", "b.jsonl")
    assert told(capsys, "compact", "i")["wiped"] == 1
    assert not on_disk("i", b"east")
    assert told(capsys, "remove", "i", "10", "13", "--wipe")["items"] == 0
    assert not on_disk("i", b"west")
    assert run(capsys, "add", "i", "a.jsonl")[0].startswith("i: 4 added")


def test_wiping_an_index_that_is_not_there_or_on_a_node_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused(capsys, "nowhere is not there", "compact", "nowhere")
    refused(capsys, "wipe_removed", "remove", "1", "--wipe", "-c", "node.toml")
