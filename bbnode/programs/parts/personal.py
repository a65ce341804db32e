"""Models that stay on a client: a part of the common one, or one of its own.

Rule: what stays on a client never travels: an answer has the shared parameters alone, and the
server's model keeps what it began with in the place of the others.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bbnode.components import OnnxModel, concrete
from bbnode.dsl import BackendSlot, Graph, ModelSlot, Output, Request
from bbnode.programs.composing import ArgumentChecks, Inner, RoundPart

if TYPE_CHECKING:
    from bbnode.programs.federated import FederatedTraining


@dataclass(frozen=True)
class Layers(RoundPart):
    """Personal layers (Arivazhagan et al., 2019, arXiv:1912.00818).

    Parameters whose names fit one of `local` (as "head.*", or a whole name) stay on each client,
    which trains them with the others; all others are averaged. What clients evaluate is their own
    model with the new shared parameters.

    With `normalisation`, scale, bias and running statistics of every BatchNormalization stay too
    (FedBN; Li et al., 2021, arXiv:2102.07623), and clients train in training mode.

    Output "model" is the server's vector [P], in which the local parameters are the initial ones.
    """

    changes: ClassVar[frozenset[str]] = frozenset({"answer"})
    slot: ClassVar[str] = "personal"
    claims: ClassVar[tuple[str, ...]] = ("outgoing", "client_loads", "moved_size")
    wishes: ClassVar[Mapping[str, Any]] = {"evaluate": "clients"}

    local: tuple[str, ...] = ()  # names or patterns of the parameters that stay on each client
    normalisation: bool = False  # what BatchNormalization has stays on each client

    def kept(self, p: FederatedTraining) -> frozenset[str]:
        """Return the names of the parameters that stay on each client."""
        fitting = {n for n in p.layout if any(fnmatch.fnmatchcase(n, each) for each in self.local)}
        return frozenset(fitting | _normalising(p) & {*p.layout} if self.normalisation else fitting)

    def moved_size(self, p: FederatedTraining, _: Inner) -> int:
        """Return the number of shared parameters."""
        return sum(end - begin for begin, end, is_kept in self._runs(p) if not is_kept)

    def outgoing(self, p: FederatedTraining, _: Inner, g: Graph, weights: Output) -> Output:
        """Return the shared parameters of a vector [P]."""
        pieces = [_slice(g, weights, begin, end) for begin, end, kept in self._runs(p) if not kept]
        return _joined(g, pieces)

    def client_loads(self, p: FederatedTraining, _: Inner, g: Graph, received: Output) -> Output:
        """Load the shared parameters beside the client's own; a CommandId."""
        model = p.client_model
        return model.load_parameters(
            g, self._merged(p, g, received, model.params(g, after=received))
        )

    def answer(
        self, p: FederatedTraining, inner: Inner, g: Graph, trained: Output, weights: Output
    ) -> Output:
        """Return the shared parameters of trained weights, as `deltas` says."""
        answer: Output = inner(g, p.outgoing(g, trained), weights)
        return answer

    def combined(
        self, p: FederatedTraining, inner: Inner, g: Graph, asked: Request
    ) -> tuple[Output, Output]:
        """Combine the answers; return a tensor [P], in which nothing local has moved."""
        mean, stats = inner(g, asked)
        own = p.server_model.params(g, after=mean)
        if p.deltas:
            own = BackendSlot("compute").sub(g, own, own)
        return self._merged(p, g, mean, own), stats

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        if self.normalisation:
            if not _normalising(program):
                raise own.bad("model has no BatchNormalization; FedPer keeps what `local` names")
            train = '"train": else the statistics do not move'
            program.require("mode", program.mode == "train", train)
        good = program.evaluate in ("clients", "none")
        no_model = '"clients" or "none": the server has no complete model'
        program.require("evaluate", good, no_model)
        listed: object = self.local
        texts = isinstance(listed, list | tuple) and all(isinstance(each, str) for each in listed)
        own.require("local", texts, 'names or patterns of parameters, such as ("head.*",)')
        for pattern in self.local:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in program.layout):
                near = difflib.get_close_matches(pattern, program.layout, n=3, cutoff=0.4)
                known = near or [*program.layout][:3]
                raise own.bad(f"local: {pattern!r} fits no parameter; there is {', '.join(known)}")
        if not self.kept(program):
            raise own.bad("local is empty; name the parameters that stay on each client")
        if len(self.kept(program)) == len(program.layout):
            raise own.bad("local fits every parameter, and nothing is left to learn together")

    def _runs(self, p: FederatedTraining) -> list[tuple[int, int, bool]]:
        """Begin and end of the vector's parts that stay, or travel, one after the other."""
        runs, at, kept = [], 0, self.kept(p)
        for is_kept, names in itertools.groupby(p.layout, key=lambda name: name in kept):
            end = at + sum(math.prod(p.layout[name]) for name in names)
            runs.append((at, end, is_kept))
            at = end
        return runs

    def _merged(self, p: FederatedTraining, g: Graph, shared: Output, own: Output) -> Output:
        """Return a vector [P] of shared parameters, and of those of `own` [P] that stay."""
        pieces, at = [], 0
        for begin, end, is_kept in self._runs(p):
            if is_kept:
                pieces.append(_slice(g, own, begin, end))
            else:
                pieces.append(_slice(g, shared, at, at + end - begin))
                at += end - begin
        return _joined(g, pieces)


