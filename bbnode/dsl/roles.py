"""The slot classes, one per role.

Rule: a method is a typed name for one op of the op table; a test holds that the two agree, op
by op and argument by argument. The first argument is the Graph, then the op's inputs, then its
attributes by name, `deadline`: seconds that the op may take (0: what its execution has left), and
`after`: values that must be there before the op fires.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

from bbnode.dsl.core.graph import After, AnswersOutput, Graph, Output, ResultsOutput
from bbnode.dsl.core.names import check_class, check_name
from bbnode.dsl.core.recorder import SlotUse
from bbnode.dsl.core.slot import Slot
from bbnode.dsl.errors import BadArgument
from bbnode.ir import keys, opset
from bbnode.ir.opset import OpSpec, Port
from bbnode.ir.slots import ConcreteSpec
from bbnode.ir.types import TypeNode

Pair = tuple[Output, Output]


class ModelSlot(Slot):
    """A trainable model; its parameters are one flat float32 vector, [P].

    ```python
    local = ModelSlot("local")
    local.load_parameters(g, received)
    stats = local.train(g, epochs=1, after=received)
    update = g.bundle([local.params(g, after=stats), stats])
    ```
    """

    ROLE: ClassVar[str] = "Model"

    def forward(
        self, g: Graph, batch: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Outputs for a batch: [N, …] to [N, …], float32."""
        return cast(Output, self.op(g, "Forward", batch, deadline=deadline, after=after))

    def backward(
        self, g: Graph, grad: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Pull an output gradient of the last forward back to the parameters; a CommandId."""
        return cast(Output, self.op(g, "Backward", grad, deadline=deadline, after=after))

    def step(
        self, g: Graph, grads: Output | None = None, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """One optimizer step, with `grads` [P] or those of the last `backward`; a CommandId."""
        return cast(Output, self.op(g, "Step", grads, deadline=deadline, after=after))

    def compute_loss(
        self, g: Graph, batch: Output, target: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Mean loss of `batch` [N, …] against `target` [N] or [N, …]; float32 []."""
        return cast(
            Output, self.op(g, "ComputeLoss", batch, target, deadline=deadline, after=after)
        )

    def evaluate(
        self, g: Graph, batch: Output, target: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """The older name of `compute_loss`."""
        return cast(Output, self.op(g, "Evaluate", batch, target, deadline=deadline, after=after))

    def gradient(
        self, g: Graph, batch: Output, target: Output, *, deadline: float = 0.0, after: After = None
    ) -> Pair:
        """Gradient of the mean loss by the parameters, and that loss: (float32 [P], float32 []).

        Nothing of the model changes. `step(g, grads)` makes an optimizer step with it, here or on
        another peer.
        """
        return cast(Pair, self.op(g, "Gradient", batch, target, deadline=deadline, after=after))

    def gradient_with_input(
        self, g: Graph, batch: Output, target: Output, *, deadline: float = 0.0, after: After = None
    ) -> tuple[Output, Output, Output]:
        """As `gradient`, and by the batch too: (float32 [P], float32 like the batch, float32 []).

        Of a model as it is evaluated. Who made the batch goes on with the second by `pull_back`.
        """
        made = self.op(g, "GradientWithInput", batch, target, deadline=deadline, after=after)
        return cast("tuple[Output, Output, Output]", made)

    def pull_back(
        self,
        g: Graph,
        batch: Output,
        grad: Output,
        *,
        to_input: bool = False,
        deadline: float = 0.0,
        after: After = None,
    ) -> Pair:
        """Pull a gradient by what `forward` makes of a batch back: (float32 [P], by the batch).

        Unlike `backward` it keeps nothing, so that several executions may be between their
        `forward` and this. Without `to_input` the second is empty, float32 [0].
        """
        return cast(
            Pair,
            self.op(
                g, "PullBack", batch, grad, to_input=int(to_input), deadline=deadline, after=after
            ),
        )

    def set_learning_rate(
        self, g: Graph, rate: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Take `rate`, float32 [], for all steps from now on; a CommandId."""
        return cast(Output, self.op(g, "SetLearningRate", rate, deadline=deadline, after=after))

    def apply_delta(
        self, g: Graph, delta: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Add `delta` [P] to the parameters; a CommandId."""
        return cast(Output, self.op(g, "ApplyDelta", delta, deadline=deadline, after=after))

    def load_parameters(
        self, g: Graph, params: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Replace the parameters by `params` [P]; a CommandId."""
        return cast(Output, self.op(g, "LoadParameters", params, deadline=deadline, after=after))

    def params(self, g: Graph, *, deadline: float = 0.0, after: After = None) -> Output:
        """The parameters, [P] float32."""
        return cast(Output, self.op(g, "Params", deadline=deadline, after=after))

    def train(
        self,
        g: Graph,
        *,
        epochs: int = 1,
        batch: int = 32,
        deadline: float = 0.0,
        after: After = None,
    ) -> Output:
        """Train on the bound DataSource; Metadata with `num_samples`, `loss` and `steps`."""
        return cast(
            Output, self.op(g, "Train", epochs=epochs, batch=batch, deadline=deadline, after=after)
        )

    def train_adjusted(
        self, g: Graph, anchor: Output | None = None, correction: Output | None = None, *,
        epochs: int = 1, batch: int = 32, proximal: float = 0.0, frozen: str = "",
        deadline: float = 0.0, after: After = None,
    ) -> Pair:  # fmt: skip
        """Train as `train`, with `proximal` (w - `anchor`) + `correction` added to each gradient.

        `anchor` [P], without one the parameters that the training begins with, and `correction` [P]
        are vectors like the parameters. Parameters that `frozen` names, one a line, stay. Returns
        the Metadata of `train`, and float32 [3]: the steps made, the sum of their learning rates,
        and the part of the epochs that was done, which is below 1 where a node's `max_steps` or
        `max_train_s` ended the training.
        """
        made = self.op(
            g, "TrainAdjusted", anchor, correction,
            epochs=epochs, batch=batch, proximal=proximal, frozen=frozen,
            deadline=deadline, after=after,
        )  # fmt: skip
        return cast(Pair, made)


class AggregatorSlot(Slot):
    """Combines tensors of many peers into one.

    ```python
    mean = AggregatorSlot("mean")
    taken = mean.contribute_all(g, asked.responses)
    weights, summary = mean.aggregate(g, after=taken)
    ```
    """

    ROLE: ClassVar[str] = "Aggregator"

    def contribute(
        self,
        g: Graph,
        tensor: Output,
        metadata: Output,
        *,
        deadline: float = 0.0,
        after: After = None,
    ) -> Output:
        """Add the contribution of the peer that the delivery came from; a CommandId.

        `tensor` is float32 [P] with the same P from every peer, `metadata` a Metadata with
        `num_samples`. A second one of the same peer replaces its first.
        """
        return cast(
            Output, self.op(g, "Contribute", tensor, metadata, deadline=deadline, after=after)
        )

    def contribute_all(
        self, g: Graph, responses: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Add a cohort's answers, each a composite (tensor, metadata); a CommandId."""
        return cast(Output, self.op(g, "ContributeAll", responses, deadline=deadline, after=after))

    def aggregate(self, g: Graph, *, deadline: float = 0.0, after: After = None) -> Pair:
        """Combine and clear what was contributed: (tensor [P], Metadata).

        The op fails at run time when nothing was contributed.
        """
        return cast(Pair, self.op(g, "Aggregate", deadline=deadline, after=after))

    def current_tensor(self, g: Graph, *, deadline: float = 0.0, after: After = None) -> Output:
        """The last aggregate, [P] float32; the op fails at run time before the first."""
        return cast(Output, self.op(g, "CurrentTensor", deadline=deadline, after=after))


class DataSourceSlot(Slot):
    """Hands out examples, batch by batch.

    ```python
    batch, labels = DataSourceSlot("data").next_batch(g, after=tick)
    ```
    """

    ROLE: ClassVar[str] = "DataSource"

    def next_batch(self, g: Graph, *, deadline: float = 0.0, after: After = None) -> Pair:
        """The next (batch [N, …] float32, labels [N], or [N, …])."""
        return cast(Pair, self.op(g, "NextBatch", deadline=deadline, after=after))

    def reset(self, g: Graph, *, deadline: float = 0.0, after: After = None) -> Output:
        """Start from the first batch again; a Trigger."""
        return cast(Output, self.op(g, "Reset", deadline=deadline, after=after))

    def on_data_loaded(self, g: Graph, *, deadline: float = 0.0, after: After = None) -> Output:
        """Fires when the source has its data; a Trigger."""
        return cast(Output, self.op(g, "OnDataLoaded", deadline=deadline, after=after))

    def statistics(self, g: Graph, *, deadline: float = 0.0, after: After = None) -> Pair:
        """Of each feature count, mean, squared deviations, minimum, maximum: (float64 [5, F],
        Metadata with `num_samples`)."""
        return cast(Pair, self.op(g, "Statistics", deadline=deadline, after=after))

    def standardize(
        self, g: Graph, statistics: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Take the statistics of all peers, by which features are standardised; a CommandId."""
        return cast(Output, self.op(g, "Standardize", statistics, deadline=deadline, after=after))


class CodecSlot(Slot):
    """Compresses tensors, e.g. before they are sent.

    ```python
    update = g.net_out("update", server, update, codec=CodecSlot("codec"))
    ```
    """

    ROLE: ClassVar[str] = "Codec"

    def encode(
        self, g: Graph, tensor: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """A tensor to its code, a tensor of a shape and dtype that the codec chooses."""
        return cast(Output, self.op(g, "Encode", tensor, deadline=deadline, after=after))

    def decode(
        self, g: Graph, code: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """A code to the tensor that it stands for, as exactly as the codec can."""
        return cast(Output, self.op(g, "Decode", code, deadline=deadline, after=after))

    def decode_all(
        self,
        g: Graph,
        responses: Output,
        *,
        parts: str = "",
        deadline: float = 0.0,
        after: After = None,
    ) -> AnswersOutput:
        """Answers that are codes to the same ones decoded; a peer whose code is refused is missing.

        `parts` says which parts of answers that are bundles are codes, as "10" of two parts says
        it of the first. `respond(…, codec=…)` of a request records it.
        """
        return cast(
            AnswersOutput,
            self.op(g, "DecodeAll", responses, parts=parts, deadline=deadline, after=after),
        )

    def train(
        self, g: Graph, training: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Fit the codebook to examples [N, …]; a CommandId."""
        return cast(Output, self.op(g, "Train", training, deadline=deadline, after=after))

    compress = encode  # the older names of the three
    decompress = decode
    train_codebook = train


class IndexSlot(Slot):
    """Nearest-neighbour search over vectors [D] of one length.

    ```python
    index = IndexSlot("index")
    found = index.search(g, query, k=5, after=index.add(g, vector))
    ```
    """

    ROLE: ClassVar[str] = "Index"

    def add(
        self, g: Graph, vector: Output, metadata: Output | None = None, id: Output | None = None, *,  # noqa: A002
        deadline: float = 0.0, after: After = None,
    ) -> Output:  # fmt: skip
        """Store one vector [D] or several [N, D]; their ids, int64 [] or [N], which `remove` takes.

        Args:
            g: the Graph.
            vector: float32.
            metadata: of each vector, a MetadataVec.
            id: of each vector, int64 [] or [N]; one that the index holds is replaced. Without it
                the index numbers them.
            after: as everywhere.
        """
        return cast(Output, self.op(g, "Add", vector, metadata, id, deadline=deadline, after=after))

    def search(
        self, g: Graph, query: Output, where: Output | None = None, *,
        k: int = 10, deadline: float = 0.0, after: After = None,
    ) -> ResultsOutput:  # fmt: skip
        """The k nearest to `query` [D], or to each of [Q, D], nearest first, as SearchResults.

        `where`, a Metadata, says which items count: `{"language": "en", "year >=": 2020}`.
        """
        return cast(
            ResultsOutput, self.op(g, "Search", query, where, k=k, deadline=deadline, after=after)
        )

    def remove(
        self, g: Graph, item: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Forget the vectors with these ids, as `add` gave them; a CommandId."""
        return cast(Output, self.op(g, "Remove", item, deadline=deadline, after=after))

    def centroids(
        self, g: Graph, *, n: int = 16, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Up to n centres of what it holds, float32 [C, 1 + D]; a row begins with its items."""
        return cast(Output, self.op(g, "Centroids", n=n, deadline=deadline, after=after))

    def train(
        self, g: Graph, training: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Fit the index to examples [N, D]; a CommandId."""
        return cast(Output, self.op(g, "Train", training, deadline=deadline, after=after))


class PeerSelectorSlot(Slot):
    """Chooses peers of one class; what is sent to them lives on that class.

    ```python
    clients = PeerSelectorSlot("cohort", peer_class="client").sample(g, n=4, after=tick)
    received = g.net_out("weights", clients, weights)  # on "client"
    ```
    """

    ROLE: ClassVar[str] = "PeerSelector"

    def __init__(
        self,
        name: str,
        *,
        peer_class: str | None = None,
        include_self: bool = False,
        concrete: ConcreteSpec | None = None,
    ) -> None:
        """Name the slot and the class of the peers that it selects.

        Args:
            name: of the slot.
            peer_class: the compiler refuses a send to its peers without one; leave it out only if
                they are not sent to.
            include_self: a node that plays `peer_class` itself is one of the peers that it can
                choose; otherwise only others are.
            concrete: the component, if the program says it.
        """
        if type(include_self) is not bool:
            raise BadArgument(f"include_self has to be True or False, not {include_self!r:.80}")
        super().__init__(name, concrete=concrete)
        self._use = SlotUse(
            name=self._use.name,
            role=self.ROLE,
            concrete=self._use.concrete,
            peer_class=None if peer_class is None else check_class(peer_class),
            include_self=include_self,
        )

    @property
    def peer_class(self) -> str | None:
        """The class of the peers that this slot selects."""
        return self._use.peer_class

    def sample(self, g: Graph, *, n: int, deadline: float = 0.0, after: After = None) -> Output:
        """`n` different peers of the current view, as a PeerIdVec in PeerId order."""
        return cast(Output, self.op(g, "Sample", n=n, deadline=deadline, after=after))

    def current_view(self, g: Graph, *, deadline: float = 0.0, after: After = None) -> Output:
        """All peers that can be chosen, as a PeerIdVec in PeerId order."""
        return cast(Output, self.op(g, "CurrentView", deadline=deadline, after=after))

    def select(
        self,
        g: Graph,
        key: Output | None = None,
        *,
        mode: Literal["all", "random", "near_key"] = "all",
        n: int = 0,
        deadline: float = 0.0,
        after: After = None,
    ) -> Output:
        """Peers by a rule, as a PeerIdVec in PeerId order.

        `mode` is "all", "random" (n of them) or "near_key" (the n nearest to `key`). A
        selector that cannot do what is asked for fails the op at run time; it does not guess.
        """
        return cast(
            Output, self.op(g, "Select", key, mode=mode, n=n, deadline=deadline, after=after)
        )

    def observed(
        self, g: Graph, responses: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Tell the selector what those whom it chose have answered, and how fast; a CommandId.

        A selector that learns (`bbnode.Oort`, `bbnode.ByDataSize`) chooses by it from then on.
        """
        return cast(Output, self.op(g, "Observed", responses, deadline=deadline, after=after))


class ProtocolSlot(Slot):
    """A protocol with its own ops: those of the domain `ai.bytesandbrains.protocol.<protocol>`.

    The package that ships the protocol registers each with `protocol_op`; then they are methods
    of the slot by their names in snake case. A module named by an entry point of the group
    `bbnode.protocol_ops`, under the protocol's name, is imported when one of its ops is met.
    """

    ROLE: ClassVar[str] = "Protocol"

    def __init__(self, name: str, protocol: str, *, concrete: ConcreteSpec | None = None) -> None:
        """Name the slot and the protocol whose ops it records."""
        super().__init__(name, concrete=concrete)
        self._protocol = check_name("protocol name", protocol)

    def _specs(self) -> tuple[OpSpec, ...]:
        return opset.ops_of(keys.PROTOCOL_DOMAIN_PREFIX + self._protocol)


def protocol_op(
    protocol: str,
    op_type: str,
    inputs: Mapping[str, TypeNode],
    outputs: Mapping[str, TypeNode],
    **attributes: Any,
) -> OpSpec:
    """Register an op of a protocol; its component has a method of that name in snake case.

    Called once, in the module that registers the component.

    Args:
        protocol: the one that `ProtocolSlot(name, protocol)` names.
        op_type: in camel case, for instance "PassOn".
        inputs, outputs: name to type, in order.
        attributes: name to default.

    Raises:
        AuthorError: the op is registered already.
    """
    return opset.register_op(
        OpSpec(
            domain=keys.PROTOCOL_DOMAIN_PREFIX + check_name("protocol name", protocol),
            op_type=op_type,
            inputs=tuple(Port(name=name, type=node) for name, node in inputs.items()),
            outputs=tuple(Port(name=name, type=node) for name, node in outputs.items()),
            attributes=attributes,
            role="Protocol",
            suspends=True,
        )
    )
