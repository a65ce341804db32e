"""Nodes over real connections whose data mean different things: mapped, refused on both sides."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
import trio

import bbnode
from bbnode.components.data.shared_schema import SharedSchema
from bbnode.daemon.artifacts.artifact import parse_artifact, serialize
from bbnode.daemon.artifacts.build import compile_program
from bbnode.daemon.network import agreeing
from bbnode.daemon.network.agreeing import FILE_NAME
from bbnode.daemon.observing.doctor import judge_data
from bbnode.daemon.predicting.meaning import Meaning
from bbnode.daemon.state import checkpoint
from bbnode.daemon.state.weights import from_checkpoint
from bbnode.engine.readiness import PENDING
from bbnode.programs import FederatedTraining, GossipTraining
from bbnode.transport import schema_exchange
from tests.patience import PATIENCE_S

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
CLASSES = ("ant", "bee", "cat")


class Line(FederatedTraining):
    """y = 3 a - 2 b, without noise."""

    model = (2, 1)
    data = "bbnode.TableDataSource"
    loss = "mse"
    learning_rate = 0.2
    clients = 2
    quorum = 1
    epochs = 3
    evaluate = "clients"


class Animals(FederatedTraining):
    model = (2, 3)
    data = "bbnode.TableDataSource"
    learning_rate = 0.3
    clients = 2
    quorum = 1
    epochs = 2
    evaluate = "clients"


class Declared(Line):
    schema: ClassVar[Any] = {"data": {"columns": ["a", "b"]}, "held_out": {"columns": ["a", "b"]}}


class Gossip(GossipTraining):
    model = (2, 1)
    data = "bbnode.TableDataSource"
    loss = "mse"


def table(path: Path, order: str, seed: int = 0) -> Path:
    """Write columns of a line, in an order such as "b,a,y"; another name has the values of a."""
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(size=(2, 60))
    values = {"a": a, "b": b, "y": 3 * a - 2 * b}
    rows = np.stack([values.get(name, a) for name in order.split(",")], 1)
    np.savetxt(path, rows, delimiter=",", header=order, comments="", fmt="%.4f")
    return path


def animals(path: Path, names: tuple[str, ...]) -> Path:
    rng = np.random.default_rng(len(names))
    at = {"ant": (0, 0), "bee": (3, 0), "cat": (0, 3)}
    rows = []
    for name in names * 20:
        u, v = np.array(at[name]) + rng.normal(scale=0.1, size=2)
        rows.append(f"{u:.3f},{v:.3f},{name}")
    path.write_text("u,v,label\n" + "\n".join(rows) + "\n")
    return path


@asynccontextmanager
async def node(
    program: Any, target: str, peers: Any = (), path: Path | None = None, **more: Any
) -> AsyncIterator[Any]:
    of = {"path": str(path), **more.pop("of", {})}
    async with bbnode.on_trio.open(
        program,
        targets=target,
        peers=peers,
        listen=LOOPBACK,
        slots={} if path is None else {"data": of, "held_out": of},
        settings={"discovery.introductions": False, **more.pop("settings", {})},
        **more,
    ) as opened:
        yield opened


async def until(said: Callable[[Mapping[str, Any]], Any], one: Any) -> Any:
    """Return what a node's status says, once it says it."""
    with trio.fail_after(PATIENCE_S):
        while not (found := said(await one.status())):  # noqa: ASYNC110
            await trio.sleep(0.02)
        return found


def standing(status: Mapping[str, Any]) -> dict[str, str]:
    return {peer: each["standing"] for peer, each in status["data"]["peers"].items()}


