"""`CompiledModule`: a program that was recorded or compiled before, as a Module.

Rule: a replay records every op again, with the same checks as an author's recording and with
new names; so a replayed program can be part of any other one.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto

from bbnode.dsl.core.graph import After, Graph
from bbnode.dsl.core.module import Module
from bbnode.dsl.core.names import check_class, check_name, hint
from bbnode.dsl.core.recorder import SlotUse
from bbnode.dsl.errors import BrokenArtifact, ModelTooLarge, NoSuchTarget
from bbnode.dsl.onnx.copying import NodeCopier, clean_name
from bbnode.dsl.onnx.load import MAX_OPS, inlined_size
from bbnode.ir import keys
from bbnode.ir.bounds import OutOfBounds
from bbnode.ir.graph import (
    Function,
    OpNode,
    Program,
    ValueType,
    annotations_on,
    call_key,
    is_onnx_domain,
    is_wire,
)
from bbnode.ir.onnx_file import program_of
from bbnode.ir.reopen import NotReopenable, is_compiled, reopen
from bbnode.ir.seal import is_intact
from bbnode.ir.slots import Binding, ConcreteSpec

_TRAIT_SUFFIX = "Runtime"
# Metadata that recording an op again creates anew.
_REMADE_KEYS = frozenset(
    {
        keys.SLOT_KEY, keys.SLOT_ID_KEY, keys.REQUIRED_TRAIT_KEY, keys.CONCRETE_TYPE_KEY,
        keys.INSTANCE_KEY, keys.PEER_CLASS_KEY, keys.INCLUDE_SELF_KEY,
        keys.MODULE_INSTANCE_KEY, keys.QUANTIZATION_KEY, keys.ORIGINAL_OP_KEY,
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

    A compiled model is reassembled from its targets, and the parent's compile cuts it again; all
    of its classes of peers are kept. A single target can be replayed if it neither sends nor
    receives. Concrete slots keep component and config; generic ones are bound by the parent's
    compile, and `bound` has their former components.
    """

    def __init__(
        self, model: ModelProto, target: str | None = None, *, name: str | None = None
    ) -> None:
        """Open a model.

        Args:
            model: a result of `Module.build()` or `Compiler.compile()`; not changed.
            target: the one target of a compiled model to replay, by name or class; None for the
                whole program.
            name: name of the Module; None for the program's name.

        Raises:
            BrokenArtifact: the model is neither, was changed after it was compiled, or is
                inconsistent.
            NoSuchTarget: there is no such target.
            NestingTooDeep, ModelTooLarge: its calls form a cycle, or add up to too many ops.
        """
        program = _opened(model, name or "Program")
        self.name = check_name("Module name", name or clean_name(program.name) or "Program")
        self._bindings = _bindings(program)
        compiled = is_compiled(program)
        if compiled:
            if not is_intact(model):
                raise self._broken("it was changed after it was compiled; compile it again")
            program = self._reopened(program, target)
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
        """The TYPE_NAME of the component that each slot was bound to at compile time."""
        return dict(self._bindings)

    def body(self, g: Graph) -> None:
        """Record the program's ops again."""
        _Replay(g, self._root, self).run()

    def bootstrap(self, g: Graph) -> None:
        """Record the program's bootstraps again."""
        for function in self._bootstraps:
            _Replay(g, function, self).run()

    def _reopened(self, program: Program, target: str | None) -> Program:
        mains = [f for f in program.functions if keys.TARGET_KEY in f.metadata]
        if target is not None:
            wanted = [f for f in mains if target in (f.name, f.metadata.get(keys.HOME_KEY))][:1]
            if not wanted:
                near = hint(str(target), [main.name for main in mains])
                raise NoSuchTarget(f"there is no target {target!r:.80}{near}", self.name)
            program.functions = [f for f in program.functions if f in wanted or f not in mains]
        try:
            return reopen(program)
        except NotReopenable as error:
            more = "; replay the whole program: CompiledModule(model) without a target"
            raise self._broken(f"{error}{more if target is not None else ''}") from error

    def _broken(self, what: str) -> BrokenArtifact:
        return BrokenArtifact(what, self.name)

    # --- functions ---------------------------------------------------------------------------

    def _bootstrap_of(self, function: Function) -> Function | None:
        return self._functions.get((function.domain, function.name + keys.BOOTSTRAP_SUFFIX, ""))

    def _bootstraps_of(self, root: Function, *, whole: bool) -> list[Function]:
        """Return the root's bootstrap; with `whole` also those whose Modules were inlined."""
        own = self._bootstrap_of(root)
        bootstraps = [] if own is None else [own]
        if whole:
            named = {f.name + keys.BOOTSTRAP_SUFFIX for f in self._functions.values()}
            bootstraps += [
                f for f in self._functions.values()
                if f.metadata.get(keys.MODULE_PHASE_KEY) == keys.BOOTSTRAP_PHASE
                and f.name not in named
            ]  # fmt: skip
        return bootstraps

    def _version(self, function: Function, domain: str) -> int:
        spellings = ("", keys.ONNX_DOMAIN) if is_onnx_domain(domain) else (domain,)
        for imports in (dict(function.opset_imports), dict(self._program.opset_imports)):
            for spelling in spellings:
                if spelling in imports:
                    return imports[spelling]
        return keys.ONNX_OPSET_VERSION if is_onnx_domain(domain) else keys.BB_OPSET_VERSION


