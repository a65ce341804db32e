"""The one place that decides who may talk.

Rule: the rules in RULES apply in order, and the first one that denies decides. The first four
depend on lists, credentials and the wall clock; their verdict on a peer is cached until a list
changes or a date of its membership passes (in either direction, since clocks jump). Rates are
counted on the monotonic clock. Both clocks are arguments.

An envelope that comes too fast is not refused but has to wait (`Decision.wait_s`). The conduct of a
peer (`conduct`) counts after the lists and credentials, even before its hello.

The transport asks `decide_peer` before the hello, `decide_connection` after it, and
`decide_envelope` for each envelope, through `PolicyAuthorizer`. Disconnects are not reported here:
the state of a peer is kept, so that a new connection gives no new budget, until the table is full;
then the peers that have been quiet for longest are forgotten.
"""

from __future__ import annotations

import enum
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from bbnode.access.conduct import Conduct
from bbnode.access.decision import Decision, PeerRates, Rate, Reason, Standing
from bbnode.access.errors import PolicyError, StatementRefused
from bbnode.access.revocation import RevocationList
from bbnode.access.statement import MAX_MEMBERSHIP_BYTES, Membership, open_membership
from bbnode.access.ticket import Ledger, invitation_of
from bbnode.ir.caps import MAX_ADMITTED, MAX_LISTED_PEERS, MAX_REFUSED
from bbnode.ir.peer import PeerId

# The number of entries forgotten at once, since finding the quietest takes a pass over the table.
_FORGOTTEN_AT_ONCE = MAX_ADMITTED // 8

_FOREVER = float("inf")


@dataclass(slots=True)
class _Admission:
    """The cached verdict on a peer; it holds for one generation and span of unix time."""

    credentials: bytes = b""
    classes: tuple[str, ...] = ()
    membership: Membership | StatementRefused | None = None
    verdict: Decision | None = None
    generation: int = -1
    from_s: float = -_FOREVER
    until_s: float = _FOREVER
    # Monotonic times up to which its envelopes are paid for (`buckets`).
    messages_paid_ns: float = 0
    bytes_paid_ns: float = 0
    last_ns: int = 0


_NOBODY = _Admission()
_ALLOWED = Decision(allowed=True, reason=Reason.ALLOWED, rule="all", detail="every rule allows it")


def _allow(rule: str, detail: str) -> Decision:
    return Decision(allowed=True, reason=Reason.ALLOWED, rule=rule, detail=detail)


def _deny(rule: str, reason: Reason, detail: str, wait_s: float = 0.0) -> Decision:
    return Decision(allowed=False, reason=reason, rule=rule, detail=detail, wait_s=wait_s)


