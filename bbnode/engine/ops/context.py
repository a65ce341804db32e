"""What a contract method sees of the node: one object per call, never shared.

Rule: it is a snapshot, so that it may be read in a worker thread. Only `open_completion`
reaches back, and only while the method runs on the polling thread.
"""

from __future__ import annotations

from bbnode.components.contracts import ComponentError, PeersView
from bbnode.engine.ingress import Completed, Ingress
from bbnode.engine.parking import ParkingTable
from bbnode.ir.peer import PeerId
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
        "_ingress",
        "_parking",
        "completion",
        "execution",
        "now_ns",
        "offloaded",
        "peer_class",
        "peers",
        "self_peer",
        "source_peer",
    )

    def __init__(
        self,
        *,
        now_ns: int,
        self_peer: PeerId,
        source_peer: PeerId | None,
        peer_class: str | None,
        execution: int,
        peers: PeersView,
        ingress: Ingress,
        parking: ParkingTable,
        offloaded: bool,
    ) -> None:
        self.now_ns = now_ns
        self.self_peer = self_peer
        self.source_peer = source_peer
        self.peer_class = peer_class
        self.execution = execution
        self.peers = peers
        self.offloaded = offloaded
        self.completion: OpenCompletion | None = None
        self._ingress = ingress
        self._parking = parking

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
        self.completion = OpenCompletion(self._ingress, self._parking.new_token())
        return self.completion