def _opened(model: ModelProto, module: str) -> Program:
    candidate: object = model
    if not isinstance(candidate, ModelProto) or not candidate.functions:
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
    bound = {}
    for key, text in program.metadata.items():
        if key.startswith(keys.BINDING_PREFIX):
            target, _, slot = key.removeprefix(keys.BINDING_PREFIX).rpartition(".")
            bound[slot] = Binding.decode(target, slot, text).type_name
    return bound


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


class _Replay(NodeCopier):
    """One function, recorded again into a Graph."""

    def __init__(self, g: Graph, function: Function, program: CompiledModule) -> None:
        super().__init__(g, function.kinds(), function.types)
        self._function = function
        self._program = program

    def run(self) -> None:
        outputs = set(self._function.outputs)
        self.g.recorder.keep_extras(self._program._program.extras)
        for name in self._function.inputs:
            self.input(name, name)
        for node in self._function.nodes:
            with self.scopes_of(node):
                self._record(node, outputs)
        for node in self._function.nodes:
            for value, held in annotations_on(node).items():
                parameters = {key: self.value(name, node.name) for key, name in held.items()}
                self.g.annotate(self.value(value, node.name), parameters)
        for name in self._function.outputs:
            if name in outputs:  # not made by a PassThrough, as g.output records it
                self.g.output(name, self.value(name, "an output"))

    def _record(self, node: OpNode, outputs: set[str]) -> None:
        waits = [self.value(name, node.name) for name in node.after] or None
        callee = self._program._functions.get(call_key(node))
        if _is_output(node, outputs):
            (name,) = node.outputs
            outputs.discard(name)
            value = self.known[name] = self.value(node.inputs[0], node.name)
            declared = self.declared.get(name) or ValueType.of(value.type)
            self.g.output(
                name, value, after=waits, shape=declared.shape, denotation=declared.denotation,
                axes=[word or None for word in declared.axes],
            )  # fmt: skip
        elif callee is not None:
            self._call(node, callee, waits)
        else:
            meta = {k: v for k, v in node.metadata.items() if k not in _REMADE_KEYS}
            if keys.FAN_IN_KEY in meta:
                meta[keys.FAN_IN_KEY] = self.value(meta[keys.FAN_IN_KEY], node.name).name
            version = self._program._version(self._function, node.domain)
            self.copy(node, version, slot=self._slot(node), after=waits, metadata=meta)

    def _call(self, node: OpNode, callee: Function, waits: After) -> None:
        call = _Body(callee, self._program).call()
        for formal, actual in zip(callee.inputs, node.inputs, strict=False):
            if actual:
                call.input(formal, self.value(actual, node.name))
        outputs = call.build(self.g, after=waits)
        if (
            keys.CALL_KEY in node.metadata
        ):  # the key that distinguishes its ports from those of other calls
            self.g.last_node.metadata[keys.CALL_KEY] = node.metadata[keys.CALL_KEY]
        for formal, actual in zip(callee.outputs, node.outputs, strict=False):
            if actual:
                self.known[actual] = outputs.output(formal)

    def _slot(self, node: OpNode) -> SlotUse | None:
        meta = node.metadata
        name = meta.get(keys.SLOT_KEY)
        if name is None:
            return None
        listed = self._function.metadata.get(keys.SLOT_ROLE_PREFIX + name, "").split("|")[0]
        role = listed or meta.get(keys.REQUIRED_TRAIT_KEY, "").removesuffix(_TRAIT_SUFFIX)
        type_name = meta.get(keys.CONCRETE_TYPE_KEY)
        concrete = None
        if type_name is not None:
            config = self._function.defaults.get(name)
            value = b"" if config is None else config.value
            concrete = ConcreteSpec(role=role or "Backend", type_name=type_name, config=value)
        return SlotUse(
            name=check_name("slot name", name),
            role=role or "Backend",
            concrete=concrete,
            peer_class=None if is_wire(node) else meta.get(keys.PEER_CLASS_KEY),
            include_self=meta.get(keys.INCLUDE_SELF_KEY) == "true",
        )


def _is_output(node: OpNode, outputs: set[str]) -> bool:
    is_pass = node.domain == keys.SYSCALL_DOMAIN and node.op_type == "PassThrough"
    return (
        is_pass and len(node.inputs) == 1 and len(node.outputs) == 1 and node.outputs[0] in outputs
    )
