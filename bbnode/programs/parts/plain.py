"""The parts that a program has where nobody says anything: all clients at once, and their mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from bbnode.components import Aggregator, Codec, ConnectedView, FedAvg, PeerSelector
from bbnode.components.registry import component_class
from bbnode.dsl import ConcreteSpec
from bbnode.ir.errors import BbnodeError
from bbnode.programs.composing import ArgumentChecks, RoundPart
from bbnode.programs.training import component_of

Selects: TypeAlias = str | type[PeerSelector] | ConcreteSpec
# What combines the answers of a round: a class, its TYPE_NAME, or a class with settings.
Combines: TypeAlias = str | type[Aggregator] | ConcreteSpec
Codes: TypeAlias = str | type[Codec] | ConcreteSpec


@dataclass(frozen=True)
class Course(RoundPart):
    """Base of courses.

    Attributes:
        home: the class of peer that begins a round.
        selector, clients: of whom is asked, where these are no settings.
    """

    slot: ClassVar[str] = "course"
    home: ClassVar[str] = "server"
    selector: ClassVar[Selects] = ConnectedView
    clients: ClassVar[int] = 1


@dataclass(frozen=True)
class Asking(Course):
    """Base of courses in which a server asks clients."""

    clients: int = 4  # type: ignore[misc]  # peers that a round asks
    deadline_s: float = 60.0  # that a round waits for its answers, seconds
    selector: Selects = ConnectedView  # type: ignore[misc]  # chooses the clients; a PeerSelector, as `concrete(…)` too

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        own.require_counts(clients=1)
        own.require_numbers("deadline_s")
        found = program.selector_class
        if found.observes == "metadata" and not program.answers_tell:
            raise own.bad(
                f"selector={found.TYPE_NAME} learns from what clients tell of their training, which"
                " their answers do not say here; take another, such as bbnode.PowerOfTwoChoices"
            )


@dataclass(frozen=True)
class AllAtOnce(Asking):
    """A server asks its clients all at once."""

    quorum: int = 0  # answers that are enough at the deadline; 0: as `enough` says: of 3 clients 2

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        own.require_counts(clients=1, quorum=0)
        most = f"an integer between 0 (the default) and clients={self.clients}"
        own.require("quorum", self.quorum <= self.clients, most)
        super().check(program, own)


@dataclass(frozen=True)
class Combine(RoundPart):
    """Base of what combines answers."""

    slot: ClassVar[str] = "combine"
    alone: ClassVar[bool] = True

    # Clients answer how far they moved the weights, not the weights; None: no, or as parts wish.
    deltas: bool | None = field(default=None, kw_only=True)
    # An answer weighs as many examples as it is made of, or one; None: so, or as parts wish.
    weighted: bool | None = field(default=None, kw_only=True)

    @property
    def rule(self) -> Combines:
        """The aggregator, with its settings where it has some."""
        raise NotImplementedError

    def taken(self, program: Any) -> type[Aggregator]:  # noqa: ARG002
        """Return the class of the aggregator. Raises BadArgument for none."""
        found = class_of(self.rule)
        assert found is not None
        return found

    @property
    def changes(self) -> frozenset[str]:  # type: ignore[override]
        """Return the rule, where it is another than the mean, and that it compares answers."""
        if self.rule is FedAvg:
            return frozenset()
        config = getattr(class_of(self.rule), "Config", FedAvg.Config)
        return frozenset({"rule", "compared"} if hasattr(config(), "byzantine") else {"rule"})

    @property
    def needs(self) -> Mapping[str, tuple[bool, str]]:  # type: ignore[override]
        """Return that answers are moves, where it combines these."""
        found = class_of(self.rule)
        if found is None or not getattr(found, "of_deltas", False):
            return {}
        return {"deltas": (True, f"{found.TYPE_NAME} combines changes of the weights")}

    @property
    def refuses(self) -> Mapping[str, str]:  # type: ignore[override]
        """Return numbers of another kind, where it combines moves by their lengths."""
        if not getattr(class_of(self.rule), "of_deltas", False):
            return {}
        return {"extra": "it would bend the numbers that an answer has behind the move of weights"}

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        for name in ("deltas", "weighted"):
            own.require(name, isinstance(getattr(self, name), bool | None), "true or false")
        _ = self.taken(program)


@dataclass(frozen=True)
class Aggregated(Combine):
    """An aggregator; FedAvg, the mean of answers by numbers of examples."""

    aggregator: Combines = FedAvg  # a class, its TYPE_NAME, or `concrete(…)`

    @property
    def rule(self) -> Combines:
        """The aggregator."""
        return self.aggregator

    def taken(self, program: Any) -> type[Aggregator]:
        """Return the class of the aggregator. Raises BadArgument for none."""
        found: type[Aggregator] = component_of(program, "aggregator", Aggregator, "bbnode.FedAvg")
        return found


@dataclass(frozen=True)
class Coded(RoundPart):
    """Codes of what travels: of moves of the weights, and of the weights that clients get."""

    slot: ClassVar[str] = "compress"
    alone: ClassVar[bool] = True

    codec: Codes | None = None  # of answers, with `deltas`: a Codec as `aggregator` is one
    codec_down: Codes | None = None  # of the weights that clients get; not one of deltas

    @property
    def changes(self) -> frozenset[str]:  # type: ignore[override]
        """Return that answers have a code, where they do."""
        return frozenset() if self.codec is None else frozenset({"codes"})

    @property
    def needs(self) -> Mapping[str, tuple[bool, str]]:  # type: ignore[override]
        """Return that answers are moves, where they have a code."""
        moved = "codec= encodes how far clients moved the weights; set deltas=True as well"
        return {} if self.codec is None else {"deltas": (True, moved)}

    @property
    def refuses(self) -> Mapping[str, str]:  # type: ignore[override]
        """Return numbers of another kind in answers that have a code."""
        bent = "codec= would bend the numbers that an answer has behind the move of weights"
        return {} if self.codec is None else {"extra": bent}

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        if self.codec is not None:
            _ = program.codec_class("codec")
        if self.codec_down is not None and program.codec_class("codec_down").of_deltas:
            raise own.bad(
                "codec_down= encodes weights, and this codec is for deltas; take another, such as "
                "bbnode.BFloat16Codec"
            )


def class_of(rule: Combines) -> type[Any] | None:
    """Return the class of a rule; None for what is none."""
    if isinstance(rule, type):
        return rule
    try:
        return component_class(rule.type_name if isinstance(rule, ConcreteSpec) else rule)
    except (BbnodeError, AttributeError, TypeError):
        return None  # whoever checks it says what it is
