"""The loop between a node and its transport.

Rule: pass the transport's events to the node, poll it, carry out the steps, sleep until the next
deadline or wake-up. The driver makes no decisions: the engine defines the meaning of a step, and
the transport moves bytes. Offloaded work runs in worker threads, so that the loop can answer pings
and read streams while a model trains.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import trio

from bbnode import transport as seam
from bbnode.engine import Node, steps
from bbnode.ir.crossing import decode_crossings
from bbnode.ir.errors import BbnodeError
from bbnode.transport.base import Transport
from bbnode.transport.errors import (
    EnvelopeTooLargeError,
    NotAllowedError,
    NotConnectedError,
    NotSupportedError,
    QueueFullError,
)
from bbnode.transport.topics import Topics

logger = logging.getLogger(__name__)

# Two: one for a model that trains and one for another op that waits for a disk. ONNX Runtime
# releases the GIL in its own threads, so more workers than cores would only take turns.
DEFAULT_WORKER_THREADS = 2

# Transport events taken between two polls: enough to batch, few enough to stay responsive.
MAX_EVENTS_PER_TURN = 256

# Refusals on our side, which are no fault of the peer and are decided anew for each envelope. A
# wrong clock, for example, denies everybody, and no peer must be blamed for that.
_OUR_OWN_REASONS = (QueueFullError, EnvelopeTooLargeError, NotAllowedError)

StepObserver = Callable[[steps.Step], None]


def trio_clock_ns() -> int:
    """trio's monotonic clock in nanoseconds; virtual under a MockClock."""
    return int(trio.current_time() * 1_000_000_000)


