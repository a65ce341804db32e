"""A context such as the engine gives, and components bound the way install binds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bbnode.components.aggregators.fedavg import FedAvg, FedAvgConfig
from bbnode.components.backends.ort import OrtBackend, OrtBackendConfig
from bbnode.components.contracts import Completion
from bbnode.components.data.base import MemoryDataSource
from bbnode.components.models.onnx_model import OnnxModel, OnnxModelConfig
from bbnode.ir.peer import PeerId

PEERS = tuple(sorted(PeerId.from_seed(i) for i in range(8)))


@dataclass
class Peers:
    of_class: dict[str, list[PeerId]] = field(default_factory=dict)

    def connected(self, peer_class: str | None = None) -> Sequence[PeerId]:
        if peer_class is None:
            return sorted(p for peers in self.of_class.values() for p in peers)
        return sorted(self.of_class.get(peer_class, []))


@dataclass
class Context:
    now_ns: int = 0
    self_peer: PeerId = PEERS[0]
    source_peer: PeerId | None = None
    source_classes: Sequence[str] = ()
    source_seen_at: Any = None
    peer_class: str | None = None
    plays_peer_class: bool = False
    include_self: bool = False
    execution: int = 1
    op: str = "Encode_0"
    declared_shape: Sequence[int | str | None] | None = None
    peers: Peers = field(default_factory=Peers)
    refused: dict[PeerId, str] = field(default_factory=dict)

    def refuse(self, peer: PeerId, reason: str) -> None:
        self.refused[peer] = reason

    def open_completion(self) -> Completion:
        raise AssertionError("no shipped component parks an op by itself")


CTX = Context()


def ort() -> OrtBackend:
    return OrtBackend(OrtBackendConfig())


def fedavg(**config: Any) -> FedAvg:
    component = FedAvg(FedAvgConfig(**config))
    component.bind({"backend": ort()})
    return component


def onnx_model(
    config: OnnxModelConfig, source: MemoryDataSource | None = None, backend=None
) -> OnnxModel:
    component = OnnxModel(config)
    bound = {"backend": backend or ort()}
    component.bind({**bound, "data_source": source} if source is not None else bound)
    return component
