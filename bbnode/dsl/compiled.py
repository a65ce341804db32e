"""`CompiledModule`: a program that was recorded or compiled before, as a Module.

Rule: replaying is recording again, op by op, with the same checks as an author's recording
and with names of its own; so a replayed program can stand inside of any other one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count

import onnx
from onnx import FunctionProto, ModelProto, NodeProto

from bbnode.dsl import onnx_walk
from bbnode.dsl.compiled_rejoin import is_compiled, rejoin
from bbnode.dsl.core.graph import Graph, Output
from bbnode.dsl.core.module import Module
from bbnode.dsl.core.names import check_class, check_name, hint
from bbnode.dsl.core.recorder import SlotUse
from bbnode.dsl.errors import BrokenArtifact, ModelTooLarge, NoSuchTarget
from bbnode.dsl.onnx_calls import MAX_OPS, FunctionKey, inlined_size
from bbnode.dsl.onnx_record import clean_name, copied_attribute, scopes_of
from bbnode.ir import keys, opset, protos, types
from bbnode.ir.seal import is_intact
from bbnode.ir.slots import Binding, ConcreteSpec
from bbnode.ir.types import TypeNode

_TRAIT_SUFFIX = "Runtime"
# What recording an op again makes anew.
_REMADE_KEYS = frozenset(
    {
        keys.SLOT_KEY, keys.SLOT_ID_KEY, keys.REQUIRED_TRAIT_KEY, keys.CONCRETE_TYPE_KEY,
        keys.INSTANCE_KEY, keys.PEER_CLASS_KEY, keys.AFTER_KEY, keys.MODULE_INSTANCE_KEY,
        keys.SOURCE_LINE_KEY,
    }
)  # fmt: skip


class CompiledModule(Module):
    """Replays a recorded or compiled model; its inputs and outputs are the program's.

    ```python
    round_ = CompiledModule(onnx.load("round.onnx"))

    class Nightly(Module):
        home = "server"

        def body(self, g):
            tick = g.input("tick", types.TRIGGER)
            made = round_.call().input("tick", tick).build(g)
            g.output("accuracy", made.output("accuracy"))
    ```

    A compiled model is put together again from its targets, and the parent's compile cuts it
    anew; all of its classes of peers stay. One target alone can be replayed when it neither
    sends nor receives. Slots stay what they were: concrete ones keep component and config,
    generic ones are bound by the parent's compile; `bound` says to what they were.
    """

    def __init__(
        self, model: ModelProto, target: str | None = None, *, name: str | None = None
    ) -> None:
        """Take a model.

        Args:
            model: what `Module.build()` or `Compiler.compile()` returned; not changed.
            target: of a compiled model: the one target to replay, by name or class. The whole
                program when left out.
            name: of the Module; the program's when left out.

        Raises:
            BrokenArtifact: it is neither, was changed after it was compiled, or its parts do
                not fit together.
            NoSuchTarget: there is no such target.
            NestingTooDeep, ModelTooLarge: its calls nest in a ring, or are too many ops.
        """
        given: object = model
        is_model = isinstance(given, ModelProto)
        # A text that is no UTF-8 is bytes, or cannot be read at all.
        broken = onnx_walk.broken_text(model) if is_model else None
        called = name or (clean_name(model.graph.name) if is_model and broken is None else "")
        self.name = check_name("Module name", called or "Program")
        if broken is not None:
            raise self._broken(
                f"a text in it ({broken}) is no UTF-8: it is damaged; fetch it again"
            )
        if not is_model or not model.functions:
            raise self._broken(
                f"{model!r:.60} holds no program; give what Module.build() or Compiler().compile() "
                "returned (a plain ONNX model is an OnnxModule)"
            )
        onnx_walk.check_depth(model, self.name)
        self._bindings = _bindings(model)
        if is_compiled(model):
            if not is_intact(model):
                raise self._broken("it was changed after it was compiled; compile it again")
            recorded = rejoin(model, self._mains(model, target), self.name)
        elif target is not None:
            raise NoSuchTarget(
                f"the model is not compiled, so that it has no target {target!r:.60}; leave "
                "target out",
                self.name,
            )
        else:
            recorded = ModelProto()
            recorded.CopyFrom(model)
        root = recorded.functions[0]
        size = inlined_size(root.node, recorded.functions, self.name)
        if size > MAX_OPS:
            raise ModelTooLarge(f"it has {size} ops; {MAX_OPS} at most", self.name)
        self.home = check_class(
            protos.get_meta(root, keys.HOME_KEY) or keys.SELF_CLASS, module=self.name
        )
        self._library = _Library(recorded, self.name)
        self._root = root
        self._bootstraps = self._library.bootstraps_of(root, whole=is_compiled(model))

    @property
    def bound(self) -> Mapping[str, str]:
        """TYPE_NAME of the component that each slot was bound to when it was compiled."""
        return dict(self._bindings)

    def body(self, g: Graph) -> None:
        """Record the program's ops again."""
        _Replay(g, self._root, self._library).run()

    def bootstrap(self, g: Graph) -> None:
        """Record the program's bootstraps again."""
        for function in self._bootstraps:
            _Replay(g, function, self._library).run()

    def _mains(self, model: ModelProto, target: str | None) -> list[FunctionProto]:
        mains = [f for f in model.functions if protos.get_meta(f, keys.TARGET_KEY) is not None]
        if target is None:
            if not mains:
                raise self._broken("it has no targets; compile the program again")
            return mains
        for main in mains:
            if target in (main.name, protos.get_meta(main, keys.HOME_KEY)):
                return [main]
        raise NoSuchTarget(
            f"there is no target {target!r:.80}{hint(str(target), [f.name for f in mains])}",
            self.name,
        )

    def _broken(self, what: str) -> BrokenArtifact:
        return BrokenArtifact(what, self.name)


