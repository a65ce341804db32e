"""Training on clients that differ: what each adds to its gradients, and what its answer weighs.

Rule: what a client trains with is an argument of `ModelSlot.train_adjusted`; what it keeps from
round to round is a slot of its own, which is saved and restored with the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bbnode.components import StateVector, StateVectorConfig, concrete
from bbnode.dsl import BackendSlot, Graph, ModelSlot, Output, Request, syscalls, types
from bbnode.programs.composing import ArgumentChecks, Inner, RoundPart

if TYPE_CHECKING:
    from bbnode.programs.federated import FederatedTraining


@dataclass(frozen=True)
class ClientPart(RoundPart):
    """Base of what clients train by."""

    slot: ClassVar[str] = "client"
    claims: ClassVar[tuple[str, ...]] = ("local_training",)


@dataclass(frozen=True)
class Proximal(ClientPart):
    """FedProx: a proximal term, and partial work (Li et al., 2020, arXiv:1812.06127, alg. 2).

    A client trains on its loss and `proximal` / 2 times the squared distance of its weights w from
    those that it received. A node that can't do all `epochs` before the deadline says so by its own
    setting `max_steps` or `max_train_s` of the slot "local": it answers with what it has by then,
    the Metadata of its answer has `work`, the part of the epochs that it did, and the answer
    counts.
    """

    proximal: float = 0.01  # the paper's mu; 0 is FedAvg

    def local_training(
        self, p: FederatedTraining, _: Inner, g: Graph, weights: Output
    ) -> tuple[Output, Output]:
        """Train with the proximal term; see `FederatedTraining.local_training`."""
        model = p.client_model
        told, _work = model.train_adjusted(
            g, epochs=p.epochs, batch=p.batch, proximal=float(self.proximal),
            after=p.ready(g, weights),
        )  # fmt: skip
        return p.answer(g, model.params(g), weights), told

    def check(self, program: Any, own: ArgumentChecks) -> None:  # noqa: ARG002
        """Check the settings. Raises BadArgument."""
        own.require_not_negative("proximal")


@dataclass(frozen=True)
class AnswersMoves(ClientPart):
    """Base of those whose clients answer a move of the weights, and more behind it."""

    changes: ClassVar[frozenset[str]] = frozenset({"answer", "extra"})
    wishes: ClassVar[Mapping[str, Any]] = {"deltas": True}
    needs: ClassVar[Mapping[str, tuple[bool, str]]] = {"deltas": (True, "the answers are moves")}

    def parts(self, p: FederatedTraining, g: Graph, mean: Output) -> tuple[Output, Output]:
        """Return the move and the other numbers of a mean of answers."""
        compute = BackendSlot("compute")
        begin, middle, end = (g.constant([at]) for at in (0, p.moved_size, p.answer_size))
        return compute.slice(g, mean, begin, middle), compute.slice(g, mean, middle, end)

    def require_sgd(self, program: Any, *, momentum: bool = False) -> None:
        """Refuse an optimizer of the clients whose moves are no sum of gradients."""
        sgd = program.optimizer == "sgd"
        program.require("optimizer", sgd, '"sgd": its moves add gradients up')
        if not momentum:
            none = program.momentum == 0
            program.require("momentum", none, "0: moves have to add gradients up")


@dataclass(frozen=True)
class ControlVariates(AnswersMoves):
    """SCAFFOLD (Karimireddy et al., 2020, arXiv:1910.06378, algorithm 1, option II).

    The server has a control variate c, each client one of its own, c_i; both begin with zeros. A
    client receives x and c, makes K steps y <- y - rate (gradient - c_i + c), and takes
    c_i <- c_i - c + (x - y) / (K rate). The server steps with the mean of y - x, and takes
    c <- c + |S| / N times the mean move of the c_i, where |S| answered.

    A client takes its new c_i when the server has told it that its answer was in time: the answer
    of a client that is late changes neither c nor c_i.
    """

    changes: ClassVar[frozenset[str]] = frozenset({"answer", "variates"})
    claims: ClassVar[tuple[str, ...]] = ("client_update", "local_training", "answer")
    # The paper's mean is of clients.
    wishes: ClassVar[Mapping[str, Any]] = {"deltas": True, "weighted": False}

    population: int = 0  # N, the clients that there are in all; 0: `clients`, all take part

    def sent(self, p: FederatedTraining, inner: Inner, g: Graph, peers: Output) -> Output:
        """Return the server's weights, and its control variate, [P] each."""
        control = _vector(p, "control").params(g, after=peers)
        return g.bundle([inner(g, peers), control])

    def client_update(
        self, p: FederatedTraining, _: Inner, g: Graph, asked: Request
    ) -> tuple[Output, Output]:
        """Train with c - c_i added to each gradient; return the moves of weights and of c_i."""
        compute, model = BackendSlot("compute"), p.client_model
        x, control = g.unbundle(asked.received, [types.TENSOR_FLOAT, types.TENSOR_FLOAT])
        p.client_loads(g, x)
        own = _vector(p, "own_control").params(g, after=x)
        told, work = model.train_adjusted(
            g, correction=compute.sub(g, control, own), epochs=p.epochs, batch=p.batch,
            after=p.ready(g, x),
        )  # fmt: skip
        moved = compute.sub(g, model.params(g), x)
        rates = compute.gather(g, work, g.constant(1), axis=0)
        turned = compute.neg(g, compute.add(g, control, compute.div(g, moved, rates)))
        _vector(p, "next_control").load_parameters(g, compute.add(g, own, turned))
        return compute.concat(g, moved, turned, axis=0), told

    def combined(
        self, p: FederatedTraining, inner: Inner, g: Graph, asked: Request
    ) -> tuple[Output, Output]:
        """Move the server's control variate; return the mean move of the weights."""
        compute = BackendSlot("compute")
        mean, stats = inner(g, asked)
        moved, turned = self.parts(p, g, mean)
        # Not of all that answered: what was refused is in no mean.
        count = syscalls.metadata_number(g, stats, key="contributors")
        share = compute.div(g, count, g.constant(float(self.population or p.clients)))
        _vector(p, "control").apply_delta(g, compute.mul(g, turned, share))
        # On each client that is in the mean; an own execution, in which nothing waits.
        taken = g.net_out("taken", asked.responses.peers, g.constant(True, after=moved))
        kept = _vector(p, "next_control").params(g, after=taken)
        _vector(p, "own_control").load_parameters(g, kept)
        return moved, stats

    def answer_size(self, p: FederatedTraining, _: Inner) -> int:
        """Return the length of the tensor that a client answers: two moves."""
        return 2 * p.size

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        self.require_sgd(program)
        own.require_counts(population=0)
        enough = self.population == 0 or self.population >= program.clients
        own.require("population", enough, f"0 or at least clients={program.clients}")


