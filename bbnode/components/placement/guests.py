"""`GuestItems`: whose the items are that a peer keeps for others, and how many of each.

Rule: an item belongs to who brought its id first; nobody else replaces or removes it. What one peer
may bring, and all together, is the keeper's own decision.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import msgpack
import numpy as np
import numpy.typing as npt

from bbnode.components.contracts import OpContext, ProtocolComponent
from bbnode.components.errors import ExchangeRefused
from bbnode.components.placement import ops as ops
from bbnode.components.registry import register_component
from bbnode.components.settings import local_setting
from bbnode.ir.peer import PeerId


@dataclass(frozen=True, kw_only=True)
class GuestItemsConfig:
    """Settings of `GuestItems`.

    Attributes:
        max_items: that this peer keeps for all.
        max_items_of_one: that it keeps for one peer; its own count too.
    """

    max_items: int = local_setting(1_000_000)
    max_items_of_one: int = local_setting(100_000)


@register_component
class GuestItems(ProtocolComponent):
    """Admits items by their ids, and remembers who brought each."""

    TYPE_NAME: ClassVar[str] = "bbnode.GuestItems"
    Config: ClassVar[type] = GuestItemsConfig
    config: GuestItemsConfig

    def __init__(self, config: GuestItemsConfig) -> None:
        super().__init__(config)
        for name in ("max_items", "max_items_of_one"):
            self.require(getattr(config, name) >= 1, f"{name} has to be 1 or more")
        self._owner: dict[int, PeerId] = {}
        self._counts: Counter[PeerId] = Counter()

    def admit(self, ctx: OpContext, owner: PeerId, ids: Any) -> npt.NDArray[np.int64]:
        """Return the ids, which are the owner's from now on; ExchangeRefused for none of them."""
        fresh = self._theirs(owner, ids)[1]
        one, every = self.config.max_items_of_one, self.config.max_items
        if self._counts[owner] + len(fresh) > one:
            raise self._refused(f"it keeps {one} items for one peer (max_items_of_one)")
        if len(self._owner) + len(fresh) > every:
            raise self._refused(f"it keeps {every} items (max_items)")
        self._owner.update(dict.fromkeys(fresh, owner))
        self._counts[owner] += len(fresh)
        return np.asarray(ids, np.int64)

    def release(self, ctx: OpContext, owner: PeerId, ids: Any) -> npt.NDArray[np.int64]:
        """Return the ids, which are nobody's from now on; ExchangeRefused for none of them."""
        known = self._theirs(owner, ids)[0]
        for number in known:
            del self._owner[number]
        self._counts[owner] -= len(known)
        return np.asarray(ids, np.int64)

    def _theirs(self, owner: PeerId, ids: Any) -> tuple[list[int], list[int]]:
        """Return which of the ids are the owner's, and which nobody's."""
        numbers = set(np.asarray(ids, np.int64).reshape(-1).tolist())
        known = [number for number in numbers if number in self._owner]
        foreign = next((number for number in known if self._owner[number] != owner), None)
        if foreign is not None:
            raise self._refused(f"the item {foreign} is another peer's")
        return known, [number for number in numbers if number not in self._owner]

    def _refused(self, reason: str) -> ExchangeRefused:
        return ExchangeRefused(component=self.TYPE_NAME, reason=reason)

    def serialize(self) -> bytes:
        """Return the ids of each owner."""
        of: dict[PeerId, list[int]] = {}
        for number, owner in self._owner.items():
            of.setdefault(owner, []).append(number)
        rows = [[p.to_bytes(), np.array(ids, "<i8").tobytes()] for p, ids in of.items()]
        return bytes(msgpack.packb(rows))

    def restore(self, data: bytes) -> None:
        """Take what was saved; ComponentError for bytes of anything else."""
        owner: dict[int, PeerId] = {}
        with self.restoring():
            for peer, ids in msgpack.unpackb(data) if data else ():
                owner.update(
                    dict.fromkeys(np.frombuffer(ids, "<i8").tolist(), PeerId.from_bytes(peer))
                )
        self._owner, self._counts = owner, Counter(owner.values())
