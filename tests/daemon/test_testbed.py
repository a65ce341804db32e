"""The plan of a testbed, its folders, ports, configurations, view and report: nothing starts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from functools import cache
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bbnode.daemon.config import sources
from bbnode.daemon.config.sources import ConfigError
from bbnode.daemon.observing import round_table
from bbnode.daemon.observing.round_table import rounds_table
from bbnode.daemon.testbed import nodes as folders
from bbnode.daemon.testbed import plan as plans
from bbnode.daemon.testbed import view as views
from bbnode.daemon.testbed.demo import DemoOptions, demo_plan, demo_row, draw_accuracy
from bbnode.daemon.testbed.plan import find_invocation, make_plan, parse_nodes
from bbnode.daemon.testbed.program import (
    ArtifactTakesNoArguments,
    RunnableProgram,
    find_program,
)
from bbnode.daemon.testbed.report import round_row, write_report

HERE = Path("/work")


def record(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "round": number,
        "ok": True,
        "seconds": 0.5,
        "bytes": 123_456,
        "responded": ["A", "B"],
        "missing": [],
        "missing_why": {},
        "refused": {},
        "failures": [],
        "outputs": {"accuracy": 0.9, "loss": 0.25, "model": {"sha256": f"{number:064}"}},
        **changes,
    }


def row(number: int, **changes: Any) -> dict[str, Any]:
    return round_row("server", record(number, **changes))


@cache
def digits() -> RunnableProgram:
    return find_program("bbnode.examples.federated_digits:FederatedRound", {})


@cache
def ring() -> RunnableProgram:
    """Three classes; the stores answer encoders and the door."""
    return find_program("tests/daemon/testbed_programs.py:Retrieval", {})


@cache
def gossip() -> RunnableProgram:
    return find_program("bbnode.examples.gossip_averaging:GossipAveraging", {})


def links(plan: plans.LocalPlan) -> list[frozenset[str]]:
    return [frozenset((node.name, to)) for node in plan.nodes.values() for to in node.dials]


# --- the program ------------------------------------------------------------------------------


def test_classes_and_who_talks_to_whom_come_from_the_program() -> None:
    assert list(digits().classes) == ["server", "client"]
    assert digits().talks == {frozenset(("server", "client"))}
    assert list(ring().classes) == ["door", "encoder", "store"]
    assert ring().talks == {frozenset(pair) for pair in combinations(ring().classes, 2)}
    assert gossip().talks == {frozenset(["peer"])}
    # A protocol without messages of its own connects nobody.
    asynchronous = find_program("bbnode.programs:FedBuff", {"model": [4, 3]})
    assert asynchronous.talks == {frozenset(("server", "client"))}


def test_components_of_its_own_are_imported_where_they_are() -> None:
    assert digits().modules == ()
    assert gossip().modules == ("bbnode.examples.gossip_averaging",)
    assert ring().modules == ("bbnode.examples.custom_index",)
    own = find_program("tests.e2e.one_tensor:OneTensor", {"size": 1})
    assert own.modules == ("tests.e2e.one_tensor",)
    assert any(Path(folder) in Path(__file__).parents for folder in own.python_path)


def test_an_artifact_is_a_program_too(tmp_path: Path) -> None:
    file = tmp_path / "a.onnx"
    digits().save(file)
    found = find_program(str(file), {})
    assert found.artifact.sha256 == digits().artifact.sha256
    assert found.home == "server"  # it has the input
    found.save(tmp_path / "b.onnx")
    found.save(file)
    assert (tmp_path / "b.onnx").read_bytes() == file.read_bytes()
    with pytest.raises(ArtifactTakesNoArguments, match="seed"):
        find_program(str(file), {"seed": 1})


# --- nodes and who dials whom -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ("", {"server": 1, "client": 2}),
        ("client=3", {"server": 1, "client": 3}),
        (" server=2 , client=1,", {"server": 2, "client": 1}),
        ("server+client=2", {"server-client": 2}),
    ],
)
def test_counts_of_nodes(asked: str, made: dict[str, int]) -> None:
    assert {group.name: group.count for group in parse_nodes(asked, digits())} == made


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("client", "'client' is not CLASS=COUNT"),
        ("client=0", "at least 1"),
        ("client=-1", "at least 1"),
        ("client=²", "at least 1"),
        ("client=1e3", "at least 1"),
        ("clinet=1", "no class 'clinet'; did you mean 'client'? It has: server, client"),
        ("client=1,client=2", "named twice"),
        ("client+client=2", "named twice"),
        ("client=100000", "more than the 256"),
    ],
)
def test_counts_that_are_refused(asked: str, why: str) -> None:
    with pytest.raises(plans.NodesRefused) as refused:
        parse_nodes(asked, digits())
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


@given(st.text(max_size=60))
def test_any_text_makes_nodes_or_one_line_of_refusal(text: str) -> None:
    told = ""
    try:
        assert sum(group.count for group in parse_nodes(text, digits())) <= plans.MAX_NODES
    except plans.NodesRefused as refused:
        told = str(refused)
    assert "\n" not in told or "\n" in text


def test_gossip_has_two_nodes_at_least_by_default() -> None:
    assert [group.count for group in parse_nodes("", gossip())] == [2]


def test_clients_dial_the_server() -> None:
    plan = make_plan(digits(), nodes="client=3", base=HERE)
    assert list(plan.nodes) == ["server", "client-0", "client-1", "client-2"]
    assert plan.nodes["client-2"].dials == ("server",)
    assert [node.name for node in plan.nodes.values() if node.is_dialled] == ["server"]


def test_all_pairs_of_three_classes_are_connected_once_and_the_last_to_start_dials() -> None:
    invocation = find_invocation(
        ring(), target="door", inputs={"document": [1.0], "question": [1.0]}, times=1, options={}
    )
    plan = make_plan(ring(), nodes="door=1,encoder=2,store=3", invocation=invocation, base=HERE)
    found = links(plan)
    assert len(found) == len(set(found)) == 1 * 2 + 1 * 3 + 2 * 3
    assert plan.is_staged
    assert len(plan.nodes["door"].dials) == 5
    assert not plan.nodes["door"].is_dialled
    (entry,) = plans.node_config(plan.nodes["door"], plan).invoke
    assert entry.wait_for is not None
    assert (entry.wait_for.peer_class, entry.wait_for.peers) == ("store", 3)
    assert entry.wait_for.also == {"encoder": 2}


@pytest.mark.parametrize("count", [2, 5, 16, 17, 18, 20, 64, 200])
def test_gossip_is_a_whole_mesh_or_a_ring_with_shortcuts(count: int) -> None:
    plan = make_plan(gossip(), nodes=f"peer={count}", base=HERE)
    found = links(plan)
    assert len(found) == len(set(found))
    if count <= plans.MAX_FULL_MESH:
        assert len(found) == count * (count - 1) / 2
    else:
        assert len(found) <= count * count.bit_length()
        # Everybody is reached in few steps.
        near = {"peer-0"}
        for _ in range(count.bit_length()):
            near |= {name for pair in found if pair & near for name in pair}
        assert len(near) == count


def test_a_node_that_plays_two_classes_is_not_connected_with_itself() -> None:
    plan = make_plan(digits(), nodes="server+client=1", base=HERE)
    assert links(plan) == []
    assert plans.node_config(plan.nodes["server-client"], plan).artifact.targets == [
        "server",
        "client",
    ]


def test_odd_names_of_classes_are_names_of_folders() -> None:
    assert plans._file_name("@self") == "self"
    assert plans._file_name("über klasse/../x") == "ber-klasse-..-x"
    assert plans._file_name("../..") == "node"
    assert len(plans._file_name("x" * 300)) < 50


# --- what is invoked --------------------------------------------------------------------------


def test_a_target_that_needs_triggers_alone_is_invoked_without_being_told() -> None:
    found = find_invocation(digits(), target=None, inputs={}, times=None, options={})
    assert found is not None
    assert (found.target, found.inputs, found.times) == ("server", {"tick": "trigger"}, 20)


def test_a_program_that_starts_itself_needs_nothing() -> None:
    assert find_invocation(gossip(), target=None, inputs={}, times=None, options={}) is None


@pytest.mark.parametrize(
    ("target", "inputs", "why"),
    [
        (None, {}, "--invoke CLASS.*door takes document: Tensor.FLOAT, question.*--until-ctrl-c"),
        (None, {"question": [1.0]}, r"inputs \(question\) go with the target"),
        ("dor", {}, "no class 'dor'; did you mean 'door'"),
        ("asker", {"vectors": [[1.0]]}, "give --input NAME=VALUE for metadata, ids too"),
        ("door", {"questoin": [1.0]}, "no input 'questoin'; did you mean 'question'"),
    ],
)
def test_what_can_not_be_invoked_is_told(target: str | None, inputs: Any, why: str) -> None:
    program = replicas() if target == "asker" else ring()
    with pytest.raises(plans.NothingToInvoke, match=why):
        find_invocation(program, target=target, inputs=inputs, times=None, options={})


def test_the_inputs_of_one_part_are_enough() -> None:
    for program, target, inputs in (
        (ring(), "door", {"question": [1.0]}),
        (replicas(), "asker", {"query": [1.0]}),
    ):
        found = find_invocation(program, target=target, inputs=inputs, times=None, options={})
        assert found is not None
        assert found.inputs == inputs


@cache
def replicas() -> RunnableProgram:
    return find_program("bbnode.programs:ShardedSearch", {"replicas": 2})


# --- settings ---------------------------------------------------------------------------------


def config_of(name: str, *settings: str, program: RunnableProgram | None = None) -> Any:
    base = ["slots.data.dataset=digits"] if program is None else []
    plan = make_plan(
        program or digits(), nodes="", settings=[*base, *settings], base=Path("/home/me/project")
    )
    return plans.node_config(plan.nodes[name], plan)


def test_settings_go_to_classes_and_nodes_with_numbers_filled_in() -> None:
    given = (
        "client.slots.data.shard={i}",
        "client.slots.data.shards={n}",
        "client.1.slots.data.batch_size=7",
        "node.log_level=debug",
    )
    client = config_of("client-1", *given)
    assert client.slots["data"] == {
        "dataset": "digits",
        "shard": 1,
        "shards": 2,
        "batch_size": 7,
    }
    assert client.node.log_level == "debug"
    assert config_of("client-0", *given).slots["data"]["shard"] == 0
    assert "batch_size" not in config_of("client-0", *given).slots["data"]
    assert config_of("server", *given).slots["data"] == {"dataset": "digits"}
    assert config_of("client-1", "limits.frames=1{i}").limits.frames == 11


def test_a_slot_that_one_class_has_is_set_there_alone() -> None:
    plan = make_plan(digits(), settings=["slots.local.learning_rate=3.5"], base=HERE)
    assert plans.node_config(plan.nodes["server"], plan).slots == {}
    client = plans.node_config(plan.nodes["client-0"], plan)
    assert client.slots == {"local": {"learning_rate": 3.5}}


def test_paths_count_from_the_working_directory() -> None:
    program = find_program("tests/daemon/testbed_programs.py:Reading", {"path": "all.npz"})
    config = config_of("reader", "reader.slots.data.path=data/{name}.npz", program=program)
    assert config.slots["data"]["path"] == "/home/me/project/data/reader.npz"
    # The program's own is the user's: it was compiled here.
    assert config_of("reader", program=program).slots["data"]["path"] == "/home/me/project/all.npz"
    absolute = config_of("reader", "slots.data.path=/else/where.npz", program=program)
    assert absolute.slots["data"]["path"] == "/else/where.npz"


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("node.log_levl=debug", r"^server: flag node.log_levl: .*did you mean 'log_level'"),
        ("client.1.node.log_level=loud", r"^client-1: flag node.log_level"),
        ("client.slots.data.shrad=1", r"^client-0: slot 'data': .*'shrad'; did you mean 'shard'"),
        ("client.slots.data.shard=x", r"^client-0: slot 'data': setting 'shard'"),
        ("slots.dat.path=1", "no class of the program has a slot 'dat'; did you mean 'data'"),
        ("server.slots.local.seed=1", r"^server: it has no slot 'local'"),
        ("client.2.node.log_level=debug", "there is no node client.2"),
        ("node.name=x", "node.name follows from the testbed"),
        ("artifact.path=x", "artifact.path follows from the testbed"),
        ("klient.node.log_level=x", "'klient' is neither a class"),
    ],
)
def test_settings_that_a_node_would_refuse_are_refused_with_its_name(
    setting: str, why: str
) -> None:
    with pytest.raises((ConfigError, plans.SettingsRefused), match=why) as refused:
        make_plan(digits(), settings=["slots.data.dataset=digits", setting], base=HERE)
    assert "\n" not in str(refused.value)


# --- folders and ports ------------------------------------------------------------------------


def test_a_folder_of_an_earlier_testbed_is_cleared_or_kept(tmp_path: Path) -> None:
    with folders.held_folder(tmp_path / "out") as nodes:
        (nodes / "old").write_text("x")
    with folders.held_folder(tmp_path / "out", keep=True) as nodes:
        assert (nodes / "old").exists()
    with folders.held_folder(tmp_path / "out") as nodes:
        folders.settle(nodes)
        assert not (nodes / "old").exists()
    assert [path.name for path in nodes.iterdir()] == [folders.MARKER]


def names_in(nodes: Path) -> set[str]:
    return {path.name for path in nodes.iterdir()} - {folders.MARKER}


def run_in(out: Path, name: str, *, settled: bool) -> Path:
    """Write a run of one node, which is called so."""
    with folders.held_folder(out) as nodes:
        assert not list(nodes.glob("[!.]*"))
        (nodes / name).mkdir()
        (nodes / "artifact.onnx").write_text(name)
        if settled:
            folders.settle(nodes)
    return nodes


def test_a_run_that_never_got_going_replaces_no_other(tmp_path: Path) -> None:
    for first in ("first", "second"):  # none of them is worth keeping, and the last one is shown
        nodes = run_in(tmp_path, first, settled=False)
        assert (nodes / "artifact.onnx").read_text() == first
    run_in(tmp_path, "good", settled=True)
    for bad in ("bad", "worse"):
        run_in(tmp_path, bad, settled=False)
        assert names_in(nodes) == {"artifact.onnx", "good"}
        assert (nodes / "artifact.onnx").read_text() == "good"
        assert {"artifact.onnx", bad} < names_in(tmp_path / "failed")
    run_in(tmp_path, "better", settled=True)
    assert (nodes / "artifact.onnx").read_text() == "better"
    assert names_in(nodes) == {"artifact.onnx", "better"}


class _Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("at", range(12))
def test_one_run_is_whole_whenever_the_testbed_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, settled: bool
) -> None:
    run_in(tmp_path, "good", settled=True)
    rename, left = Path.rename, [at]

    def dying(self: Path, target: Path) -> Path:
        if left[0] == 0:
            raise _Killed
        left[0] -= 1
        return rename(self, target)

    with monkeypatch.context() as patched, contextlib.suppress(_Killed):
        patched.setattr(Path, "rename", dying)
        run_in(tmp_path, "new", settled=settled)
    with folders.held_folder(tmp_path, keep=True) as nodes:
        text = (nodes / "artifact.onnx").read_text()
        assert names_in(nodes) == {"artifact.onnx", text}
    assert text == "good" or settled


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with (
        pytest.raises(folders.FolderRefused, match=r"no testbed made; .*--out"),
        folders.held_folder(tmp_path, keep=True),
    ):
        pass
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(folders.FolderRefused, match=r"Not a directory|File exists"),
        folders.held_folder(tmp_path / "file"),
    ):
        pass


def test_two_testbeds_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        folders.held_folder(tmp_path),
        pytest.raises(folders.StillRunning, match="--out"),
        folders.held_folder(tmp_path),
    ):
        pass


def test_a_folder_in_which_a_node_still_runs_is_left_alone(tmp_path: Path) -> None:
    with folders.held_folder(tmp_path) as nodes:
        state = nodes / "client-0" / "state"
        state.mkdir(parents=True)
        lock = os.open(state / "lock", os.O_RDWR | os.O_CREAT)
        os.write(lock, b"4711\n")
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with (
            pytest.raises(folders.StillRunning, match=r"client-0 .*process 4711.*kill 4711"),
            folders.held_folder(tmp_path),
        ):
            pass
        assert state.exists()
    finally:
        os.close(lock)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind((folders.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(folders.PortRefused, match=f"port {port}.*in use.*--port"):
            folders.choose_port(port)


def test_ports_are_different() -> None:
    chosen = folders.choose_ports(50)
    assert len(set(chosen)) == 50
    assert set(chosen) <= set(folders.PORTS)


# --- what is written --------------------------------------------------------------------------


def test_shards_follow_the_order_of_the_peer_ids(tmp_path: Path) -> None:
    plan = demo_plan(DemoOptions(clients=5, rounds=3, seed=7))
    with folders.held_folder(tmp_path) as nodes:
        made = folders.write_nodes(plan, nodes, port=0, wait_s=20.0)
    server, clients = made[0], made[1:]
    resolved = {node.name: sources.resolve(node.config, environ={}) for node in made}
    by_shard = sorted(clients, key=lambda node: resolved[node.name].config.slots["data"]["shard"])
    peers = [node.identity.peer_id for node in by_shard]
    assert peers == sorted(peers)
    assert [node.name for node in by_shard] == [f"client-{i}" for i in range(5)]
    assert len({node.state_dir for node in made}) == 6
    config = resolved["server"].config
    assert config.slots["data"]["split"] == "test"
    assert config.invoke[0].times == 3
    assert config.invoke[0].wait_for is not None
    assert config.invoke[0].wait_for.enough_peers == 4
    (bootstrap,) = resolved["client-0"].config.network.bootstrap
    assert config.network.listen == [bootstrap.rpartition("/p2p/")[0]]
    assert bootstrap.endswith(f"/p2p/{server.peer}")


def test_kept_nodes_keep_their_keys_and_new_ones_come_after_them(tmp_path: Path) -> None:
    def write(nodes: str, *, keep: bool) -> dict[str, str]:
        plan = make_plan(gossip(), nodes=nodes, base=HERE)
        with folders.held_folder(tmp_path, keep=keep) as folder:
            made = folders.write_nodes(plan, folder, port=0, wait_s=1.0)
        return {node.name: node.peer for node in made}

    first = write("peer=2", keep=False)
    more = write("peer=4", keep=True)
    assert more.items() >= first.items()
    assert len(set(more.values())) == 4
    assert write("peer=1", keep=True).keys() == {"peer"}
    assert write("peer=2", keep=True) == first
    assert write("peer=2", keep=False).values() != first.values()


def test_the_command_that_starts_a_node_again_is_for_a_shell(tmp_path: Path) -> None:
    plan = make_plan(ring(), base=HERE)
    with folders.held_folder(tmp_path / "it's odd") as nodes:
        made = folders.write_nodes(plan, nodes, port=0, wait_s=1.0)
    assert made[0].start_command.startswith("PYTHONPATH=")
    assert made[0].start_command.endswith("""/it'"'"'s odd/nodes/door/node.toml'""")


