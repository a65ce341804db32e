"""Strategies for clients that differ: what each adds to its gradients, and what its answer weighs.

Rule: what a client trains with is an argument of `ModelSlot.train_adjusted`; what it keeps from
round to round is a slot of its own, which is saved and restored with the node.
"""

from __future__ import annotations

from dataclasses import dataclass

from bbnode.components import StateVector, StateVectorConfig, concrete
from bbnode.dsl import BackendSlot, Graph, ModelSlot, Output, Request, syscalls, types
from bbnode.programs.federated import FederatedTraining
from bbnode.programs.strategies.server_optimizers import FedOpt


@dataclass(kw_only=True, eq=False)
class FedProx(FederatedTraining):
    """FedAvg with a proximal term, and partial work (Li et al., 2020, arXiv:1812.06127, alg. 2).

    A client trains on its loss and `proximal` / 2 times the squared distance of its weights w from
    those that it received. A node that can't do all `epochs` before the deadline says so by its own
    setting `max_steps` or `max_train_s` of the slot "local": it answers with what it has by then,
    the Metadata of its answer has `work`, the part of the epochs that it did, and the answer
    counts.
    """

    proximal: float = 0.01  # the paper's mu; 0 is FedAvg

    def local_training(self, g: Graph, weights: Output) -> tuple[Output, Output]:
        """Train with the proximal term; see `FederatedTraining.local_training`."""
        model = self.client_model
        told, _ = model.train_adjusted(
            g, epochs=self.epochs, batch=self.batch, proximal=float(self.proximal),
            after=self.ready(g, weights),
        )  # fmt: skip
        return self.answer(g, model.params(g), weights), told

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_not_negative("proximal")


@dataclass(kw_only=True, eq=False)
class AnswersMoves(FedOpt):
    """Base of strategies whose clients answer a move of the weights [P], and more behind it."""

    deltas: bool = True

    def parts(self, g: Graph, mean: Output) -> tuple[Output, Output]:
        """Return the move [P] and the other numbers of a mean of answers."""
        compute = BackendSlot("compute")
        begin, middle, end = (g.constant([at]) for at in (0, self.size, self.answer_size))
        return compute.slice(g, mean, begin, middle), compute.slice(g, mean, middle, end)

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require("deltas", self.deltas is True, "true: the answers are moves")

    def require_sgd(self, *, momentum: bool = False) -> None:
        """Refuse an optimizer of the clients whose moves are no sum of gradients."""
        config = self._config
        self.require("optimizer", config.optimizer == "sgd", '"sgd": its moves add gradients up')
        if not momentum:
            self.require("momentum", config.momentum == 0, "0: moves have to add gradients up")


