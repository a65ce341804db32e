"""Where fills land: the sites of installed Recvs.

Rule: a site says, before a payload is decoded, what may come and from whom: from a peer of a
class that sends there in the program, and from this node itself. A fill without a payload is
taken only where nothing behind the site reads the payload as more than a trigger.
"""

from __future__ import annotations

from dataclasses import dataclass

from bbnode.engine.frame import EntryPlan
from bbnode.ir import types
from bbnode.ir.types import TypeNode


@dataclass(frozen=True, slots=True, kw_only=True)
class RecvSite:
    """The site of a Recv or RecvReq. Seeds are payload, sender and, of a RecvReq, req_id."""

    site: int
    name: str
    senders: frozenset[str]  # classes, of which a peer that sends here plays one
    plan: EntryPlan
    is_request: bool
    declared: TypeNode | None  # what the payload is, or descends from; None: anything
    type_hash: int | None  # what the fill has to say; None: any leaf of `declared`
    trigger_only: bool  # a fill without a payload will do
    slot: int | None  # of the component that the payload is for


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSite:
    """The site of a RecvRespBatched."""

    site: int
    name: str
    senders: frozenset[str]  # classes that are asked
    # What the program answers with, or what that descends from, of each op that answers. Empty
    # where the artifact does not say: anything.
    answers: tuple[TypeNode, ...] = ()


def answers_with(site: ResponseSite, type_hash: int, *, trigger_only: bool) -> TypeNode | str:
    """The type to decode, or the kind of refusal: TypeMismatch or UnknownTypeHash."""
    node = types.TRIGGER if trigger_only else types.type_by_hash(type_hash)
    if node is None or not node.is_leaf:
        return "UnknownTypeHash"
    if site.answers and not any(node.is_a(declared) for declared in site.answers):
        return "TypeMismatch"
    return node


def accepts(site: RecvSite, type_hash: int) -> TypeNode | str:
    """The type to decode, or the kind of refusal: TypeMismatch or UnknownTypeHash."""
    if site.type_hash is not None and type_hash != site.type_hash:
        return "TypeMismatch"
    node = types.type_by_hash(type_hash)
    if node is None or not node.is_leaf:
        return "UnknownTypeHash"
    if site.declared is not None and not node.is_a(site.declared):
        return "TypeMismatch"
    return node
