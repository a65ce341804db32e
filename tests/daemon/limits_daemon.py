"""Limits of running a node: control plane, history, state, testbeds; each with what reaches it."""

from __future__ import annotations

import json
import mmap
import resource
import socket
import sqlite3
import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import trio

from bbnode.api.on_trio import OutputQueue
from bbnode.api.where import _token
from bbnode.daemon import paths
from bbnode.daemon.access.control import _rate
from bbnode.daemon.config import AccessSection, NodeSection
from bbnode.daemon.config.sources import ConfigError
from bbnode.daemon.control import routes
from bbnode.daemon.control.client import DEFAULT_TIMEOUT_S, ControlClient
from bbnode.daemon.control.errors import ControlTimeout
from bbnode.daemon.control.feed import Feed
from bbnode.daemon.control.http import Problem, read_query
from bbnode.daemon.control.token import TokenFileUnsafe, load_or_create_token
from bbnode.daemon.history import store
from bbnode.daemon.history.history import RoundHistory
from bbnode.daemon.history.scalars import metric_name
from bbnode.daemon.history.store import RoundStore
from bbnode.daemon.invoke.exact import Encoder, ValueOmitted, decoded
from bbnode.daemon.invoke.rounds import Round
from bbnode.daemon.lifecycle import process
from bbnode.daemon.observing import doctor
from bbnode.daemon.observing.doctor import CheckResult
from bbnode.daemon.paths import StorageError
from bbnode.daemon.state import checkpoint
from bbnode.daemon.state.checkpoint import CheckpointRefused
from bbnode.daemon.testbed import run as testbed
from bbnode.daemon.testbed.plan import NodesRefused, parse_nodes
from bbnode.sim import NotReached
from tests.daemon.limits_reach import Place, Reach, refusing
from tests.daemon.test_checkpoint import saved
from tests.daemon.test_round_history import made
from tests.daemon.test_testbed import digits
from tests.daemon.test_testbed_run import prepared
from tests.sim.test_network import asked

# --- the control plane --------------------------------------------------------------------------


def _outputs(most: int) -> None:
    queue = OutputQueue()
    for number in range(most + 2):
        queue.push(cast("Any", SimpleNamespace(name=str(number))), 1)
    assert queue.lost == 2
    assert cast("Any", queue.take()).name == "2"


def _output_bytes(most: int) -> None:
    """One of any size stays; of several, as many as fit."""
    queue = OutputQueue()
    for number, size in enumerate((most, 1, most - 1, 1)):
        queue.push(cast("Any", SimpleNamespace(name=str(number))), size)
    assert queue.lost == 2
    assert [cast("Any", queue.take()).name for _ in range(2)] == ["2", "3"]


def _query(count: int) -> None:
    text = "&".join(f"f{n}=1" for n in range(count))
    read_query({"raw_path": b"/", "query_string": text.encode()})


def _kept(most: int) -> None:
    """What is published, and nobody reads: the oldest go; nobody asks for more."""
    feed = Feed("log")
    for number in range(most + 1):
        feed.publish({"n": number})
    assert [feed.kept()[at].data["n"] for at in (0, -1)] == [1, most]
    for query in (routes.EventsQuery, routes.LogsQuery):
        refusing(ValueError, lambda n, query=query: query(last=n), "less than or equal")(most)


def _queued(most: int) -> None:
    feed = Feed("log")
    subscription = cast("Any", feed.subscribe())
    for number in range(most + 1):
        feed.publish({"n": number})
    assert feed.dropped == subscription._dropped == 1
    assert subscription._waiting[0].data["n"] == 1


def _token_of(most: int, place: Place) -> None:
    path = place.folder / "control.token"
    for size, fits in ((most, True), (most + 1, False)):
        path.write_text("t" * size)
        path.chmod(0o600)
        if fits:
            assert load_or_create_token(path) == _token(path) == "t" * size
            continue
        with pytest.raises(TokenFileUnsafe, match="holds no token; remove it"):
            load_or_create_token(path)
        with pytest.raises(ConfigError, match="not the content of"):
            _token(path)


def _answer_s(most: float, place: Place) -> None:
    """A daemon that takes a request and says nothing; a command has this time for it."""
    assert most == DEFAULT_TIMEOUT_S
    assert cast("Any", ControlClient(place.folder / "s"))._http.timeout == most
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(place.folder / "s"))
        silent.listen()
        with (
            ControlClient(place.folder / "s", timeout_s=0.01) as client,
            pytest.raises(ControlTimeout, match="try a longer --timeout"),
        ):
            client.get("/v1/status")