@dataclass(kw_only=True, eq=False)
class Scaffold(AnswersMoves):
    """SCAFFOLD (Karimireddy et al., 2020, arXiv:1910.06378, algorithm 1, option II).

    The server has a control variate c, each client one of its own, c_i; both begin with zeros. A
    client receives x and c, makes K steps y <- y - rate (gradient - c_i + c), and takes
    c_i <- c_i - c + (x - y) / (K rate). The server takes x <- x + `server_learning_rate` times the
    mean of y - x, and c <- c + |S| / N times the mean move of the c_i, where |S| answered.

    A client takes its new c_i when the server has told it that its answer was in time: the answer
    of a client that is late changes neither c nor c_i.
    """

    weighted: bool = False  # the paper's mean is of clients
    population: int = 0  # N, the clients that there are in all; 0: `clients`, all take part

    def sent(self, g: Graph, peers: Output) -> Output:
        """Return the server's weights, and its control variate, [P] each."""
        control = self._vector("control").params(g, after=peers)
        return g.bundle([super().sent(g, peers), control])

    def client_update(self, g: Graph, asked: Request) -> tuple[Output, Output]:
        """Train with c - c_i added to each gradient; return the moves of weights and of c_i."""
        compute, model = BackendSlot("compute"), self.client_model
        x, control = g.unbundle(asked.received, [types.TENSOR_FLOAT, types.TENSOR_FLOAT])
        self.client_loads(g, x)
        own = self._vector("own_control").params(g, after=x)
        told, work = model.train_adjusted(
            g, correction=compute.sub(g, control, own), epochs=self.epochs, batch=self.batch,
            after=self.ready(g, x),
        )  # fmt: skip
        moved = compute.sub(g, model.params(g), x)
        rates = compute.gather(g, work, g.constant(1), axis=0)
        turned = compute.neg(g, compute.add(g, control, compute.div(g, moved, rates)))
        self._vector("next_control").load_parameters(g, compute.add(g, own, turned))
        return compute.concat(g, moved, turned, axis=0), told

    def combined(self, g: Graph, asked: Request) -> tuple[Output, Output]:
        """Move the server's control variate; return the mean move of the weights."""
        compute = BackendSlot("compute")
        mean, stats = super().combined(g, asked)
        moved, turned = self.parts(g, mean)
        # Not of all that answered: what was refused is in no mean.
        count = syscalls.metadata_number(g, stats, key="contributors")
        share = compute.div(g, count, g.constant(float(self.population or self.clients)))
        self._vector("control").apply_delta(g, compute.mul(g, turned, share))
        # On each client that is in the mean; an own execution, in which nothing waits.
        taken = g.net_out("taken", asked.responses.peers, g.constant(True, after=moved))
        kept = self._vector("next_control").params(g, after=taken)
        self._vector("own_control").load_parameters(g, kept)
        return moved, stats

    @property
    def answer_size(self) -> int:
        """The length of the tensor that a client answers: two moves."""
        return 2 * self.size

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_sgd()
        self.require_counts(population=0)
        enough = self.population == 0 or self.population >= self.clients
        self.require("population", enough, f"0 or at least clients={self.clients}")

    def _vector(self, slot: str) -> ModelSlot:
        return ModelSlot(slot, concrete=concrete(StateVector, StateVectorConfig(size=self.size)))


@dataclass(kw_only=True, eq=False)
class FedNova(AnswersMoves):
    """FedNova: moves that are normalised by local work (Wang et al., 2020, arXiv:2007.07481).

    A client answers d_i, its move divided by the norm a_i of how its steps add gradients up, and
    a_i. The server moves by the mean of d_i times the mean of a_i, so that a client that makes more
    steps does not pull further. a_i is the sum of the learning rates of the steps: their number
    times the rate; with `momentum` and with `proximal` it is the paper's (section 5).
    """

    proximal: float = 0.0

    extra_numbers = 1  # a_i, or the number of steps

    def local_training(self, g: Graph, weights: Output) -> tuple[Output, Output]:
        """Train; return the normalised move with its norm, and the Metadata."""
        compute, model = BackendSlot("compute"), self.client_model
        told, work = model.train_adjusted(
            g, epochs=self.epochs, batch=self.batch, proximal=float(self.proximal),
            after=self.ready(g, weights),
        )  # fmt: skip
        norm, scale = self._norm(g, work)
        move = compute.div(g, self.answer(g, model.params(g), weights), norm)
        return compute.concat(g, move, scale, axis=0), told

    def combined(self, g: Graph, asked: Request) -> tuple[Output, Output]:
        """Return the mean of the normalised moves, at the mean of the norms."""
        mean, stats = super().combined(g, asked)
        move, scale = self.parts(g, mean)
        return BackendSlot("compute").mul(g, move, scale), stats

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_sgd(momentum=True)
        self.require_not_negative("proximal")
        config = self._config
        if config.momentum or self.proximal:
            plain = config.schedule == "constant"
            self.require("schedule", plain, '"constant" beside a momentum or proximal')
            both = bool(config.momentum and self.proximal)
            self.require("proximal", not both, "0 beside a momentum")
            self.require("nesterov", not config.nesterov, "false: the norm is of plain momentum")
            kept = bool(config.momentum and config.keep_optimizer_state)
            self.require(
                "keep_optimizer_state", not kept,
                "false beside a momentum: the norm is of one that begins with 0 in each round",
            )  # fmt: skip
            short = self.proximal * self.learning_rate < 1
            self.require("proximal", short, f"below 1 / learning_rate ({self.learning_rate})")

    def _norm(self, g: Graph, work: Output) -> tuple[Output, Output]:
        """Emit what a move is divided by, and what the mean is multiplied with, [1] each."""
        compute = BackendSlot("compute")
        steps = compute.slice(g, work, g.constant([0]), g.constant([1]))
        rates = compute.slice(g, work, g.constant([1]), g.constant([2]))
        m = float(self._config.momentum)
        if m:
            # Gradient k of n adds up to (1 - m^(n-k)) / (1 - m) of itself.
            fading = compute.sub(g, g.constant(1.0), compute.pow(g, g.constant(m), steps))
            less = compute.mul(g, fading, g.constant(m / (1 - m)))
            norm = compute.mul(g, compute.sub(g, steps, less), g.constant(1 / (1 - m)))
            return norm, norm
        if self.proximal:
            # Of gradient k of n, (1 - rate mu)^(n-k) is left.
            a = float(self.proximal) * float(self.learning_rate)
            left = compute.pow(g, g.constant(1 - a), steps)
            norm = compute.mul(g, compute.sub(g, g.constant(1.0), left), g.constant(1 / a))
            return norm, steps
        return rates, rates