def test_a_disk_that_is_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bbnode.daemon.paths import StorageError

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    plan = make_plan(digits(), settings=["slots.data.dataset=digits"], base=HERE)
    with folders.held_folder(tmp_path) as nodes:
        monkeypatch.setattr("tempfile.mkstemp", full)
        with pytest.raises(StorageError, match="No space left on device"):
            folders.write_nodes(plan, nodes, port=0, wait_s=1.0)


# --- report and view --------------------------------------------------------------------------


def test_the_demo_draws_accuracy_and_loss_of_the_rounds_that_went_well(tmp_path: Path) -> None:
    failed = row(3, ok=False, outputs={}, failures=["op: QuorumNotReached: 1 of 2"])
    rows = [demo_row(each) for each in (row(1), row(2, missing=["C"]), failed)]
    assert rows[1]["model_sha256"] == f"{2:064}"
    assert rows[2]["failures"] == ["op: QuorumNotReached: 1 of 2"]
    assert draw_accuracy(tmp_path, rows).stat().st_size > 1000
    report = json.loads(write_report(tmp_path, {"rounds": rows}).read_text())
    assert report["rounds"][0]["accuracy"] == 0.9


@pytest.mark.parametrize("terminal", [False, True])
def test_the_view_shows_rounds_names_states_and_failures(terminal: bool) -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    names = {"A": "client-0", "B": "client-1"}
    with views.RoundsView(console, rounds=2, names=names) as view:
        view.note("client-1 ended (SIGKILL)")
        view.state("client-1", "starting")
        view.state("client-1", "not ready: no file data/1.npz")
        view.round_started(1, "server")
        view.answered("A")
        view.round_started(2, "server")  # it does not wait for the checkpoint of the first
        coded = {"codec.raw_bytes": 400_000, "codec.code_bytes": 100_300}
        view.round_finished(row(1, responded=["A"], missing=["B"], metrics=coded))
        assert view._running == {"server": 2}
        assert view._progress() == "round 2/2, answered by nobody yet"
        view.round_finished(row(2, ok=False, outputs={}, failures=["too few"]))
        view.value("client-0", "estimate", [1.0, 2.0])
    text = out.getvalue()
    for word in ("SIGKILL", "90.00%", "0.2500", "123.5 KB", "too few", "no file data/1.npz"):
        assert word in text
    assert ("codecs 400.0 KB as 100.3 KB" in text) is not terminal  # there the table has no room


