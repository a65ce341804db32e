"""Peer selectors that learn from answers: by numbers of examples, and Oort.

Rule: what peers say of themselves counts within bounds that are relative to what the others say,
and halves with each answer that is missing; times are measured by this node. So a liar is chosen no
more often than the bounds allow, and one that does not answer fades.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, Final

from bbnode.components.contracts import OpContext
from bbnode.components.registry import register_component
from bbnode.components.selectors.turns import forget_absent, uniform
from bbnode.components.selectors.views import ConnectedView
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Composite, Metadata, PeerIdVec, ResponseBatch, Value

# Misses in a row that count: beyond, a peer is as rare a guest as it gets.
_MAX_MISSES: Final = 16
_NS_PER_S: Final = 1_000_000_000
_MAX_UTILITY: Final = 1e30  # so that sums stay finite
_LEAST_WEIGHT: Final = 1e-12  # so that who has no utility at all can be drawn, if no one else is


def told(answer: Value) -> Metadata | None:
    """Return the Metadata that an answer is, or has as one of its parts; None where it has none."""
    parts = answer if isinstance(answer, Composite) else (answer,)
    return next((part for part in parts if isinstance(part, Metadata)), None)


def number_told(answer: Value, name: str) -> float | None:
    """Return a finite number of at least 0 that an answer tells; None where it tells none."""
    said = told(answer)
    value = None if said is None else said.get(name)
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        return None
    return float(value)  # type: ignore[arg-type]


def weighted_draw(weights: Mapping[PeerId, float], n: int, seed: int, counter: int) -> list[PeerId]:
    """Return `n` different peers, drawn one after the other in proportion to their weights.

    By the keys of Efraimidis and Spirakis (2006, doi:10.1016/j.ipl.2005.11.003).
    """
    keys = {
        peer: -math.log(uniform(seed, counter, peer.to_bytes())) / max(weight, _LEAST_WEIGHT)
        for peer, weight in weights.items()
    }
    return sorted(keys, key=lambda peer: (keys[peer], peer))[:n]


def median(values: Sequence[float]) -> float:
    """Return the lower median."""
    return sorted(values)[(len(values) - 1) // 2]


@dataclass(frozen=True, kw_only=True)
class ByDataSizeConfig:
    """Settings of `ByDataSize`.

    Attributes:
        max_ratio: the most examples that count, as a multiple of the median of what peers told.
        max_samples: the same, in examples.
        min_peers: peers that there have to be for a draw; with fewer it fails.
        seed: of the draws.
    """

    max_ratio: float = 10.0
    max_samples: int = 1_000_000
    min_peers: int = 1
    seed: int = 0


@dataclass(slots=True)
class _Size:
    samples: int = 0
    misses: int = 0


@register_component
class ByDataSize(ConnectedView):
    """Draws connected peers in proportion to their numbers of examples, without replacement.

    `observed` takes the numbers from `num_samples` of the answers; a peer that has not told any
    counts as the median of those that have. A number counts up to `max_ratio` medians, and half for
    each answer in a row that is missing or tells no number.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.ByDataSize"
    Config: ClassVar[type] = ByDataSizeConfig
    observes: ClassVar[str] = "metadata"

    def __init__(self, config: ByDataSizeConfig) -> None:
        super().__init__(config)
        self.require(1 <= config.max_ratio < math.inf, "max_ratio has to be a number of at least 1")
        self.require(config.max_samples >= 1, "max_samples has to be at least 1")
        self._sizes: dict[PeerId, _Size] = {}

    def observed(self, ctx: OpContext, responses: ResponseBatch) -> None:
        """Take the numbers of examples that answers tell."""
        for peer, answer in responses.responses:
            said, known = number_told(answer, "num_samples"), self._sizes.setdefault(peer, _Size())
            if said is None or said < 1:
                known.misses = min(known.misses + 1, _MAX_MISSES)
            else:
                known.samples, known.misses = int(min(said, self.config.max_samples)), 0
        for peer in responses.missing:
            known = self._sizes.setdefault(peer, _Size())
            known.misses = min(known.misses + 1, _MAX_MISSES)

    def drawn(self, ctx: OpContext, peers: Sequence[PeerId], n: int) -> PeerIdVec:
        forget_absent(self._sizes, peers)
        return self.counted(weighted_draw(self.weights(peers), n, self._seed, self._draws))

    def weights(self, candidates: Sequence[PeerId]) -> dict[PeerId, float]:
        """Return by how much each candidate counts, in examples."""
        rows = {peer: self._sizes.get(peer, _Size()) for peer in candidates}
        known = [row.samples for row in rows.values() if row.samples]
        usual = median(known) if known else 1
        return {
            peer: min(row.samples or usual, usual * self.config.max_ratio) * 0.5**row.misses
            for peer, row in rows.items()
        }

    def state(self) -> dict[str, Any]:
        return {"sizes": [[p.to_bytes(), *astuple(row)] for p, row in self._sizes.items()]}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        self._sizes = {
            PeerId.from_bytes(raw): _Size(int(samples), min(int(misses), _MAX_MISSES))
            for raw, samples, misses in saved["sizes"]
        }


