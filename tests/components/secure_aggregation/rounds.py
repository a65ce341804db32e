"""Rounds of secure aggregation without a network: parties, and who drops out at which step."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bbnode.access.keys import SigningKey
from bbnode.access.secrets import NodeSecrets
from bbnode.components.secure_aggregation.client_round import CLIENT_TYPE, ClientRound
from bbnode.components.secure_aggregation.plan import RoundPlan, SecAggConfig
from bbnode.components.secure_aggregation.server_round import ServerRound
from bbnode.ir.peer import PeerId

ROUND = b"round of a test."
SERVER = PeerId.from_seed("server")


def drawing(seed: object) -> Callable[[int], bytes]:
    calls = itertools.count()
    return lambda n: hashlib.shake_256(f"{seed}/{next(calls)}".encode()).digest(n)


def key(number: int) -> SigningKey:
    return SigningKey.from_seed(hashlib.sha256(f"client {number}".encode()).digest())


@dataclass
class Party:
    number: int
    plan: RoundPlan
    server: PeerId = SERVER
    round_id: bytes = ROUND
    draw: Any = None

    def __post_init__(self) -> None:
        self.secrets = NodeSecrets(key(self.number))
        self.peer = self.secrets.key.peer_id
        self.draw = drawing(self.number)
        self.round = ClientRound(
            self.plan, me=self.peer, server=self.server, round_id=self.round_id
        )

    def sign(self, body: bytes) -> bytes:
        return self.secrets.sign(CLIENT_TYPE, body)


@dataclass
class Play:
    """One round; `gone[step]` are numbers of clients that are gone from that step on."""

    plan: RoundPlan
    vectors: dict[int, np.ndarray]
    weights: dict[int, int]
    gone: dict[str, Iterable[int]] = field(default_factory=dict)
    server_id: PeerId = SERVER

    def __post_init__(self) -> None:
        self.parties = {n: Party(n, self.plan, self.server_id) for n in sorted(self.vectors)}
        self.server = ServerRound(self.plan, me=self.server_id, round_id=ROUND)
        self.alive = set(self.parties)
        self.refused: dict[str, dict[PeerId, str]] = {}
        self.masked: dict[PeerId, np.ndarray] = {}
        self.revealed: dict[PeerId, bytes] = {}

    def _answers(self, step: str, act: Callable[[Party], Any]) -> dict[PeerId, Any]:
        self.alive -= set(self.gone.get(step, ()))
        asked = [self.parties[n] for n in sorted(self.alive)]
        return {party.peer: act(party) for party in asked if self.server.has(party.peer)}

    def keys(self) -> bytes:
        answers = self._answers("keys", lambda p: p.round.advertise(p.draw, p.sign))
        listing, self.refused["keys"] = self.server.take_keys(answers.items())
        return listing

    def letters(self, listing: bytes) -> None:
        answers = self._answers("letters", lambda p: p.round.share(listing, p.draw))
        self.refused["letters"] = self.server.take_letters(answers.items())

    def vectors_in(self) -> bytes:
        def act(p: Party) -> np.ndarray:
            mail = self.server.mail(p.peer)
            words = p.round.mask(mail, self.vectors[p.number], self.weights[p.number], p.draw)
            return words.view(np.uint8)

        self.masked = self._answers("vectors", act)
        listing, self.refused["vectors"] = self.server.take_vectors(self.masked.items())
        return listing

    def signatures(self, listing: bytes) -> bytes:
        answers = self._answers("signatures", lambda p: p.round.confirm(listing, p.sign))
        signatures, self.refused["signatures"] = self.server.take_signatures(answers.items())
        return signatures

    def unmask(self, signatures: bytes) -> tuple[np.ndarray, int]:
        self.revealed = self._answers("shares", lambda p: p.round.reveal(signatures))
        mean, total, self.refused["shares"] = self.server.unmask(self.revealed.items())
        return mean, total

    def run(self) -> tuple[np.ndarray, int]:
        self.letters(self.keys())
        return self.unmask(self.signatures(self.vectors_in()))

    def number_of(self, peer: PeerId) -> int:
        return next(n for n, p in self.parties.items() if p.peer == peer)


def play(count: int, size: int = 50, seed: int = 0, gone: Any = None, **settings: Any) -> Play:
    random = np.random.default_rng(seed)
    settings = {"equal_weights": False, **settings}
    config = SecAggConfig(size=size, clients=count, clip=2.0, max_samples=100, **settings)
    return Play(
        RoundPlan.of(config),
        {n: random.normal(0, 1, size).astype(np.float32) for n in range(count)},
        {n: int(random.integers(1, 100)) for n in range(count)},
        gone or {},
    )


def quantised_mean(p: Play, numbers: Iterable[int]) -> tuple[np.ndarray, int]:
    """The mean that numpy computes of the quantised vectors of these clients."""
    ring = p.plan.ring
    total = sum(p.weights[n] for n in numbers)
    sums = np.zeros(p.plan.config.size, np.int64)
    for n in numbers:
        clipped = np.clip(p.vectors[n].astype(np.float64), -ring.clip, ring.clip)
        sums += p.weights[n] * np.rint(clipped * (ring.levels / ring.clip)).astype(np.int64)
    return (sums * (ring.clip / ring.levels / total)).astype(np.float32), total


def group_means(p: Play) -> list[np.ndarray]:
    """The means that numpy computes of the groups that were not given up."""
    return [
        quantised_mean(p, [p.number_of(peer) for peer in p.server._left(place)])[0]
        for place in range(p.plan.config.groups)
        if place not in p.server.lost
    ]
