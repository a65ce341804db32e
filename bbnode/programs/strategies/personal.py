"""Strategies in which a client keeps a part of the model, or a model of its own.

Rule: what stays on a client never travels: an answer has the shared parameters alone, and the
server's model keeps what it began with in the place of the others.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from bbnode.components import OnnxModel, concrete
from bbnode.dsl import BackendSlot, Graph, ModelSlot, Output, Request
from bbnode.programs.federated import FederatedTraining


@dataclass(kw_only=True, eq=False)
class FedPer(FederatedTraining):
    """Federated training with personal layers (Arivazhagan et al., 2019, arXiv:1912.00818).

    Parameters whose names fit one of `local` (as "head.*", or a whole name) stay on each client,
    which trains them with the others; all others are averaged. What clients evaluate is their own
    model with the new shared parameters.

    Output "model" is the server's vector [P], in which the local parameters are the initial ones.
    """

    evaluate: str = "clients"
    local: tuple[str, ...] = ()  # names or patterns of the parameters that stay on each client

    @property
    def kept(self) -> frozenset[str]:
        """The names of the parameters that stay on each client."""
        return frozenset(
            name for name in self.layout if any(fnmatch.fnmatchcase(name, p) for p in self.local)
        )

    @property
    def answer_size(self) -> int:
        """The length of the tensor that a client answers: the shared parameters."""
        return sum(end - begin for begin, end, is_kept in self._runs if not is_kept)

    def outgoing(self, g: Graph, weights: Output) -> Output:
        """Return the shared parameters of a vector [P]."""
        pieces = [
            self._slice(g, weights, begin, end) for begin, end, kept in self._runs if not kept
        ]
        return _joined(g, pieces)

    def client_loads(self, g: Graph, received: Output) -> Output:
        """Load the shared parameters beside the client's own; a CommandId."""
        model = self.client_model
        return model.load_parameters(g, self._merged(g, received, model.params(g, after=received)))

    def answer(self, g: Graph, trained: Output, weights: Output) -> Output:
        """Return the shared parameters of trained weights, as `deltas` says."""
        return super().answer(g, self.outgoing(g, trained), weights)

    def combined(self, g: Graph, asked: Request) -> tuple[Output, Output]:
        """Combine the answers; return a tensor [P], in which nothing local has moved."""
        mean, stats = super().combined(g, asked)
        own = self.server_model.params(g, after=mean)
        if self.deltas:
            own = BackendSlot("compute").sub(g, own, own)
        return self._merged(g, mean, own), stats

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        good = self.evaluate in ("clients", "none")
        self.require("evaluate", good, '"clients" or "none": the server has no complete model')
        listed: object = self.local
        texts = isinstance(listed, list | tuple) and all(isinstance(each, str) for each in listed)
        self.require("local", texts, 'names or patterns of parameters, such as ("head.*",)')
        for pattern in self.local:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in self.layout):
                near = difflib.get_close_matches(pattern, self.layout, n=3, cutoff=0.4)
                known = near or [*self.layout][:3]
                raise self.bad(f"local: {pattern!r} fits no parameter; there is {', '.join(known)}")
        if not self.kept:
            raise self.bad("local is empty; name the parameters that stay on each client")
        if len(self.kept) == len(self.layout):
            raise self.bad("local fits every parameter, and nothing is left to learn together")

    @cached_property
    def _runs(self) -> list[tuple[int, int, bool]]:
        """Begin and end of the vector's parts that stay, or travel, one after the other."""
        runs, at, kept = [], 0, self.kept
        for is_kept, names in itertools.groupby(self.layout, key=lambda name: name in kept):
            end = at + sum(math.prod(self.layout[name]) for name in names)
            runs.append((at, end, is_kept))
            at = end
        return runs

    def _merged(self, g: Graph, shared: Output, own: Output) -> Output:
        """Return a vector [P] of shared parameters, and of those of `own` [P] that stay."""
        pieces, at = [], 0
        for begin, end, is_kept in self._runs:
            if is_kept:
                pieces.append(self._slice(g, own, begin, end))
            else:
                pieces.append(self._slice(g, shared, at, at + end - begin))
                at += end - begin
        return _joined(g, pieces)

    def _slice(self, g: Graph, vector: Output, begin: int, end: int) -> Output:
        compute = BackendSlot("compute")
        return compute.slice(g, vector, g.constant([begin]), g.constant([end]))


