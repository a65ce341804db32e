"""Arguments that all programs without a server share: who a peer's values go to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from bbnode.components import ConnectedView, ConstantView, PeerSelector, concrete
from bbnode.dsl import ConcreteSpec, Graph, Output, PeerSelectorSlot
from bbnode.programs.arguments import ReadyProgram
from bbnode.programs.parts.plain import Selects
from bbnode.programs.training import component_of


class PeersProgram(ReadyProgram):
    """Base of programs whose peers are all of the class "peer"; their slot "cohort" selects."""

    home = "peer"
    with_self: ClassVar[bool] = False  # a peer is one of those that its slot "cohort" selects

    selector: Selects = ConnectedView  # a PeerSelector: a class, its TYPE_NAME, or `concrete(…)`

    @property
    def cohort(self) -> PeerSelectorSlot:
        """The slot that selects peers."""
        given = self.selector
        return PeerSelectorSlot(
            "cohort", peer_class="peer", include_self=self.with_self,
            concrete=given if isinstance(given, ConcreteSpec) else None,
        )  # fmt: skip

    def own(self, g: Graph, after: Output) -> Output:
        """Return a list with this peer alone: what is sent to it starts an execution here."""
        nobody_else = concrete(ConstantView)
        slot = PeerSelectorSlot("own", peer_class="peer", include_self=True, concrete=nobody_else)
        return slot.current_view(g, after=after)

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots."""
        if isinstance(self.selector, ConcreteSpec):
            return super().bindings()
        return {**super().bindings(), "cohort": self._selector_class}

    def check_selector(self) -> None:
        """Check the argument `selector`. Raises BadArgument."""
        found = self._selector_class
        if found.observes:
            raise self.bad(
                f"selector={found.TYPE_NAME} learns from what clients answer a server, and there "
                "is none here; take another, such as bbnode.ConnectedView"
            )

    @property
    def _selector_class(self) -> type[PeerSelector]:
        found: type[PeerSelector] = component_of(
            self, "selector", PeerSelector, "bbnode.ConnectedView"
        )
        return found