def _bindings(model: ModelProto) -> dict[str, str]:
    found = {}
    for entry in model.metadata_props:
        if entry.key.startswith(keys.BINDING_PREFIX):
            target, _, slot = entry.key.removeprefix(keys.BINDING_PREFIX).rpartition(".")
            found[slot] = Binding.decode(target, slot, entry.value).type_name
    return found


class _Library:
    """The functions of a recorded model."""

    def __init__(self, model: ModelProto, module: str) -> None:
        self.module = module
        self._imports = {o.domain: o.version for o in model.opset_import}
        self._functions: dict[FunctionKey, FunctionProto] = {
            protos.function_key(f): f for f in model.functions
        }

    def get(self, node: NodeProto) -> FunctionProto | None:
        """The function that a node calls, or None."""
        return self._functions.get(protos.call_key(node))

    def bootstrap_of(self, function: FunctionProto) -> FunctionProto | None:
        """The bootstrap of the Module whose body a function is, or None."""
        key = (function.domain, function.name + keys.BOOTSTRAP_SUFFIX, "")
        return self._functions.get(key)

    def bootstraps_of(self, root: FunctionProto, *, whole: bool) -> list[FunctionProto]:
        """The root's bootstrap; with `whole` also those whose Modules were inlined."""
        own = self.bootstrap_of(root)
        found = [] if own is None else [own]
        if whole:
            named = {f.name + keys.BOOTSTRAP_SUFFIX for f in self._functions.values()}
            found += [
                f for f in self._functions.values()
                if protos.get_meta(f, keys.MODULE_PHASE_KEY) == keys.BOOTSTRAP_PHASE
                and f.name not in named
            ]  # fmt: skip
        return found

    def version(self, function: FunctionProto, domain: str) -> int:
        """The opset version of a domain in a function."""
        spellings = ("", keys.ONNX_DOMAIN) if protos.is_onnx_domain(domain) else (domain,)
        own = {o.domain: o.version for o in function.opset_import}
        for versions in (own, self._imports):
            for spelling in spellings:
                if spelling in versions:
                    return versions[spelling]
        return keys.BB_OPSET_VERSION if domain else keys.ONNX_OPSET_VERSION


class _Body(Module):
    """A sub-Module of a replayed program."""

    def __init__(self, function: FunctionProto, library: _Library) -> None:
        self.name = check_name("Module name", function.name, module=library.module)
        home = protos.get_meta(function, keys.HOME_KEY) or keys.SELF_CLASS
        self.home = check_class(home, module=self.name)
        self._function = function
        self._library = library

    def body(self, g: Graph) -> None:
        _Replay(g, self._function, self._library).run()

    def bootstrap(self, g: Graph) -> None:
        function = self._library.bootstrap_of(self._function)
        if function is not None:
            _Replay(g, function, self._library).run()


