"""`PrivateSum`: a server's component that charges a round, and releases its noisy sum.

Rule: a client is untrusted, so that each update is clipped here again; the number that a sum is
divided by is fixed, so that who answers does not change it. Sums are of whole steps, and the noise
is discrete Gaussian: what floats have below their last digit tells nothing (Mironov, 2012,
doi:10.1145/2382196.2382264).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import msgpack
import numpy as np
import numpy.typing as npt

from bbnode.components.contracts import OpContext, ProtocolComponent, offload
from bbnode.components.libraries import DP_ACCOUNTING, OptionalLibrary
from bbnode.components.privacy.accounting import (
    ACCOUNTANTS,
    PrivacyLedger,
    charges_from,
    epsilon_of,
    require_library,
    rows_of,
)
from bbnode.components.privacy.errors import BudgetSpent, NoSuchRelease
from bbnode.components.registry import register_component
from bbnode.components.secure_aggregation import noise as discrete
from bbnode.components.settings import path_setting
from bbnode.ir.opset import protocol_op
from bbnode.ir.peer import PeerId
from bbnode.ir.texts import listed
from bbnode.ir.values import Metadata, PeerIdVec, ResponseBatch, Value

PROTOCOL: Final = "privacy"
# A deviation in steps: the finer, the nearer a sum of steps is to that of the updates.
DEVIATION_STEPS: Final = 1 << 15
LEAST_NOISE: Final = 1e-6  # so that sums of steps fit into 64 bits
# What rounding may make longer is less than this makes shorter.
_WITHIN: Final = 1 - 2.0**-40
# Rounds that were charged and not released; beyond, the oldest one can't be any more.
MAX_ROUNDS: Final = 64
# Refusals that the metadata of a result spells out: it is shown to people.
_MOST_TOLD: Final = 8
# Bounds of an adaptive norm, so that no share of clients makes it 0 or infinite.
_LEAST_NORM, _MOST_NORM = 1e-12, 1e12


_op = partial(protocol_op, PROTOCOL)

_op("Begin", "peers:peers", "kept:bool",
    doc="Charge a round, or refuse it; `kept` says of each peer if it is asked.")  # fmt: skip
_op("Norm", "", "norm:float", doc="The L2 norm that this round clips to, [1].")
_op("Release", "responses:responses", "mean:float stats:metadata",
    doc="The noisy sum of clipped updates over a fixed number.")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PrivateSumConfig:
    """Settings of `PrivateSum`.

    Attributes:
        size: numbers of an update.
        clients: what a sum is divided by: the clients of a round, or how many are expected.
        clip: the largest L2 norm of an update; with `quantile` the first one.
        noise: the noise multiplier: the deviation of the sum's noise over the clip.
        epsilon: the budget; a round that would spend more does not begin.
        delta: of the budget, from 0 to below 1; below 1 over the number of clients is usual.
        population: clients that there are, of whom each is asked with the chance
            clients / population (Poisson sampling, drawn in secret); 0: those that were chosen are
            asked, and nothing is claimed for their choice.
        accountant: "rdp" or "pld", which is closer and slower.
        quantile: the part of updates that a norm shall leave as they are, from 0 to below 1; the
            norm then follows it. 0: the norm stays.
        clip_rate: how far a norm goes in a round.
        count_noise: the deviation of the noise of the number of unclipped updates, in clients; 0:
            clients / 20.
        ledger: a file that has what was charged before a round begins; else snapshots have it.
    """

    size: int
    clients: int
    noise: float
    epsilon: float
    delta: float
    clip: float = 1.0
    population: int = 0
    accountant: str = "rdp"
    quantile: float = 0.0
    clip_rate: float = 0.2
    count_noise: float = 0.0
    ledger: str = path_setting("")


@register_component
class PrivateSum(ProtocolComponent):
    """Sums of clipped updates with Gaussian noise (McMahan et al., 2018, arXiv:1710.06963).

    With `quantile` the norm follows a quantile of the updates' norms (Andrew et al., 2021,
    arXiv:1905.03871, algorithm 1).
    """

    TYPE_NAME: ClassVar[str] = "bbnode.PrivateSum"
    libraries: ClassVar[tuple[OptionalLibrary, ...]] = (DP_ACCOUNTING,)
    Config: ClassVar[type] = PrivateSumConfig
    config: PrivateSumConfig

    def __init__(self, config: PrivateSumConfig) -> None:
        super().__init__(config)
        c = config
        self.require(c.size >= 1 and c.clients >= 1, "size and clients have to be 1 or more")
        positive = (c.noise, c.epsilon, c.clip, c.clip_rate)
        self.require(
            all(0 < each < math.inf for each in positive),
            "noise, epsilon, clip and clip_rate have to be numbers above 0",
        )
        self.require(
            _LEAST_NORM <= c.clip <= _MOST_NORM,
            f"clip {c.clip} is not between {_LEAST_NORM:g} and {_MOST_NORM:g}",
        )
        self.require(c.noise >= LEAST_NOISE, f"noise {c.noise} is below {LEAST_NOISE:g}")
        self.require(0 < c.delta < 1, f"delta {c.delta} is not between 0 and 1")
        self.require(
            c.population == 0 or c.population >= c.clients,
            f"population {c.population} is neither 0 nor at least clients={c.clients}",
        )
        self.require(c.accountant in ACCOUNTANTS, f"accountant {c.accountant!r} is not known")
        self.require(0 <= c.quantile < 1, f"quantile {c.quantile} is not from 0 to below 1")
        self.require(0 <= c.count_noise < math.inf, f"count_noise {c.count_noise} is below 0")
        self.require(
            not c.quantile or 2 * self.count_deviation > c.noise,
            f"count_noise {self.count_deviation:g} leaves no noise to the updates: it has to be "
            f"above noise / 2 = {c.noise / 2:g}",
        )
        require_library()  # a node without it does not start, rather than fail its rounds
        self._ledger = PrivacyLedger(c.ledger)
        self._norm = float(c.clip)
        self._rounds: dict[int, float] = {}  # execution -> the norm of its round

    @property
    def rate(self) -> float:
        """The chance of a client to be asked that is claimed; 1 where none is."""
        return self.config.clients / self.config.population if self.config.population else 1.0

    @property
    def count_deviation(self) -> float:
        """The deviation of the noise of the number of unclipped updates, in clients."""
        return self.config.count_noise or self.config.clients / 20

    @property
    def update_noise(self) -> float:
        """The noise multiplier of the updates' own sum.

        It is higher than `noise` where the number of unclipped ones is released too, so that both
        together cost what `noise` says (Andrew et al., theorem 1).
        """
        z = float(self.config.noise)
        if not self.config.quantile:
            return z
        return float((z**-2 - (2 * self.count_deviation) ** -2) ** -0.5)

    @offload
    def begin(self, ctx: OpContext, peers: PeerIdVec) -> Value:
        """Charge a round of this execution; return which of the peers are asked, bool [N].

        Raises BudgetSpent, before anybody is asked, LedgerUnavailable.
        """
        c = self.config
        noise = float(c.noise)
        after = epsilon_of(self._ledger.charged(self.rate, noise), c.delta, c.accountant)
        if not after <= c.epsilon:
            raise BudgetSpent(
                f"{self.TYPE_NAME}: a further round would make epsilon {after:.4g} at delta "
                f"{c.delta:g}, beyond the budget of {c.epsilon:g}; the model so far is final"
            )
        if not c.population and len(peers) > c.clients:
            raise NoSuchRelease(
                f"{self.TYPE_NAME}: {len(peers)} peers for a round of {c.clients} clients"
            )
        self._ledger.charge(self.rate, noise)
        while len(self._rounds) >= MAX_ROUNDS:
            del self._rounds[next(iter(self._rounds))]
        self._rounds[ctx.execution] = self._norm
        if self.rate >= 1:
            return np.ones(len(peers), bool)
        draws = np.frombuffer(ctx.random_bytes(8 * len(peers)), "<u8")
        return draws < np.uint64(math.floor(self.rate * 2.0**64))

    @offload(reads_only=True)
    def norm(self, ctx: OpContext) -> Value:
        """Return the L2 norm that this execution's round clips to, [1] float32."""
        return np.array([self._of(ctx)], np.float32)

    @offload
    def release(self, ctx: OpContext, responses: ResponseBatch) -> tuple[Value, Metadata]:
        """Return the noisy mean, [size] float32, and what is told of it.

        An answer is a composite (update, …); with `quantile` the update has one more number: 1
        where it was not clipped, else 0. Told are `contributors`, `refused`, `num_samples` (the
        contributors), `epsilon` spent so far, at `delta`, `rounds` charged, `clip`, and the
        deviation of the noise of the mean, `noise_deviation`. If some were refused, `refused_why`
        names them. Raises NoSuchRelease.
        """
        c, norm = self.config, self._of(ctx)
        del self._rounds[ctx.execution]  # once: a second sum would have other noise
        step = norm * self.update_noise / DEVIATION_STEPS
        count_step = self.count_deviation / DEVIATION_STEPS
        total, counted = np.zeros(c.size, np.int64), 0
        refused: dict[PeerId, str] = {}
        taken: set[PeerId] = set()
        for peer, answer in responses.responses:
            update = answer[0] if isinstance(answer, tuple) and answer else answer
            reason = self._reason(update)
            if peer in taken:
                reason = "it has answered in this round already; its first answer counts"
            if reason:
                refused[peer] = reason
                continue
            taken.add(peer)
            wide = np.asarray(update, np.float64)
            # Towards 0, so that no rounding makes an update longer than the norm.
            total += (discrete.clipped(wide[: c.size], norm * _WITHIN) / step).astype(np.int64)
            if c.quantile:
                counted += math.trunc((float(wide[-1] > 0.5) - 0.5) / count_step)
        total += discrete.drawn(c.size, DEVIATION_STEPS, ctx.random_bytes(discrete.KEY_BYTES))
        mean = (total * (step / c.clients)).astype(np.float32)
        mean.flags.writeable = False
        told: dict[str, int | float | str] = {
            "num_samples": len(taken),
            "contributors": len(taken),
            "refused": len(refused),
            "epsilon": epsilon_of(self._ledger.charges, c.delta, c.accountant),
            "delta": float(c.delta),
            "rounds": sum(self._ledger.charges.values()),
            "clip": norm,
            "noise_deviation": norm * self.update_noise / c.clients,
        }
        if c.quantile:
            key = ctx.random_bytes(discrete.KEY_BYTES)
            counted += int(discrete.drawn(1, DEVIATION_STEPS, key)[0])
            share = counted * count_step / c.clients + 0.5
            told["unclipped"] = share
            told["next_clip"] = self._follow(share)
        if refused:
            rows = [f"{peer}: {refused[peer]}" for peer in sorted(refused)]
            told["refused_why"] = listed(rows, _MOST_TOLD)
        return mean, Metadata(told)

    def serialize(self) -> bytes:
        """Return what was charged, the norm, and the rounds under way."""
        state = [rows_of(self._ledger.charges), self._norm, list(self._rounds.items())]
        return bytes(msgpack.packb(state))

    def restore(self, data: bytes) -> None:
        """Load a saved state; ComponentError for bytes of anything else."""
        if not data:
            return
        with self.restoring():
            rows, norm, rounds = msgpack.unpackb(data)
            charges = charges_from(rows)
            held = {int(execution): _norm_of(each) for execution, each in rounds}
            norm = _norm_of(norm)
        self._ledger.take_over(charges)
        self._rounds = held
        self._norm = norm if self.config.quantile else float(self.config.clip)

    def _follow(self, share: float) -> float:
        """Move the norm by the noisy share of unclipped updates; return it."""
        moved = self._norm * math.exp(-self.config.clip_rate * (share - self.config.quantile))
        self._norm = min(max(moved, _LEAST_NORM), _MOST_NORM)
        return self._norm

    def _of(self, ctx: OpContext) -> float:
        found = self._rounds.get(ctx.execution)
        if found is None:
            raise NoSuchRelease(
                f"{self.TYPE_NAME}: this execution has no round to release: none was begun, it was "
                f"released already, or {MAX_ROUNDS} others were begun after it"
            )
        return found

    def _reason(self, update: Value) -> str:
        """Return why an update can't be counted; "" where it can."""
        size = self.config.size + bool(self.config.quantile)
        if not isinstance(update, np.ndarray) or update.dtype != np.float32:
            kind = update.dtype if isinstance(update, np.ndarray) else type(update).__name__
            return f"its update is {kind}, not float32"
        if update.shape != (size,):
            return f"its update has the shape {list(update.shape)}, not {[size]}"
        return "" if _finite(update) else "its update holds NaN or infinity"


def _finite(update: npt.NDArray[Any]) -> bool:
    return bool(np.isfinite(update).all())


def _norm_of(value: Any) -> float:
    if not _LEAST_NORM <= float(value) <= _MOST_NORM:
        raise ValueError(f"{value!r:.30} is no norm")
    return float(value)