class Driver:
    """Drives one `Node` over one `Transport` until `stop` is called."""

    def __init__(
        self,
        node: Node,
        transport: Transport,
        *,
        observe: StepObserver | None = None,
        heard: Callable[[seam.TransportEvent], None] | None = None,
        reach: Callable[[steps.SendEnvelope], bool] | None = None,
        keep: Callable[[steps.SendEnvelope], bool] = lambda _step: False,
        doubt: Callable[[seam.DeliveryFailed], bool] = lambda _event: False,
        topics: Topics | None = None,
        clock_ns: Callable[[], int] = trio_clock_ns,
        worker_threads: int = DEFAULT_WORKER_THREADS,
    ) -> None:
        """Set the callbacks of the driver.

        `observe` gets every step after it was carried out, and `heard` every event of the transport
        before the node is polled on it; neither may block, and their exceptions are counted and
        logged. `reach` may dial a peer before a send to it; it returns True if that peer accepts
        messages now. `keep` gets an envelope whose peer accepts none, and returns True if it takes
        over the envelope: it sends it later, by `send`, or reports its failure to the node.
        `doubt` gets an envelope that may have arrived, and returns True if it reports the outcome
        to the node later. `topics` carries the messages that components publish; without it none
        can.
        """
        self._topics = topics
        self._node = node
        self._transport = transport
        self._observe = observe
        self._heard = heard
        self._reach = reach
        self._keep = keep
        self._doubt = doubt
        self._clock_ns = clock_ns
        self._threads = trio.CapacityLimiter(worker_threads)
        self._wake = trio.Event()
        # True while the trio thread passes events to the node and will poll right after.
        self._polls_next = False
        # The deadline that `run` sleeps for.
        self._deadline: int | None = None
        self._stopping = False
        self._stopped = trio.Event()
        self._counts: Counter[str] = Counter()

    def counters(self) -> dict[str, int]:
        """Return the counts of polls, of tasks, and of failed sends by kind."""
        return dict(self._counts)

    @property
    def tasks_running(self) -> int:
        """The number of offloaded tasks in worker threads now."""
        return self._threads.borrowed_tokens

    def wake(self) -> None:
        """Poll soon. Call it on the trio thread after handing work to the node."""
        self._wake.set()

    def stop(self) -> None:
        """Return from `run` after the current turn; offloaded work is abandoned."""
        self._stopping = True
        self._wake.set()

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Drive until `stop`; results of tasks that end later are dropped."""
        token, here = trio.lowlevel.current_trio_token(), threading.get_ident()
        self._node.set_wake(lambda: self._woken(token, here))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pump, nursery)
            task_status.started()
            while not self._stopping:
                self._wake = trio.Event()
                self._turn(nursery)
                await self._sleep()
            nursery.cancel_scope.cancel()
        self._stopped.set()

    async def stopped(self) -> None:
        """Wait until `run` has returned, after which the node is not polled any more."""
        await self._stopped.wait()

    def take_rest(self) -> int:
        """Pass to the node whatever the transport has received by now, also after `run`.

        Returns the number of envelopes. Their senders have been acknowledged, so they belong into
        the node's last snapshot, and must precede a peer's statements about them on a stream.
        """
        envelopes = 0
        with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
            while True:
                event = self._transport.events.receive_nowait()
                envelopes += isinstance(event, seam.EnvelopeReceived)
                self._take(event)
        return envelopes

    def _woken(self, token: trio.lowlevel.TrioToken, here: int) -> None:
        """Poll soon; the node calls it, from any thread, when it has work again."""
        if threading.get_ident() == here:
            # No detour through trio's wake-up socket, and no second poll if one follows anyway.
            if not self._polls_next:
                self._wake.set()
            return
        # A worker thread may outlive the loop, with nothing left to wake.
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(self.wake, idempotent=True)

    def _turn(self, nursery: trio.Nursery) -> None:
        """Poll the node and carry out its steps."""
        self._counts["driver.polls"] += 1
        for step in self._node.poll(self._clock_ns()):
            self._carry_out(step, nursery)

    async def _sleep(self) -> None:
        """Sleep until somebody wakes us, or until the engine's next deadline."""
        deadline = self._deadline = self._node.next_deadline()
        if deadline is None:
            await self._wake.wait()
            return
        remaining_s = (deadline - self._clock_ns()) / 1_000_000_000
        if remaining_s <= 0:
            await trio.lowlevel.checkpoint()  # let other tasks run even if we are always late
            return
        with trio.move_on_after(remaining_s):
            await self._wake.wait()

    async def _pump(self, nursery: trio.Nursery) -> None:
        """Feed the node from the transport and poll it; many events share one poll."""
        events = self._transport.events
        while True:
            try:
                event = await events.receive()
            except trio.EndOfChannel:
                return
            self._polls_next = True
            try:
                self._take(event)
                for _ in range(MAX_EVENTS_PER_TURN):
                    self._take(events.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel):
                pass
            finally:
                self._polls_next = False
            if self._stopping:
                return
            self._turn_between(nursery)

    def _turn_between(self, nursery: trio.Nursery) -> None:
        """Poll here, and wake the sleeping task only for an earlier deadline."""
        self._turn(nursery)
        deadline = self._node.next_deadline()
        # A deadline that is gone or later costs a poll at the old time, instead of a wake-up now.
        if deadline is not None and (self._deadline is None or deadline < self._deadline):
            self._wake.set()

    def _take(self, event: seam.TransportEvent) -> None:
        node = self._node
        if self._heard is not None:
            self._tell(self._heard, event)
        match event:
            case seam.EnvelopeReceived(peer=peer, data=data, observed_address=address):
                node.deliver_inbound(peer, data, address)
            case seam.ConnectionOpened(peer=peer, hello=hello):
                crossings = decode_crossings(hello.crossings)
                node.peer_connected(peer, hello.classes, hello.listen_addresses, crossings)
            case seam.ConnectionClosed(peer=peer, reason=reason):
                node.peer_disconnected(peer, reason)
            case seam.DeliveryFailed(peer=peer, tag=tag, reason=reason, blames_peer=blames_peer):
                if event.in_doubt and self._doubt(event):
                    return
                self._counts["driver.send_failed"] += 1
                node.send_failed(peer, reason, tag=tag, blames_peer=blames_peer)
            case seam.HelloRefused():
                self._counts["driver.hello_refused"] += 1
            case seam.ProtocolViolation():
                self._counts["driver.protocol_violations"] += 1
            case seam.RelayMisused():
                pass  # the transport has counted it

    def _carry_out(self, step: steps.Step, nursery: trio.Nursery) -> None:
        match step:
            case steps.SendEnvelope():
                self.send(step)
            case steps.PublishMessage() | steps.FollowTopic():
                self._for_topics(step)
            case steps.RunTask():
                nursery.start_soon(self._run_task, step, nursery)
        if self._observe is not None:
            self._tell(self._observe, step)

    def _for_topics(self, step: steps.PublishMessage | steps.FollowTopic) -> None:
        topics, topic = self._topics, step.topic
        try:
            if topics is None:
                raise NotSupportedError("this host carries no topics")
            if isinstance(step, steps.PublishMessage):
                topics.publish(topic, step.payload)
            elif step.on:
                topics.follow(
                    topic, lambda peer, data: self._node.deliver_message(peer, topic, data)
                )
            else:
                topics.leave(topic)
        except BbnodeError as error:
            kind = type(error).__name__
            self._counts[f"driver.{kind}"] += 1
            if self._counts[f"driver.{kind}"] == 1:  # once: every message may fail this way
                logger.warning("a topic failed", extra={"topic": topic, "reason": str(error)})

    def _tell(self, listener: Callable[[Any], None], what: Any) -> None:
        try:
            listener(what)
        except Exception:
            # The boundary: a listener must not end the loop.
            self._counts["driver.listener_failed"] += 1
            logger.exception("a listener failed", extra={"about": type(what).__name__})

    def send(self, step: steps.SendEnvelope) -> None:
        """Hand an envelope to the transport; report a failure to the node."""
        try:
            try:
                self._transport.send(step.peer, step.parts, tag=step.tag)
            except NotConnectedError:
                if self._reach is None or not self._reach(step):
                    if self._keep(step):
                        return
                    raise
                self._transport.send(step.peer, step.parts, tag=step.tag)
        except BbnodeError as error:
            # The engine handles it like any failed send, in its requests, its governor and its
            # backoff.
            self._counts[f"driver.{type(error).__name__}"] += 1
            ours = isinstance(error, _OUR_OWN_REASONS)
            self._node.send_failed(step.peer, str(error), tag=step.tag, blames_peer=not ours)
        except Exception as error:
            self._counts["driver.send_broken"] += 1
            if self._counts["driver.send_broken"] == 1:  # once: every envelope may fail this way
                logger.exception("the transport raised what is not a BbnodeError")
            reason = f"the transport failed: {type(error).__name__}"
            self._node.send_failed(step.peer, reason, tag=step.tag, blames_peer=False)

    async def _run_task(self, step: steps.RunTask, nursery: trio.Nursery) -> None:
        self._counts["driver.tasks"] += 1
        try:
            result = await trio.to_thread.run_sync(
                step.fn, limiter=self._threads, abandon_on_cancel=True
            )
        except Exception as error:  # noqa: BLE001 - the boundary of third-party component code
            self._node.fail(step.token, error)
        else:
            self._polls_next = True
            self._node.complete(step.token, result)
            self._polls_next = False
            if not self._stopping:
                self._turn_between(nursery)
