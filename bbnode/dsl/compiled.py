"""`CompiledModule`: a program that was recorded or compiled before, as a Module.

Rule: replaying is recording again, op by op, with the same checks as an author's recording
and with names of its own; so a replayed program can stand inside of any other one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count

from onnx import ModelProto

from bbnode.dsl.backend.catalogue import onnx_schema, port_names
from bbnode.dsl.compiled_rejoin import rejoin
from bbnode.dsl.core.graph import Graph, Output
from bbnode.dsl.core.module import Module
from bbnode.dsl.core.names import check_class, check_name, hint
from bbnode.dsl.core.recorder import SlotUse
from bbnode.dsl.errors import BrokenArtifact, ModelTooLarge, NoSuchTarget
from bbnode.dsl.onnx.graph import renamed_attributes
from bbnode.dsl.onnx.load import MAX_OPS, inlined_size
from bbnode.dsl.onnx.module import clean_name, scopes_of
from bbnode.ir import keys, opset, protos, types
from bbnode.ir.bounds import OutOfBounds
from bbnode.ir.graph import Function, OpNode, Program, call_key, is_onnx_domain, is_wire
from bbnode.ir.onnx_file import program_of
from bbnode.ir.seal import is_intact
from bbnode.ir.slots import Binding, ConcreteSpec

_TRAIT_SUFFIX = "Runtime"
# Metadata that recording an op again makes anew.
_REMADE_KEYS = frozenset(
    {
        keys.SLOT_KEY, keys.SLOT_ID_KEY, keys.REQUIRED_TRAIT_KEY, keys.CONCRETE_TYPE_KEY,
        keys.INSTANCE_KEY, keys.PEER_CLASS_KEY, keys.MODULE_INSTANCE_KEY,
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
        """Open a model.

        Args:
            model: a result of `Module.build()` or `Compiler.compile()`; not changed.
            target: of a compiled model: the one target to replay, by name or class. The whole
                program when left out.
            name: of the Module; the program's when left out.

        Raises:
            BrokenArtifact: it is neither, was changed after it was compiled, or its parts do
                not fit together.
            NoSuchTarget: there is no such target.
            NestingTooDeep, ModelTooLarge: its calls nest in a ring, or are too many ops.
        """
        program = _opened(model, name or "Program")
        self.name = check_name("Module name", name or clean_name(program.name) or "Program")
        self._bindings = _bindings(program)
        compiled = is_compiled(program)
        if compiled:
            if not is_intact(model):
                raise self._broken("it was changed after it was compiled; compile it again")
            mains = {main.key for main in self._mains(program, target)}
            joined = rejoin(
                model, [f for f in model.functions if protos.function_key(f) in mains], self.name
            )
            program = program_of(joined)
        elif target is not None:
            raise NoSuchTarget(
                f"the model is not compiled, so that it has no target {target!r:.60}; leave "
                "target out",
                self.name,
            )
        self._program = program
        self._functions = {function.key: function for function in program.functions}
        self._root = root = program.functions[0]
        size = inlined_size(root, self._functions, self.name)
        if size > MAX_OPS:
            raise ModelTooLarge(f"it has {size} ops; {MAX_OPS} at most", self.name)
        self.home = check_class(_home(root), module=self.name)
        self._bootstraps = self._bootstraps_of(root, whole=compiled)

    @property
    def bound(self) -> Mapping[str, str]:
        """TYPE_NAME of the component that each slot was bound to when it was compiled."""
        return dict(self._bindings)

    def body(self, g: Graph) -> None:
        """Record the program's ops again."""
        _Replay(g, self._root, self).run()

    def bootstrap(self, g: Graph) -> None:
        """Record the program's bootstraps again."""
        for function in self._bootstraps:
            _Replay(g, function, self).run()

    def _mains(self, program: Program, target: str | None) -> list[Function]:
        mains = [f for f in program.functions if keys.TARGET_KEY in f.metadata]
        if target is None:
            if not mains:
                raise self._broken("it has no targets; compile the program again")
            return mains
        for main in mains:
            if target in (main.name, main.metadata.get(keys.HOME_KEY)):
                return [main]
        raise NoSuchTarget(
            f"there is no target {target!r:.80}{hint(str(target), [f.name for f in mains])}",
            self.name,
        )

    def _broken(self, what: str) -> BrokenArtifact:
        return BrokenArtifact(what, self.name)

    # --- functions ---------------------------------------------------------------------------

    def _called(self, node: OpNode) -> Function | None:
        return self._functions.get(call_key(node))

    def _bootstrap_of(self, function: Function) -> Function | None:
        return self._functions.get((function.domain, function.name + keys.BOOTSTRAP_SUFFIX, ""))

    def _bootstraps_of(self, root: Function, *, whole: bool) -> list[Function]:
        """Return the root's bootstrap; with `whole` also those whose Modules were inlined."""
        own = self._bootstrap_of(root)
        found = [] if own is None else [own]
        if whole:
            named = {f.name + keys.BOOTSTRAP_SUFFIX for f in self._functions.values()}
            found += [
                f for f in self._functions.values()
                if f.metadata.get(keys.MODULE_PHASE_KEY) == keys.BOOTSTRAP_PHASE
                and f.name not in named
            ]  # fmt: skip
        return found

    def _version(self, function: Function, domain: str) -> int:
        """Return the opset version of a domain in a function."""
        spellings = ("", keys.ONNX_DOMAIN) if is_onnx_domain(domain) else (domain,)
        for imports in (dict(function.opset_imports), dict(self._program.opset_imports)):
            for spelling in spellings:
                if spelling in imports:
                    return imports[spelling]
        return keys.BB_OPSET_VERSION if domain else keys.ONNX_OPSET_VERSION