@dataclass(kw_only=True, eq=False)
class FedRep(FedPer):
    """FedPer in which a client trains one part at a time (Collins et al., 2021, arXiv:2102.07078).

    First what stays on the client, for `head_epochs`, with the shared parameters as they were
    received; then these, for `epochs`, with what stays as it now is (algorithm 1).
    """

    head_epochs: int = 1

    def local_training(self, g: Graph, weights: Output) -> tuple[Output, Output]:
        """Train the local parameters, then the shared ones; answer the latter."""
        model = self.client_model
        shared = "\n".join(name for name in self.layout if name not in self.kept)
        head, _ = model.train_adjusted(
            g, epochs=self.head_epochs, batch=self.batch, frozen=shared,
            after=self.ready(g, weights),
        )  # fmt: skip
        told, _ = model.train_adjusted(
            g, epochs=self.epochs, batch=self.batch, frozen="\n".join(sorted(self.kept)),
            after=head,
        )  # fmt: skip
        return self.answer(g, model.params(g), weights), told

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_counts(head_epochs=1)
        clips = bool(self._config.clip_norm)
        self.require("clip_norm", not clips, "0: its norm is of all parameters; use clip_value")


@dataclass(kw_only=True, eq=False)
class FedBN(FedPer):
    """FedBN: normalisation stays on each client (Li et al., 2021, arXiv:2102.07623).

    What stays are scale, bias and running statistics of every BatchNormalization, and what `local`
    names besides; all else is averaged. Clients train in training mode.
    """

    mode: str = "train"

    @property
    def kept(self) -> frozenset[str]:
        """The names of the parameters that stay on each client."""
        return super().kept | self._normalising & {*self.layout}

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        if not self._normalising:
            raise self.bad("model has no BatchNormalization; FedPer keeps what `local` names")
        self.require("mode", self.mode == "train", '"train": else the statistics do not move')
        super().check()

    @property
    def _normalising(self) -> frozenset[str]:
        nodes = [node for node in self.forward.graph.node if node.op_type == "BatchNormalization"]
        return frozenset(name for node in nodes for name in node.input[1:5])


@dataclass(kw_only=True, eq=False)
class Ditto(FederatedTraining):
    """Ditto: each client has a model of its own beside the common one (Li et al., 2021).

    A client trains the common weights as in FedAvg, and then its own model, for `personal_epochs`,
    on its loss and `proximal` / 2 times the squared distance from the common weights that it
    received (arXiv:2012.04221, algorithm 1). Its own model stays with it, in the slot
    "personal", and is what it evaluates.
    """

    evaluate: str = "clients"
    proximal: float = 0.1  # the paper's lambda; 0: clients learn alone
    personal_epochs: int = 1

    @property
    def personal_model(self) -> ModelSlot:
        """The slot of a client's own model."""
        return ModelSlot("personal", concrete=concrete(OnnxModel, self._config))

    @property
    def evaluated_model(self) -> ModelSlot:
        """The slot of the model that a client evaluates: its own."""
        return self.personal_model

    def local_training(self, g: Graph, weights: Output) -> tuple[Output, Output]:
        """Train the common weights, then the client's own model; answer the former."""
        tensor, told = super().local_training(g, weights)
        self.personal_model.train_adjusted(
            g, weights, epochs=self.personal_epochs, batch=self.batch,
            proximal=float(self.proximal), after=told,
        )  # fmt: skip
        return tensor, told

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_not_negative("proximal")
        self.require_counts(personal_epochs=1)
        if isinstance(self, FedPer):
            raise self.bad(
                "the own model of Ditto keeps near all common weights, of which FedPer sends a "
                "part; leave one of them out"
            )


def _joined(g: Graph, pieces: list[Output]) -> Output:
    return pieces[0] if len(pieces) == 1 else BackendSlot("compute").concat(g, *pieces, axis=0)