async def _pinged(most: float) -> None:
    """A peer that does not echo: the answer is a time-out of this length."""

    async def never(_: Any) -> float:
        await trio.sleep_forever()
        raise AssertionError

    peer = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
    info = SimpleNamespace(peer=peer)
    host = SimpleNamespace(ping=never, transport=SimpleNamespace(peer_info=lambda _: info))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "_connected", lambda _, text: text)
        began = trio.current_time()
        with pytest.raises(Problem, match=f"within {most:g} s"):
            await routes.ping(cast("Any", host), routes.PingBody(peer=peer))
    assert trio.current_time() - began == most


def _waits_s(most: float) -> None:
    for body in (
        lambda s: routes.PingBody(peer="p", timeout_s=s),
        lambda s: routes.InvokeBody(target="t", wait_s=s),
        lambda s: routes.EmitBody(wait_s=s),
    ):
        refusing(ValueError, body, "less than or equal")(most)


async def _rounds_bytes(most: int, place: Place) -> None:
    """The newest rounds that fit into an answer, and how many older ones did not."""
    file = store.rounds_file(place.folder)
    kept = RoundStore(file, keep=10)
    for number in range(1, 6):
        kept.add(made(number), 1)
    kept.close()
    size = max(len(json.dumps(each)) for each in store.read_rounds(file))
    found = store.read_rounds(file, max_bytes=2 * size)
    assert [each["round"] for each in found] == [4, 5]
    assert found.left_out == 3
    asked = {}

    def read(**given: Any) -> Any:
        asked.update(given)
        return found

    host = cast("Any", SimpleNamespace(history=SimpleNamespace(read=read), rounds=[]))
    answer = await routes.rounds(host, routes.RoundsQuery())
    assert asked["max_bytes"] == most
    assert answer["trouble"].startswith("3 older rounds are left out: an answer holds 12 MiB")


# --- the history --------------------------------------------------------------------------------


def _metric(most: int) -> None:
    assert metric_name("m" * most) == "m" * most
    assert len(metric_name("m" * (most + 1)).encode()) == most