@dataclass(frozen=True)
class Normalised(AnswersMoves):
    """FedNova: moves that are normalised by local work (Wang et al., 2020, arXiv:2007.07481).

    A client answers d_i, its move divided by the norm a_i of how its steps add gradients up, and
    a_i. The server moves by the mean of d_i times the mean of a_i, so that a client that makes more
    steps does not pull further. a_i is the sum of the learning rates of the steps: their number
    times the rate; with `momentum` and with `proximal` it is the paper's (section 5).
    """

    proximal: float = 0.0

    def extra_numbers(self, _p: FederatedTraining, _: Inner) -> int:
        """Return 1: a_i, or the number of steps."""
        return 1

    def local_training(
        self, p: FederatedTraining, _: Inner, g: Graph, weights: Output
    ) -> tuple[Output, Output]:
        """Train; return the normalised move with its norm, and the Metadata."""
        compute, model = BackendSlot("compute"), p.client_model
        told, work = model.train_adjusted(
            g, epochs=p.epochs, batch=p.batch, proximal=float(self.proximal),
            after=p.ready(g, weights),
        )  # fmt: skip
        norm, scale = self._norm(p, g, work)
        move = compute.div(g, p.answer(g, model.params(g), weights), norm)
        return compute.concat(g, move, scale, axis=0), told

    def combined(
        self, p: FederatedTraining, inner: Inner, g: Graph, asked: Request
    ) -> tuple[Output, Output]:
        """Return the mean of the normalised moves, at the mean of the norms."""
        mean, stats = inner(g, asked)
        move, scale = self.parts(p, g, mean)
        return BackendSlot("compute").mul(g, move, scale), stats

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        self.require_sgd(program, momentum=True)
        own.require_not_negative("proximal")
        if program.momentum or self.proximal:
            plain = program.schedule == "constant"
            program.require("schedule", plain, '"constant" beside a momentum or proximal')
            both = bool(program.momentum and self.proximal)
            own.require("proximal", not both, "0 beside a momentum")
            program.require(
                "nesterov", not program.nesterov, "false: the norm is of plain momentum"
            )
            kept = bool(program.momentum and program.keep_optimizer_state)
            program.require(
                "keep_optimizer_state", not kept,
                "false beside a momentum: the norm is of one that begins with 0 in each round",
            )  # fmt: skip
            rate = program.learning_rate
            own.require("proximal", self.proximal * rate < 1, f"below 1 / learning_rate ({rate})")

    def _norm(self, p: FederatedTraining, g: Graph, work: Output) -> tuple[Output, Output]:
        """Emit what a move is divided by, and what the mean is multiplied with, [1] each."""
        compute = BackendSlot("compute")
        steps = compute.slice(g, work, g.constant([0]), g.constant([1]))
        rates = compute.slice(g, work, g.constant([1]), g.constant([2]))
        m = float(p.momentum)
        if m:
            # Gradient k of n adds up to (1 - m^(n-k)) / (1 - m) of itself.
            fading = compute.sub(g, g.constant(1.0), compute.pow(g, g.constant(m), steps))
            less = compute.mul(g, fading, g.constant(m / (1 - m)))
            norm = compute.mul(g, compute.sub(g, steps, less), g.constant(1 / (1 - m)))
            return norm, norm
        if self.proximal:
            # Of gradient k of n, (1 - rate mu)^(n-k) is left.
            a = float(self.proximal) * float(p.learning_rate)
            left = compute.pow(g, g.constant(1 - a), steps)
            norm = compute.mul(g, compute.sub(g, g.constant(1.0), left), g.constant(1 / a))
            return norm, steps
        return rates, rates


