"""Networks of shards in the simulator, and what an exact search over all of them finds."""

from __future__ import annotations

from typing import Any

import numpy as np

from bbnode.components import values
from bbnode.components.indexes.flat import FlatIndex as FlatIndex
from bbnode.dsl import Module
from bbnode.ir.peer import PeerId
from bbnode.sim import Network, SimNode
from tests.programs.files import compiled

NO_METADATA = values.MetadataVec()
D = 8


def vectors(count: int, seed: int, *, clusters: int = 0, width: int = D) -> np.ndarray:
    """Gaussian vectors, float32 [count, width]; around centres, if there are any."""
    draws = np.random.default_rng(seed)
    made = draws.normal(size=(count, width))
    if clusters:
        centres = 6 * np.random.default_rng(7).normal(size=(clusters, width))
        made += centres[draws.integers(0, clusters, count)]
    return made.astype(np.float32)


def nearest(items: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    """The places of the k nearest by Euclidean distance, [Q, k]."""
    away = np.linalg.norm(items[None].astype(np.float64) - queries[:, None], axis=2)
    return np.argsort(away, axis=1, kind="stable")[:, :k]


class Shards:
    """An asker and shards of one program, which know each other."""

    def __init__(self, program: Module, count: int, *, config: Any = None, seed: int = 1) -> None:
        self.artifact = compiled(program)
        self.net = Network(seed)
        self.asker = self.net.add("asker", self.artifact, ["asker"])
        self.nodes: list[SimNode] = []
        self._config = {"index": config or {}}
        for _ in range(count):
            self.add()

    def add(self, *, artifact: Any = None, config: Any = None) -> SimNode:
        name = f"shard-{len(self.nodes)}"
        slots = {"index": config} if config is not None else self._config
        node = self.net.add(name, artifact or self.artifact, ["shard"], config=slots)
        self.nodes.append(node)
        return node

    def run(self, node: SimNode | str, target: str, **inputs: Any) -> dict[str, Any]:
        """What an execution gives, or no outputs of a failed one."""
        found = self.net.find(node)
        number = found.invoke(target, inputs)
        self.net.run_until(lambda: found.has_finished(number))
        return found.outputs(number)

    def fill(self, node: SimNode, items: np.ndarray, metadata: Any = NO_METADATA) -> np.ndarray:
        return self.run(node, "shard", vectors=items, metadata=metadata)["added"]

    def search(self, query: np.ndarray, **inputs: Any) -> dict[str, Any]:
        return self.run(self.asker, "asker", query=query, **inputs)

    @property
    def peers(self) -> list[PeerId]:
        return [node.peer_id for node in self.nodes]


def distances(found: values.SearchResults, query: int = 0) -> list[float]:
    return [hit.distance for hit in found.hits(query)]