async def test_columns_in_another_order_are_mapped_and_the_model_is_not_ruined(
    tmp_path: Path,
) -> None:
    label = {"of": {"label": "y"}}
    async with (
        node(Line, "server", state_dir=tmp_path / "server") as server,
        node(Line, "client", [server], table(tmp_path / "0.csv", "a,b,y"), **label) as first,
    ):
        await until(lambda s: standing(s) == {str(first.peer_id): "agrees"}, server)
        async with node(
            Line, "client", [server], table(tmp_path / "1.csv", "b,a,y", 1), **label
        ) as other:
            await until(lambda s: [*standing(s).values()] == ["agrees"] * 2, server)
            result = await server.train(20)
            assert result.history["loss"][-1] < 0.01
            status = await server.status()
            told = status["data"]["peers"][str(other.peer_id)]
            assert told["mapped"]["data"] == ["columns are brought into the order a, b"]
            own = (await other.status())["data"]["own"]["data"]
            assert own["mapped"] == ["columns are brought into the order a, b"]
            carried = await trio.to_thread.run_sync(other._host.meaning, "local")
            assert carried.data.columns == ("a", "b")
            # The server has no data, and its model says what they mean.
            assert (await trio.to_thread.run_sync(server._host.meaning, "global")).data.columns == (
                "a",
                "b",
            )


async def test_a_class_that_the_first_peer_lacks_gets_a_number_before_the_first_round(
    tmp_path: Path,
) -> None:
    async with (
        node(Animals, "server") as server,
        node(Animals, "client", [server], animals(tmp_path / "0.csv", CLASSES[1:])) as first,
    ):
        await until(lambda s: standing(s) == {str(first.peer_id): "agrees"}, server)
        async with node(Animals, "client", [server], animals(tmp_path / "1.csv", CLASSES)):
            await until(lambda s: [*standing(s).values()] == ["agrees"] * 2, server)
            references = (await server.status())["data"]["references"]
            assert "classes bee, cat, ant" in references["client/data"]["meaning"]
            result = await server.train(10)
            assert result.history["accuracy"][-1] == 1.0
            # From now on the numbers stand: who comes with another class is refused.
            late = animals(tmp_path / "2.csv", CLASSES)
            late.write_text(late.read_text().replace("ant", "dog"))
            async with node(Animals, "client", [server], late) as other:
                found = await until(
                    lambda s: s["data"]["peers"].get(str(other.peer_id), {}).get("reason"), server
                )
                await until(lambda s: "refused" in standing(s).values(), server)
                found = (await server.status())["data"]["peers"][str(other.peer_id)]["reason"]
                assert found == "classes bee, cat, dog; the federation has bee, cat, ant"


async def test_what_can_not_be_mapped_is_refused_on_both_sides_in_one_line(tmp_path: Path) -> None:
    label = {"of": {"label": "y"}}
    line = "columns b, c; the federation has a, b"
    path = tmp_path / "1.csv"
    async with (
        node(Line, "server") as server,
        node(Line, "client", [server], table(tmp_path / "0.csv", "a,b,y"), **label) as first,
    ):
        await until(lambda s: standing(s) == {str(first.peer_id): "agrees"}, server)
        async with node(Line, "client", [server], table(path, "b,c,y", 1), **label) as other:
            wrong = str(other.peer_id)

            def of(status: Mapping[str, Any]) -> str:
                return next((p["not_ready"] for p in status["peers"] if p["peer"] == wrong), "")

            # What the peer says of itself may stand behind it.
            assert (await until(lambda s: line in of(s) and of(s), server)).startswith(line)
            await until(lambda s: f"slots data, held_out: {line}" in str(s["health"]), other)
            assert (await other.status())["phase"] == "not ready"
            finding = judge_data((await server.status())["data"])
            assert finding.verdict.value == "WARNING"
            assert finding.detail == f"{wrong}: {line}"
            result = await server.train(1)
            assert result.rounds[-1]["ok"]
            assert len(server._host.node.connected_peers("client")) == 1
            # Its owner mends the file; nothing is restarted.
            table(path, "b,a,y", 1)
            other._host.reload()
            await until(lambda s: standing(s).get(wrong) == "agrees", server)
            assert (await other.status())["phase"] == "ready"


