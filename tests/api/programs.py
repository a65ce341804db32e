"""Programs and components for the tests of the Python API."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from bbnode.components import MemoryDataSource, register_component
from bbnode.dsl import DataSourceSlot, Graph, Module, types
from tests.patience import PATIENCE_S

# Set by a test to let a `BatchSource` go on that waits, and by the source once it does.
GO_ON, IS_WAITING = threading.Event(), threading.Event()


@dataclass(frozen=True, kw_only=True)
class BatchSourceConfig:
    """Settings of `BatchSource`: `mode` is "give", "wait" or "raise"."""

    mode: str = "give"
    batch_size: int = 0
    seed: int = 0


@register_component
class BatchSource(MemoryDataSource):
    """Two examples; its NextBatch gives them, waits for GO_ON, or raises."""

    TYPE_NAME: ClassVar[str] = "tests.api.BatchSource"
    Config: ClassVar[type] = BatchSourceConfig
    config: BatchSourceConfig

    def load(self) -> Any:
        return np.ones((2, 3), np.float32), np.zeros(2, np.int64)

    def next_batch(self, ctx: Any) -> Any:
        if self.config.mode == "raise":
            raise RuntimeError("the callback is broken")
        if self.config.mode == "exit":
            sys.exit(5)
        if self.config.mode == "wait":
            IS_WAITING.set()
            GO_ON.wait(PATIENCE_S)
        return super().next_batch(ctx)

    next_batch.__dict__.update(MemoryDataSource.next_batch.__dict__)


class Batches(Module):
    """One class, "worker": a trigger gives a batch; "twice" is the input, doubled by nobody."""

    home = "worker"

    def body(self, g: Graph) -> None:
        tick = g.input("tick", types.TRIGGER)
        batch, labels = DataSourceSlot("data").next_batch(g, after=tick)
        g.output("batch", batch)
        g.output("labels", labels)

    def bindings(self) -> Mapping[str, Any]:
        return {"data": BatchSource}


class TellBack(Module):
    """The server tells one client, which tells it back by a message of its own."""

    home = "server"

    def body(self, g: Graph) -> None:
        from bbnode.dsl import PeerSelectorSlot

        said = g.input("said", types.TENSOR_FLOAT)
        peers = PeerSelectorSlot("who", peer_class="client").sample(g, n=1, after=said)
        heard = g.net_out("told", peers, said)
        back = g.net_out("back", heard.sender, heard)
        g.output("echo", back)

    def bindings(self) -> Mapping[str, Any]:
        from bbnode.components import ConnectedView

        return {"who": ConnectedView}
