"""The context that a contract method gets: one object per call, never shared.

Rule: it is a snapshot, so that it may be read in a worker thread. `open_completion` reaches back,
and what a method asks for (sends, timers) is noted here, checked, and done when it has returned:
both only while the method runs on the polling thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from multiaddr import Multiaddr

from bbnode.components.contracts import ComponentError, HostSecrets, PeersView
from bbnode.engine.bus import FIRST_PROGRAM_KIND, MAX_KIND
from bbnode.engine.errors import PayloadTooLarge
from bbnode.engine.ingress import Completed, Ingress
from bbnode.engine.messaging.actions import (
    Action,
    CancelTimer,
    Follow,
    LearnAddresses,
    PublishEvent,
    PublishOnTopic,
    SendMessage,
    SetTimer,
    suffix_of,
)
from bbnode.engine.messaging.topics import is_topic
from bbnode.engine.peers.neighbours import PeersWithSelf
from bbnode.engine.services import Services
from bbnode.ir.caps import (
    MAX_ASKED,
    MAX_CALLS,
    MAX_KEY_CHARS,
    MAX_TIMERS,
    MAX_TOPIC_BYTES,
    MAX_TOPIC_CHARS,
)
from bbnode.ir.envelope import WireCorrelation
from bbnode.ir.peer import PeerId
from bbnode.ir.shapes import Dim
from bbnode.ir.values import Value


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
        "_rt",
        "_secrets",
        "addresses",
        "asked",
        "completion",
        "correlation",
        "declared_shape",
        "execution",
        "include_self",
        "now_ns",
        "offloaded",
        "op",
        "peer_class",
        "peers",
        "plays_peer_class",
        "reason",
        "self_peer",
        "slot",
        "source_classes",
        "source_peer",
        "source_seen_at",
    )

    def __init__(
        self,
        rt: Services,
        cell_at: int,
        *,
        now_ns: int,
        source_peer: PeerId | None,
        peer_class: str | None,
        include_self: bool,
        declared_shape: Sequence[Dim] | None,
        execution: int,
        op: str,
        offloaded: bool,
        correlation: WireCorrelation | None,
        reason: str = "",
    ) -> None:
        neighbours = rt.neighbours
        self.now_ns = now_ns
        self.self_peer = neighbours.self_peer
        self.source_peer = source_peer
        self.source_classes = (
            () if source_peer is None else neighbours.peers.classes_of(source_peer)
        )
        self.source_seen_at = None if source_peer is None else neighbours.book.seen_at(source_peer)
        self.peer_class = peer_class
        self.declared_shape = declared_shape
        self.execution = execution
        self.op = op
        self.slot = rt.cells[cell_at].slot
        own = neighbours.ready_classes
        self.plays_peer_class = peer_class in own
        self.include_self = include_self and (peer_class is None or self.plays_peer_class)
        view = neighbours.view(rt.clock.now_ns)
        self.peers: PeersView = (
            PeersWithSelf(view, self.self_peer, own) if self.include_self else view
        )
        self.offloaded = offloaded
        self.completion: OpenCompletion | None = None
        self.addresses: Sequence[Multiaddr] = neighbours.own_addresses
        self.correlation = correlation
        self.reason = reason
        self.asked: list[Action] | None = None
        # None: in a worker thread, or the method has returned.
        self._rt = None if offloaded else rt
        self._secrets = (rt.secrets, rt.cells[cell_at].binding.type_name) if offloaded else None
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
        rt = self._running("open_completion")
        self.completion = OpenCompletion(rt.ingress, rt.suspensions.new_token())
        return self.completion

    def refuse(self, peer: PeerId, reason: str) -> None:
        """As the contract says."""
        rt = self._running("refuse")
        rt.reports.refused_by_component(rt.cells[self._cell_at].slot, self.execution, peer, reason)

    def sign(self, body: bytes) -> bytes:
        """As the contract says."""
        secrets, type_name = self._given_secrets("sign")
        return secrets.sign(type_name, bytes(body))

    def random_bytes(self, count: int) -> bytes:
        """As the contract says."""
        return self._given_secrets("random_bytes")[0].random_bytes(count)

    def _given_secrets(self, what: str) -> tuple[HostSecrets, str]:
        if self._secrets is None:
            raise ComponentError(
                f"{what} in a method that is not offloaded; mark it @offload, so that its result "
                "is recorded and a replay needs no secret"
            )
        secrets, type_name = self._secrets
        if secrets is None:
            raise ComponentError(f"{what}: this host gives components no secrets")
        return secrets, type_name

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
        if rt.calls.count(self._cell_at) + asked >= MAX_CALLS:
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

    def follow(self, topic: str) -> None:
        """As the contract says."""
        rt = self._running("follow")
        self._check_topic(rt, topic)
        self._check_hook(rt, "on_message")
        self._ask(Follow(topic=topic, on=True))

    def unfollow(self, topic: str) -> None:
        """As the contract says."""
        self._check_topic(self._running("unfollow"), topic)
        self._ask(Follow(topic=topic, on=False))

    def publish(self, topic: str, payload: bytes) -> None:
        """As the contract says."""
        self._check_topic(self._running("publish"), topic)
        if not isinstance(payload, bytes | bytearray | memoryview):
            raise ComponentError(f"publish: a message is bytes, not {type(payload).__name__}")
        if len(payload) > MAX_TOPIC_BYTES:
            raise PayloadTooLarge(
                f"publish: a message of {len(payload)} bytes on a topic; at most "
                f"{MAX_TOPIC_BYTES} are carried (MAX_TOPIC_BYTES); send what is larger to each peer"
            )
        self._ask(PublishOnTopic(topic=topic, payload=bytes(payload)))

    def publish_event(self, kind: int) -> None:
        """As the contract says."""
        self._running("publish_event")
        if type(kind) is not int or not FIRST_PROGRAM_KIND <= kind <= MAX_KIND:
            raise ComponentError(
                f"publish_event: kind {kind!r}; a program's own are {FIRST_PROGRAM_KIND} and up"
            )
        self._ask(PublishEvent(kind=kind))

    def set_timer(self, key: str, after_ns: int) -> None:
        """As the contract says."""
        rt = self._running("set_timer")
        self._check_hook(rt, "on_timer")
        _check_key("key", key)
        if type(after_ns) is not int or after_ns < 0:
            raise ComponentError(f"set_timer: {after_ns!r} ns; give an integer, 0 or more")
        timers = rt.timers
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

    def close(self) -> Sequence[Action]:
        """Return what the method asked for; it has returned."""
        self._rt = None
        return self.asked or ()

    def _running(self, what: str) -> Services:
        if self._rt is None:
            raise ComponentError(
                f"{what} in an offloaded method, or after the method has returned; do it in a "
                "method that runs on the polling thread, for instance on_timer"
            )
        return self._rt

    def _checked(self, rt: Services, peer: object, slot: str, op: str, payload: object) -> bytes:
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

    def _check_topic(self, rt: Services, topic: str) -> None:
        component = rt.cells[self._cell_at].component
        if not getattr(component, "uses_topics", False):
            raise ComponentError(
                f"{type(component).__qualname__} uses topics and does not say so: give the class "
                "uses_topics = True, so that a host without topics can refuse it"
            )
        if not is_topic(topic):
            raise ComponentError(
                f"{topic!r} is no name of a topic: 1 to {MAX_TOPIC_CHARS} letters, digits and "
                "any of . _ - /"
            )

    def _check_hook(self, rt: Services, name: str) -> None:
        component = rt.cells[self._cell_at].component
        if not callable(getattr(component, name, None)):
            raise ComponentError(
                f"{type(component).__qualname__} has no {name}(); inherit ProtocolComponent"
            )

    def _ask(self, action: Action) -> None:
        if self.asked is None:
            self.asked = []
        if len(self.asked) >= MAX_ASKED:
            raise ComponentError(f"one call of a method asks for over {MAX_ASKED} things")
        self.asked.append(action)


def _check_key(what: str, key: object) -> None:
    if not isinstance(key, str) or len(key) > MAX_KEY_CHARS:
        raise ComponentError(f"a {what} has to be a text of up to {MAX_KEY_CHARS} characters")
