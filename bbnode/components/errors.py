"""Errors of components, one class per reason.

Rule: every class is a `ComponentError`, so that only the op fails and not the node; the second base
says whose fault it is. A message names the component, the value, and the remedy.
"""

from __future__ import annotations

from bbnode.ir.errors import AuthorError, BbnodeError, DeploymentError, PeerError

# Peers that one message names; there may be a thousand.
_MOST_TOLD = 8


class ComponentError(BbnodeError):
    """A component could not do what an op asked; the op fails, and the node continues."""


class BackendError(ComponentError, AuthorError):
    """A backend cannot prepare or run a graph with these inputs.

    `node`: the name of the graph's node that is to blame, as far as the backend knows it.
    """

    def __init__(self, message: str, *, node: str = "") -> None:
        self.node = node
        super().__init__(message)


class GraphKilled(BackendError):
    """A graph ended the process that ran it, or took more memory or time than it may have.

    `reason`: "crash", "memory" or "time". Other graphs of the node are not affected.
    """

    def __init__(self, message: str, *, node: str = "", reason: str) -> None:
        self.reason = reason
        super().__init__(message, node=node)


class BackendUnavailable(ComponentError, DeploymentError):
    """A backend cannot be set up on this machine as configured."""


class InvalidComponentConfig(ComponentError, DeploymentError):
    """A setting of a component is out of its range."""


class ParameterMismatch(ComponentError):
    """A vector does not fit the parameters of a model."""


class WeightsNotFinite(ParameterMismatch):
    """A weight that is given to a model holds NaN or infinity."""


class NotExportable(ComponentError, DeploymentError):
    """A model component has no weights that can be taken out, or put in."""


class TrainingFailed(ComponentError):
    """Training cannot start, or its parameters are no longer finite."""


class DataUnavailable(ComponentError, DeploymentError):
    """A component cannot load the files that its config names."""


class DataDiffers(DataUnavailable):
    """The data mean something else than those of the federation."""


class TextRefused(ComponentError):
    """A text cannot be encoded: it is no Unicode text, or there are too many at once."""


class StatisticsMissing(DataUnavailable):
    """A data source waits for the statistics that standardise its features."""


class StatisticsRefused(ComponentError, PeerError):
    """Statistics that another peer sent can't be those of this data source's features."""


class DataDoesNotFit(ComponentError, DeploymentError):
    """Data are there, and a model can't be trained on them."""


class ContributionRefused(ComponentError, PeerError):
    """An aggregator does not count the contribution of one peer; the other peers still count."""

    def __init__(self, *, component: str, peer: str, reason: str) -> None:
        self.peer = peer
        self.reason = reason
        super().__init__(f"{component}: contribution of {peer} refused: {reason}")


class NothingToAggregate(ComponentError):
    """An aggregator is asked for a result and has no contribution."""


class NotEnoughContributions(ComponentError):
    """Fewer peers contributed than a robust aggregator needs to withstand so many liars."""

    def __init__(
        self, *, component: str, available: int, needed: int, byzantine: int, refused: str = ""
    ) -> None:
        self.component, self.byzantine = component, byzantine
        self.available = available
        self.needed = needed
        super().__init__(
            f"{component}: {available} contribution(s), and to withstand {byzantine} liar(s) it "
            f"needs {needed}; ask more peers, or lower its setting byzantine"
            + (f" (refused: {refused})" if refused else "")
        )

    def beside(self, refused: str) -> NotEnoughContributions:
        """Return the same error that also says who was refused, and why."""
        return NotEnoughContributions(
            component=self.component, available=self.available, needed=self.needed,
            byzantine=self.byzantine, refused=refused,
        )  # fmt: skip


class NobodyTrusted(ComponentError, PeerError):
    """No contribution points the way of the node's own, which is what they are trusted by."""


class NonFiniteAggregate(ComponentError, PeerError):
    """The result of an aggregate holds NaN or infinity, and is not returned."""


class MismatchedShapes(ComponentError, PeerError):
    """Contributions differ in shape, and no shape has the majority."""

    def __init__(self, *, component: str, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        told = [f"{peer}: {list(shape)}" for peer, shape in list(shapes.items())[:_MOST_TOLD]]
        more = len(shapes) - len(told)
        listed = ", ".join([*told, f"{more} more"] if more else told)
        super().__init__(
            f"{component}: contributions differ in shape and none has the majority ({listed}); "
            "let all peers run the same artifact"
        )


class NotEncodable(ComponentError):
    """A codec does not take a tensor: its type, its size, or a number that it holds."""


class CodeRefused(ComponentError, PeerError):
    """A code is none of this codec's: malformed, too large, or of another codec or codebook."""

    def __init__(self, *, component: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{component}: the code is refused: {reason}")


class NotEnoughPeers(ComponentError):
    """Fewer peers can be chosen than the config demands."""

    def __init__(self, *, component: str, available: int, needed: int, peer_class: str) -> None:
        self.available = available
        self.needed = needed
        self.peer_class = peer_class
        super().__init__(
            f"{component}: {available} {peer_class} peer(s) can be chosen, min_peers is {needed}; "
            "wait for more to connect, or lower min_peers"
        )


class ExchangeRefused(ComponentError, PeerError):
    """A message of another member of an overlay that breaks the overlay's rules."""

    def __init__(self, *, component: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{component}: the exchange is refused: {reason}")


class UnsupportedSelection(ComponentError, AuthorError):
    """A peer selector does not support the selection that a program asks for."""


class UnsupportedByModel(ComponentError, AuthorError):
    """A program asks a model for something that its class does not do."""

    def __init__(self, *, component: str, op: str) -> None:
        super().__init__(
            f"{component} has no {op}; bind a model that has it to this slot, such as "
            "bbnode.OnnxModel, or override the method of that name"
        )


class UnsupportedByDataSource(ComponentError, AuthorError):
    """A program asks a data source for statistics, and it has no numbers to take them of."""

    def __init__(self, *, component: str, op: str) -> None:
        super().__init__(
            f"{component} has no {op}; bind a source of numbers to this slot, such as "
            "bbnode.ArrayDataSource"
        )