class Policy:
    """The lists, network and limits of one node, and its verdict on each peer.

    Only one task uses it, so it has no lock.
    """

    def __init__(
        self,
        *,
        network: PeerId | None = None,
        revocations: RevocationList | None = None,
        limits: PeerRates | None = None,
        inviter: PeerId | None = None,
    ) -> None:
        """Create the policy of a node; with `network` None it is open and asks for no membership.

        `inviter` is this node's own id if it invites: a peer that shows one of its tickets as
        credentials may connect to redeem it, but send no envelopes.
        """
        self._inviter = inviter
        self._ledger = Ledger()
        self._network = network
        self._revocations = revocations
        self._blocked: frozenset[PeerId] = frozenset()
        self._allowed: frozenset[PeerId] | None = None
        self._admitted: dict[PeerId, _Admission] = {}
        self._refused: OrderedDict[PeerId, _Admission] = OrderedDict()
        self._generation = 0
        self.conduct = Conduct()
        self.set_limits(limits or PeerRates())

    # --- what can change while running: each change makes every verdict stale ---

    def block(self, peer: PeerId) -> None:
        """Deny a peer; raises PolicyError when the list is full."""
        self.block_only((*self._blocked, peer))

    def unblock(self, peer: PeerId) -> None:
        """Remove a peer from the block list."""
        self.block_only(self._blocked - {peer})

    def block_only(self, peers: Iterable[PeerId]) -> None:
        """Deny exactly these peers; raises PolicyError when they are too many."""
        blocked = frozenset(peers)
        if len(blocked) > MAX_LISTED_PEERS:
            raise PolicyError(
                f"the block list holds {MAX_LISTED_PEERS} peers, which is all it takes; use an "
                "allow list or a private network"
            )
        self._blocked = blocked
        self._generation += 1

    def allow_only(self, peers: Iterable[PeerId] | None) -> None:
        """Deny all peers but these; None denies nobody. Raises PolicyError beyond the bound."""
        allowed = None if peers is None else frozenset(peers)
        if allowed is not None and len(allowed) > MAX_LISTED_PEERS:
            raise PolicyError(f"an allow list takes {MAX_LISTED_PEERS} peers, not {len(allowed)}")
        self._allowed = allowed
        self._generation += 1

    def set_network(self, network: PeerId | None, revocations: RevocationList | None) -> None:
        """Use another private network, or another revocation list of its owner."""
        if revocations is not None and revocations.network != network:
            raise PolicyError(f"a revocation list of {revocations.network} says nothing here")
        if network != self._network:
            for entry in (*self._admitted.values(), *self._refused.values()):
                entry.membership = None
        self._network, self._revocations = network, revocations
        self._generation += 1

    def set_ledger(self, ledger: Ledger) -> None:
        """Use this ledger of the node's tickets: a ticket without a use left admits no guest."""
        self._ledger = ledger

    def set_limits(self, limits: PeerRates) -> None:
        """Use other rates, from the next envelope on."""
        self._limits = limits
        messages, size = limits.messages, limits.bytes
        self._message_ns = 0.0 if messages is None else messages.ns_per_unit
        self._message_burst_ns = _FOREVER if messages is None else messages.burst_ns
        self._byte_ns = 0.0 if size is None else size.ns_per_unit
        self._byte_burst_ns = _FOREVER if size is None else size.burst_ns

    def is_known(self, peer: PeerId, *, now_ns: int) -> bool:
        """Return True for a member, or on an open node a useful peer, in good standing."""
        if not self.conduct.in_good_standing(peer, now_ns):
            return False
        if self._network is None:
            return peer in self.conduct.known
        entry = self._admitted.get(peer)
        return entry is not None and entry.verdict is not None and entry.verdict.allowed

    # --- decisions ---

    def decide_peer(self, peer: PeerId, *, now_ns: int) -> Decision:
        """Decide if a peer may say hello at all, by the lists and its conduct."""
        for rule in (Policy._block_list, Policy._allow_list):
            decision = rule(self, peer, _NOBODY, 0.0)
            if not decision.allowed:
                return decision
        decision = self.conduct.decide(peer, now_ns)
        return _ALLOWED if decision.allowed or decision.wait_s else decision

    def decide_connection(
        self,
        peer: PeerId,
        *,
        credentials: bytes,
        classes: Iterable[str],
        now_ns: int,
        unix_s: float,
    ) -> Decision:
        """Decide if a peer that said hello may stay, by its credentials and its classes."""
        old = self._admitted.get(peer) or self._refused.get(peer)
        # Oversized credentials are cut here, and then refused as too large.
        shown = credentials[: MAX_MEMBERSHIP_BYTES + 1]
        entry = _Admission(credentials=shown, classes=tuple(classes), last_ns=now_ns)
        if old is not None:
            entry.messages_paid_ns = old.messages_paid_ns
            entry.bytes_paid_ns = old.bytes_paid_ns
            if old.credentials == shown:
                entry.membership = old.membership
        verdict = self._judge(peer, entry, unix_s)
        if verdict.allowed:
            self._refused.pop(peer, None)
            self._admit(peer, entry)
            behaviour = self.conduct.decide(peer, now_ns)
            if not behaviour.allowed and not behaviour.wait_s:
                return behaviour
            closed = self._network is not None or self._allowed is not None
            return replace(verdict, standing=Standing.MEMBER) if closed else verdict
        # A second connection that is refused takes nothing from the first one.
        if peer not in self._admitted:
            self._refuse(peer, entry)
        # A guest is connected to redeem its ticket: programs must not find it by a class.
        is_for_guests = verdict.rule == "membership" and not entry.classes
        if is_for_guests and self._is_guest(peer, credentials, unix_s):
            detail = "a guest with a ticket: it may redeem it and no more"
            return replace(_allow("membership", detail), standing=Standing.GUEST)
        return verdict

    def decide_envelope(
        self, peer: PeerId, size_bytes: int, *, now_ns: int, unix_s: float
    ) -> Decision:
        """Decide if an envelope of that size may come in now, and charge it if so."""
        entry = self._admitted.get(peer) or self._stranger(peer)
        entry.last_ns = now_ns
        verdict = self._standing(peer, entry, unix_s)
        if verdict.allowed:
            has_record = peer in self.conduct.records
            if has_record:
                behaviour = self.conduct.decide(peer, now_ns)
                if not behaviour.allowed:
                    return behaviour
            # Inlined from `buckets`, since this runs for each envelope.
            messages = max(entry.messages_paid_ns, now_ns) + self._message_ns
            size = max(entry.bytes_paid_ns, now_ns) + size_bytes * self._byte_ns
            if messages - now_ns > self._message_burst_ns and entry.messages_paid_ns > now_ns:
                verdict = self._message_rate(entry, now_ns, 1)
            elif size - now_ns > self._byte_burst_ns and entry.bytes_paid_ns > now_ns:
                verdict = self._byte_budget(entry, now_ns, size_bytes)
            else:
                entry.messages_paid_ns, entry.bytes_paid_ns = messages, size
                if has_record:
                    self.conduct.pay(peer, now_ns)
                return verdict
        return verdict

    def decide_outbound(self, peer: PeerId, *, unix_s: float) -> Decision:
        """Decide if we may send to a peer; the rates are only for what comes in."""
        return self._standing(peer, self._admitted.get(peer) or self._stranger(peer), unix_s)

    def explain(self, peer: PeerId, *, now_ns: int, unix_s: float) -> tuple[Decision, ...]:
        """Return each rule's decision on a peer, in the order of RULES; nothing is charged."""
        entry = self._admitted.get(peer) or self._refused.get(peer) or _Admission()
        return (
            *(rule(self, peer, entry, unix_s) for rule in STANDING_RULES.values()),
            self.conduct.decide(peer, now_ns),
            self._message_rate(entry, now_ns, 1),
            self._byte_budget(entry, now_ns, 1),
        )

    # --- inside ---

    def _standing(self, peer: PeerId, entry: _Admission, unix_s: float) -> Decision:
        verdict = entry.verdict
        if (
            verdict is None
            or entry.generation != self._generation
            or not entry.from_s <= unix_s < entry.until_s
        ):
            verdict = self._judge(peer, entry, unix_s)
        return verdict

    def _judge(self, peer: PeerId, entry: _Admission, unix_s: float) -> Decision:
        verdict = _ALLOWED
        for rule in STANDING_RULES.values():
            decision = rule(self, peer, entry, unix_s)
            if not decision.allowed:
                verdict = decision
                break
        entry.verdict = verdict
        entry.generation = self._generation
        entry.from_s, entry.until_s = _span(self._membership_of(peer, entry), unix_s)
        return verdict

    def heard_ns(self, peer: PeerId) -> int:
        """Return when an envelope of a peer was last judged, in monotonic time; 0 for never."""
        return self._admitted.get(peer, _NOBODY).last_ns

    def forget_quiet(self, now_ns: int, after_ns: int, connected: Container[PeerId]) -> int:
        """Forget the verdicts on peers that are gone; return the number of entries removed."""

        def stays(peer: PeerId, entry: _Admission) -> bool:
            return now_ns - entry.last_ns < after_ns or peer in connected

        before = len(self._admitted) + len(self._refused)
        # Rebuilt, since a dictionary keeps its size when entries are deleted.
        self._admitted = {p: each for p, each in self._admitted.items() if stays(p, each)}
        self._refused = OrderedDict(row for row in self._refused.items() if stays(*row))
        gone = before - len(self._admitted) - len(self._refused)
        return gone + self.conduct.forget_forgiven(now_ns)

    def _membership_of(
        self, peer: PeerId, entry: _Admission
    ) -> Membership | StatementRefused | None:
        """Return the membership, None on an open node; cached, since a check takes 100 us."""
        if self._network is None:
            return None
        if entry.membership is None:
            try:
                entry.membership = open_membership(entry.credentials, self._network, peer)
            except StatementRefused as error:
                # The traceback would keep its frames alive as long as the entry.
                entry.membership = error.with_traceback(None)
        return entry.membership

    def _is_guest(self, peer: PeerId, credentials: bytes, unix_s: float) -> bool:
        if self._inviter is None or self._network is None:
            return False
        ticket = invitation_of(credentials, self._inviter, self._network, unix_s)
        return ticket is not None and self._ledger.has_use(ticket, peer)

    def _stranger(self, peer: PeerId) -> _Admission:
        entry = self._refused.get(peer)
        if entry is None:
            entry = _Admission()
            self._refuse(peer, entry)
        return entry

    def _refuse(self, peer: PeerId, entry: _Admission) -> None:
        self._refused[peer] = entry
        self._refused.move_to_end(peer)
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def _admit(self, peer: PeerId, entry: _Admission) -> None:
        if peer not in self._admitted and len(self._admitted) >= MAX_ADMITTED:
            quietest = sorted(self._admitted, key=lambda each: self._admitted[each].last_ns)
            for each in quietest[:_FORGOTTEN_AT_ONCE]:
                del self._admitted[each]
        self._admitted[peer] = entry

    def _block_list(self, peer: PeerId, entry: _Admission, unix_s: float) -> Decision:  # noqa: ARG002
        if peer in self._blocked:
            detail = f"it is blocked here; lift it with: bbnode peers allow {peer}"
            return _deny("block_list", Reason.BLOCKLISTED, detail)
        return _allow("block_list", f"not among the {len(self._blocked)} blocked peers")

    def _allow_list(self, peer: PeerId, entry: _Admission, unix_s: float) -> Decision:  # noqa: ARG002
        if self._allowed is None:
            return _allow("allow_list", "there is no allow list")
        if peer not in self._allowed:
            detail = f"it is not among the {len(self._allowed)} peers of the allow list"
            return _deny("allow_list", Reason.NOT_ALLOWLISTED, detail)
        return _allow("allow_list", "it is on the allow list")

    def _membership(self, peer: PeerId, entry: _Admission, unix_s: float) -> Decision:
        membership = self._membership_of(peer, entry)
        if membership is None:
            return _allow("membership", "this node belongs to no private network")
        try:
            if isinstance(membership, StatementRefused):
                refused = membership
                return _deny(
                    "membership", Reason.NOT_A_MEMBER, f"{refused.reason.value}: {refused}"
                )
            membership.check(unix_s, self._revocations)
        except StatementRefused as error:
            return _deny("membership", Reason.NOT_A_MEMBER, f"{error.reason.value}: {error}")
        own = membership.own
        return _allow("membership", f"statement {own.serial_text} of {own.network}")

    def _classes(self, peer: PeerId, entry: _Admission, unix_s: float) -> Decision:  # noqa: ARG002
        membership = self._membership_of(peer, entry)
        if membership is None:
            return _allow("classes", "any peer may play any class")
        if isinstance(membership, StatementRefused):
            return _allow("classes", "no membership says which classes it may play")
        granted = membership.own.classes
        if granted is None:
            return _allow("classes", "it may play all classes")
        excess = [name for name in entry.classes if name not in granted]
        if excess:
            detail = f"it plays {excess[0]!r}, and its statement allows {', '.join(granted)}"
            return _deny("classes", Reason.CLASS_NOT_GRANTED, detail)
        return _allow("classes", f"it may play {', '.join(granted)}")

    def _message_rate(self, entry: _Admission, now_ns: int, units: int) -> Decision:
        ahead_ns = max(0.0, entry.messages_paid_ns - now_ns)
        return _rate("message_rate", Reason.MESSAGE_RATE, self._limits.messages, ahead_ns, units)

    def _byte_budget(self, entry: _Admission, now_ns: int, units: int) -> Decision:
        ahead_ns = max(0.0, entry.bytes_paid_ns - now_ns)
        return _rate("byte_budget", Reason.BYTE_BUDGET, self._limits.bytes, ahead_ns, units)


