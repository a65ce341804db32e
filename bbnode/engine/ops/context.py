"""What a contract method sees of the node: one object per call, never shared.

Rule: it is a snapshot, so that it may be read in a worker thread. `open_completion` reaches back,
and what a method asks for (sends, timers) is noted here, checked, and carried out when it has
returned: both only while the method runs on the polling thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from bbnode.components.contracts import ComponentError, PeersView
from bbnode.engine.errors import PayloadTooLarge
from bbnode.engine.ingress import Completed, Ingress
from bbnode.engine.limits import cut_text
from bbnode.engine.parking import ParkingTable
from bbnode.ir import ids
from bbnode.ir.address import component_suffix
from bbnode.ir.caps import MAX_ASKED, MAX_CALLS, MAX_KEY_CHARS, MAX_TIMERS
from bbnode.ir.envelope import WireCorrelation
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Value

if TYPE_CHECKING:
    from bbnode.engine.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessage:
    """A message for a peer's component; with a tag, a request."""

    peer: PeerId
    suffix: bytes
    payload: bytes
    wire_req_id: int
    tag: str | None = None
    deadline_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """A timer of the component."""

    key: str
    after_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTimer:
    """No timer of the component any more."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnAddresses:
    """Where a peer is said to be."""

    peer: PeerId
    addresses: tuple[Multiaddr, ...]


Asked: TypeAlias = SendMessage | SetTimer | CancelTimer | LearnAddresses


# Suffixes that the components of one process ask for: those of its programs' slots.
@lru_cache(1024)
def suffix_of(slot: str, op: str) -> bytes:
    """Where an inbound op of a slot is reached; ComponentError for what is no name of an op."""
    try:
        return component_suffix(ids.component_ref(slot), op)
    except (MultiaddrError, ValueError) as error:
        raise ComponentError(f"{op!r} is no name of an inbound op: {error}") from error


class OpenCompletion:
    """Completes one parked op from any thread; only the first call counts."""

    __slots__ = ("_ingress", "token")

    def __init__(self, ingress: Ingress, token: int) -> None:
        self._ingress = ingress
        self.token = token

    def complete(self, result: Value) -> None:
        """Finish the op with its output (a tuple for several)."""
        self._ingress.push_completion(Completed(token=self.token, result=result, error=None))

    def fail(self, error: BaseException) -> None:
        """Finish the op with a failure."""
        self._ingress.push_completion(Completed(token=self.token, result=None, error=error))


class CallContext:
    """Fulfils the contract `OpContext`."""

    __slots__ = (
        "_cell_at",
        "_ingress",
        "_parking",
        "_rt",
        "addresses",
        "asked",
        "completion",
        "correlation",
        "execution",
        "now_ns",
        "offloaded",
        "peer_class",
        "peers",
        "self_peer",
        "source_peer",
    )

    def __init__(
        self,
        *,
        now_ns: int,
        self_peer: PeerId,
        source_peer: PeerId | None,
        peer_class: str | None,
        execution: int,
        peers: PeersView,
        ingress: Ingress,
        parking: ParkingTable,
        offloaded: bool,
        addresses: Sequence[Multiaddr],
        correlation: WireCorrelation | None,
        rt: Runtime | None,
        cell_at: int,
    ) -> None:
        self.now_ns = now_ns
        self.self_peer = self_peer
        self.source_peer = source_peer
        self.peer_class = peer_class
        self.execution = execution
        self.peers = peers
        self.offloaded = offloaded
        self.completion: OpenCompletion | None = None
        self._ingress = ingress
        self._parking = parking
        self.addresses = addresses
        self.correlation = correlation
        self.asked: list[Asked] | None = None
        self._rt = rt  # None: in a worker thread, or the method has returned
        self._cell_at = cell_at

    def open_completion(self) -> OpenCompletion:
        """Park this op until the completion is used; the method then returns PENDING.

        Raises ComponentError in an offloaded method, and when it was opened before.
        """
        if self.offloaded:
            raise ComponentError(
                "open_completion in an offloaded method; return the result there instead"
            )
        if self.completion is not None:
            raise ComponentError("open_completion was called before in this call")
        self.completion = OpenCompletion(self._ingress, self._parking.new_token())
        return self.completion

    def refuse(self, peer: PeerId, reason: str) -> None:
        """As the contract says."""
        rt = self._running("refuse")
        rt.counts["contributions.refused"] += 1
        rt.telemetry(
            "contribution.refused",
            slot=rt.cells[self._cell_at].slot,
            execution=self.execution,
            peer=peer,
            reason=cut_text(reason, rt.limits.failure_detail_bytes),
        )

    # -- what a method asks for --------------------------------------------------------------

    def send(self, peer: PeerId, slot: str, op: str, payload: bytes) -> None:
        """As the contract says; PayloadTooLarge for what fits into no envelope."""
        rt = self._running("send")
        suffix = self._checked(rt, peer, slot, op, payload)
        self._ask(
            SendMessage(
                peer=peer, suffix=suffix, payload=bytes(payload), wire_req_id=rt.wire_ids.next_u64()
            )
        )

    def request(
        self, peer: PeerId, slot: str, op: str, payload: bytes, *, tag: str, deadline_ns: int
    ) -> int:
        """As the contract says; PayloadTooLarge for what fits into no envelope."""
        rt = self._running("request")
        suffix = self._checked(rt, peer, slot, op, payload)
        self._check_hook(rt, "on_answer")
        _check_key("tag", tag)
        if type(deadline_ns) is not int or deadline_ns < 1:
            raise ComponentError(f"request: a deadline of {deadline_ns!r} ns; give a positive one")
        asked = sum(isinstance(w, SendMessage) and w.tag is not None for w in self.asked or ())
        if rt.control.calls.count(self._cell_at) + asked >= MAX_CALLS:
            raise ComponentError(
                f"request: {MAX_CALLS} requests of this component wait for answers; ask fewer peers"
            )
        wire_req_id = rt.wire_ids.next_u64()
        self._ask(
            SendMessage(
                peer=peer,
                suffix=suffix,
                payload=bytes(payload),
                wire_req_id=wire_req_id,
                tag=tag,
                deadline_ns=deadline_ns,
            )
        )
        return wire_req_id

    def set_timer(self, key: str, after_ns: int) -> None:
        """As the contract says."""
        rt = self._running("set_timer")
        self._check_hook(rt, "on_timer")
        _check_key("key", key)
        if type(after_ns) is not int or after_ns < 0:
            raise ComponentError(f"set_timer: {after_ns!r} ns; give an integer, 0 or more")
        timers = rt.control.timers
        asked = {w.key for w in self.asked or () if isinstance(w, SetTimer)}
        fresh = key not in asked and not timers.has(self._cell_at, key)
        if fresh and timers.count(self._cell_at) + len(asked) >= MAX_TIMERS:
            raise ComponentError(f"set_timer: {MAX_TIMERS} timers are armed; cancel some")
        self._ask(SetTimer(key=key, after_ns=after_ns))

    def cancel_timer(self, key: str) -> None:
        """As the contract says."""
        self._running("cancel_timer")
        self._ask(CancelTimer(key=key))

    def learn_addresses(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
        """As the contract says."""
        self._running("learn_addresses")
        self._ask(LearnAddresses(peer=peer, addresses=tuple(addresses)))

    def close(self) -> Sequence[Asked]:
        """The method has returned: what it asked for."""
        self._rt = None
        return self.asked or ()

    def _running(self, what: str) -> Runtime:
        if self._rt is None:
            raise ComponentError(
                f"{what} in an offloaded method, or after the method has returned; do it in a "
                "method that runs on the polling thread, for instance on_timer"
            )
        return self._rt

    def _checked(self, rt: Runtime, peer: object, slot: str, op: str, payload: object) -> bytes:
        if not isinstance(peer, PeerId) or not isinstance(payload, bytes | bytearray | memoryview):
            raise ComponentError(
                f"a message needs a PeerId and bytes, not {type(peer).__name__} and "
                f"{type(payload).__name__}"
            )
        cap = rt.outbound.max_payload
        if cap is not None and len(payload) > cap:
            raise PayloadTooLarge(
                f"a message of {len(payload)} bytes; one envelope takes {cap} "
                "(limit envelope_bytes)"
            )
        return suffix_of(slot, op)

    def _check_hook(self, rt: Runtime, name: str) -> None:
        component = rt.cells[self._cell_at].component
        if not callable(getattr(component, name, None)):
            raise ComponentError(
                f"{type(component).__qualname__} has no {name}(); inherit ProtocolComponent"
            )

    def _ask(self, wish: Asked) -> None:
        if self.asked is None:
            self.asked = []
        if len(self.asked) >= MAX_ASKED:
            raise ComponentError(f"one call of a method asks for over {MAX_ASKED} things")
        self.asked.append(wish)


def _check_key(what: str, key: object) -> None:
    if not isinstance(key, str) or len(key) > MAX_KEY_CHARS:
        raise ComponentError(f"a {what} has to be a text of up to {MAX_KEY_CHARS} characters")
