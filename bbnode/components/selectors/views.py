"""Peer selectors: the connected peers, or a fixed list.

Rule: results are in PeerId order, and a draw is a pure function of (seed, number of the draw,
candidates); a selection that is not supported is an error.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgpack

from bbnode.components.contracts import OpContext, PeerSelector
from bbnode.components.errors import InvalidComponentConfig, NotEnoughPeers, UnsupportedSelection
from bbnode.components.registry import register_component
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.values import PeerIdVec, Value

_MAX_SEED = (1 << 63) - 1  # what msgpack and TOML both carry as an integer


def draw(peers: Sequence[PeerId], n: int, seed: int, counter: int) -> PeerIdVec:
    """Return `n` of `peers`, in PeerId order; all of them where n is as many or more.

    Each peer is ranked by SHA-256 over seed, counter and its id, and the lowest n are taken:
    uniform, and the same on every machine and with every version of every library.
    """
    if n >= len(peers):
        return PeerIdVec(sorted(peers))
    salt = seed.to_bytes(8, "big", signed=True) + counter.to_bytes(8, "big")
    ranked = sorted(peers, key=lambda peer: hashlib.sha256(salt + peer.to_bytes()).digest())
    return PeerIdVec(sorted(ranked[:n]))


@dataclass(frozen=True, kw_only=True)
class DrawingConfig:
    """Settings of a selector that draws.

    Attributes:
        min_peers: peers that there have to be for a draw; with fewer it fails.
        seed: of the draws.
    """

    min_peers: int = 1
    seed: int = 0


class DrawingSelector(PeerSelector):
    """The contract over a list of candidates, which a subclass provides.

    Their `Config` has the settings of `DrawingConfig`.
    """

    Config: ClassVar[type] = DrawingConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.require(0 <= config.seed <= _MAX_SEED, f"seed has to be in 0 .. {_MAX_SEED}")
        self.require(config.min_peers >= 0, "min_peers must not be negative")
        self._seed: int = config.seed
        self._draws = 0

    @abstractmethod
    def candidates(self, ctx: OpContext) -> Sequence[PeerId]:
        """Return the peers that can be chosen, in PeerId order."""

    def sample(self, ctx: OpContext, *, n: int) -> PeerIdVec:
        """Return `n` different peers by a seeded draw, all where there are no more than n.

        Raises:
            UnsupportedSelection: n is below 1.
            NotEnoughPeers: fewer than `min_peers` can be chosen.
        """
        if n < 1:
            raise UnsupportedSelection(
                f"{self.TYPE_NAME}: a sample of {n} peers; ask for 1 or more"
            )
        return self.drawn(ctx, self._checked(ctx), n)

    def drawn(self, ctx: OpContext, peers: Sequence[PeerId], n: int) -> PeerIdVec:
        """Return up to `n` of `peers` by the next draw, which is uniform by default."""
        return self.counted(draw(peers, n, self.seed(ctx), self._draws))

    def seed(self, ctx: OpContext) -> int:
        """Return the seed of this node's draws.

        It is the setting where a class draws from another one. Where peers draw from among
        themselves it is mixed with the node's own id: with one seed and the same candidates they
        would all draw the same one.
        """
        if not ctx.plays_peer_class:
            return self._seed
        own = self._seed.to_bytes(8, "big") + ctx.self_peer.to_bytes()
        return int.from_bytes(hashlib.sha256(own).digest()[:8], "big") & _MAX_SEED

    def counted(self, chosen: Iterable[PeerId]) -> PeerIdVec:
        """Return what was chosen, in PeerId order, and count the draw."""
        self._draws += 1
        return PeerIdVec(sorted(chosen))

    def current_view(self, ctx: OpContext) -> PeerIdVec:
        """Return all peers that can be chosen, even if they are fewer than `min_peers`."""
        return PeerIdVec(self._all(ctx))

    def select(self, ctx: OpContext, key: Value | None, *, mode: str, n: int) -> PeerIdVec:
        """Return n peers by a draw (mode "random"), or every one ("all").

        Raises:
            UnsupportedSelection: another mode; this selector knows no nearness.
            NotEnoughPeers: as for `sample`.
        """
        if mode == "random":
            return self.sample(ctx, n=n)
        if mode == "all":
            return PeerIdVec(self._checked(ctx))
        raise UnsupportedSelection(
            f"{self.TYPE_NAME}: mode {mode!r} is not offered; use 'random' or 'all'"
        )

    def serialize(self) -> bytes:
        """Return the number of draws so far, and `state`."""
        return bytes(msgpack.packb({"draws": self._draws, **self.state()}))

    def restore(self, data: bytes) -> None:
        """Continue the count of draws; ComponentError for bytes of anything else."""
        if not data:
            return
        with self.restoring():
            saved = msgpack.unpackb(data)
            draws = saved["draws"]
            if type(draws) is not int or not 0 <= draws <= _MAX_SEED:
                raise ValueError(f"{draws!r} draws")
            self.load_state(saved)
        self._draws = draws

    def state(self) -> dict[str, Any]:
        """Return what a subclass keeps besides, as msgpack takes it."""
        return {}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Take `state` out of what was saved; any error of a decoder for what is none."""

    def _all(self, ctx: OpContext) -> Sequence[PeerId]:
        """Return the candidates, and this node where the program includes it."""
        found = self.candidates(ctx)
        return sorted({*found, ctx.self_peer}) if ctx.include_self else found

    def _checked(self, ctx: OpContext) -> Sequence[PeerId]:
        candidates = self._all(ctx)
        if len(candidates) < self.config.min_peers:
            raise NotEnoughPeers(
                component=self.TYPE_NAME,
                available=len(candidates),
                needed=self.config.min_peers,
                peer_class=ctx.peer_class or "eligible",
            )
        return candidates


@register_component
class ConnectedView(DrawingSelector):
    """Chooses among the peers of the slot's class that are connected now."""

    TYPE_NAME: ClassVar[str] = "bbnode.ConnectedView"

    def candidates(self, ctx: OpContext) -> Sequence[PeerId]:
        return sorted(ctx.peers.connected(ctx.peer_class))


@dataclass(frozen=True, kw_only=True)
class ConstantViewConfig:
    """Settings of `ConstantView`.

    Attributes:
        peers: PeerIds as base58 text.
        min_peers: peers that there have to be for a draw; with fewer it fails.
        seed: of the draws.
    """

    peers: tuple[str, ...] = ()
    min_peers: int = 1
    seed: int = 0


@register_component
class ConstantView(DrawingSelector):
    """Chooses among the peers that the config lists, connected or not."""

    TYPE_NAME: ClassVar[str] = "bbnode.ConstantView"
    Config: ClassVar[type] = ConstantViewConfig

    def __init__(self, config: ConstantViewConfig) -> None:
        super().__init__(config)
        try:
            self._peers = tuple(sorted({PeerId.parse(text) for text in config.peers}))
        except DecodeError as error:
            raise InvalidComponentConfig(
                f"{self.TYPE_NAME}: an entry of `peers` is not a PeerId: {error}"
            ) from error

    def candidates(self, ctx: OpContext) -> Sequence[PeerId]:
        return self._peers