_StandingRule = Callable[[Policy, PeerId, _Admission, float], Decision]

# The rules of lists, credentials and dates, in their order; the first that denies decides.
STANDING_RULES: dict[str, _StandingRule] = {
    "block_list": Policy._block_list,
    "allow_list": Policy._allow_list,
    "membership": Policy._membership,
    "classes": Policy._classes,
}
# Rates come last, so that a denied peer uses up none.
RULES: tuple[str, ...] = (*STANDING_RULES, "conduct", "message_rate", "byte_budget")


def _span(membership: Membership | StatementRefused | None, unix_s: float) -> tuple[float, float]:
    """Return the span of unix seconds, its end excluded, in which a membership's dates agree."""
    if not isinstance(membership, Membership):
        return -_FOREVER, _FOREVER
    begin, end = membership.valid_from_s, membership.valid_until_s
    if unix_s < begin:
        return -_FOREVER, begin
    return (begin, end) if unix_s < end else (end, _FOREVER)


def _rate(rule: str, reason: Reason, rate: Rate | None, ahead_ns: float, units: int) -> Decision:
    """Decide if `units` more may come in; the arrivals are paid for until `ahead_ns` from now."""
    if rate is None:
        return _allow(rule, "there is no limit")
    limit = f"{rate.per_second:g} a second and {rate.burst:g} at once"
    # An envelope larger than the burst waits until the bucket is full, and no longer.
    over_ns = ahead_ns + min(units * rate.ns_per_unit, rate.burst_ns) - rate.burst_ns
    if over_ns > 0:
        wait_s = over_ns / 1e9
        return _deny(rule, reason, f"over {limit}; it may come in {wait_s:.3f} s", wait_s)
    return _allow(rule, f"{rate.burst - ahead_ns / rate.ns_per_unit:.0f} left of {limit}")