def is_compiled(program: Program) -> bool:
    """Return True if the compiler made the program."""
    return keys.COMPILED_KEY in program.metadata


def _opened(model: ModelProto, module: str) -> Program:
    given: object = model
    if not isinstance(given, ModelProto) or not given.functions:
        raise BrokenArtifact(
            f"{model!r:.60} holds no program; give the result of Module.build() or "
            "Compiler().compile() (a plain ONNX model is an OnnxModule)",
            module,
        )
    try:
        return program_of(model)
    except OutOfBounds as error:
        raise BrokenArtifact(f"it is damaged, or no program: {error}", module) from error


def _bindings(program: Program) -> dict[str, str]:
    found = {}
    for key, text in program.metadata.items():
        if key.startswith(keys.BINDING_PREFIX):
            target, _, slot = key.removeprefix(keys.BINDING_PREFIX).rpartition(".")
            found[slot] = Binding.decode(target, slot, text).type_name
    return found


def _home(function: Function) -> str:
    return function.metadata.get(keys.HOME_KEY) or keys.SELF_CLASS


class _Body(Module):
    """A sub-Module of a replayed program."""

    def __init__(self, function: Function, program: CompiledModule) -> None:
        self.name = check_name("Module name", function.name, module=program.name)
        self.home = check_class(_home(function), module=self.name)
        self._function = function
        self._program = program

    def body(self, g: Graph) -> None:
        _Replay(g, self._function, self._program).run()

    def bootstrap(self, g: Graph) -> None:
        function = self._program._bootstrap_of(self._function)
        if function is not None:
            _Replay(g, function, self._program).run()