@dataclass(frozen=True)
class Fair(AnswersMoves):
    """q-FedAvg: clients that fare worse count for more (Li et al., 2020, arXiv:1905.10497, alg. 2).

    With F the loss of a client over all its examples at the weights w that it received, y what it
    trained, L = `lipschitz` and D = L (w - y), it answers F^q D and h = q F^(q-1) |D|^2 + L F^q;
    the server takes w <- w - sum of F^q D / sum of h. q = 0 is the mean of clients, each counted
    once; the larger q, the more alike their losses become.
    """

    changes: ClassVar[frozenset[str]] = frozenset({"answer", "extra", "loss"})
    claims: ClassVar[tuple[str, ...]] = ("client_update", "local_training", "answer")
    wishes: ClassVar[Mapping[str, Any]] = {"deltas": True, "weighted": False}
    needs: ClassVar[Mapping[str, tuple[bool, str]]] = {
        **AnswersMoves.needs, "weighted": (False, "the losses are what clients weigh"),
    }  # fmt: skip

    q: float = 0.2
    lipschitz: float = 0.0  # L; 0: 1 / `learning_rate`, as the authors have it

    def extra_numbers(self, _p: FederatedTraining, _: Inner) -> int:
        """Return 1: h."""
        return 1

    def client_update(
        self, p: FederatedTraining, _: Inner, g: Graph, asked: Request
    ) -> tuple[Output, Output]:
        """Measure the loss, train, and return the weighted move with its h."""
        compute, model, w = BackendSlot("compute"), p.client_model, asked.received
        loaded = p.client_loads(g, w)
        ready = p.ready(g, loaded)
        start = loaded if ready is None else ready
        _number, examples, labels = p.examples(g, p.train_data(), start)
        loss = compute.reshape(g, model.compute_loss(g, examples, labels), g.constant([1]))
        told = model.train(g, epochs=p.epochs, batch=p.batch, after=loss)
        steep = float(self.lipschitz or 1 / p.learning_rate)
        down = compute.mul(g, compute.sub(g, model.params(g), w), g.constant(steep))
        powers = [_power(g, loss, each) for each in (self.q, self.q - 1)]
        length = compute.reduce_sum(g, compute.mul(g, down, down), g.constant([0]), keepdims=True)
        curved = compute.mul(g, compute.mul(g, length, powers[1]), g.constant(float(self.q)))
        h = compute.add(g, curved, compute.mul(g, powers[0], g.constant(steep)))
        return compute.concat(g, compute.mul(g, down, powers[0]), h, axis=0), told

    def combined(
        self, p: FederatedTraining, inner: Inner, g: Graph, asked: Request
    ) -> tuple[Output, Output]:
        """Return the move of the weights."""
        mean, stats = inner(g, asked)
        move, h = self.parts(p, g, mean)
        return BackendSlot("compute").div(g, move, h), stats

    def check(self, program: Any, own: ArgumentChecks) -> None:  # noqa: ARG002
        """Check the settings. Raises BadArgument."""
        own.require_not_negative("q", "lipschitz")


