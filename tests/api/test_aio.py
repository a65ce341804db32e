"""`bbnode.aio` and `bbnode.on_trio`: cancelled tasks, closed loops, blocks that fail."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import bbnode
from bbnode.transport import NotSupportedError
from tests.api.programs import GO_ON, IS_WAITING, Batches, TellBack
from tests.patience import PATIENCE_S

TICK = {"tick": "trigger"}


@pytest.fixture(autouse=True)
def _nobody_waits() -> Iterator[None]:
    GO_ON.clear()
    IS_WAITING.clear()
    yield
    GO_ON.set()


def worker(**more: Any) -> Any:
    return bbnode.aio.open(Batches, transport="memory", **more)


# -- asyncio --------------------------------------------------------------------------------------


def test_asyncio_has_the_whole_node(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            bbnode.aio.open(TellBack, targets="server", transport="memory") as server,
            bbnode.aio.open(TellBack, targets="client", transport="memory", peers=[server]),
        ):
            await server.wait_for_peers(1, "client", timeout_s=PATIENCE_S)
            async with await server.outputs() as outputs:
                outcomes = await asyncio.gather(
                    *(server.invoke("server", {"said": float(n)}) for n in range(3))
                )
                assert [float(each["echo"]) for each in outcomes] == [0, 1, 2]
                found = [float((await anext(outputs)).value) for _ in range(3)]
                assert sorted(found) == [0, 1, 2]
            assert (await server.invoke("server", {"said": 4.0}, timeout_s=0)).ok is None
            assert float(await server.next_output("echo", timeout_s=PATIENCE_S)) == 4
            async with await server.events(["app_event"], last=1, follow=False) as events:
                assert [line["event"]["topic"] async for line in events] == ["echo"]
            there = await bbnode.aio.connect(server.socket)
            assert (await there.status())["peer_id"] == server.peer_id
            assert float((await there.invoke("server", {"said": 5.0}))["echo"]) == 5
        assert not server.running

    asyncio.run(main())


def test_a_cancelled_task_ends_its_wait_alone() -> None:
    async def main() -> None:
        async with worker(slots={"data": {"mode": "wait"}}) as node:
            waiting = asyncio.create_task(node.invoke("worker", TICK))
            await asyncio.to_thread(IS_WAITING.wait, PATIENCE_S)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            GO_ON.set()
            assert (await node.invoke("worker", TICK)).ok
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(node.next_output("never"), 0.01)

    asyncio.run(main())


def test_a_cancelled_open_leaves_no_node(tmp_path: Path) -> None:
    async def main() -> None:
        opening = asyncio.create_task(worker(state_dir=tmp_path / "state").__aenter__())
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        async with worker(state_dir=tmp_path / "state") as node:
            assert node.running

    asyncio.run(main())


def test_a_loop_closed_under_a_node_leaves_it_to_the_next_one() -> None:
    found: list[Any] = []

    async def leave() -> None:
        node = await worker(slots={"data": {"mode": "wait"}})
        found.append(node)
        asyncio.get_running_loop().create_task(node.invoke("worker", TICK))
        await asyncio.to_thread(IS_WAITING.wait, PATIENCE_S)

    async def use() -> None:
        GO_ON.set()
        assert (await found[0].invoke("worker", TICK)).ok
        await found[0].stop()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.close()
    gc.collect()
    asyncio.run(use())


def test_a_stop_ends_the_streams_and_the_waits() -> None:
    async def main() -> None:
        node = await worker()
        stream = await node.events()
        waiting = asyncio.create_task(anext(stream, None))
        never = asyncio.create_task(node.next_output("never"))
        await node.peers()
        await node.stop()
        while (line := await asyncio.wait_for(waiting, PATIENCE_S)) is not None:
            waiting = asyncio.create_task(anext(stream, None))
            assert line["event"]["type"] == "stopping"
        with pytest.raises(bbnode.NodeStopped):
            await never

    asyncio.run(main())


# -- trio -----------------------------------------------------------------------------------------


async def test_trio_has_the_node_in_its_own_loop() -> None:
    settings = {"network.settings.network": "trio's own"}
    opened = {"transport": "memory", "settings": settings}
    async with (
        bbnode.on_trio.open(TellBack, targets="server", **opened) as server,
        bbnode.on_trio.open(TellBack, targets="client", peers=[server], **opened),
    ):
        await server.wait_for_peers(1, "client", timeout_s=PATIENCE_S)
        async with await server.outputs() as outputs:
            assert (await server.invoke("server", {"said": [1.0, 2.0]}))["echo"].tolist() == [1, 2]
            assert (await anext(outputs)).name == "echo"
        with trio.move_on_after(0):
            await server.next_output("never")
    with pytest.raises(bbnode.NodeStopped):
        await server.status()


async def test_an_error_in_the_block_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with bbnode.on_trio.open(
            Batches, transport="memory", settings={"network.settings.network": "errors"}
        ) as node:
            1 / 0  # noqa: B018
    assert not node.running


async def test_a_cancelled_block_stops_its_node_in_order(tmp_path: Path) -> None:
    with trio.CancelScope() as scope:
        async with bbnode.on_trio.open(
            Batches,
            transport="memory",
            settings={"network.settings.network": "cancelled"},
            state_dir=tmp_path / "state",
        ) as node:
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert not node.running
    assert [each for each in (tmp_path / "state").iterdir() if "checkpoint" in each.name]


async def test_nodes_of_two_loops_do_not_share_a_network_in_memory() -> None:
    shared = {"transport": "memory", "settings": {"network.settings.network": "one"}}
    with bbnode.open(Batches, **shared), pytest.raises(bbnode.BbnodeError, match="another loop"):
        async with bbnode.on_trio.open(Batches, **shared):
            pass


# -- py-libp2p ------------------------------------------------------------------------------------


async def names(host: Any, suffix: str) -> str:
    return f"{host.get_id()}{suffix}"


def test_each_face_has_the_host_of_py_libp2p_on_the_nodes_loop() -> None:
    async def asked() -> None:
        async with bbnode.aio.open(Batches, transport="libp2p") as node:
            assert await node.with_libp2p(names, "!") == f"{node.peer_id}!"

    async def native() -> None:
        async with bbnode.on_trio.open(Batches, transport="libp2p") as node:
            assert await node.with_libp2p(names, "!") == f"{node.peer_id}!"
            assert [str(each) for each in node.libp2p_host.get_addrs()] == list(node.addresses)

    asyncio.run(asked())
    trio.run(native)
    with bbnode.open(Batches, transport="libp2p") as node:
        assert node.with_libp2p(names, "!") == f"{node.peer_id}!"
        with pytest.raises(ZeroDivisionError):
            node.with_libp2p(fails)
        assert node.running


async def fails(_host: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("transport", ["lean", "memory"])
def test_a_node_without_it_says_which_transport_has_it(transport: str) -> None:
    with bbnode.open(Batches, transport=transport) as node:
        with pytest.raises(NotSupportedError, match=r"network\.transport has to be libp2p"):
            _ = node.libp2p_host
        with pytest.raises(NotSupportedError):
            node.with_libp2p(names, "")
