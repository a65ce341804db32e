"""`UpdateBuffer`: versions of a server's weights, and the sum of the updates that began at them.

Rule: an update's staleness is counted from the versions that the server gave to that peer itself;
nothing that a client says makes an update younger than that, and one given version is answered
once. The buffer is a running sum, so it costs one vector, however many updates are in it.
(Xie et al., 2019, arXiv:1903.03934; Nguyen et al., 2022, arXiv:2106.06639.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from bbnode.components.asynchronous import ops as ops
from bbnode.components.contracts import OpContext, ProtocolComponent
from bbnode.components.errors import ContributionRefused, NothingToAggregate
from bbnode.components.registry import register_component
from bbnode.components.vectors import vector_problem
from bbnode.ir import codec, types
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Composite, Metadata, ResponseBatch, Value

Vector = npt.NDArray[np.float32]

STALENESS: Final = ("constant", "hinge", "polynomial")
NO_VERSION: Final = -1  # in the place of a version: there is nothing to do


class StaleUpdate(ContributionRefused):
    """An update began at a version that is further back than `max_staleness`."""


@dataclass(frozen=True, kw_only=True)
class UpdateBufferConfig:
    """Settings of `UpdateBuffer`.

    With t, the server's version, and v, the one that an update began at, d = t - v:

    Attributes:
        size: numbers of an update.
        buffer: updates that make a step.
        mixing: alpha of FedAsync, above 0 and up to 1: updates are weights, which are mixed into
            the server's one after the other. 0: they are moves of the weights, whose mean is taken.
        staleness: s(d), by which an update counts less: "constant" 1; "polynomial"
            (1 + d)^-`exponent`; "hinge" 1 up to d = `hinge_at`, then
            1 / (`hinge_slope` (d - `hinge_at`) + 1).
        exponent: of the polynomial.
        hinge_slope: of the hinge.
        hinge_at: of the hinge, in versions.
        max_staleness: the largest d that is taken, in versions.
        max_abs: the largest absolute value in an update.
        max_samples: the highest `num_samples`, in examples, that is believed of an update.
        max_clients: peers whose versions are known; beyond, who has asked least recently is
            forgotten.
        step_deadline_s: after which a step that was begun and not published counts as failed,
            seconds.
    """

    size: int
    buffer: int = 1
    mixing: float = 0.0
    staleness: Literal["constant", "hinge", "polynomial"] = "polynomial"
    exponent: float = 0.5
    hinge_slope: float = 10.0
    hinge_at: int = 4
    max_staleness: int = 20
    max_abs: float = float(1 << 24)
    max_samples: int = 1_000_000
    max_clients: int = 4096
    step_deadline_s: float = 60.0


@register_component
class UpdateBuffer(ProtocolComponent):
    """The server's versions and its buffer of updates; on a client, what reads an offer of work."""

    TYPE_NAME: ClassVar[str] = "bbnode.UpdateBuffer"
    Config: ClassVar[type] = UpdateBufferConfig
    config: UpdateBufferConfig

    def __init__(self, config: UpdateBufferConfig) -> None:
        super().__init__(config)
        for name in ("size", "buffer", "max_samples", "max_clients"):
            self.require(
                getattr(config, name) >= 1, f"{name} is {getattr(config, name)}; 1 or more"
            )
        for name in ("max_staleness", "hinge_at"):
            self.require(
                getattr(config, name) >= 0, f"{name} is {getattr(config, name)}; 0 or more"
            )
        for name in ("exponent", "hinge_slope", "step_deadline_s", "max_abs"):
            value = getattr(config, name)
            self.require(0 < value < math.inf, f"{name} is {value}; a number above 0")
        self.require(0 <= config.mixing <= 1, f"mixing is {config.mixing}; 0 to 1")
        self.require(config.staleness in STALENESS, f"staleness is none of {STALENESS}")
        self._version = 0
        # By peer, least recent first: the versions that it was given; True: it has answered.
        self._given: dict[PeerId, dict[int, bool]] = {}
        self._step_until_ns: int | None = None  # a step is under way, at most until then
        self._sum: Vector | None = None  # the buffer, and what is told of it
        self._kept = 1.0
        self._updates = self._samples = self._total_staleness = self._most_staleness = 0
        self._peers: set[PeerId] = set()

    def discount(self, staleness: int) -> float:
        """Return s of a staleness, in versions."""
        config = self.config
        if config.staleness == "polynomial":
            return float((1.0 + staleness) ** -config.exponent)
        if config.staleness == "hinge" and staleness > config.hinge_at:
            return 1 / (config.hinge_slope * (staleness - config.hinge_at) + 1)
        return 1.0

    # -- the server ---------------------------------------------------------------------------

    def give(self, ctx: OpContext, weights: Value) -> tuple[Value, Value]:
        """Return the weights and their version for who asks; no numbers and -1: wait for a step.

        It waits if it has answered this version: one client can't fill a buffer alone.
        """
        peer = ctx.source_peer or ctx.self_peer
        known = self._given.pop(peer, {})
        while len(self._given) >= self.config.max_clients:
            del self._given[next(iter(self._given))]
        first = self._version - self.config.max_staleness
        self._given[peer] = {at: done for at, done in known.items() if at >= first}
        if self._given[peer].setdefault(self._version, False):
            return np.zeros(0, np.float32), np.array(NO_VERSION, np.int64)
        return weights, np.array(self._version, np.int64)

    def take(self, ctx: OpContext, tensor: Value, metadata: Metadata, version: Value) -> Value:
        """Add the sender's update, [size] float32; return a bool [] that says: make a step.

        It is true for one update of each step: while one is under way, updates are added for the
        next one, which begins with the first update after it.

        Raises:
            StaleUpdate: it began more than `max_staleness` versions ago.
            ContributionRefused: the peer was not given this version, has answered it, or what it
                sent can't be counted.
        """
        peer = ctx.source_peer or ctx.self_peer
        began = self._began(peer, version)
        reason = self._problem(tensor) or self._problem_of_count(metadata)
        if reason is not None:
            raise self._refusal(peer, reason)
        self._given[peer][began] = True
        staleness = self._version - began
        share = self.discount(staleness)
        vector: Any = tensor
        old = np.zeros(self.config.size, np.float32) if self._sum is None else self._sum
        if self.config.mixing:
            share *= self.config.mixing
            self._kept *= 1 - share
            old = old * np.float32(1 - share)
        self._sum = old + np.float32(share) * vector
        self._peers.add(peer)
        self._updates += 1
        self._samples += int(metadata["num_samples"])
        self._total_staleness += staleness
        self._most_staleness = max(self._most_staleness, staleness)
        under_way = self._step_until_ns is not None and ctx.now_ns < self._step_until_ns
        full = self._updates >= self.config.buffer and not under_way
        if full:
            self._step_until_ns = ctx.now_ns + round(self.config.step_deadline_s * 1e9)
        return np.array(full)

    def collect(self, ctx: OpContext) -> tuple[Value, Value, Metadata]:
        """Return the update of a step, [size] float32, and empty the buffer.

        Without `mixing`: the mean of s(d) times each move. With it the new weights are `kept`
        (float32 []) times the server's, plus the tensor. The Metadata has `updates`,
        `contributors` (peers), `num_samples`, `staleness` (the mean), `max_staleness` and
        `version` (before the step). Raises NothingToAggregate.
        """
        if self._sum is None:
            raise NothingToAggregate(f"{self.TYPE_NAME}: no update to step with; Take comes first")
        found = self._sum if self.config.mixing else self._sum / np.float32(self._updates)
        found.flags.writeable = False
        kept = np.array(self._kept, np.float32)
        stats = Metadata(
            updates=self._updates,
            contributors=len(self._peers),
            num_samples=self._samples,
            staleness=self._total_staleness / self._updates,
            max_staleness=self._most_staleness,
            version=self._version,
        )
        self._empty()
        return found, kept, stats

    def publish(self, ctx: OpContext, weights: Value) -> Value:
        """Count the next version, of these weights; the step is over."""
        self._version += 1
        self._step_until_ns = None
        return np.array(self._version, np.int64)

    # -- a client -----------------------------------------------------------------------------

    def begin(self, ctx: OpContext, responses: ResponseBatch) -> tuple[Value, Value, Value]:
        """Return what the server answered: if there is work, weights [size], and their version.

        Raises ContributionRefused for an answer that is none.
        """
        for peer, answer in responses.responses:
            if not isinstance(answer, Composite) or len(answer) != 2:
                raise self._refusal(peer, "the answer is not a composite of (weights, version)")
            weights, version = answer
            number = _version(version)
            if number == NO_VERSION:
                return np.array(False), np.zeros(0, np.float32), version
            reason = self._problem(weights)
            if number is None or number < 0:
                reason = "its version is no number from 0 on"
            if reason is not None:
                raise self._refusal(peer, reason)
            return np.array(True), weights, version
        raise NothingToAggregate(f"{self.TYPE_NAME}: no server answered; see who is connected")

    # -- state --------------------------------------------------------------------------------

    def serialize(self) -> bytes:
        """Return the versions and the buffer."""
        head = Metadata(
            version=self._version, updates=self._updates, samples=self._samples, kept=self._kept,
            total=self._total_staleness, most=self._most_staleness,
        )  # fmt: skip
        given = [
            Composite((
                peer,
                np.array([*versions], np.int64),
                np.array([*versions.values()], bool),
            ))
            for peer, versions in self._given.items()
        ]  # fmt: skip
        held = () if self._sum is None else (self._sum,)
        parts = (head, Composite(given), Composite(sorted(self._peers)), Composite(held))
        return codec.encode_value(Composite(parts))

    def restore(self, data: bytes) -> None:
        """Load a saved state; ComponentError for bytes of anything else."""
        if not data:
            return
        with self.restoring():
            head, given, peers, held = codec.decode_value(types.COMPOSITE, data)
            loaded = {
                peer: dict(zip(map(int, at), map(bool, done), strict=True))
                for peer, at, done in given
            }
            if held and self._problem(held[0]):
                raise ValueError(self._problem(held[0]))
            self._version, self._updates = int(head["version"]), int(head["updates"])
            self._samples, self._kept = int(head["samples"]), float(head["kept"])
            self._total_staleness, self._most_staleness = int(head["total"]), int(head["most"])
            self._given, self._peers = loaded, {*peers}
            self._sum = held[0] if held else None
        self._step_until_ns = None

    # -- parts --------------------------------------------------------------------------------

    def _empty(self) -> None:
        self._sum, self._kept, self._peers = None, 1.0, set()
        self._updates = self._samples = self._total_staleness = self._most_staleness = 0

    def _began(self, peer: PeerId, version: Value) -> int:
        """Return the version that an update began at."""
        number = _version(version)
        if number is None:
            raise self._refusal(peer, "its version is not a single int64")
        if 0 <= number < self._version - self.config.max_staleness:
            raise StaleUpdate(
                component=self.TYPE_NAME,
                peer=str(peer),
                reason=f"it began at version {number}, and now is {self._version} "
                f"(max_staleness={self.config.max_staleness})",
            )
        answered = self._given.get(peer, {}).get(number)
        if answered is None:
            raise self._refusal(peer, f"it was not given version {number}; let it ask again")
        if answered:
            raise self._refusal(peer, f"it has answered version {number} already")
        return number

    def _problem(self, tensor: Value) -> str | None:
        """Return why a vector can't be counted."""
        return vector_problem(tensor, self.config.size, self.config.max_abs)

    def _problem_of_count(self, metadata: Value) -> str | None:
        """Return why a number of examples can't be counted."""
        count = metadata.get("num_samples") if isinstance(metadata, Metadata) else None
        if isinstance(count, bool) or not isinstance(count, int):
            return "num_samples is not an integer"
        if not 1 <= count <= self.config.max_samples:
            return f"num_samples is outside 1 .. {self.config.max_samples} (max_samples)"
        return None

    def _refusal(self, peer: PeerId, reason: str) -> ContributionRefused:
        return ContributionRefused(component=self.TYPE_NAME, peer=str(peer), reason=reason)


def _version(value: Value) -> int | None:
    single = isinstance(value, np.ndarray) and value.dtype == np.int64 and value.shape == ()
    return int(np.asarray(value)) if single else None