@dataclass(kw_only=True, eq=False)
class QFedAvg(AnswersMoves):
    """q-FedAvg: clients that fare worse count for more (Li et al., 2020, arXiv:1905.10497, alg. 2).

    With F the loss of a client over all its examples at the weights w that it received, y what it
    trained, L = `lipschitz` and D = L (w - y), it answers F^q D and h = q F^(q-1) |D|^2 + L F^q;
    the server takes w <- w - sum of F^q D / sum of h. q = 0 is the mean of clients, each counted
    once; the larger q, the more alike their losses become.
    """

    weighted: bool = False
    q: float = 0.2
    lipschitz: float = 0.0  # L; 0: 1 / `learning_rate`, as the authors have it

    extra_numbers = 1  # h

    def client_update(self, g: Graph, asked: Request) -> tuple[Output, Output]:
        """Measure the loss, train, and return the weighted move with its h."""
        compute, model, w = BackendSlot("compute"), self.client_model, asked.received
        loaded = self.client_loads(g, w)
        ready = self.ready(g, loaded)
        start = loaded if ready is None else ready
        _, examples, labels = self.examples(g, self.train_data(), start)
        loss = compute.reshape(g, model.compute_loss(g, examples, labels), g.constant([1]))
        told = model.train(g, epochs=self.epochs, batch=self.batch, after=loss)
        steep = float(self.lipschitz or 1 / self.learning_rate)
        down = compute.mul(g, compute.sub(g, model.params(g), w), g.constant(steep))
        powers = [self._power(g, loss, each) for each in (self.q, self.q - 1)]
        length = compute.reduce_sum(g, compute.mul(g, down, down), g.constant([0]), keepdims=True)
        curved = compute.mul(g, compute.mul(g, length, powers[1]), g.constant(float(self.q)))
        h = compute.add(g, curved, compute.mul(g, powers[0], g.constant(steep)))
        return compute.concat(g, compute.mul(g, down, powers[0]), h, axis=0), told

    def combined(self, g: Graph, asked: Request) -> tuple[Output, Output]:
        """Return the move of the weights."""
        mean, stats = super().combined(g, asked)
        move, h = self.parts(g, mean)
        return BackendSlot("compute").div(g, move, h), stats

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_not_negative("q", "lipschitz")
        self.require("weighted", not self.weighted, "false: the losses are what clients weigh")

    def _power(self, g: Graph, loss: Output, power: float) -> Output:
        # As in the authors' code, so that a loss of 0 has a power below 0 as well.
        compute = BackendSlot("compute")
        return compute.pow(
            g, compute.add(g, loss, g.constant(1e-10)), g.constant(float(power))
        )  # fmt: skip
