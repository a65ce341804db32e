"""The preparation of a node's components, such as loading data, and reports of its failures.

Rule: all components are prepared before any peer can reach the node. Failed ones are tried again as
long as the node runs, at growing intervals, and at once after a reload: a file may arrive later. A
change is reported once, in one line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import trio

from bbnode.engine import All, Slots, steps
from bbnode.engine.bootstrap.bootstraps import SLOT_PREFIX
from bbnode.engine.bootstrap.targets import BootstrapTarget
from bbnode.engine.ops.role import BOOTSTRAP_METHOD
from bbnode.engine.readiness import reasons_text
from bbnode.ir.errors import BbnodeError

logger = logging.getLogger(__name__)

# A supervisor waits a minute for READY (TimeoutStartSec of the unit in bbnode/daemon/units).
PATIENCE_S: Final = 45.0
# The pause between two attempts: looking for a file costs nothing, reading a large one that does
# not fit costs seconds.
FIRST_PAUSE_S: Final = 2.0
LONGEST_PAUSE_S: Final = 60.0
# The least ratio of a pause to the attempt before it: otherwise a large file that does not fit
# would be read all the time.
PAUSE_PER_ATTEMPT: Final = 20


class PreparedNode(Protocol):
    """The part of the engine that prepares components."""

    def run_bootstrap(self, target: BootstrapTarget) -> Mapping[str, int]:
        """Queue bootstraps; each ends with a step."""
        ...

    def not_ready(self) -> Mapping[str, str]:
        """Return the slots that could not be prepared, and why."""
        ...


class Preparing:
    """Prepares the components of one node, and retries after failures."""

    def __init__(
        self,
        node: PreparedNode,
        *,
        wake: Callable[[], None],
        publish: Callable[[Mapping[str, Any]], None],
        ready: Callable[[], None],
        notify: Callable[[str], None],
    ) -> None:
        """Prepare nothing yet.

        `publish` gets an event "not_ready" when the reasons change, the supervisor a line by
        `notify`; `ready` is called at the end.
        """
        self._node = node
        self._wake = wake
        self._publish = publish
        self._ready = ready
        self._notify = notify
        self._under_way: set[str] = set()
        self._progress = trio.Event()  # set when a condition of a wait may have changed
        self._asked = trio.Event()
        self._told: Mapping[str, str] = {}

    async def first(self, stopped: Callable[[], bool]) -> None:
        """Prepare all components, and wait for a bounded time until they are."""
        self._start(All(modules=False))
        with trio.move_on_after(PATIENCE_S):
            await self._until_done(stopped)
        if self._under_way:
            slots = ",".join(sorted(name.removeprefix(SLOT_PREFIX) for name in self._under_way))
            logger.warning("components are not ready yet, continuing", extra={"slots": slots})

    async def run(self) -> None:
        """Retry the failed preparations for ever."""
        pause_s = FIRST_PAUSE_S
        began_s = trio.current_time()
        while True:
            await self._until_done()
            took_s = trio.current_time() - began_s
            failed = tuple(self._node.not_ready())
            if not failed:
                self._progress = trio.Event()
                await self._progress.wait()
                pause_s, began_s = FIRST_PAUSE_S, trio.current_time()
                continue
            with trio.move_on_after(max(pause_s, PAUSE_PER_ATTEMPT * took_s)) as waited:
                await self._asked.wait()
            self._asked = trio.Event()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if waited.cancelled_caught else pause_s
            began_s = trio.current_time()
            self._start(Slots(failed))

    def prepare(self, slots: Sequence[str]) -> None:
        """Prepare these components, again if they have been prepared before."""
        self._start(Slots(tuple(slots)))
        self.changed()

    def again(self) -> None:
        """Retry the failed preparations now."""
        self._asked.set()

    def observe(self, step: steps.Step) -> None:
        """Note the end of a bootstrap; called for every step of the node."""
        if isinstance(step, steps.BootstrapComplete):
            self._under_way.discard(step.target)
            self.changed()

    def changed(self) -> None:
        """Wake the waits, to check their conditions again."""
        self._progress.set()

    def is_own(self, step: steps.Step) -> bool:
        """Return True for the failure of a component's bootstrap, which is reported as a reason."""
        if isinstance(step, steps.BootstrapComplete):
            return step.target.startswith(SLOT_PREFIX) and not step.ok
        return isinstance(step, steps.OpFailed) and step.op == f"{step.target}.{BOOTSTRAP_METHOD}"

    def tell(self) -> bool:
        """Report a change, once the node has started; return False if something is not ready."""
        reasons = dict(self._node.not_ready())
        if reasons and reasons != self._told:
            line = reasons_text(reasons)
            logger.warning("not ready", extra={"reason": line})
            self._notify(f"STATUS=not ready: {line}")
            self._publish({"type": "not_ready", "reason": line, "slots": reasons})
        elif self._told and not reasons:
            self._ready()
        self._told = reasons
        return not reasons

    def _start(self, target: BootstrapTarget) -> None:
        try:
            self._under_way |= set(self._node.run_bootstrap(target))
        except BbnodeError as error:  # no room for it now, or a program has asked for it
            logger.info("components are prepared later", extra={"reason": str(error)})
        self._wake()

    async def _until_done(self, stopped: Callable[[], bool] = lambda: False) -> None:
        while self._under_way and not stopped():
            self._progress = trio.Event()
            await self._progress.wait()