async def test_what_the_program_says_is_compared_before_a_node_is_ready(tmp_path: Path) -> None:
    with pytest.raises(bbnode.NodeNotReady, match="columns b, c; the federation has a, b"):
        async with node(
            Declared, "client", [], table(tmp_path / "0.csv", "b,c,y"), of={"label": "y"}
        ) as wrong:
            await wrong.invoke("client", {})
    async with node(
        Declared, "client", [], table(tmp_path / "0.csv", "b,a,y"), of={"label": "y"}
    ) as right:
        assert right._host.node.component("data").schema().names == ("a", "b")


async def test_the_reference_outlives_the_server(tmp_path: Path) -> None:
    label = {"of": {"label": "y"}}
    state = {"state_dir": tmp_path / "server"}
    first_path, other_path = table(tmp_path / "0.csv", "a,b,y"), table(tmp_path / "1.csv", "b,a,y")
    async with (
        node(Line, "server", **state) as server,
        node(Line, "client", [server], first_path, **label),
    ):
        await until(lambda s: {*standing(s).values()} == {"agrees"}, server)
        await server.train(1)
    saved = json.loads((tmp_path / "server" / FILE_NAME).read_text())
    assert saved["used"]
    async with (
        node(Line, "server", **state) as server,
        node(Line, "client", [server], other_path, **label) as other,
    ):
        await until(lambda s: {*standing(s).values()} == {"agrees"}, server)
        assert other._host.node.component("data").schema().names == ("a", "b")
    (tmp_path / "server" / FILE_NAME).write_text("{")
    async with (
        node(Line, "server", **state) as server,
        node(Line, "client", [server], other_path, **label) as other,
    ):
        await until(lambda s: {*standing(s).values()} == {"agrees"}, server)
        assert other._host.node.component("data").schema().names == ("b", "a")


async def test_peers_of_an_earlier_release_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreeing.schema_exchange, "serve", lambda *_: None)
    async with (
        node(Line, "server") as server,
        node(Line, "client", [server], table(tmp_path / "0.csv", "a,b,y"), of={"label": "y"}),
    ):
        await until(lambda s: {*standing(s).values()} == {"unnamed"}, server)
        (told,) = (await server.status())["data"]["peers"].values()
        assert told["reason"] == "it does not say what its data mean"


@pytest.mark.parametrize(
    "lie",
    [
        b"[" * 200_000,
        b"{}",
        json.dumps({"schemas": 7}).encode(),
        json.dumps({"schemas": json.dumps({"data": "[" * 99_999}), "adopted": {}, "waits": "",
                    "refused": "", "references": "{}", "since": 0, "used": False}).encode(),
        b"x" * (17 << 20),
    ],
    ids=["nested", "empty", "mistyped", "bomb", "17 MiB"],
)  # fmt: skip
async def test_who_lies_about_its_data_is_held_and_nothing_else_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: bytes
) -> None:
    label = {"of": {"label": "y"}}
    async with (
        node(Line, "server") as server,
        node(Line, "client", [server], table(tmp_path / "0.csv", "a,b,y"), **label) as first,
    ):
        await until(lambda s: standing(s) == {str(first.peer_id): "agrees"}, server)

        async def answer(*_: Any) -> bytes:
            return lie

        monkeypatch.setattr(agreeing.Agreeing, "_answer", answer)
        async with node(
            Line, "client", [server], table(tmp_path / "1.csv", "b,a,y"), **label
        ) as liar:
            held = await until(
                lambda s: (
                    (found := s["data"]["peers"].get(str(liar.peer_id)))
                    and found["reason"] != PENDING
                    and found
                ),
                server,
            )
            assert held["standing"] == "pending"
            assert held["reason"].startswith(PENDING)
            assert len(server._host.node.connected_peers("client")) == 1
            assert (await server.train(1)).rounds[-1]["ok"]


