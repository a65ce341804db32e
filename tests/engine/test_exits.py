"""Code of a component ends no node: `sys.exit` and all else that is no Exception are failures."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from bbnode.components.contracts import ProtocolComponent, inbound, offload
from bbnode.components.registry import component_class
from bbnode.engine import Node, Slots, errors, steps
from bbnode.ir import keys, opset
from bbnode.ir.authors_code import AuthorsCodeFailed, authors_code
from bbnode.ir.interrupts import let_stop
from bbnode.ir.values import TRIGGER
from bbnode.ops import CustomOpFailed, custom_op
from tests.engine.builder import Partition, model
from tests.engine.support import _once, bring_up, of, peer
from tests.engine.test_messenger import message

DOMAIN = f"{keys.PROTOCOL_DOMAIN_PREFIX}exits"
if opset.lookup_op(DOMAIN, "Now") is None:
    for name in ("Now", "InThread", "Arm", "Later"):
        opset.op(DOMAIN, name, "trigger:trigger", "cmd:cmd", role="Protocol", suspends=True)


class Rude(BaseException):
    """Not even an Exception."""


def leave() -> None:
    sys.exit(7)


def interrupt() -> None:
    raise KeyboardInterrupt


def close() -> None:
    raise GeneratorExit


def rude() -> None:
    raise Rude("out")


WAYS = [leave, interrupt, close, rude]
KINDS = {leave: "SystemExit: 7", interrupt: "KeyboardInterrupt", close: "GeneratorExit",
         rude: "Rude: out"}  # fmt: skip
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@_once
class Exits(ProtocolComponent):
    """A component that leaves where it is told to."""

    TYPE_NAME: ClassVar[str] = "test.Exits"
    at: ClassVar[str] = ""
    way: ClassVar[Callable[[], None]] = leave

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._maybe("init")

    def _maybe(self, place: str) -> None:
        if type(self).at == place:
            type(self).way()

    def now(self, _ctx: Any, _trigger: Any) -> None:
        self._maybe("now")

    @offload
    def in_thread(self, _ctx: Any, _trigger: Any) -> None:
        self._maybe("in_thread")

    def arm(self, ctx: Any, _trigger: Any) -> None:
        ctx.set_timer("beat", 5)

    def on_timer(self, _ctx: Any, _key: str) -> None:
        self._maybe("on_timer")

    @inbound("Hear")
    def hear(self, _ctx: Any, _payload: bytes) -> None:
        self._maybe("hear")

    def bootstrap(self, _ctx: Any) -> None:
        self._maybe("bootstrap")

    def facts(self) -> dict[str, Any]:
        self._maybe("facts")
        return {"well": 1}

    def serialize(self) -> bytes:
        self._maybe("serialize")
        return b""

    def restore(self, _data: bytes) -> None:
        self._maybe("restore")

    def on_stop(self) -> None:
        self._maybe("on_stop")


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], None]:
    def choose(place: str, way: Callable[[], None]) -> None:
        cls = component_class("test.Exits")
        monkeypatch.setattr(cls, "at", place)
        monkeypatch.setattr(cls, "way", staticmethod(way))

    return choose


def node_of(op: str) -> Node:
    p = Partition("server", inputs=["x"])
    p.bind("w", "Protocol", "test.Exits")
    p.op(DOMAIN, op, ["x"], ["y"], slot="w")
    return bring_up(model(p), "server")


def failed(made: list[steps.Step], way: Callable[[], None]) -> None:
    (failure,) = of(steps.OpFailed, made)
    assert failure.kind == "UnexpectedException"
    assert failure.detail.startswith(KINDS[way])


def goes_on(node: Node, exits: Any) -> None:
    """The node does its work as if nothing had been."""
    exits("nowhere", leave)
    execution = node.invoke("server", {"x": TRIGGER})
    made = node.poll(100)
    for task in of(steps.RunTask, made):
        node.complete(task.token, task.fn())
    made += node.poll(101)
    (end,) = [s for s in of(steps.ExecutionFinished, made) if s.execution == execution]
    assert end.ok


@every_way
def test_in_a_method(way: Callable[[], None], exits: Any) -> None:
    node = node_of("Now")
    exits("now", way)
    node.invoke("server", {"x": TRIGGER})
    failed(node.poll(1), way)
    goes_on(node, exits)


@every_way
def test_in_a_method_in_a_thread(way: Callable[[], None], exits: Any) -> None:
    node = node_of("InThread")
    exits("in_thread", way)
    node.invoke("server", {"x": TRIGGER})
    (task,) = of(steps.RunTask, node.poll(1))
    raised: list[Exception] = []

    def work() -> None:
        try:
            task.fn()
        except Exception as error:  # noqa: BLE001 - what a host's pool of threads hands on
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    node.fail(task.token, raised[0])
    failed(node.poll(2), way)
    goes_on(node, exits)


@every_way
def test_in_a_timer(way: Callable[[], None], exits: Any) -> None:
    node = node_of("Arm")
    exits("on_timer", way)
    node.invoke("server", {"x": TRIGGER})
    node.poll(1)
    failed(node.poll(7), way)
    goes_on(node, exits)


@every_way
def test_in_its_preparation_and_in_what_peers_ask(way: Callable[[], None], exits: Any) -> None:
    node = node_of("Now")
    exits("bootstrap", way)
    node.run_bootstrap(Slots(("w",)))
    failed(node.poll(1), way)
    exits("nowhere", way)
    node.run_bootstrap(Slots(("w",)))
    node.poll(2)
    exits("hear", way)
    node.peer_connected(peer(1), ["server"])
    node.deliver_inbound(peer(1), message("Hear", slot="w", wire_req_id=1))
    failed(node.poll(3), way)
    goes_on(node, exits)


@every_way
def test_where_it_is_made_saved_loaded_shown_and_stopped(
    way: Callable[[], None], exits: Any
) -> None:
    kind = KINDS[way].partition(":")[0]
    node = node_of("Now")
    exits("init", way)
    with pytest.raises(errors.ComponentConstructionFailed, match=kind):
        node_of("Now")
    exits("serialize", way)
    with pytest.raises(errors.SnapshotFailed, match=kind):
        node.snapshot()
    exits("nowhere", way)
    saved = node.snapshot()
    again = node_of("Now")
    exits("restore", way)
    with pytest.raises(errors.SnapshotRefused, match=kind):
        again.restore(saved)
    exits("facts", way)
    assert node._rt.cells[0].facts() == {}
    exits("on_stop", way)
    assert kind in node.stop_components()["w"]
    goes_on(node, exits)


@every_way
def test_in_a_custom_op(way: Callable[[], None]) -> None:
    @custom_op(f"test.exits.{way.__name__}")
    def quit_it(x: NDArray[np.float32]) -> NDArray[np.float32]:
        way()
        return x

    with pytest.raises(CustomOpFailed, match=KINDS[way].partition(":")[0]):
        quit_it(np.zeros(1, np.float32))


@every_way
def test_in_a_module_of_the_author(way: Callable[[], None]) -> None:
    with (
        pytest.raises(AuthorsCodeFailed, match=KINDS[way].partition(":")[0]),
        authors_code("the module can't be imported"),
    ):
        way()


def stopped_by(number: int) -> None:
    try:
        signal.raise_signal(number)
    except BaseException as error:  # noqa: BLE001 - as at a boundary to somebody's code
        let_stop(error)


def test_a_person_stops_what_somebodys_code_does() -> None:
    """Ctrl-C, and what a handler of the host raises, go through."""

    def at_sigterm(*_: object) -> None:
        raise SystemExit(3)

    for number, handler, kind in (
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGTERM, at_sigterm, SystemExit),
    ):
        before = signal.signal(number, handler)
        try:
            with pytest.raises(kind):
                stopped_by(number)
        finally:
            signal.signal(number, before)
