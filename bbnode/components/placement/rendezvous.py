"""`ItemPlacement`: which of the peers keep an item.

Rule: it follows from the item's id and the peers alone: rendezvous hashing (Thaler and Ravishankar,
1998, doi:10.1109/90.663936). The peers with the greatest hash of (PeerId, id) keep it, so that
a peer that comes or goes moves its own share of the items and no others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from bbnode.components.contracts import OpContext, ProtocolComponent
from bbnode.components.errors import ComponentError
from bbnode.components.placement import ops as ops
from bbnode.components.registry import register_component
from bbnode.ir.peer import PeerId
from bbnode.ir.values import MetadataVec, PeerIdVec

_MAX_REPLICAS: Final = 64
Ids = npt.NDArray[np.int64]
Items = tuple[npt.NDArray[np.float32], MetadataVec, Ids]


@dataclass(frozen=True, kw_only=True)
class ItemPlacementConfig:
    """Settings of `ItemPlacement`; all members should have the same.

    Attributes:
        replicas: peers that keep an item, 1 to 64.
    """

    replicas: int = 2


def keepers(peers: Sequence[PeerId], ids: Ids, replicas: int) -> npt.NDArray[np.bool_]:
    """Return which peer keeps which item: bool [peers, ids], `replicas` true in each column.

    All peers keep all items where there are no more than `replicas`.
    """
    if len(peers) <= replicas:
        return np.ones((len(peers), len(ids)), np.bool_)
    seeds = [int.from_bytes(hashlib.sha256(peer.to_bytes()).digest()[:8], "big") for peer in peers]
    mixed = _mixed(ids.astype(np.uint64))
    ranks = _mixed(np.array(seeds, np.uint64)[:, None] ^ mixed)
    # The least of those that are kept: of equal ranks, which 64 bits hardly have, all keep it.
    least = np.partition(ranks, len(peers) - replicas, axis=0)[len(peers) - replicas]
    kept: npt.NDArray[np.bool_] = ranks >= least
    return kept


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a bijection of 64 bits that spreads each bit over all: the finalizer of SplitMix64
    (Steele, Lea and Flood, 2014, doi:10.1145/2660193.2660195)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


@register_component
class ItemPlacement(ProtocolComponent):
    """Says which peers keep an item, and picks what is this peer's own."""

    TYPE_NAME: ClassVar[str] = "bbnode.ItemPlacement"
    Config: ClassVar[type] = ItemPlacementConfig
    config: ItemPlacementConfig

    def __init__(self, config: ItemPlacementConfig) -> None:
        super().__init__(config)
        good = 1 <= config.replicas <= _MAX_REPLICAS
        self.require(good, f"replicas has to be in 1 .. {_MAX_REPLICAS}")

    def placed(
        self, ctx: OpContext, peers: PeerIdVec, vectors: Any, metadata: MetadataVec, ids: Any
    ) -> npt.NDArray[np.bool_]:
        """Return the mask of the peers that keep one of the items, bool [peers].

        Raises ComponentError for ids, metadata and vectors that do not belong together.
        """
        numbers = self._numbers(vectors, metadata, ids)
        any_of: npt.NDArray[np.bool_] = np.logical_or.reduce(
            keepers(peers, numbers, self.config.replicas), axis=1
        )
        return any_of

    def keep(
        self, ctx: OpContext, peers: PeerIdVec, vectors: Any, metadata: MetadataVec, ids: Any
    ) -> Items:
        """Return the items that this peer keeps; raises as `placed`."""
        numbers = self._numbers(vectors, metadata, ids)
        own = [place for place, peer in enumerate(peers) if peer == ctx.self_peer]
        if not own:
            raise ComponentError(f"{self.TYPE_NAME}: this peer is none of those that keep items")
        mine = keepers(peers, numbers, self.config.replicas)[own[0]]
        if mine.all():
            return vectors, metadata, ids
        kept = np.flatnonzero(mine)
        rows = np.reshape(vectors, (len(numbers), -1))[kept]
        told = MetadataVec(metadata[at] for at in kept) if metadata else metadata
        return rows, told, numbers[kept]

    def _numbers(self, vectors: Any, metadata: MetadataVec, ids: Any) -> Ids:
        wanted = np.shape(vectors)[:-1]
        if np.ndim(vectors) not in (1, 2) or np.shape(ids) != wanted:
            raise ComponentError(
                f"{self.TYPE_NAME}: vectors {list(np.shape(vectors))} with ids "
                f"{list(np.shape(ids))}; they are [D] with [], or [N, D] with [N]"
            )
        numbers = np.asarray(ids, np.int64).reshape(-1)
        if len(metadata) not in (0, len(numbers)):
            raise ComponentError(
                f"{self.TYPE_NAME}: {len(numbers)} items with metadata of {len(metadata)}; give "
                "that of each, or none"
            )
        if len(np.unique(numbers)) < len(numbers) or (numbers < 0).any():
            raise ComponentError(
                f"{self.TYPE_NAME}: an id is negative, or stands twice; ids are from 0 to 2**63 - 1"
            )
        return numbers