class _Replay:
    """One function, recorded again into a Graph."""

    def __init__(self, g: Graph, function: FunctionProto, library: _Library) -> None:
        self._g = g
        self._function = function
        self._library = library
        self._kinds = protos.value_types(function)
        self._known: dict[str, Output] = {}
        self._roles = _slot_roles(function)
        self._configs = {a.name: a.s for a in function.attribute_proto}
        self._numbers = count()

    def run(self) -> None:
        outputs = set(self._function.output)
        for name in self._function.input:
            self._known[name] = self._g.input(name, self._kinds.get(name, types.ANY))
        for node in self._function.node:
            with ExitStack() as scopes:
                for scope in scopes_of(node.name):
                    scopes.enter_context(self._g.with_module(scope))
                self._record(node, outputs)
        for name in self._function.output:
            if name in outputs:  # made by an op of another kind than g.output records
                self._g.output(name, self._value(name, "an output"))

    def _record(self, node: NodeProto, outputs: set[str]) -> None:
        waits = [self._value(n, node.name) for n in _after(node)]
        callee = self._library.get(node)
        if _is_output(node, outputs):
            name = node.output[0]
            outputs.discard(name)
            value = self._known[name] = self._value(node.input[0], node.name)
            self._g.output(name, value, after=waits or None)
        elif callee is not None:
            self._call(node, callee, waits)
        else:
            self._emit(node, waits)

    def _call(self, node: NodeProto, callee: FunctionProto, waits: list[Output]) -> None:
        call = _Body(callee, self._library).call()
        for formal, actual in zip(callee.input, node.input, strict=False):
            if actual:
                call.input(formal, self._value(actual, node.name))
        made = call.build(self._g, after=waits or None)
        for formal, actual in zip(callee.output, node.output, strict=False):
            if actual:
                self._known[actual] = made.output(formal)

    def _emit(self, node: NodeProto, waits: list[Output]) -> None:
        outer = {name: self._value(name, node.name).name for name in onnx_walk.reads(node)}
        domain = "" if protos.is_onnx_domain(node.domain) else node.domain
        version = self._library.version(self._function, domain)
        meta = {k: v for k, v in protos.all_meta(node).items() if k not in _REMADE_KEYS}
        if keys.FAN_IN_KEY in meta:
            meta[keys.FAN_IN_KEY] = self._value(meta[keys.FAN_IN_KEY], node.name).name
        made = self._g.emit(
            domain,
            node.op_type,
            inputs=[self._value(name, node.name) if name else None for name in node.input],
            outputs=list(zip(self._labels(node, version), self._types(node), strict=True)),
            attributes=[copied_attribute(a, outer, self._fresh) for a in node.attribute],
            metadata=meta,
            slot=self._slot(node),
            after=waits or None,
            opset_version=version,
        )
        self._known.update((n, v) for n, v in zip(node.output, made, strict=True) if n)

    def _value(self, name: str, reader: str) -> Output:
        found = self._known.get(name)
        if found is None:
            raise self._g.error(
                BrokenArtifact,
                f"{reader or 'an op'!r:.80} reads {name!r:.80}, which nothing before it makes; "
                "record or compile the program again",
            )
        return found

    def _types(self, node: NodeProto) -> list[TypeNode]:
        return [self._kinds.get(name, types.ANY) for name in node.output]

    def _labels(self, node: NodeProto, version: int) -> Sequence[str]:
        """Names of the op's output ports, those of a variadic one numbered."""
        spec = opset.lookup_op(node.domain, node.op_type)
        ports: list[tuple[str, bool]] = []
        if spec is not None:
            ports = [(port.name, port.variadic) for port in spec.outputs]
        elif protos.is_onnx_domain(node.domain) or node.domain == onnx_walk.ONNX_ML_DOMAIN:
            domain = "" if protos.is_onnx_domain(node.domain) else node.domain
            schema = protos.onnx_schema(node.op_type, version, domain)
            if schema is None:
                raise self._g.error(
                    BrokenArtifact, f"ONNX has no op {node.op_type!r} at opset {version}"
                )
            variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
            ports = [(port.name, port.option == variadic) for port in schema.outputs]
        labels: list[str] = []
        for name, many in ports:
            wanted = len(node.output) - len(labels)
            labels += [f"{name}_{i}" for i in range(wanted)] if many else [name]
        labels += [f"value_{i}" for i in range(len(labels), len(node.output))]
        return labels[: len(node.output)]

    def _fresh(self) -> str:
        return f"inner.{next(self._numbers)}"

    def _slot(self, node: NodeProto) -> SlotUse | None:
        meta = protos.all_meta(node)
        name = meta.get(keys.SLOT_KEY)
        if name is None:
            return None
        trait = meta.get(keys.REQUIRED_TRAIT_KEY, "").removesuffix(_TRAIT_SUFFIX)
        role = self._roles.get(name, trait) or "Backend"
        type_name = meta.get(keys.CONCRETE_TYPE_KEY)
        concrete = None
        if type_name is not None:
            config = self._configs.get(name, b"")
            concrete = ConcreteSpec(role=role, type_name=type_name, config=config)
        peer_class = None if protos.is_wire(node) else meta.get(keys.PEER_CLASS_KEY)
        return SlotUse(
            name=check_name("slot", name),
            role=role,
            concrete=concrete,
            peer_class=peer_class,
        )


def _slot_roles(function: FunctionProto) -> dict[str, str]:
    return {
        entry.key.removeprefix(keys.SLOT_ROLE_PREFIX): entry.value.split("|")[0]
        for entry in function.metadata_props
        if entry.key.startswith(keys.SLOT_ROLE_PREFIX)
    }


def _after(node: NodeProto) -> list[str]:
    return [n for n in (protos.get_meta(node, keys.AFTER_KEY) or "").split(",") if n]


def _is_output(node: NodeProto, outputs: set[str]) -> bool:
    """Whether a node is what `g.output` records."""
    is_pass = node.domain == keys.SYSCALL_DOMAIN and node.op_type == "PassThrough"
    return is_pass and len(node.input) == 1 and len(node.output) == 1 and node.output[0] in outputs
