"""The agreement of all parties of a round, which the program that they run says."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import msgpack

from bbnode.components.errors import InvalidComponentConfig
from bbnode.components.secure_aggregation import noise
from bbnode.components.secure_aggregation.errors import RingTooNarrow
from bbnode.components.secure_aggregation.graph import share_threshold
from bbnode.components.secure_aggregation.ring import MOST_LEVELS, Ring
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId

# Of the messages and of what is signed: peers of another version have another digest.
_VERSION: Final = 2
# Clients of one round: the keys of all travel in one value.
MAX_CLIENTS: Final = 4096


@dataclass(frozen=True, kw_only=True)
class SecAggConfig:
    """Settings of `SecAggClient` and `SecAggServer`, the same on all peers of a program.

    Attributes:
        size: numbers in a client's vector.
        clients: that a round asks, at most.
        corrupt: part of the clients, from 0 to below 1, that may collude with the server.
        threshold: clients that have to stay to the end, of each group. 0: the fewest that are safe,
            more than half of the group's clients and of all corrupt ones together.
        groups: into which the clients of a round are dealt; each has a sum of its own, and the
            result is the median of the groups' means in each number. So clients that lie spoil
            their groups alone, and the server learns as many sums. 1, or 3 and more.
        neighbours: clients with which each shares masks and secrets, an even number; 0: all.
        clip: the largest absolute value of a number; larger ones count as this.
        levels: steps from 0 to `clip`; 0: as many as words of 32 bits leave, or words of 64 where
            these are few.
        max_samples: the largest weight of an honest client, in examples; more count as this.
        equal_weights: every client weighs 1. Otherwise a client weighs the examples that it claims.
        norm: the largest L2 norm of a client's vector; longer ones are scaled down. 0: any.
        client_noise: deviation of the noise in the sum, in units of `norm`, that the fewest honest
            clients who stay add together; it needs `norm` and `equal_weights`. 0: none.
        members: PeerIds, as text, of which alone clients believe keys; empty: of all peers.
        pardoned: PeerIds, as text, that the server asks again although they lied about shares.
        max_rounds: rounds under way at once; beyond, the oldest one ends.
    """

    size: int = 1
    clients: int = 4
    corrupt: float = 1 / 3
    threshold: int = 0
    groups: int = 1
    neighbours: int = 0
    clip: float = 1.0
    levels: int = 0
    max_samples: int = 10_000
    equal_weights: bool = True
    norm: float = 0.0
    client_noise: float = 0.0
    members: tuple[str, ...] = ()
    pardoned: tuple[str, ...] = ()
    max_rounds: int = 4


@dataclass(frozen=True)
class RoundPlan:
    """A configuration, checked, with all that follows from it.

    Attributes:
        share_threshold: of a client's shares, that give its secret back.
        corrupt: clients that may collude with the server, all of them in one group perhaps.
        threshold: of each group.
        deviation: of each client's noise, in steps; 0: none.
    """

    config: SecAggConfig
    ring: Ring
    threshold: int
    share_threshold: int
    corrupt: int
    deviation: float
    members: frozenset[PeerId]

    @classmethod
    def of(cls, config: SecAggConfig) -> RoundPlan:
        """Check a configuration. Raises InvalidComponentConfig and RingTooNarrow."""
        clients, degree = config.clients, config.neighbours
        _require(2 <= clients <= MAX_CLIENTS, f"clients={clients} is outside 2 .. {MAX_CLIENTS}")
        _require(config.size >= 1, f"size={config.size} is not 1 or more")
        _require(config.max_rounds >= 1, f"max_rounds={config.max_rounds} is not 1 or more")
        _require(config.max_samples >= 1, f"max_samples={config.max_samples} is not 1 or more")
        _require(config.levels >= 0, f"levels={config.levels} is not 0 or more")
        usable = math.isfinite(config.clip) and config.clip > 1e-30
        _require(usable, f"clip={config.clip} is not a number above 0")
        _require(0 <= config.corrupt < 1, f"corrupt={config.corrupt} is not from 0 to below 1")
        corrupt = math.floor(config.corrupt * clients)
        groups, size = config.groups, clients
        if groups != 1:
            _require(3 <= groups <= clients, f"groups={groups} is not 1, nor 3 to {clients}")
            _require(config.equal_weights and not degree, "groups go with equal_weights, and all as"
                     " neighbours (0)")  # fmt: skip
            size = -(-clients // groups)
        least = (size + corrupt) // 2 + 1
        threshold = config.threshold or least
        _require(
            least <= threshold <= clients // groups,
            f"threshold={threshold} is outside {least} .. {clients // groups}: with {corrupt} "
            f"corrupt clients in a group of {size}, fewer than {least} could be shown two lists"
            + ("; take fewer groups or a smaller corrupt" if groups > 1 else ""),
        )
        shares: int | None = threshold
        if degree:
            _require(
                degree % 2 == 0 and 2 <= degree < clients - 1,
                f"neighbours={degree} is no even number from 2 to below {clients - 1}; 0 is all",
            )
            shares = share_threshold(clients, corrupt, degree)
            _require(
                shares is not None and shares <= degree,
                f"neighbours={degree} of {clients} clients, {corrupt} of them corrupt, are not "
                "safe: take as many as bbnode.components.neighbours_for says",
            )
        members = peers_of("members", config.members)
        for name in ("norm", "client_noise"):
            given = getattr(config, name)
            _require(0 <= given < math.inf, f"{name}={given} is not 0 or a number above")
        with_noise = config.client_noise > 0
        _require(
            not with_noise or (config.norm > 0 and config.equal_weights),
            f"client_noise={config.client_noise} needs a norm, and clients of equal weight",
        )
        ring, deviation = _ring(config, size, threshold - corrupt)
        return cls(config, ring, threshold, shares or threshold, corrupt, deviation, members)

    @property
    def needed_groups(self) -> int:
        """Groups that have to stay: more than half."""
        return self.config.groups // 2 + 1

    @property
    def quorum(self) -> int:
        """Clients without which no round can end well."""
        return self.threshold * self.needed_groups

    def rho(self, contributors: int) -> float:
        """Return how private a sum with noise is, as rho of zCDP: the corrupt add no noise."""
        r, c = self.ring, self.config
        length = noise.sensitivity(c.norm, c.size, r.levels / r.clip)
        return noise.concentrated(length, self.deviation, contributors - self.corrupt, c.size)

    @cached_property
    def digest(self) -> bytes:
        """A hash of all that has to be the same on all sides; whom a node believes is its own."""
        c, r = self.config, self.ring
        said = (
            *(_VERSION, c.size, c.clients, self.threshold, self.share_threshold, c.neighbours),
            *(r.clip, r.levels, r.max_weight, r.margin, r.bits),
            *(float(c.norm), self.deviation, c.groups),
        )
        return hashlib.sha256(msgpack.packb(said)).digest()

    def head(self, server: PeerId, round_id: bytes) -> bytes:
        """Return what every signature of a round begins with."""
        return self.digest + round_id + hashlib.sha256(server.to_bytes()).digest()


def peers_of(setting: str, texts: Sequence[str]) -> frozenset[PeerId]:
    """Return the PeerIds of a setting. Raises InvalidComponentConfig."""
    try:
        return frozenset(PeerId.parse(text) for text in texts)
    except DecodeError as error:
        raise InvalidComponentConfig(f"secure aggregation: {setting}: {error}") from error


def session(head: bytes, listing: bytes) -> bytes:
    """Return what all that follows the exchange of keys is bound to: the round and all its keys.

    Letters, masks and signatures of two clients fit together only where both have seen the same
    list of keys. Each client's own, drawn for this round, are in its list.
    """
    return head + hashlib.sha256(listing).digest()


def _ring(config: SecAggConfig, clients: int, honest: int) -> tuple[Ring, float]:
    """Return the ring of a sum of so many clients, and the deviation of each one's noise in steps.

    `honest` of them, or more, add noise.
    """
    # No number of a vector is larger than its norm.
    clip = min(config.clip, config.norm) if config.norm else config.clip
    weight = 1 if config.equal_weights else config.max_samples
    if not config.client_noise:
        found = Ring.fitting(clip=clip, levels=config.levels, max_weight=weight, clients=clients)
        return found, 0.0

    def with_noise(levels: int) -> tuple[Ring, float]:
        length = noise.sensitivity(config.norm, config.size, levels / clip)
        deviation = config.client_noise * length / math.sqrt(honest)
        if deviation > noise.MAX_DEVIATION:
            raise RingTooNarrow(
                f"noise of {deviation:.0f} steps on each client, and {noise.MAX_DEVIATION:.0f} "
                "are the most; lower the levels or client_noise"
            )
        made = Ring.fitting(
            clip=clip,
            levels=levels,
            max_weight=weight,
            clients=clients,
            margin=noise.margin(deviation),
        )
        return made, deviation

    if config.levels:
        return with_noise(config.levels)
    # As fine as the noise can be drawn and 32 bits leave; finer steps would drown in it.
    for bits in range(MOST_LEVELS.bit_length() - 1, 0, -1):
        try:
            made, deviation = with_noise(1 << bits)
        except RingTooNarrow:
            continue
        if made.bits <= 32:
            return made, deviation
    return with_noise(1)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise InvalidComponentConfig(f"secure aggregation: {problem}")