class HelloLike(Protocol):
    """The parts of a hello that the policy reads."""

    @property
    def credentials(self) -> bytes:
        """The membership that the peer shows."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that it plays."""
        ...


class PolicyAuthorizer:
    """The transport's `Authorizer`: the policy with this machine's clocks.

    It declares what it needs of a hello itself, so that this layer does not import the transport.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """Use these clocks: one for rates, one for the dates of statements."""
        self._policy = policy
        self._monotonic_ns = monotonic_ns
        self._unix_s = unix_s

    def connection(self, peer: PeerId, direction: enum.Enum) -> Decision:  # noqa: ARG002
        """Decide on a connection before its hello."""
        return self._policy.decide_peer(peer, now_ns=self._monotonic_ns())

    def hello(self, peer: PeerId, direction: enum.Enum, hello: HelloLike) -> Decision:  # noqa: ARG002
        """Decide on the peer's first message."""
        return self._policy.decide_connection(
            peer,
            credentials=hello.credentials,
            classes=hello.classes,
            now_ns=self._monotonic_ns(),
            unix_s=self._unix_s(),
        )

    def envelope(self, peer: PeerId, direction: enum.Enum, size: int) -> Decision:
        """Decide on one envelope of `size` bytes, from the peer or to it."""
        if direction.value != "inbound":
            return self._policy.decide_outbound(peer, unix_s=self._unix_s())
        return self._policy.decide_envelope(
            peer, size, now_ns=self._monotonic_ns(), unix_s=self._unix_s()
        )

    def is_known(self, peer: PeerId) -> bool:
        """Return True if a peer is a member, or has been of use."""
        return self._policy.is_known(peer, now_ns=self._monotonic_ns())