@dataclass(frozen=True, kw_only=True)
class OortConfig:
    """Settings of `Oort`; the defaults are the paper's, where it has some.

    Attributes:
        exploration: part of a cohort that has not been heard of, in the first draw.
        exploration_decay: by which it is multiplied in each draw.
        min_exploration: below which it does not go.
        cut_off: part of the utility of the last peer that would be taken, from which on peers are
            in the draw.
        penalty: the exponent alpha of the penalty of slow peers; 0: time does not count.
        window: draws that the pacer compares.
        pace: percentile of peers' times that is the preferred time of a round at first.
        pacer_step: percentiles by which the pacer raises it.
        clip: percentile of utilities above which they count as that one.
        max_ratio: the most that a utility counts, as a multiple of the median.
        max_samples: the most examples that count.
        max_turns: answers after which a peer is not preferred any more; 0: none.
        min_peers: peers that there have to be for a draw; with fewer it fails.
        seed: of the draws.
    """

    exploration: float = 0.9
    exploration_decay: float = 0.98
    min_exploration: float = 0.2
    cut_off: float = 0.95
    penalty: float = 2.0
    window: int = 20
    pace: float = 30.0
    pacer_step: float = 5.0
    clip: float = 95.0
    max_ratio: float = 10.0
    max_samples: int = 1_000_000
    max_turns: int = 0
    min_peers: int = 1
    seed: int = 0


@dataclass(slots=True)
class _Arm:
    """A peer: its statistical utility, time, last draw, answers, and misses in a row."""

    utility: float = 0.0
    took_ns: int = 0
    heard_at: int = 0  # the number of the draw after which it last answered, from 1 on; 0: never
    turns: int = 0
    misses: int = 0


