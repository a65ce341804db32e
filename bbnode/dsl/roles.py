"""The slot classes, one per role.

Rule: a method is a typed name for one op of the op table; a test compares the two, op by op and
argument by argument. The first argument is the Graph, then the op's inputs, then its attributes by
name, `deadline`: seconds that the op may take (0: the rest of its execution's time), and `after`:
values that must be there before the op fires.
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

        The model runs in evaluation mode. The peer that made the batch continues with the second
        gradient by `pull_back`.
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
        """Pull a gradient of the output of `forward` back: (float32 [P], gradient by the batch).

        Unlike `backward` it keeps no state, so that several executions may be between their
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
        """Set the learning rate, float32 [], of all further steps; a CommandId."""
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

        `anchor` [P] (default: the parameters at the start of the training) and `correction` [P]
        are vectors like the parameters. Parameters that `frozen` names, one per line, do not
        change. Returns the Metadata of `train`, and float32 [3]: the number of steps, the sum of
        their learning rates, and the completed fraction of the epochs, which is below 1 if a
        node's `max_steps` or `max_train_s` ended the training.
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
        """Add the contribution of the peer that sent the delivery; a CommandId.

        `tensor` is float32 [P] with the same P from every peer, `metadata` a Metadata with
        `num_samples`. A second contribution of a peer replaces its first.
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
        """Combine and clear the contributions: (tensor [P], Metadata).

        The op fails at run time if there are none.
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
        """Count, mean, squared deviations, minimum and maximum of each feature: (float64 [5, F],
        Metadata with `num_samples`)."""
        return cast(Pair, self.op(g, "Statistics", deadline=deadline, after=after))

    def standardize(
        self, g: Graph, statistics: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Standardise features by the statistics of all peers; a CommandId."""
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
        """Encode a tensor; the code is a tensor of a shape and dtype that the codec chooses."""
        return cast(Output, self.op(g, "Encode", tensor, deadline=deadline, after=after))

    def decode(
        self, g: Graph, code: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Decode a code to its tensor, as exactly as the codec can."""
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
        """Decode a batch of answers; a peer whose code is refused counts as missing.

        `parts` marks the encoded parts of bundles: "10" marks the first of two. A request's
        `respond(…, codec=…)` records this op.
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

    compress = encode  # older names of the three methods
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
        """Store one vector [D] or several [N, D]; returns their ids, int64 [] or [N], for `remove`.

        Args:
            g: the Graph.
            vector: float32.
            metadata: metadata of each vector, a MetadataVec.
            id: id of each vector, int64 [] or [N]; a vector with the same id is replaced. Without
                it the index numbers them.
            after: as everywhere.
        """
        return cast(Output, self.op(g, "Add", vector, metadata, id, deadline=deadline, after=after))

    def search(
        self, g: Graph, query: Output, where: Output | None = None, *,
        k: int = 10, deadline: float = 0.0, after: After = None,
    ) -> ResultsOutput:  # fmt: skip
        """The k nearest to `query` [D], or to each of [Q, D], nearest first, as SearchResults.

        `where`, a Metadata, filters the items: `{"language": "en", "year >=": 2020}`.
        """
        return cast(
            ResultsOutput, self.op(g, "Search", query, where, k=k, deadline=deadline, after=after)
        )

    def remove(
        self, g: Graph, item: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Remove the vectors with these ids, as returned by `add`; a CommandId."""
        return cast(Output, self.op(g, "Remove", item, deadline=deadline, after=after))

    def centroids(
        self, g: Graph, *, n: int = 16, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Up to n centroids of the vectors, float32 [C, 1 + D]; rows begin with an item count."""
        return cast(Output, self.op(g, "Centroids", n=n, deadline=deadline, after=after))

    def train(
        self, g: Graph, training: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Fit the index to examples [N, D]; a CommandId."""
        return cast(Output, self.op(g, "Train", training, deadline=deadline, after=after))


class PeerSelectorSlot(Slot):
    """Chooses peers of one class; values sent to them live on that class.

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
        """Create a slot for the selection of peers of one class.

        Args:
            name: name of the slot.
            peer_class: class of the peers; omit it only if nothing is sent to them, since the
                compiler refuses a send without it.
            include_self: True if a node that plays `peer_class` itself can be chosen too;
                otherwise only other nodes can.
            concrete: the component, if the program chooses it.
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

        `mode` is "all", "random" (n of them) or "near_key" (the n nearest to `key`). The op
        fails at run time if the selector does not support the mode.
        """
        return cast(
            Output, self.op(g, "Select", key, mode=mode, n=n, deadline=deadline, after=after)
        )

    def observed(
        self, g: Graph, responses: Output, *, deadline: float = 0.0, after: After = None
    ) -> Output:
        """Report the answers of the chosen peers, and their delays, to the selector; a CommandId.

        A learning selector (`bbnode.Oort`, `bbnode.ByDataSize`) uses them for its next choices.
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
        """Create a slot for the ops of one protocol."""
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

    Call it once, in the module that registers the component.

    Args:
        protocol: name of the protocol, as in `ProtocolSlot(name, protocol)`.
        op_type: the op's name in camel case, for instance "PassOn".
        inputs, outputs: types by port name, in order.
        attributes: defaults by name.

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