class _Replay:
    """One function, recorded again into a Graph."""

    def __init__(self, g: Graph, function: Function, program: CompiledModule) -> None:
        self._g = g
        self._function = function
        self._program = program
        self._kinds = function.kinds()
        self._known: dict[str, Output] = {}
        self._numbers = count()

    def run(self) -> None:
        outputs = set(self._function.outputs)
        for name in self._function.inputs:
            self._known[name] = self._g.input(name, self._kinds.get(name, types.ANY))
        for node in self._function.nodes:
            with ExitStack() as scopes:
                for scope in scopes_of(node.name):
                    scopes.enter_context(self._g.with_module(scope))
                self._record(node, outputs)
        for name in self._function.outputs:
            if name in outputs:  # made by an op of another kind than g.output records
                self._g.output(name, self._value(name, "an output"))

    def _record(self, node: OpNode, outputs: set[str]) -> None:
        waits = [self._value(name, node.name) for name in node.after]
        callee = self._program._called(node)
        if _is_output(node, outputs):
            (name,) = node.outputs
            outputs.discard(name)
            value = self._known[name] = self._value(node.inputs[0], node.name)
            self._g.output(name, value, after=waits or None)
        elif callee is not None:
            self._call(node, callee, waits)
        else:
            self._emit(node, waits)

    def _call(self, node: OpNode, callee: Function, waits: list[Output]) -> None:
        call = _Body(callee, self._program).call()
        for formal, actual in zip(callee.inputs, node.inputs, strict=False):
            if actual:
                call.input(formal, self._value(actual, node.name))
        made = call.build(self._g, after=waits or None)
        for formal, actual in zip(callee.outputs, node.outputs, strict=False):
            if actual:
                self._known[actual] = made.output(formal)

    def _emit(self, node: OpNode, waits: list[Output]) -> None:
        outer = {name: self._value(name, node.name).name for name in node.computes_with}
        domain = "" if is_onnx_domain(node.domain) else node.domain
        version = self._program._version(self._function, domain)
        meta = {k: v for k, v in node.metadata.items() if k not in _REMADE_KEYS}
        if keys.FAN_IN_KEY in meta:
            meta[keys.FAN_IN_KEY] = self._value(meta[keys.FAN_IN_KEY], node.name).name
        kinds = [self._kinds.get(name, types.ANY) for name in node.outputs]
        made = self._g.emit(
            domain,
            node.op_type,
            inputs=[self._value(name, node.name) if name else None for name in node.inputs],
            outputs=list(zip(self._labels(node, version), kinds, strict=True)),
            attributes=renamed_attributes(node, outer, lambda: f"inner.{next(self._numbers)}"),
            metadata=meta,
            slot=self._slot(node),
            after=waits or None,
            opset_version=version,
        )
        self._known.update((n, v) for n, v in zip(node.outputs, made, strict=True) if n)

    def _value(self, name: str, reader: str) -> Output:
        found = self._known.get(name)
        if found is None:
            raise BrokenArtifact(
                f"{reader or 'an op'!r:.80} reads {name!r:.80}, which nothing before it makes; "
                "record or compile the program again"
            )
        return found

    def _labels(self, node: OpNode, version: int) -> Sequence[str]:
        """Return the names of the op's output ports, those of a variadic one numbered."""
        number = len(node.outputs)
        labels: list[str] = []
        spec = opset.lookup_op(node.domain, node.op_type)
        if spec is not None:
            for port in spec.outputs:
                rest = number - len(labels)
                labels += (
                    [f"{port.name}_{i}" for i in range(rest)] if port.variadic else [port.name]
                )
        elif is_onnx_domain(node.domain) or node.domain == keys.ONNX_ML_DOMAIN:
            domain = "" if is_onnx_domain(node.domain) else node.domain
            schema = onnx_schema(node.op_type, version, domain)
            if schema is None:
                raise BrokenArtifact(f"ONNX has no op {node.op_type!r} at opset {version}")
            labels = port_names(schema.outputs, number)
        labels += [f"value_{i}" for i in range(len(labels), number)]
        return labels[:number]

    def _slot(self, node: OpNode) -> SlotUse | None:
        meta = node.metadata
        name = meta.get(keys.SLOT_KEY)
        if name is None:
            return None
        told = self._function.metadata.get(keys.SLOT_ROLE_PREFIX + name, "").split("|")[0]
        role = told or meta.get(keys.REQUIRED_TRAIT_KEY, "").removesuffix(_TRAIT_SUFFIX)
        type_name = meta.get(keys.CONCRETE_TYPE_KEY)
        concrete = None
        if type_name is not None:
            config = self._function.defaults.get(name)
            value = b"" if config is None else config.value
            concrete = ConcreteSpec(role=role or "Backend", type_name=type_name, config=value)
        return SlotUse(
            name=check_name("slot", name),
            role=role or "Backend",
            concrete=concrete,
            peer_class=None if is_wire(node) else meta.get(keys.PEER_CLASS_KEY),
        )


def _is_output(node: OpNode, outputs: set[str]) -> bool:
    """Return True if a node is one that `g.output` records."""
    is_pass = node.domain == keys.SYSCALL_DOMAIN and node.op_type == "PassThrough"
    return (
        is_pass and len(node.inputs) == 1 and len(node.outputs) == 1 and node.outputs[0] in outputs
    )
