"""The command line as a user meets it: output, one-line errors, exit codes, quick help."""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from bbnode import __version__
from bbnode.cli import exits
from bbnode.cli import main as main_module
from bbnode.cli.main import command_names, main
from bbnode.daemon.artifacts.artifact import serialize
from bbnode.daemon.artifacts.build import compile_module
from bbnode.daemon.config import reference, sources
from bbnode.transport.identity import load_identity
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent


@cache
def compiled() -> bytes:
    return serialize(compile_module("tests.cli.asking:Ask", {}))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(*args: object) -> tuple[int, str, str]:
        code = main([str(a) for a in args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def init(run, directory: Path, *more: object) -> str:
    place = Path() if isinstance(directory, str) else directory
    (place / "a.onnx").write_bytes(compiled())
    given = ("--artifact", place / "a.onnx", "--target", "client")
    code, out, _ = run("init", directory, *given, *more)
    assert code == 0
    return out.strip()


def one_line(err: str) -> str:
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_help_names_every_command_and_exit_code(run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert {"init", "compile", "run", "status", "peers", "wait"} <= set(command_names())
    for name in command_names():
        assert f"\n  {name} " in out
    for number, meaning in exits.MEANINGS.items():
        assert f"{number}  {meaning}" in out
    assert run()[:2] == (0, out)


@pytest.mark.parametrize("name", command_names())
def test_every_command_has_help_and_documents_its_options(run, name: str) -> None:
    code, out, _ = run(name, "--help")
    assert code == 0
    assert f"Usage: bbnode {name}" in out


def every_help(run: Any) -> Iterator[tuple[str, list[str]]]:
    """The help of each command, and of each command of a group."""
    for name in command_names():
        lines = run(name, "--help")[1].splitlines()
        yield name, lines
        for line in lines[lines.index("Commands:") + 1 :] if "Commands:" in lines else ():
            if re.match(r"  \w", line):
                inner = line.split()[0]
                yield f"{name} {inner}", run(name, inner, "--help")[1].splitlines()


def test_help_is_whole_in_80_columns_and_names_no_type_of_python(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name, lines in every_help(run):
        assert max(map(len, lines)) <= 80, name
        options = lines[lines.index("Options:") :]
        assert not [line for line in options if re.search(r"<\w+( range)?>|RANGE", line)], name
        assert not [line for line in lines[1:] if line.endswith("...")], name  # a sentence was cut
        words = lines[0].partition("[OPTIONS]")[2]
        assert words == words.upper(), name


def test_the_help_has_each_command_once_and_whole(run, monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = [name for names in main_module.HELP_GROUPS.values() for name in names]
    assert sorted(grouped) == main_module.shipped()
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("--help")[1].partition("Begin:")[2].partition("Examples:")[0]
    assert "..." not in shown  # a sentence that was cut
    assert max(map(len, shown.splitlines())) <= 80


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from bbnode.cli.main import main; main(['--help'])\n"
        "heavy = {'libp2p','onnx','onnxruntime','numpy','trio','pydantic','sklearn','rich'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stderr.strip() == "[]"


def test_a_command_that_is_not_there_is_a_usage_error_with_a_hint(run) -> None:
    code, out, err = run("stats")
    assert (code, out) == (exits.USAGE, "")
    assert "Did you mean 'status'" in one_line(err)
    code, _, err = run("version", "--yaml")
    assert code == exits.USAGE
    assert "bbnode version --help" in one_line(err)


def test_version(run) -> None:
    assert run("--version")[:2] == (0, f"bbnode {__version__}\n")
    code, out, _ = run("version", "--json")
    found = json.loads(out)
    assert (code, found["schema"], found["bbnode"]) == (0, "bbnode/version/1", __version__)
    assert re.fullmatch(r"[0-9a-f]{12}", found["build"])
    assert found["trio"] == metadata.version("trio")
    assert f"trio          {found['trio']}\n" in run("version")[1]


def test_init_makes_a_node_that_can_be_read_back(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    peer_id = init(run, "n1", "--listen", "/ip4/127.0.0.1/tcp/4001")
    key = tmp_path / "n1" / "state" / "identity.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert str(load_identity(key).peer_id) == peer_id
    found = sources.resolve(tmp_path / "n1" / "node.toml", environ={})
    assert found.state_dir == tmp_path / "n1" / "state"
    assert found.config.node.name == "n1"
    assert found.absolute(found.config.artifact.path).resolve() == tmp_path / "a.onnx"
    assert found.config.network.listen == ["/ip4/127.0.0.1/tcp/4001"]
    assert run("id", "-c", "n1/node.toml")[:2] == (0, f"{peer_id}\n")
    assert json.loads(run("id", "--state-dir", "n1/state", "--json")[1])["peer_id"] == peer_id


def test_init_keeps_what_is_there(run, tmp_path: Path) -> None:
    peer_id = init(run, tmp_path)
    code, _, err = run("init", tmp_path, "--artifact", "b.onnx", "--target", "server")
    assert code == exits.USAGE
    assert "--force overwrites it" in one_line(err)
    assert init(run, tmp_path, "--force") == peer_id


def test_init_writes_nothing_when_an_option_is_wrong(run, tmp_path: Path) -> None:
    directory = tmp_path / "n"
    for more in (
        ["--artifact", "a", "--module", "a:B", "--target", "c"],
        ["--target", "c"],
        ["--artifact", "a"],
        ["--artifact", "a", "--target", "c", "--listen", "nowhere"],
        ["--artifact", "a", "--target", "c", "--bootstrap", "/ip4/127.0.0.1/tcp/1"],
    ):
        code, out, err = run("init", directory, *more)
        assert (code, out) == (exits.USAGE, "")
        one_line(err)
    assert not directory.exists()


def test_init_reference_prints_the_keys(run) -> None:
    assert run("init", "--reference")[:2] == (0, reference.as_toml())


def test_id_never_makes_an_identity(run, tmp_path: Path) -> None:
    code, _, err = run("id", "--state-dir", tmp_path)
    assert code == exits.USAGE
    assert "no identity yet" in one_line(err)
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_others_can_read_is_refused(run, tmp_path: Path) -> None:
    init(run, tmp_path)
    (tmp_path / "state" / "identity.key").chmod(0o644)
    code, _, err = run("id", "-c", tmp_path / "node.toml")
    assert code == exits.FAILURE
    assert "chmod 600" in one_line(err)


def test_a_wrong_configuration_stops_run_before_anything_starts(run, tmp_path: Path) -> None:
    init(run, tmp_path)
    file = tmp_path / "node.toml"
    for more, expected in (
        (["--set", "node.log_levl=info"], "did you mean 'log_level'"),
        (["--set", "nonsense"], "is not KEY=VALUE"),
        (["--log-level", "loud"], "it is 'loud'"),
    ):
        code, _, err = run("run", "-c", file, *more)
        assert code == exits.USAGE
        assert expected in one_line(err)
    code, _, err = run("run", "-c", tmp_path / "none.toml")
    assert code == exits.USAGE
    assert "bbnode init" in one_line(err)


def test_status_of_a_node_that_does_not_run(run, tmp_path: Path) -> None:
    code, out, err = run("status", "--state-dir", tmp_path, "--json")
    assert (code, out) == (exits.UNREACHABLE, "")
    assert "bbnode run" in one_line(err)


def test_inspect_refuses_what_is_no_artifact(run, tmp_path: Path) -> None:
    file = tmp_path / "x.onnx"
    file.write_bytes(b"\xff\xff")
    code, _, err = run("inspect", file)
    assert code == exits.REFUSED
    assert "not an ONNX model" in one_line(err)
    file.write_bytes(onnx.ModelProto(ir_version=8).SerializeToString())
    code, _, err = run("inspect", file)
    assert code == exits.REFUSED
    assert "bbnode compile" in one_line(err)


def test_compile_then_inspect_shows_targets_slots_and_edges(run, tmp_path: Path) -> None:
    file = tmp_path / "a.onnx"
    program = "bbnode.examples.federated_digits:FederatedRound"
    code, out, err = run("compile", program, "-o", file, "--arg", "deadline_s=0.5", "--json")
    assert code == 0, err
    made = json.loads(out)
    assert made["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    onnx.checker.check_model(onnx.load(file))

    code, out, _ = run("inspect", file)
    assert code == 0
    for shown in ("bbnode.OnnxModel", "accuracy", "messages"):
        assert shown in out
    # Classes and messages by their names; hashes, sites and names of ops are for --verbose.
    assert not any(hidden in out for hidden in (*made["targets"], "SendReqBatched", "DedupGateRx"))
    rows = [line.split() for line in out.partition("messages")[2].splitlines()]
    assert ["round", "Tensor.FLOAT", "server", "client"] in rows
    assert ["round:", "answer"] in [row[:2] for row in rows]
    code, out, _ = run("inspect", file, "--verbose")
    for shown in (*made["targets"], "500 ms", "DedupGateRx", "accuracy"):
        assert shown in out
    told = json.loads(run("inspect", file, "--json")[1])
    assert told["schema"] == "bbnode/inspect/1"
    assert [target["class"] for target in told["targets"]] == ["client", "server"]
    request, response = told["wire_edges"]
    assert (request["from"], request["to"]) == (made["targets"][1], made["targets"][0])
    assert (response["from"], response["to"]) == (made["targets"][0], made["targets"][1])
    assert request["gates"] == ["DedupGateRx", "PeerHealthGateRx", "BackoffGateRx"]
    assert {"slot": "local", "role": "Model", "type_name": "bbnode.OnnxModel", "slot_id": 2} in (
        told["targets"][0]["slots"]
    )


def test_inspect_lists_what_is_trained_of_a_model_and_why(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"]),
        helper.make_node("Mul", ["h", "half"], ["y"]),
    ]
    held = {"w": np.eye(2) + 0.1, "b": np.ones(2), "half": np.asarray(0.5)}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, ["b", 2])],
        [helper.make_tensor_value_info("y", 1, ["b", 2])],
        [numpy_helper.from_array(each.astype(np.float32), name) for name, each in held.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, ir_version=10, opset_imports=opsets)
    onnx.save(model, tmp_path / "m.onnx")
    file = tmp_path / "a.onnx"
    arguments = [f"model={tmp_path / 'm.onnx'}", "clients=1", "loss=mse"]
    given = [each for argument in arguments for each in ("--arg", argument)]
    code, _, err = run("compile", "bbnode.programs:FederatedTraining", "-o", file, *given)
    assert code == 0, err
    monkeypatch.setenv("COLUMNS", "100")
    out = run("inspect", file)[1]
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "half 1 fixed a single number" in rows
    assert "w 2 x 2 trained a weight of Gemm" in rows
    assert "single numbers are not trained" in " ".join(out.split())
    told = json.loads(run("inspect", file, "--json")[1])
    assert {each["name"]: each["trained"] for each in told["parameters"]["local"]} == {
        "w": True, "b": True, "half": False,
    }  # fmt: skip
    (line,) = told["model_warnings"]["local"]
    assert line.endswith("those that are parameters: half")


def test_compile_refuses_what_it_cannot_import(run, tmp_path: Path) -> None:
    code, _, err = run("compile", "no_such_package:Thing", "-o", tmp_path / "a.onnx")
    assert code == exits.USAGE
    assert "no_such_package" in one_line(err)
    assert list(tmp_path.iterdir()) == []


def test_demo_checks_its_options(run) -> None:
    for arguments in (["--clients", "0"], ["--split", "odd"], ["--port", "70000"]):
        code, _, err = run("demo", *arguments)
        assert code == exits.USAGE
        one_line(err)


def test_every_name_in_the_exit_table_is_a_class() -> None:
    for name, code in exits.table().items():
        module, _, cls = name.rpartition(".")
        found = getattr(importlib.import_module(module), cls)
        assert issubclass(found, Exception)
        assert code in exits.MEANINGS
        assert exits.code_for(found.__new__(found)) == code


def test_a_group_of_faults_is_a_line_each_and_a_bug_is_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bbnode.cli import main as module
    from bbnode.daemon.control.errors import NotRunning

    def fail_with(error: BaseException) -> None:
        def app(**_: object) -> None:
            raise error

        monkeypatch.setattr(module, "app", app)

    fail_with(ExceptionGroup("tasks", [NotRunning("one"), ExceptionGroup("x", [NotRunning("2")])]))
    assert main([]) == exits.UNREACHABLE
    assert capsys.readouterr().err == "error: one\nerror: 2\n"
    fail_with(ExceptionGroup("tasks", [NotRunning("one"), ValueError("bug")]))
    with pytest.raises(ExceptionGroup):
        main([])
    fail_with(KeyboardInterrupt())
    assert main([]) == exits.INTERRUPTED


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("bbnode sta", ["status"]),
        ("bbnode peers dis", ["disconnect"]),
        ("bbnode status --state", ["--state-dir"]),
        ("bbnode wait --cl", ["--class"]),
    ],
)
def test_completion_knows_commands_that_are_not_imported_yet(
    words: str, offered: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from bbnode.cli.main import main; main()"],
        env={
            **os.environ,
            "_BBNODE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        },
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.stdout.split() == offered


@pytest.mark.parametrize("command", ["version", "--help", "components", "components --json"])
def test_a_disk_that_is_full_takes_one_line(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bbnode", *command.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert done.returncode == exits.FAILURE
    assert done.stderr == (
        "error: standard output: No space left on device; free space on that file system\n"
    )


def test_errors_of_the_system_are_one_line_and_others_a_traceback(
    monkeypatch: pytest.MonkeyPatch, run
) -> None:
    raised: list[BaseException] = []

    def fail(*_: object, **__: object) -> None:
        raise raised.pop()

    monkeypatch.setattr(main_module, "app", fail)
    for error, said in (
        (OSError(errno.EROFS, "Read-only file system", "/x"), "/x: Read-only file system; it is"),
        (OSError(errno.EMFILE, "Too many open files", "/y"), "/y: Too many open files; raise the"),
        ("b\udcff".encode, "'b\\udcff': this name is not UTF-8; rename"),
    ):
        if not isinstance(error, OSError):
            with pytest.raises(UnicodeEncodeError) as caught:
                error()
            error = caught.value
        for each in (error, ExceptionGroup("tasks", [error])):
            raised.append(each)
            code, _, err = run("version")
            assert (code, err.count("\n")) == (exits.FAILURE, 1)
            assert err.startswith(f"error: {said}")
    raised.append(OSError(errno.EBADF, "Bad file descriptor"))
    with pytest.raises(OSError, match="Bad file"):
        run("version")


def test_nothing_is_imported_before_an_interrupt_is_silent() -> None:
    """Python shows its traceback for no longer than it must."""
    script = (
        "import sys; before = set(sys.modules); import bbnode.__main__; "
        "print(*sorted(set(sys.modules) - before - {'__future__'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["bbnode", "bbnode.__main__"]


def test_an_interrupt_while_it_imports_is_silent() -> None:
    script = """
import signal, sys
class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from bbnode.__main__ import run
run()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "version"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("command", ["version", "init --reference"])
def test_a_reader_that_has_seen_enough_gets_no_traceback(command: str) -> None:
    # As in `bbnode version | true`, with the pipe closed before anything is written.
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "bbnode.cli.main", *command.split()],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (exits.FAILURE, "")
