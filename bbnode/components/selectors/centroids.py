"""`CentroidSelector`: the peers whose items are nearest to a query, by the centres that they tell.

Rule: what a peer tells decides how often it is asked, and nothing else. It is checked and bounded:
so many centres of each peer, finite, of one length. One that tells others is reported, and is
chosen as one that has told nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from bbnode.components.contracts import OpContext
from bbnode.components.errors import UnsupportedSelection
from bbnode.components.indexes.searchers import METRICS, Metric
from bbnode.components.registry import register_component
from bbnode.components.selectors.views import DrawingConfig, DrawingSelector, draw
from bbnode.ir.peer import PeerId
from bbnode.ir.values import PeerIdVec, ResponseBatch, Value

_MAX_CENTROIDS: Final = 256
_MAX_PEERS: Final = 4096  # that centres are kept of
_MAX_WIDTH: Final = 1 << 16
Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class CentroidSelectorConfig(DrawingConfig):
    """Settings of `CentroidSelector`.

    Attributes:
        metric: of the peers' indexes: "l2", "ip" or "cosine".
        max_centroids: that a peer may tell, 1 to 256; one that tells more is refused.
        max_asked: peers that are chosen for a batch of queries together, at most.
        untold: of those that have told nothing, so many are drawn besides; 0: they are not asked.
    """

    metric: Metric = "l2"
    max_centroids: int = 16
    max_asked: int = 32
    untold: int = 1


@register_component
class CentroidSelector(DrawingSelector):
    """Chooses the connected peers with a centre near a query; draws them while none is known."""

    TYPE_NAME: ClassVar[str] = "bbnode.CentroidSelector"
    Config: ClassVar[type] = CentroidSelectorConfig
    config: CentroidSelectorConfig

    def __init__(self, config: CentroidSelectorConfig) -> None:
        super().__init__(config)
        self.require(config.metric in METRICS, f"metric has to be one of {', '.join(METRICS)}")
        good = 1 <= config.max_centroids <= _MAX_CENTROIDS
        self.require(good, f"max_centroids has to be in 1 .. {_MAX_CENTROIDS}")
        self.require(config.max_asked >= 1, "max_asked has to be 1 or more")
        self.require(config.untold >= 0, "untold must not be negative")
        self.told: dict[PeerId, Rows] = {}  # of each peer, a row [items, centre …] each

    def candidates(self, ctx: OpContext) -> Sequence[PeerId]:
        return sorted(ctx.peers.connected(ctx.peer_class))

    # -- what peers tell ---------------------------------------------------------------------

    def observed(self, ctx: OpContext, responses: ResponseBatch) -> None:
        """Take the centres that peers answered, float32 [C, 1 + D], a number of items first.

        Who did not answer in time is chosen by what it told before; not so who refuses to tell.
        """
        for peer, answer in responses.responses:
            self.told.pop(peer, None)
            wrong = self._wrong(answer)
            if wrong:
                ctx.refuse(peer, wrong)
            else:
                self.told[peer] = np.array(answer, np.float32)
        for peer, _ in responses.reasons:
            self.told.pop(peer, None)
        while len(self.told) > _MAX_PEERS:
            del self.told[next(iter(self.told))]

    def _wrong(self, answer: Value) -> str:
        if not isinstance(answer, np.ndarray) or answer.dtype != np.float32 or answer.ndim != 2:
            return "its centroids are no float32 [C, 1 + D]"
        count, width = answer.shape
        if count > self.config.max_centroids or not 1 <= width <= 1 + _MAX_WIDTH:
            return f"{count} centroids of {width - 1}; up to {self.config.max_centroids} count"
        if not np.isfinite(answer).all() or (answer[:, :1] < 0).any():
            return "its centroids hold NaN, infinity, or a negative number of items"
        return ""

    # -- who is asked ------------------------------------------------------------------------

    def select(self, ctx: OpContext, key: Value | None, *, mode: str, n: int) -> PeerIdVec:
        """Return by "near_key" the `n` peers whose centres are nearest to a query [D].

        Of a batch [Q, D] they are the union, of which `max_asked` remain: those that most queries
        want. Raises UnsupportedSelection for another key, NotEnoughPeers where nobody is there.
        """
        if mode != "near_key":
            return super().select(ctx, key, mode=mode, n=n)
        if not isinstance(key, np.ndarray) or key.ndim not in (1, 2) or key.dtype.kind != "f":
            raise UnsupportedSelection(
                f"{self.TYPE_NAME}: near_key takes a query of floats, [D] or [Q, D]"
            )
        if n < 1:
            raise UnsupportedSelection(f"{self.TYPE_NAME}: {n} peers near a key; ask for 1 or more")
        there = self._checked(ctx)
        width = 1 + key.shape[-1]
        known = [p for p in there if p in self.told and self.told[p].shape[1] == width]
        others = [p for p in there if p not in self.told or self.told[p].shape[1] != width]
        if not known:
            return self.drawn(ctx, others, self.config.max_asked)
        chosen = self._near([p for p in known if len(self.told[p])], np.atleast_2d(key), n)
        extra = draw(others, self.config.untold, self.seed(ctx), self._draws)
        return self.counted({*chosen, *extra})

    def _near(self, known: Sequence[PeerId], queries: Any, n: int) -> list[PeerId]:
        """Return the peers that the queries want, those that most want first."""
        if not known or not len(queries):
            return []
        far = np.stack([self._distances(queries, self.told[peer][:, 1:]) for peer in known], axis=1)
        wanted = np.argsort(far, axis=1, kind="stable")[:, :n]
        votes = Counter(wanted.ravel().tolist())
        best = sorted(votes, key=lambda at: (-votes[at], float(far[:, at].min()), known[at]))
        return [known[at] for at in best[: self.config.max_asked]]

    def _distances(self, queries: Any, centres: Any) -> Any:
        """Return how far each query is from the nearest of the centres, [Q]."""
        queries, centres = queries.astype(np.float64), centres.astype(np.float64)
        if self.config.metric == "cosine":
            queries, centres = _of_length_1(queries), _of_length_1(centres)
        products = queries @ centres.T
        if self.config.metric == "l2":
            # Less the square of the query, which is the same for all peers.
            return ((centres * centres).sum(axis=1) - 2 * products).min(axis=1)
        return -products.max(axis=1)

    # -- snapshot ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the centres."""
        rows = [[p.to_bytes(), r.shape[1], r.astype("<f4").tobytes()] for p, r in self.told.items()]
        return {"told": rows}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        told = {}
        for peer, width, data in saved["told"][:_MAX_PEERS]:
            rows = np.frombuffer(data, "<f4").reshape(-1, width).astype(np.float32)
            if self._wrong(rows):
                raise ValueError(self._wrong(rows))
            told[PeerId.from_bytes(peer)] = rows
        self.told = told


def _of_length_1(vectors: Any) -> Any:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1)