def _busy(most: int, place: Place) -> None:
    """Another writer holds the file, for longer than a history waits for it."""
    file = store.rounds_file(place.folder)
    store_of = RoundStore(file, keep=10)
    assert store._connect(file).execute("PRAGMA busy_timeout").fetchone()[0] == most
    store_of.close()
    place.patch.setattr(store, "BUSY_TIMEOUT_MS", 1)
    mine = RoundStore(file, keep=10)
    with sqlite3.connect(file, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises((sqlite3.OperationalError, StorageError), match="locked"):
            mine.add(made(1), 1)
        other.execute("ROLLBACK")
    mine.close()


def _kept_rounds(most: int, place: Place) -> None:
    """The history of a node keeps so many; of one more, the oldest goes."""
    asked = []

    class Asked(Exception):
        pass

    def recorder(_: Any, *, keep: int) -> Any:
        asked.append(keep)
        raise Asked

    place.patch.setattr("bbnode.daemon.history.history.RoundRecorder", recorder)
    history = cast("Any", RoundHistory.__new__(RoundHistory))
    history._config = SimpleNamespace(node=NodeSection(), trackers=[])
    history._recorder, history._state_dir = None, place.folder
    with pytest.raises(Asked):
        history.begin(SimpleNamespace(target="server"), 0)
    assert asked == [most]
    kept = RoundStore(store.rounds_file(place.folder), keep=3)
    for number in range(1, 5):
        kept.add(made(number), 1)
    kept.close()
    found = store.read_rounds(store.rounds_file(place.folder))
    assert [each["round"] for each in found] == [2, 3, 4]


def _peers_of_a_round(most: int, place: Place) -> None:
    said = []
    place.patch.setattr(
        "bbnode.daemon.invoke.rounds.logger.info", lambda text, extra: said.append((text, extra))
    )
    one = Round(number=1, target="server", execution=1)
    for number in range(most):
        one.say(f"p{number}", {"bytes_in": 1})
    assert not said
    for number in range(most + 2):
        one.say(f"p{number}", {"bytes_out": 1})
    assert list(one.peers) == [f"p{n}" for n in range(most)]
    assert len(said) == 1


def _exact(most: int) -> None:
    """Values of one answer: together at the bound, and a byte more is told without its content."""
    encode = Encoder()
    half = np.zeros(most // 2, np.uint8)
    assert all("omitted" not in encode(half) for _ in range(2))
    told = encode(np.zeros(1, np.uint8))
    with pytest.raises(ValueOmitted, match=f"an answer takes {most} with all its values. Read it"):
        decoded(told)


# --- state, files and the clock -----------------------------------------------------------------


def _checkpoint(most: int, place: Place) -> None:
    path = place.sparse(most + 1, "node.checkpoint")
    with pytest.raises(CheckpointRefused, match="larger than any checkpoint"):
        checkpoint.read(path)
    path.unlink()
    # Nor is one written: of one piece that msgpack has no head for, and of more in all.
    checkpoint.write(place.folder, saved(1))
    with (
        place.sparse(1 << 32).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as large,
    ):
        huge = checkpoint.Checkpoint(
            artifact_sha256="a" * 64, node=cast("Any", large), rounds_done={}
        )
        with pytest.raises(StorageError, match="larger than any that is read"):
            checkpoint.write(place.folder, huge)
    place.patch.setattr(checkpoint, "MAX_CHECKPOINT_BYTES", 100)
    with pytest.raises(StorageError, match="larger than any that is read"):
        checkpoint.write(place.folder, saved(2))
    place.patch.undo()
    assert [each.node[0] for each in checkpoint.usable(place.folder, "a" * 64)] == [1]


def _entries(most: int, place: Place) -> None:
    """A state directory with many files: no more than these are looked at."""

    class Entry(SimpleNamespace):
        def __enter__(self) -> Any:
            return iter(self)

        def __exit__(self, *_: object) -> None:
            pass

        def __iter__(self) -> Any:
            while True:
                self.seen += 1
                yield SimpleNamespace(name="other")

    listed = Entry(seen=0)
    place.patch.setattr(paths.os, "scandir", lambda _: listed)
    assert paths.remove_orphans(place.folder, ()) == []
    assert listed.seen == most
    again = Entry(seen=0)
    assert checkpoint._kept(cast("Any", SimpleNamespace(iterdir=lambda: iter(again)))) == []
    assert again.seen == most


def _files(most: int, place: Place) -> None:
    asked: list[Any] = []
    place.patch.setattr(resource, "setrlimit", lambda _, wanted: asked.append(wanted))
    for hard, soft in ((resource.RLIM_INFINITY, 10), (most * 2, 10), (100, 10), (most * 2, most)):
        place.patch.setattr(resource, "getrlimit", lambda _, s=soft, h=hard: (s, h))
        process.raise_file_limit()
    assert asked == [(most, resource.RLIM_INFINITY), (most, most * 2), (100, 100)]


def _clock(most: int, place: Place) -> None:
    for error, verdict in ((most, CheckResult.PASSED), (most + 1, CheckResult.WARNING)):
        place.patch.setattr(doctor, "_kernel_clock", lambda error=error: (True, error))
        found = doctor._clock(cast("Any", None))
        assert found.verdict is verdict


def _burst(most: None) -> None:
    """Unset: as many as in a second; set, it is the burst."""
    section = AccessSection()
    assert section.message_burst is most
    rate = cast("Any", _rate(section.messages_per_s, section.message_burst))
    assert rate.burst == rate.per_second
    assert cast("Any", _rate(10.0, 3.0)).burst == 3.0


# --- testbeds and simulations -------------------------------------------------------------------


def _gone(given: str) -> Reach:
    async def reach(most: float, place: Place) -> None:
        """A node that does not answer: while it starts, and once it has answered."""
        bed = cast("Any", prepared(place.folder))
        node = bed._nodes[0]
        place.patch.setattr(testbed.ChildNode, "last_words", lambda _: "nothing", raising=False)
        answers = [True] if given == "GONE" else []

        class Client:
            def __init__(self, *_: Any, **__: Any) -> None:
                pass

            async def __aenter__(self) -> Any:
                await trio.lowlevel.checkpoint()
                if not answers:
                    raise testbed.NotRunning("x")
                return self

            async def __aexit__(self, *_: object) -> None:
                pass

        async def caught_up(*_: Any) -> None:
            await trio.lowlevel.checkpoint()
            answers.clear()

        place.patch.setattr(testbed, "AsyncControlClient", Client)
        bed._catch_up = bed._stream = caught_up
        failed = []

        def fail(text: str) -> None:
            failed.append((trio.current_time() - began, text))
            raise testbed.RunFailed(text)

        bed._fail = fail
        began = trio.current_time()
        with pytest.raises(testbed.RunFailed, match="did not answer for"):
            await bed._follow(node)
        ((after_s, _),) = failed
        rest = testbed.START_PER_NODE_S * len(bed._plan.nodes)
        others = {
            "GONE": 0.0,
            "START": testbed.JOIN_TIMEOUT_S + rest,
            "JOIN": testbed.START_TIMEOUT_S + rest,
        }
        assert after_s == pytest.approx(most + others[given], abs=2 * testbed.ASK_EVERY_S)

    return reach


async def _stops(most: float, place: Place) -> None:
    """A daemon that does not end: it is killed after this time."""
    bed = cast("Any", prepared(place.folder))
    ended, killed = threading.Event(), []
    began = trio.current_time()

    async def asks(_: Any) -> None:
        await trio.lowlevel.checkpoint()

    def kill() -> None:
        killed.append(trio.current_time() - began)
        ended.set()

    class Endless:
        @property
        def kill(self) -> Any:
            return kill

        def wait(self) -> None:
            ended.wait(60)

    async def waits(*_: Any, **__: Any) -> None:
        await trio.sleep_forever()

    place.patch.setattr(testbed, "_ask_to_stop", asks)
    place.patch.setattr(trio.to_thread, "run_sync", waits)
    bed._nodes = [SimpleNamespace(name="n", process=Endless(), exit_code=None)]
    await bed._stop_all()
    assert killed == [pytest.approx(most)]


def _virtual(most: int) -> None:
    """Something happens each nine minutes, for ever: a run ends after this time."""
    for run in (lambda net: net.run_until(lambda: False), lambda net: net.run_until_idle()):
        net, _ = asked()

        def again(net: Any = net) -> None:
            net.at(net.now_ns + 540 * 10**9, again)

        again()
        with pytest.raises(NotReached, match=f"{most} ns"):
            run(net)
        assert most - 540 * 10**9 < net.now_ns <= most


def _nodes(count: int) -> None:
    parse_nodes(f"client={count - 1}", digits())


REACHED: dict[str, Reach] = {
    "api.on_trio.MAX_WAITING_OUTPUTS": _outputs,
    "api.on_trio.MAX_WAITING_BYTES": _output_bytes,
    "max_query_fields": refusing(Problem, _query, "fields"),
    "kept_items": _kept,
    "queued_items": _queued,
    "max_token_chars": _token_of,
    "daemon.control.client.DEFAULT_TIMEOUT_S": _answer_s,
    "daemon.control.routes.PING_TIMEOUT_S": _pinged,
    "daemon.control.routes.MAX_ROUNDS": refusing(
        ValueError, lambda n: routes.RoundsQuery(last=n), "less than or equal"
    ),
    "daemon.control.routes.MAX_ROUNDS_BYTES": _rounds_bytes,
    "max_wait_s": _waits_s,
    "daemon.history.scalars.MAX_METRIC_NAME_BYTES": _metric,
    "daemon.history.store.BUSY_TIMEOUT_MS": _busy,
    "node.keep_rounds": _kept_rounds,
    "daemon.invoke.rounds.MAX_PEERS_OF_A_ROUND": _peers_of_a_round,
    "daemon.invoke.exact.MAX_EXACT_BYTES": _exact,
    "max_checkpoint_bytes": _checkpoint,
    "max_state_entries": _entries,
    "open_files": _files,
    "daemon.observing.doctor.MAX_CLOCK_ERROR_US": _clock,
    "access.message_burst": _burst,
    "daemon.testbed.run.GONE_TIMEOUT_S": _gone("GONE"),
    "daemon.testbed.run.START_TIMEOUT_S": _gone("START"),
    "daemon.testbed.run.JOIN_TIMEOUT_S": _gone("JOIN"),
    "daemon.testbed.run.STOP_TIMEOUT_S": _stops,
    "sim.network.DEFAULT_LIMIT_NS": _virtual,
    "daemon.testbed.plan.MAX_NODES": refusing(NodesRefused, _nodes, "the simulator"),
}
