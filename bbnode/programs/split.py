"""Split learning: one model in parts on several peers, trained through the wire.

Rule: parts are cut from the model while the program is recorded, and each is a model of its own;
what crosses a cut are activations one way, and the gradients by them the other.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, shape_inference

from bbnode.components import Codec, ConnectedView, HeldModel, OnnxModel, OnnxModelConfig, concrete
from bbnode.components.settings import stored_settings
from bbnode.dsl import (
    BackendSlot,
    CodecSlot,
    ConcreteSpec,
    DataSourceSlot,
    Graph,
    ModelSlot,
    Output,
    PeerSelectorSlot,
    Request,
    types,
)
from bbnode.ir.errors import BbnodeError
from bbnode.programs.parts.plain import Codes
from bbnode.programs.training import TRAIN_SLOT, Forward, TrainingProgram, component_of

BOTTOM, TOP, HEAD = "bottom", "top", "head"
_LOSS_SETTINGS = (
    "loss", "label_smoothing", "class_weights", "pos_weight", "ignore_index", "class_axis",
    "huber_delta",
)  # fmt: skip


class SplitLearning(TrainingProgram):
    """One step of split learning (Gupta and Raskar, 2018, arXiv:1810.06060), on a client's batch.

    The model is cut behind the value `cut`. Input "tick" (Trigger) has a client compute the bottom
    on its next `batch` examples, and send the activations and the labels to a peer of the class
    "server", which has the top. That makes its step and answers the gradient by the
    activations, with which the client makes the step of its bottom. Both steps together are that of
    the whole model on this batch. With `head`, a second value behind the first, what is behind it
    is the client's as well, and so the labels stay there.

    Output, on the client: "loss", float32 [], before the step.

    A step of a client is one execution. Of clients that step at once, the top takes each as it
    comes; of clients that step in turn, one begins when the other has its "loss". Each has parts of
    its own, or with `shared` the server keeps these too: then a step begins with their
    weights and ends with their gradients, and the server makes the step, so that clients in turn
    train one model.
    """

    home = "client"

    cut: str = ""  # the value behind which the clients' bottom ends
    head: str = ""  # the value behind which the clients' head begins; empty: the server has labels
    shared: bool = False  # the parts of clients are the same, and kept by the server
    deadline_s: float = 60.0  # that a client waits for each answer of the server, seconds
    codec: Codes | None = None  # of what crosses a cut, both ways, and of the loss beside it

    def body(self, g: Graph) -> None:
        """Record a step."""
        self.check()
        server = PeerSelectorSlot("server", peer_class="server").sample(
            g, n=1, after=g.input("tick", types.TRIGGER)
        )
        ready = self._fetched(g, server) if self.shared else server
        _, examples, labels = self.examples(g, self.batches(), ready)
        bottom = self.part(BOTTOM)
        activations = g.expect(bottom.forward(g, examples), types.TENSOR_FLOAT)
        if self.head:
            by_head, by_activations, loss = self._u_shaped(g, server, activations, labels)
        else:
            by_activations, loss = self._with_labels(g, server, activations, labels)
            by_head = None
        by_bottom, _ = bottom.pull_back(g, examples, by_activations)
        found = [by_bottom, *([] if by_head is None else [by_head])]
        if self.shared:
            done = [self._handed_in(g, server, found)]
        else:
            done = [
                self.part(name).step(g, grads, after=by_bottom)
                for name, grads in zip(self.own_parts, found, strict=True)
            ]
        g.output("loss", loss, after=done)

    def _with_labels(
        self, g: Graph, server: Output, activations: Output, labels: Output
    ) -> tuple[Output, Output]:
        """Have the server step on activations and labels; return the gradient, and the loss."""
        code = self._codec()
        asked = self._ask(g, "step", server, g.bundle([activations, labels]), code)
        received, told = g.unbundle(asked.received, [types.TENSOR_FLOAT, labels.type])
        top = self.part(TOP)
        grads, by_activations, loss = top.gradient_with_input(g, received, told)
        asked.respond(g.bundle([by_activations, loss]), after=top.step(g, grads), codec=code)
        gradients, losses = asked.responses.unbundled([types.TENSOR_FLOAT, types.TENSOR_FLOAT])
        return gradients.concatenated(), BackendSlot("compute").squeeze(g, losses.stacked)

    def _u_shaped(
        self, g: Graph, server: Output, activations: Output, labels: Output
    ) -> tuple[Output, Output, Output]:
        """Go through the server's part and back; the gradients of the head, and as above.

        The activations travel twice, so that the server keeps nothing between the two requests.
        """
        top, head, code = self.part(TOP), self.part(HEAD), self._codec()
        asked = self._ask(g, "forward", server, activations, code)
        asked.respond(g.expect(top.forward(g, asked.received), types.TENSOR_FLOAT), codec=code)
        received = asked.responses.concatenated()
        by_head, by_received, loss = head.gradient_with_input(g, received, labels)
        back = self._ask(g, "backward", server, g.bundle([activations, by_received]), code)
        again, grad = g.unbundle(back.received, [types.TENSOR_FLOAT, types.TENSOR_FLOAT])
        grads, by_activations = top.pull_back(g, again, grad, to_input=True)
        back.respond(by_activations, after=top.step(g, grads), codec=code)
        return by_head, back.responses.concatenated(), loss

    def _fetched(self, g: Graph, server: Output) -> Output:
        """Load on the client the weights of its parts; return the last command."""
        asked = self._ask(g, "weights", server, server)
        parts = [self.kept_part(name).params(g, after=asked.received) for name in self.own_parts]
        asked.respond(g.bundle(parts))
        loaded = server
        received = asked.responses.unbundled([types.TENSOR_FLOAT] * len(parts))
        for name, answers in zip(self.own_parts, received, strict=True):
            loaded = self.part(name).load_parameters(g, answers.concatenated())
        return loaded

    def _handed_in(self, g: Graph, server: Output, found: Sequence[Output]) -> Output:
        """Have the server step the clients' parts; return what says that it has."""
        asked = self._ask(g, "gradients", server, g.bundle(found))
        grads = g.unbundle(asked.received, [types.TENSOR_FLOAT] * len(found))
        stepped = [
            self.kept_part(name).step(g, each)
            for name, each in zip(self.own_parts, grads, strict=True)
        ]
        asked.respond(g.constant(True, after=stepped))
        return asked.responses.count

    def _ask(
        self, g: Graph, name: str, server: Output, value: Output, code: CodecSlot | None = None
    ) -> Request:
        return g.request(name, server, value, quorum=1, deadline=float(self.deadline_s), codec=code)

    @property
    def _codec_class(self) -> type[Codec]:
        found: type[Codec] = component_of(self, "codec", Codec, "bbnode.Int8Codec")
        return found

    def _codec(self) -> CodecSlot | None:
        """Return the slot that encodes what crosses a cut; None: it travels as it is."""
        if self.codec is None:
            return None
        found, given = self._codec_class, self.codec
        settings = stored_settings(given.config) if isinstance(given, ConcreteSpec) else {}
        return CodecSlot("codec", concrete=concrete(found, **settings))

    @property
    def own_parts(self) -> tuple[str, ...]:
        """The names of the parts on a client."""
        return (BOTTOM, HEAD) if self.head else (BOTTOM,)

    def part(self, name: str) -> ModelSlot:
        """Return the slot of a part where it computes: "bottom", "top" or "head"."""
        return ModelSlot(name, concrete=concrete(HeldModel, self.parts[name]))

    def kept_part(self, name: str) -> ModelSlot:
        """Return the server's slot of a part that clients share."""
        return ModelSlot(f"shared_{name}", concrete=concrete(HeldModel, self.parts[name]))

    @cached_property
    def parts(self) -> Mapping[str, OnnxModelConfig]:
        """The settings of each part, by its name. Raises BadArgument for a cut that can't be."""
        ends = {BOTTOM: self.cut, TOP: self.head} if self.head else {BOTTOM: self.cut}
        names = [*ends, HEAD if self.head else TOP]
        models = _cut(self, self.forward, [*ends.values()], names)
        whole = self._config
        trained = OnnxModel(whole).trained
        found: dict[str, OnnxModelConfig] = {}
        homes: dict[str, str] = {}
        for name, model in models.items():
            held = {tensor.name for tensor in model.graph.initializer}
            own = tuple(each for each in trained if each in held)
            if not own:
                raise self.bad(f"the {name} has no weights that are trained; cut elsewhere")
            for each in own:
                if each in homes:
                    raise self.bad(
                        f"{each!r} is trained in the {homes[each]} and in the {name}, which would "
                        "move apart; cut elsewhere, or leave it out of trainable"
                    )
                homes[each] = name
            content = model.SerializeToString(deterministic=True)
            config = replace(whole, model=content, trainable=own)
            found[name] = config if name == names[-1] else _without_loss(config)
            _check_made(self, name, found[name])
        return found

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots."""
        bound = {**super().bindings(), "server": ConnectedView}
        if self.batches().concrete is not None:
            del bound[TRAIN_SLOT]
        return bound

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        _check_parts_alone(self)
        self.require("cut", self.cut != "", "the name of a value")
        for name in ("cut", "head"):
            self.require(name, isinstance(getattr(self, name), str), "the name of a value")
        self.require("shared", isinstance(self.shared, bool), "true or false")
        self.require_numbers("deadline_s")
        if self.codec is not None and self._codec_class.of_deltas:
            raise self.bad(
                "codec= encodes activations and gradients, and this codec is for deltas; take "
                "another, such as bbnode.Int8Codec"
            )
        _ = self.parts


class VerticalLearning(TrainingProgram):
    """One step of split learning over columns (Vepakomma et al., 2018, arXiv:1812.00564).

    Several peers hold other features of the same rows, and the server holds the labels. Peers of
    the class "party0", "party1", … have the bottoms, in the order of `bottoms`; the server has the
    top, `model`, whose input [N, width] is their outputs [N, width_i] side by side.

    Input "tick" (Trigger) starts a step on the server: it takes the next `batch` examples of its
    slot "data", in which the features are row numbers, int64 [N], and asks one peer of each class
    for its bottom's outputs of these rows. It computes the loss, and sends each the gradient by its
    columns, with which it makes the step of its bottom; then the top makes its own. Together that
    is the step of the whole model.

    The slot "data" of a party has all its rows, in the order that was agreed on (`batch_size` is
    0); its labels are not read. Output, on the server: "loss", float32 [], before the step.
    """

    home = "server"

    bottoms: Sequence[Forward] = ()  # of each class of parties, as `model` is one
    deadline_s: float = 60.0  # that the server waits for each answer, seconds

    def body(self, g: Graph) -> None:
        """Record a step."""
        self.check()
        compute, table, top = BackendSlot("compute"), DataSourceSlot("table"), self.part(TOP)
        rows, labels = self.batches().next_batch(g, after=g.input("tick", types.TRIGGER))
        rows = g.expect(rows, types.TENSOR_INT64)
        labels = g.expect(labels, types.TENSOR_INT64 if self._of_classes else types.TENSOR_FLOAT)
        peers, columns = [], []
        for at, bottom in enumerate(self._bottoms):
            party = PeerSelectorSlot(f"cohort{at}", peer_class=f"party{at}").sample(
                g, n=1, after=rows
            )
            asked = self._ask(g, f"forward{at}", party, rows)
            batch = self._own(g, compute, table, asked.received, bottom)
            made = self.part(f"{BOTTOM}{at}").forward(g, batch)
            asked.respond(g.expect(made, types.TENSOR_FLOAT))
            peers.append(party)
            # A party that answers other rows than it was asked for fails here, by its own node.
            shape = compute.concat(
                g, compute.shape(g, rows), g.constant([_width(bottom.graph.output[0])]), axis=0
            )
            columns.append(compute.reshape(g, asked.responses.concatenated(), shape))
        joined = compute.concat(g, *columns, axis=1)
        grads, by_joined, loss = top.gradient_with_input(g, joined, labels)
        first, done = 0, []
        for at, (bottom, party) in enumerate(zip(self._bottoms, peers, strict=True)):
            last, one = first + _width(bottom.graph.output[0]), g.constant([1])
            own = compute.slice(g, by_joined, g.constant([first]), g.constant([last]), one)
            back = self._ask(g, f"backward{at}", party, g.bundle([rows, own]))
            again, grad = g.unbundle(back.received, [types.TENSOR_INT64, types.TENSOR_FLOAT])
            batch = self._own(g, compute, table, again, bottom)
            slot = self.part(f"{BOTTOM}{at}")
            pulled, _ = slot.pull_back(g, batch, grad)
            back.respond(g.constant(True, after=slot.step(g, pulled)))
            done.append(back.responses.count)
            first = last
        g.output("loss", loss, after=top.step(g, grads, after=done))

    def _own(
        self, g: Graph, compute: BackendSlot, table: DataSourceSlot, rows: Output, model: ModelProto
    ) -> Output:
        """Return a party's features of some rows."""
        features, _ = table.next_batch(g, after=rows)
        kind = types.TENSOR_BY_ELEM[_input(model).type.tensor_type.elem_type]
        return compute.gather(g, g.expect(features, kind), rows, axis=0)

    def _ask(self, g: Graph, name: str, peers: Output, value: Output) -> Request:
        return g.request(name, peers, value, quorum=1, deadline=float(self.deadline_s))

    def part(self, name: str) -> ModelSlot:
        """Return the slot of a part: "top", or "bottom0", "bottom1", …."""
        return ModelSlot(name, concrete=concrete(HeldModel, self.parts[name]))

    @cached_property
    def parts(self) -> Mapping[str, OnnxModelConfig]:
        """The settings of each part, by its name."""
        found = {TOP: self._config}
        for at, bottom in enumerate(self._bottoms):
            content = bottom.SerializeToString(deterministic=True)
            found[f"{BOTTOM}{at}"] = _without_loss(replace(self._config, model=content))
        for name, config in found.items():
            _check_made(self, name, config)
        return found

    @cached_property
    def _bottoms(self) -> Sequence[ModelProto]:
        return [self.taken(each) for each in self.bottoms]

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots."""
        cohorts = (f"cohort{at}" for at in range(len(self.bottoms)))
        bound = {
            **super().bindings(),
            "table": self.source,
            **dict.fromkeys(cohorts, ConnectedView),
        }
        if self.batches().concrete is not None:
            del bound[TRAIN_SLOT]
        return bound

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        settings: Any = self
        listed = isinstance(self.bottoms, list | tuple) and len(self.bottoms) > 0
        self.require("bottoms", listed, "a list of models, one for each class of parties")
        self.require(
            "trainable", not settings.trainable, "empty: names are of one model, not of several"
        )
        self.require_numbers("deadline_s")
        for model in self._bottoms:
            _check_crosses(self, model.graph.output[0].name, model.graph.output[0])
        given, made = (
            _width(_input(self.forward)),
            sum(_width(m.graph.output[0]) for m in self._bottoms),
        )
        if given != made:
            raise self.bad(
                f"model takes {given} columns, and the bottoms make {made}; they have to be as many"
            )
        _check_parts_alone(self)
        _ = self.parts


def _width(info: ValueInfoProto) -> int:
    """Return the size of the second of two axes; 0 where it is open, or there are others."""
    dims = info.type.tensor_type.shape.dim
    return int(dims[1].dim_value) if len(dims) == 2 else 0


def _input(model: ModelProto) -> ValueInfoProto:
    held = {tensor.name for tensor in model.graph.initializer}
    return next(info for info in model.graph.input if info.name not in held)


def _without_loss(config: OnnxModelConfig) -> OnnxModelConfig:
    """Return the settings of a part that has no loss: any that fits every output."""
    plain = OnnxModelConfig(model=b"")
    kept: dict[str, Any] = {name: getattr(plain, name) for name in _LOSS_SETTINGS}
    return replace(config, **(kept | {"loss": "mse"}))


def _check_made(program: TrainingProgram, name: str, config: OnnxModelConfig) -> None:
    try:
        made = OnnxModel(config)
    except BbnodeError as error:
        raise program.bad(f"the {name} can't be trained: {error}") from error
    if not made.is_plain:
        raise program.bad(
            f"the {name} trains in a form of its own (BatchNormalization, Dropout or "
            'precision="mixed"); gradients are pulled back through the one that is evaluated: '
            'take mode="as_written" and float32, or a model without these'
        )


def _check_parts_alone(program: TrainingProgram) -> None:
    """Refuse what parts can't do for themselves as the whole does. Raises BadArgument."""
    program.require("epochs", program.epochs == 1, "1: a step has one batch")
    settings: Any = program
    for name, none, why in (
        ("clip_norm", 0, "the norm is of all parts' gradients; take clip_value"),
        ("lora", None, "adapters belong to the whole model"),
        ("accumulate", 1, "each batch makes a step"),
    ):
        program.require(name, getattr(settings, name) == none, f"{none}: {why}")
    _check_made(program, "model", settings._config)