def test_the_table_names_who_is_missing_and_has_a_column_for_each_number() -> None:
    out = StringIO()
    outputs = {"error": 1e-9, "count": 3, "text": "x", "on": True, "vector": [1.0]}
    rows = [row(1, responded=["A"] * 7, missing=["C", "B", "B"], missing_why={"C": "no [d]ata"})]
    rows.append(row(2, outputs=outputs, refused={"B": "it holds [n]aN"}))
    names = {"B": "client-1", "C": "client-2"}
    Console(file=out, width=200).print(rounds_table(rows, names, width=200, by="node"))
    text = out.getvalue()
    assert "client-1, client-2 (no [d]ata)" in text
    assert "1/3  client-1" in text
    assert "not counted: client-1 (it holds [n]aN)" in text
    assert text.split()[:6] == ["node", "round", "loss", "accuracy", "count", "error"]
    assert "1.000e-09" in text


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("troubled", [False, True])
def test_the_table_fits_its_width_and_names_what_does_not(width: int, troubled: bool) -> None:
    names = [f"metric-{n}" for n in range(9)]
    rows = [row(n, outputs=dict.fromkeys(names, 0.125)) for n in range(3)]
    if troubled:
        rows.append(row(4, missing=["C"], missing_why={"C": "no data " * 20}))
    out = StringIO()
    Console(file=out, width=width).print(rounds_table(rows, {}, width=width))
    assert max(map(len, out.getvalue().splitlines())) <= width
    shown = out.getvalue().split("seconds")[0]
    missing = round_table.left_out(rows, width)
    assert missing
    assert all((name in shown) is not (name in missing) for name in names)


