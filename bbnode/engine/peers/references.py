"""The references of a federation's data, as the peer that keeps them compares others with them.

Rule: what the program says of its data never changes. What it does not say the first peer defines
whose data agree with each other; until the node has been used that grows: classes and categories
that a later peer brings get numbers behind those that are there. A peer's answer counts whole or
not at all: one that is refused leaves no trace.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bbnode.components.data.shared_schema import (
    SchemaRefused,
    SharedSchema,
    compare,
    joined,
)
from bbnode.ir.caps import MAX_SCHEMAS_BYTES

# A peer's data slots, each with what its examples mean; None where the source does not know.
Schemas = Mapping[str, SharedSchema | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of comparing a peer's data slots with the references.

    Attributes:
        refused: why the peer's data are not used, on one line; "" where they are.
        adopts: the reference of each slot that the peer is to take.
        mapped: what is brought into the federation's order, by slot.
        unnamed: slots that were compared by shape and type alone.
        grew: the groups whose reference is another one now.
    """

    refused: str = ""
    adopts: Mapping[str, SharedSchema] = field(default_factory=dict)
    mapped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unnamed: tuple[str, ...] = ()
    grew: frozenset[str] = frozenset()


class References:
    """The reference of each group of data slots of a federation."""

    def __init__(
        self,
        declared: Mapping[str, SharedSchema] | None = None,
        measured: Collection[str] = (),
    ) -> None:
        """Begin with what the program says, by group; of `measured` ones no scaling is compared."""
        self._measured = frozenset(measured)
        self._declared = dict(declared or {})
        self._kept: dict[str, SharedSchema] = dict(self._declared)

    @property
    def kept(self) -> Mapping[str, SharedSchema]:
        """The references by group."""
        return self._kept

    def take(self, groups: Mapping[str, str], schemas: Schemas, *, grows: bool) -> Verdict:
        """Compare a peer's data with the references, which it defines where there are none.

        Args:
            groups: the data slots of the peer, each with its group.
            schemas: what it says of them; of another slot nothing is taken.
            grows: the node has not been used yet.
        """
        kept = dict(self._kept)
        refused: list[str] = []
        unnamed: list[str] = []
        mapped: dict[str, tuple[str, ...]] = {}
        for slot, group in sorted(groups.items()):
            own = schemas.get(slot)
            if own is None or not own.is_named:
                unnamed.append(slot)
            if own is None:
                continue
            if group in self._measured:
                own = replace(own, scaling=None)
            known = kept.get(group)
            if known is None:
                kept[group] = own
                continue
            grown = self._as_declared(group, joined(known, own, grows=True)) if grows else known
            agreed = compare(grown, own)
            if agreed.refused:
                # The reference as it is: a peer that is refused has not made it grow.
                agreed = compare(known, own)
                refused += [line for line in agreed.refused if line not in refused]
                continue
            kept[group] = joined(grown, own)
            if mends := compare(kept[group], own).mapped:
                mapped[slot] = mends
        if refused:
            return Verdict(refused="; also ".join(refused))
        grew = frozenset(group for group, each in kept.items() if self._kept.get(group) != each)
        self._kept = kept
        return Verdict(
            adopts={
                slot: kept[group]
                for slot, group in groups.items()
                if group in kept and schemas.get(slot) is not None
            },
            mapped=mapped,
            unnamed=tuple(unnamed),
            grew=grew,
        )

    def put(self, group: str, reference: SharedSchema) -> None:
        """Take a reference that another node keeps, or that this one kept before."""
        self._kept[group] = self._as_declared(group, reference)

    def _as_declared(self, group: str, reference: SharedSchema) -> SharedSchema:
        declared = self._declared.get(group)
        return reference if declared is None else joined(declared, reference)


def schemas_to_json(schemas: Mapping[str, SharedSchema]) -> str:
    """Return schemas by name as one text. Raises SchemaRefused for one that is too long."""
    text = json.dumps({name: each.to_json() for name, each in sorted(schemas.items())})
    if len(text) > MAX_SCHEMAS_BYTES:
        raise SchemaRefused(f"{len(text)} bytes of schemas, and {MAX_SCHEMAS_BYTES} is the most")
    return text


def schemas_from_json(text: str | bytes) -> dict[str, SharedSchema]:
    """Return schemas by name, of any origin. Raises SchemaRefused."""
    if len(text) > MAX_SCHEMAS_BYTES:
        raise SchemaRefused(f"{len(text)} bytes of schemas, and {MAX_SCHEMAS_BYTES} is the most")
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaRefused("schemas that are no JSON") from error
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise SchemaRefused("no table of schemas")
    return {str(name): SharedSchema.from_json(each) for name, each in found.items()}