def _cut(
    program: TrainingProgram, model: ModelProto, at: Sequence[str], names: Sequence[str]
) -> dict[str, ModelProto]:
    """Cut a model behind values, in order, into parts of one input and one output each."""
    graph = shape_inference.infer_shapes(model, data_prop=True).graph
    made = {output for node in graph.node for output in node.output}
    infos = {info.name: info for info in (*graph.value_info, *graph.output)}
    for name in at:
        if name not in made:
            near = difflib.get_close_matches(name, sorted(made), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise program.bad(f"the model makes no value {name!r:.80}{hint}")
        _check_crosses(program, name, infos.get(name))
    ends = [_input(model), *(infos[name] for name in at), graph.output[0]]
    return {
        part: _between(program, part, model, graph, given, wanted)
        for part, (given, wanted) in zip(names, pairwise(ends), strict=True)
    }


def _check_crosses(program: TrainingProgram, name: str, info: ValueInfoProto | None) -> None:
    kind = info.type.tensor_type if info is not None else None
    if kind is None or kind.elem_type != TensorProto.FLOAT:
        raise program.bad(f"the value {name!r} is not known to be float32; cut at another one")
    dims = kind.shape.dim
    if not dims or dims[0].HasField("dim_value"):
        raise program.bad(
            f"the value {name!r} has no open first axis, that of the batch; cut at another one"
        )


def _between(
    program: TrainingProgram, part: str, model: ModelProto, graph: GraphProto,
    given: ValueInfoProto, wanted: ValueInfoProto,
) -> ModelProto:  # fmt: skip
    """Return the part of a model that computes one value from another one."""
    maker = {output: at for at, node in enumerate(graph.node) for output in node.output if output}
    held = {tensor.name for tensor in graph.initializer}
    inputs = {info.name for info in graph.input} - held
    kept: set[int] = set()
    read: set[str] = set()
    todo = [wanted.name]
    while todo:
        name = todo.pop()
        if name in read or name == given.name:
            continue
        read.add(name)
        if name in inputs:
            raise program.bad(
                f"the {part} needs {name!r} beside {given.name!r}, so that more than one value "
                "would cross; cut where one does"
            )
        if name in maker and maker[name] not in kept:
            kept.add(maker[name])
            todo.extend(_reads(graph.node[maker[name]]))
    if wanted.name == given.name or not kept:
        raise program.bad(f"the {part} would have no op; cut at another value")
    made = ModelProto()
    made.CopyFrom(model)
    made.graph.ClearField("node")
    made.graph.ClearField("initializer")
    made.graph.node.extend(node for at, node in enumerate(graph.node) if at in kept)
    made.graph.initializer.extend(t for t in graph.initializer if t.name in read)
    for field, infos in (("input", [given]), ("output", [wanted]), ("value_info", [])):
        made.graph.ClearField(field)
        getattr(made.graph, field).extend(infos)
    made.graph.name = f"{graph.name}.{part}"
    return made


def _reads(node: NodeProto) -> Iterator[str]:
    """Yield the values that a node reads, also in graphs that it holds."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for inner in (attribute.g, *attribute.graphs):
            own = {output for each in inner.node for output in each.output}
            own |= {info.name for info in inner.input} | {t.name for t in inner.initializer}
            for each in inner.node:
                yield from (name for name in _reads(each) if name not in own)
            yield from (info.name for info in inner.output if info.name not in own)