@register_component
class Oort(ConnectedView):
    """Guided selection of clients (Lai et al., 2021, arXiv:2010.06081, algorithm 1).

    Of a cohort a part, which decays, explores peers that were not heard of; the rest is drawn, in
    proportion to utility, among those near the best. A peer's utility is n L, of its `num_samples`
    n and its mean `loss` L of the last answer (the paper has n times the root of the mean square
    of its losses, which peers do not tell), clipped and scaled to 0 .. 1; plus sqrt(0.1 ln R / l)
    for a peer that was last heard of in draw l of R; times (T / t)^`penalty` where its time t,
    which this node measured, is above the preferred time T. The pacer raises T when the utility of
    the last `window` draws is below that of the `window` before.

    Answers without both numbers, or with NaN, infinities or negative ones, count as missing.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.Oort"
    Config: ClassVar[type] = OortConfig
    observes: ClassVar[str] = "metadata"

    def __init__(self, config: OortConfig) -> None:
        super().__init__(config)
        for name in ("exploration", "exploration_decay", "min_exploration", "cut_off"):
            self.require(0 <= getattr(config, name) <= 1, f"{name} has to be in 0 .. 1")
        for name in ("pace", "pacer_step", "clip"):
            self.require(0 <= getattr(config, name) <= 100, f"{name} has to be in 0 .. 100")
        self.require(0 <= config.penalty < math.inf, "penalty must not be negative")
        self.require(1 <= config.window <= 10_000, "window has to be in 1 .. 10000")
        self.require(1 <= config.max_ratio < math.inf, "max_ratio has to be a number of at least 1")
        self.require(config.max_samples >= 1, "max_samples has to be at least 1")
        self.require(config.max_turns >= 0, "max_turns must not be negative")
        self._arms: dict[PeerId, _Arm] = {}
        self._exploration, self._pace = float(config.exploration), float(config.pace)
        # The utility that each of the last draws gave, the newest last.
        self._gained: deque[float] = deque(maxlen=2 * config.window)
        self._since_pace = 0  # draws that were heard of since the pacer last looked

    def observed(self, ctx: OpContext, responses: ResponseBatch) -> None:
        """Take losses, numbers of examples and times of the answers to the last draw."""
        took_ns = dict(responses.took_ns)
        slowest = max(took_ns.values(), default=0)
        gained = 0.0
        for peer in (*responses.peers, *responses.missing):
            self._arms.setdefault(peer, _Arm())
        for peer, answer in responses.responses:
            arm, loss = self._arms[peer], number_told(answer, "loss")
            samples = number_told(answer, "num_samples")
            if loss is None or samples is None or samples < 1:
                arm.misses = min(arm.misses + 1, _MAX_MISSES)
                continue
            arm.utility = min(min(samples, self.config.max_samples) * loss, _MAX_UTILITY)
            arm.took_ns, arm.heard_at = took_ns.get(peer, arm.took_ns), max(1, self._draws)
            arm.turns, arm.misses = arm.turns + 1, 0
        limit = self._utility_limit([arm.utility for arm in self._arms.values() if arm.heard_at])
        for peer in responses.peers:
            gained += min(self._arms[peer].utility, limit)
        for peer in responses.missing:
            arm = self._arms[peer]
            arm.misses = min(arm.misses + 1, _MAX_MISSES)
            arm.took_ns = max(arm.took_ns, slowest)  # it took longer than everybody
        self._gained.append(gained)
        self._keep_pace()

    def drawn(self, ctx: OpContext, peers: Sequence[PeerId], n: int) -> PeerIdVec:
        forget_absent(self._arms, peers)
        n = min(n, len(peers))
        arms = {peer: self._arms.get(peer, _Arm()) for peer in peers}
        known = {peer: arm for peer, arm in arms.items() if arm.heard_at}
        new = {peer: 0.5**arm.misses for peer, arm in arms.items() if not arm.heard_at}
        most, share = self.config.max_turns, self._exploration
        tired = {peer for peer, arm in known.items() if most and arm.turns >= most}
        fresh = {peer: arm for peer, arm in known.items() if peer not in tired}

        # Who never answers counts half as much each time, so that such peers do not fill the part.
        there = sum(new.values())
        chance = uniform(self._seed, self._draws, b"exploring")
        most_new = min(len(new), int(there) + (chance < there - int(there)))
        exploring = min(most_new, max(round(share * n), n - len(fresh)))
        exploiting = min(len(fresh), n - exploring)
        chosen = self._best(fresh, exploiting) + weighted_draw(
            new, exploring, self._seed, self._draws
        )
        # Where both are too few: whoever is left, those that had fewer turns first.
        left = sorted(set(peers) - set(chosen), key=lambda peer: (arms[peer].turns, peer))
        self._exploration = max(self.config.min_exploration, share * self.config.exploration_decay)
        return self.counted(chosen + left[: n - len(chosen)])

    def scores(self, arms: Mapping[PeerId, _Arm]) -> dict[PeerId, float]:
        """Return the utility of peers that were heard of, as the next draw has it."""
        if not arms:
            return {}
        limit = self._utility_limit([arm.utility for arm in arms.values()])
        clipped = {peer: min(arm.utility, limit) for peer, arm in arms.items()}
        least, span = min(clipped.values()), max(clipped.values()) - min(clipped.values())
        preferred = percentile([arm.took_ns for arm in arms.values()], self._pace)
        scores = {}
        for peer, arm in arms.items():
            score = (clipped[peer] - least) / span if span > 0 else 1.0
            score += math.sqrt(0.1 * math.log(max(1, self._draws)) / arm.heard_at)
            if arm.took_ns > preferred:
                score *= (preferred / arm.took_ns) ** self.config.penalty
            scores[peer] = score * 0.5**arm.misses
        return scores

    def utilities(self) -> dict[PeerId, float]:
        """Return the utility of all peers that were heard of, as the next draw has it."""
        return self.scores({peer: arm for peer, arm in self._arms.items() if arm.heard_at})

    def _best(self, arms: Mapping[PeerId, _Arm], n: int) -> list[PeerId]:
        if n < 1:
            return []
        scores = self.scores(arms)
        threshold = self.config.cut_off * sorted(scores.values(), reverse=True)[n - 1]
        near = {peer: score for peer, score in scores.items() if score >= threshold}
        return weighted_draw(near, n, self._seed, self._draws)

    def _utility_limit(self, utilities: Sequence[float]) -> float:
        if not utilities:
            return 0.0
        # The percentile is rounded down, so that of a few peers the highest one is always cut.
        usual = median(utilities)
        most = percentile(utilities, self.config.clip)
        return min(most, usual * self.config.max_ratio) if usual > 0 else most

    def _keep_pace(self) -> None:
        window = self.config.window
        self._since_pace += 1
        if len(self._gained) < 2 * window or self._since_pace < window:
            return
        self._since_pace = 0
        gained = list(self._gained)
        if sum(gained[:window]) > sum(gained[window:]):
            self._pace = min(100.0, self._pace + self.config.pacer_step)

    def state(self) -> dict[str, Any]:
        return {
            "arms": [[peer.to_bytes(), *astuple(arm)] for peer, arm in self._arms.items()],
            "learned": [self._exploration, self._pace, list(self._gained), self._since_pace],
        }

    def load_state(self, saved: Mapping[str, Any]) -> None:
        arms = {}
        for raw, utility, took_ns, heard_at, turns, misses in saved["arms"]:
            if not 0 <= utility < math.inf or min(took_ns, heard_at, turns, misses) < 0:
                raise ValueError(f"a peer's numbers {utility!r:.20}, {took_ns!r:.20}")
            arms[PeerId.from_bytes(raw)] = _Arm(
                float(utility), int(took_ns), int(heard_at), int(turns), min(misses, _MAX_MISSES)
            )
        exploration, pace, gained, since = saved["learned"]
        self._gained.clear()
        self._gained.extend(map(float, gained))
        self._arms, self._since_pace = arms, int(since)
        self._exploration, self._pace = float(exploration), float(pace)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value at a percentile, the lower one between two; 0 of none."""
    return sorted(values)[int((len(values) - 1) * percent / 100)] if values else 0.0
