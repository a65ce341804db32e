"""The node's state on disk: taken up at the start, written while the node runs.

Rule: one file, one writer. A checkpoint that can't be written costs only the checkpoint: the
node goes on, and what was written before stays.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from bbnode.components.contracts import ComponentError
from bbnode.daemon import paths
from bbnode.daemon.invoke.rounds import Rounds
from bbnode.daemon.state import checkpoint
from bbnode.daemon.state.checkpoint import Checkpoint, Kept
from bbnode.engine import Node
from bbnode.ir.caps import MAX_KEPT_UNSENT_BYTES
from bbnode.ir.errors import BbnodeError
from bbnode.transport.driver import trio_clock_ns
from bbnode.transport.unsent import Unsent

logger = logging.getLogger(__name__)


def take_up(
    state_dir: Path, artifact_sha256: str, install: Callable[[], Node]
) -> tuple[Node, Checkpoint | None]:
    """A node with the newest checkpoint that it accepts, and that checkpoint; else a fresh one.

    `install` makes a node; it is called again after each checkpoint that a node refused.
    """
    node = install()
    for saved in checkpoint.usable(state_dir, artifact_sha256):
        try:
            node.restore(saved.node)
        except BbnodeError as error:
            logger.warning("snapshot refused", extra={"reason": str(error)})
            node = install()  # a part may have been taken
            continue
        logger.info("restored", extra={"rounds_done": saved.rounds_done})
        return node, saved
    return node, None


class Keeper:
    """Writes the checkpoints of a running node."""

    def __init__(
        self, state_dir: Path, artifact_sha256: str, node: Node, rounds: Sequence[Rounds]
    ) -> None:
        """Of one node and its rounds."""
        self._state_dir = state_dir
        self._artifact_sha256 = artifact_sha256
        self._node = node
        self._rounds = rounds
        self._one_at_a_time = trio.Lock()
        self._period_changed = trio.Event()
        self._every_s = 0.0
        # trio's time of the last one that was written, or of when the period was set first.
        self.saved_s = math.inf
        # Called with trio's time after each one that was written.
        self.on_saved: Callable[[float], None] = lambda _: None

    @property
    def every_s(self) -> float:
        """The period; 0: only when somebody asks."""
        return self._every_s

    def set_period(self, every_s: float) -> None:
        """Write a checkpoint every so many seconds; 0: only when somebody asks."""
        self._every_s = every_s
        self.saved_s = min(self.saved_s, trio.current_time())
        self._period_changed.set()

    async def run(self) -> None:
        """Write checkpoints at the period, for ever."""
        while True:
            self._period_changed = trio.Event()
            with trio.move_on_after(self._every_s or float("inf")) as waited:
                await self._period_changed.wait()
            if waited.cancelled_caught:
                await self.save()

    async def save(self) -> None:
        """Write a checkpoint, or log why there is none."""
        await self.save_last(())

    async def save_last(self, unsent: Sequence[Unsent]) -> bool:
        """Write a checkpoint with what no peer has acknowledged; False when there is none.

        Why there is none is logged, and also what is kept.
        """
        try:
            await self.save_now(unsent)
        except (paths.StorageError, ComponentError) as error:
            logger.warning("no checkpoint", extra={"reason": str(error)})
            return False
        return True

    async def save_now(self, unsent: Sequence[Unsent] = ()) -> int:
        """Write a checkpoint; returns the bytes of the node's state in it.

        Raises StorageError, or ComponentError when a component can't be saved now.
        """
        async with self._one_at_a_time:
            saved = Checkpoint(
                artifact_sha256=self._artifact_sha256,
                node=self._node.snapshot(trio_clock_ns()),
                rounds_done={r.entry.target: r.done for r in self._rounds},
                rounds_running={
                    r.entry.target: r.running for r in self._rounds if r.running is not None
                },
                unsent=_keep(unsent),
            )
            await trio.to_thread.run_sync(checkpoint.write, self._state_dir, saved)
        self.saved_s = trio.current_time()
        self.on_saved(self.saved_s)
        return len(saved.node)


def _keep(unsent: Sequence[Unsent]) -> tuple[Kept, ...]:
    """Envelopes as they are kept: their bytes as long as there is room, the first ones first."""
    kept, left = [], MAX_KEPT_UNSENT_BYTES
    for each in unsent:
        fits = each.size <= left
        left -= each.size if fits else 0
        data = b"".join(each.parts) if fits else None
        kept.append(Kept(peer=each.peer, tag=each.tag, data=data))
    return tuple(kept)