@dataclass(frozen=True)
class Alternating(Layers):
    """Personal layers that are trained by themselves (Collins et al., 2021, arXiv:2102.07078).

    First what stays on the client, for `head_epochs`, with the shared parameters as they were
    received; then these, for `epochs`, with what stays as it now is (algorithm 1).
    """

    claims: ClassVar[tuple[str, ...]] = (*Layers.claims, "local_training")

    head_epochs: int = 1

    def local_training(
        self, p: FederatedTraining, _: Inner, g: Graph, weights: Output
    ) -> tuple[Output, Output]:
        """Train the local parameters, then the shared ones; answer the latter."""
        model, kept = p.client_model, self.kept(p)
        shared = "\n".join(name for name in p.layout if name not in kept)
        head, _work = model.train_adjusted(
            g, epochs=self.head_epochs, batch=p.batch, frozen=shared,
            after=p.ready(g, weights),
        )  # fmt: skip
        told, _work = model.train_adjusted(
            g, epochs=p.epochs, batch=p.batch, frozen="\n".join(sorted(kept)),
            after=head,
        )  # fmt: skip
        return p.answer(g, model.params(g), weights), told

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        super().check(program, own)
        own.require_counts(head_epochs=1)
        clips = "0: its norm is of all parameters; use clip_value"
        program.require("clip_norm", not program.clip_norm, clips)


@dataclass(frozen=True)
class OwnModel(RoundPart):
    """Ditto: each client has a model of its own beside the common one (Li et al., 2021).

    A client trains the common weights as in FedAvg, and then its own model, for `personal_epochs`,
    on its loss and `proximal` / 2 times the squared distance from the common weights that it
    received (arXiv:2012.04221, algorithm 1). Its own model stays with it, in the slot
    "personal", and is what it evaluates.
    """

    slot: ClassVar[str] = "personal"
    claims: ClassVar[tuple[str, ...]] = ("evaluated_model",)
    wishes: ClassVar[Mapping[str, Any]] = {"evaluate": "clients"}

    proximal: float = 0.1  # the paper's lambda; 0: clients learn alone
    personal_epochs: int = 1

    def evaluated_model(self, p: FederatedTraining, _: Inner) -> ModelSlot:
        """Return the slot of the model that a client evaluates: its own."""
        return ModelSlot("personal", concrete=concrete(OnnxModel, p._config))

    def local_training(
        self, p: FederatedTraining, inner: Inner, g: Graph, weights: Output
    ) -> tuple[Output, Output]:
        """Train the common weights, then the client's own model; answer the former."""
        tensor, told = inner(g, weights)
        p.evaluated_model.train_adjusted(
            g, weights, epochs=self.personal_epochs, batch=p.batch,
            proximal=float(self.proximal), after=told,
        )  # fmt: skip
        return tensor, told

    def check(self, program: Any, own: ArgumentChecks) -> None:  # noqa: ARG002
        """Check the settings. Raises BadArgument."""
        own.require_not_negative("proximal")
        own.require_counts(personal_epochs=1)


def _normalising(p: FederatedTraining) -> frozenset[str]:
    nodes = [node for node in p.forward.graph.node if node.op_type == "BatchNormalization"]
    return frozenset(name for node in nodes for name in node.input[1:5])


def _slice(g: Graph, vector: Output, begin: int, end: int) -> Output:
    compute = BackendSlot("compute")
    return compute.slice(g, vector, g.constant([begin]), g.constant([end]))


def _joined(g: Graph, pieces: list[Output]) -> Output:
    return pieces[0] if len(pieces) == 1 else BackendSlot("compute").concat(g, *pieces, axis=0)