def test_only_the_last_best_round_is_marked() -> None:
    rows = [{**row(n), "best": n < 3} for n in range(1, 5)]
    out = StringIO()
    Console(file=out, width=80).print(rounds_table(rows, {}, width=80))
    assert [line.split()[0] for line in out.getvalue().splitlines()] == [
        "round",
        "1",
        "2*",
        "3",
        "4",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.071, "0.07"), (59.5, "59.50"), (1200.0, "20 min"), (11_100.0, "3 h 05 min")],
)
def test_times_of_any_length(seconds: float, text: str) -> None:
    assert round_table.duration(seconds) == text


def test_a_program_names_its_outputs_as_it_likes() -> None:
    """Markup and control characters in what is shown are text."""
    out = StringIO()
    outputs = {"[bold]x[/nonsense]": 1.0, "a\x1b[31m": float("nan"), "inf": float("inf")}
    rows = [row(n, outputs=outputs, missing=["[/x]"]) for n in (1, 2)]
    console = Console(file=out, width=200)
    console.print(rounds_table(rows, {}, width=200))
    assert "\x1b" not in out.getvalue()
    assert "[bold]x[/nonsense]" in out.getvalue()
    assert len(round_table.trends(rows)) == 3


def test_bars_go_from_the_least_to_the_greatest() -> None:
    assert round_table.bars([0, 1, 2, 7]) == "▁▂▃█"
    assert round_table.bars([1, 1]) == "▄▄"
    assert round_table.bars([1, float("nan"), float("inf"), 2]) == "▁  █"
    assert round_table.bars([-1e308, 1e308]) == "▄▄"


@given(st.lists(st.floats()))
def test_bars_are_as_many_as_the_numbers(values: list[float]) -> None:
    assert len(round_table.bars(values)) == len(values)
    assert all(round_table.number("x", value) for value in values)


def test_values_name_nodes_and_are_one_short_line() -> None:
    value = {"responded": ["A", "B"], "text": "a\nb", "x": [1.5, None]}
    text = views.value_text(value, {"A": "client-0"})
    assert text == "{responded: [client-0, B], text: a\N{REPLACEMENT CHARACTER}b, x: [1.5, None]}"
    assert len(views.value_text([0.125] * 1000, {})) == 100


def test_many_nodes_are_counted() -> None:
    states = {f"n{i}": "starting" for i in range(100)} | {"m": views.READY}
    text = views.states_text(states)
    assert text.startswith("1 of 101 nodes ready; n0: starting")
    assert text.endswith("and 92 more")