@dataclass(frozen=True)
class InnerSteps(ClientPart):
    """A number of steps in the place of epochs, as DiLoCo has it (Douillard et al., 2023,
    arXiv:2311.08105).
    """

    claims: ClassVar[tuple[str, ...]] = ("local_training", "client_model")
    wishes: ClassVar[Mapping[str, Any]] = {"deltas": True, "weighted": False}
    needs: ClassVar[Mapping[str, tuple[bool, str]]] = {
        "deltas": (True, "moves of the weights are what is averaged")
    }

    inner_steps: int = 500  # H: of each client in a round, in as many epochs as it takes

    def client_model(self, p: FederatedTraining, _: Inner) -> ModelSlot:
        """Return the slot of the model that a client trains: `inner_steps` steps, and no more."""
        return p.trained_model("local", max_steps=self.inner_steps)

    def local_training(
        self, p: FederatedTraining, _: Inner, g: Graph, weights: Output
    ) -> tuple[Output, Output]:
        """Train until the steps are made: an epoch has one batch at least."""
        model, ready = p.client_model, p.ready(g, weights)
        trained = model.train(g, epochs=self.inner_steps, batch=p.batch, after=ready)
        return p.answer(g, model.params(g), weights), trained

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings. Raises BadArgument."""
        own.require_counts(inner_steps=1)
        own_count = "left out: inner_steps says how much is trained"
        program.require("epochs", program.epochs == 1, own_count)
        program.require("max_steps", program.max_steps == 0, "0: inner_steps says how many")
        one = program.accumulate == 1
        program.require("accumulate", one, "1: a batch is an inner step")


def _vector(p: FederatedTraining, slot: str) -> ModelSlot:
    return ModelSlot(slot, concrete=concrete(StateVector, StateVectorConfig(size=p.size)))


def _power(g: Graph, loss: Output, power: float) -> Output:
    # As in the authors' code, so that a loss of 0 has a power below 0 as well.
    compute = BackendSlot("compute")
    return compute.pow(g, compute.add(g, loss, g.constant(1e-10)), g.constant(float(power)))