async def test_nobody_but_who_keeps_the_reference_is_answered(tmp_path: Path) -> None:
    label = {"of": {"label": "y"}}
    async with (
        node(Line, "client", [], table(tmp_path / "0.csv", "a,b,y"), **label) as one,
        node(Line, "client", [one], table(tmp_path / "1.csv", "a,b,y"), **label) as other,
    ):
        await until(lambda s: s["peers"], other)
        with pytest.raises(schema_exchange.NotSpoken):
            await schema_exchange.ask(other._host.backend, one._host.node.peer_id, b"{}")


async def test_gossiping_peers_take_the_older_order(tmp_path: Path) -> None:
    label = {"of": {"label": "y"}}
    async with (
        node(Gossip, "peer", [], table(tmp_path / "0.csv", "b,a,y"), **label) as one,
        node(Gossip, "peer", [one], table(tmp_path / "1.csv", "a,b,y"), **label) as other,
    ):
        for each in (one, other):
            await until(lambda s: {*standing(s).values()} == {"agrees"}, each)
            assert each._host.node.component("data").schema().names == ("b", "a")
        async with node(
            Gossip, "peer", [one], table(tmp_path / "2.csv", "c,a,y"), **label
        ) as wrong:
            for each in (one, wrong):
                await until(lambda s: "refused" in standing(s).values(), each)
            told = (await one.status())["data"]["peers"][str(wrong.peer_id)]["reason"]
            assert "columns c, a; the federation has b, a" in told
            # It is held alone: the other two go on.
            assert len(one._host.node.connected_peers("peer")) == 1


async def test_what_data_mean_stays_with_the_checkpoint_and_moves_with_the_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    label = {"of": {"label": "y"}}
    state = {"state_dir": tmp_path / "server"}
    async with (
        node(Line, "server", **state) as server,
        node(Line, "client", [server], table(tmp_path / "0.csv", "a,b,y"), **label),
    ):
        await until(lambda s: [*standing(s).values()] == ["agrees"], server)
        await server.train(1)
    _, saved = checkpoint.newest(tmp_path / "server")
    made_by = parse_artifact(serialize(compile_program(Line())), "line", own=True)
    _, data = from_checkpoint(saved, made_by, "global", targets=("server",))
    found = Meaning.of_model(onnx.load_from_string(data))
    assert found is not None
    assert found.data is not None
    assert (found.data.kind, found.data.columns) == ("table", ("a", "b"))

    class Wider(Line):
        model = (3, 1)

    # Another program, which goes on with nothing of this one: its data mean what they mean now.
    async with (
        node(Wider, "server", **state) as server,
        node(Wider, "client", [server], table(tmp_path / "1.csv", "c,b,a,y"), **label),
    ):
        await until(lambda s: [*standing(s).values()] == ["agrees"], server)
        told = (await server.status())["data"]["moved"]
        assert told == ["client/data: before, columns a, b; now c, b, a"]


@pytest.mark.parametrize("columns", [["x", "z"], ["b", "a"]], ids=["other", "turned"])
async def test_who_only_says_that_it_keeps_the_reference_does_not_take_a_client_away(
    tmp_path: Path, columns: list[str]
) -> None:
    label = {"of": {"label": "y"}}
    path = table(tmp_path / "0.csv", "a,b,y")
    async with node(Line, "server") as server:
        others = {"settings": {"network.listen": [LOOPBACK]}}
        async with node(Line, "client", [server], path, **label) as client:
            await until(lambda s: [*standing(s).values()] == ["agrees"], server)
            async with node(Line, "server", [client], **others) as evil:
                kept = evil._host.reference.__self__
                kept._used = True  # so that it tells at once
                kept.references.put("client/data", SharedSchema.declared({"columns": columns}))
                await until(lambda s: "refused" in standing(s).values(), evil)
                assert [*standing(await server.status()).values()] == ["agrees"]
                assert client._host.node.not_ready() == {}
                assert client._host.node.component("data").schema().names == ("a", "b")
                assert (await server.train(1)).rounds[-1]["ok"]
