"""`Module`: a program or a part of one, its calls, and their outputs.

Rule: a Module is a pure recording: `body` runs once for every call and every build, and must
record the same each time. The names of its inputs and outputs are its whole interface.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from onnx import ModelProto

from bbnode.dsl.core.graph import After, Graph, Output
from bbnode.dsl.core.names import check_class, check_name, hint
from bbnode.dsl.core.recorder import ModelRecorder, ModuleSource
from bbnode.dsl.errors import (
    BadArgument,
    BadName,
    DuplicateName,
    RecordingError,
    UnknownName,
)
from bbnode.ir import keys, types
from bbnode.ir.graph import Function, Program
from bbnode.ir.onnx_file import model_of


class Module:
    """Base of programs; a subclass overrides `body`.

    ```python
    class Double(Module):
        home = "worker"

        def body(self, g: Graph) -> None:
            x = g.input("x", types.TENSOR_FLOAT)
            g.output("y", BackendSlot("compute").add(g, x, x))

    model = Double().build()  # for the compiler
    y = Double().call().input("x", v).build(g).output("y")  # in another Module's body
    ```

    Attributes:
        name: name of the Module in the artifact; the class name unless the subclass sets another.
        home: the class of peer of its inputs, and of ops that nothing else places.
        schema: the meaning of the examples in data slots, by slot, as far as the author states it:
            {"data": {"columns": ["a", "b"], "classes": ["no", "yes"]}}. Every node compares its
            own data with it before it is ready.
    """

    name: str = "Module"
    home: str = keys.SELF_CLASS
    schema: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    def body(self, g: Graph) -> None:  # noqa: ARG002
        """Record the Module's ops. Every subclass overrides this."""
        raise RecordingError(
            f"Module {self.name!r} has no body; define `def body(self, g: Graph) -> None`"
        )

    def check_recorded(self, function: Function) -> None:
        """Check the recorded body; does nothing unless overridden. Raises RecordingError."""

    def bootstrap(self, g: Graph) -> None:
        """Record the ops that run before the first execution; records nothing unless overridden.

        The caller of the bootstrap provides its `g.input`s, which are not those of `body`.
        """

    def bindings(self) -> Mapping[str, Any]:
        """Return component classes for generic slots, by slot name.

        The command line binds these when it compiles the Module by name; a caller of `Compiler`
        is free to bind others.
        """
        return {}

    def call(self) -> ModuleCall:
        """Start a call from another Module's body: `m.call().input("x", v).build(g)`."""
        return ModuleCall(self)

    def call_bootstrap(
        self, g: Graph, inputs: Mapping[str, Output] | None = None, *, after: After = None
    ) -> ModuleOutputs:
        """Call this Module's bootstrap from a parent's: `self.index.call_bootstrap(g)`.

        The parent decides when, and with which values. The compiler, which sees the whole
        program, refuses a Module without a bootstrap, and bootstraps that call each other in a
        cycle.

        Args:
            g: the Graph of the parent's `bootstrap`.
            inputs: values for the `g.input`s of this Module's `bootstrap`, by name.
            after: values that must be there before.

        Returns:
            The outputs of this Module's `bootstrap`.

        Raises:
            BadArgument: `g` records no bootstrap, or an input has no value.
            UnknownName: `inputs` names an input that does not exist.
            RecordingError: raised by the Module's own recording.
        """
        _check_caller(g, "call_bootstrap", self.name, inputs or {})
        if not g.is_bootstrap:
            raise BadArgument(
                f"the bootstrap of Module {self.name!r} can be called from a bootstrap only; a "
                "body calls the Module itself: .call()"
            )
        source = self._source()
        name, function = g.recorder.record_bootstrap_call(source)
        outputs = _record_call(g, self.name, name, function, inputs or {}, after)
        g.recorder.bootstrap_called(source, g.last_node)
        return outputs

    def record(self) -> Program:
        """Record the program; recording twice makes equal programs.

        Returns:
            The recorded form: functions[0] is this Module's body, then those it calls, then
            the bootstraps.

        Raises:
            RecordingError: one of its subclasses, naming the Module and the line.
        """
        program = ModelRecorder().record_root(self._source())
        for slot, meaning in sorted(self.schema.items()):
            check_name("slot of `schema`", slot)
            try:
                text = json.dumps(dict(meaning), sort_keys=True, separators=(",", ":"))
            except (TypeError, ValueError, RecursionError) as error:
                raise BadArgument(f"schema of {slot!r}: {error}", self.name) from error
            program.metadata[keys.SCHEMA_PREFIX + slot] = text
        return program

    def build(self) -> ModelProto:
        """Record the program as an ONNX model, to be saved or compiled; see `record`."""
        return model_of(Module.record(self))  # a subclass may define an unrelated `record`

    def _source(self) -> ModuleSource:
        name = check_name("Module name", self.name)
        if name.endswith(keys.BOOTSTRAP_SUFFIX):
            raise BadName(
                f"Module name {name!r} ends in {keys.BOOTSTRAP_SUFFIX!r}, which names the "
                "bootstraps; choose another",
                name,
            )
        home = check_class(self.home, module=name)

        def record(recorder: ModelRecorder, is_bootstrap: bool) -> Function:
            graph = Graph(recorder, name=name, home=home)
            graph.is_bootstrap = is_bootstrap
            (self.bootstrap if is_bootstrap else self.body)(graph)
            function = graph.finish()
            if not is_bootstrap:
                self.check_recorded(function)
            return function

        return ModuleSource(identity=self, name=name, record=record)


class ModuleCall:
    """A call that is being built; see `Module.call`."""

    __slots__ = ("_inputs", "_module")

    def __init__(self, module: Module) -> None:
        self._module = module
        self._inputs: dict[str, Output] = {}

    def input(self, name: str, value: Output) -> ModuleCall:
        """Set the value of an input and return the call itself.

        Raises:
            BadArgument: `value` is not a recorded value.
            DuplicateName: the input has a value already.
        """
        if not isinstance(value, Output):
            raise BadArgument(
                f"{value!r:.60} for input {name!r} is not a recorded value", self._module.name
            )
        if name in self._inputs:
            raise value.graph.error(DuplicateName, f"input {name!r} has a value already")
        self._inputs[name] = value
        return self

    def build(self, g: Graph, *, after: After = None) -> ModuleOutputs:
        """Record the call.

        Args:
            g: the Graph of the caller.
            after: values that must be there before.

        Raises:
            UnknownName: a value was set for an input that the Module does not have.
            BadArgument: an input of the Module has no value.
            RecordingError: raised by the Module's own body.
        """
        module = self._module.name
        _check_caller(g, "build", module, self._inputs)
        function = g.recorder.record_call(self._module._source())
        return _record_call(g, module, function.name, function, self._inputs, after)


def _check_caller(g: object, call: str, module: str, given: Mapping[str, Output]) -> None:
    if not isinstance(g, Graph):
        raise BadArgument(f"{call} takes the caller's Graph, got {g!r:.60}", module)
    g.check_open()
    for value in given.values():
        g.value_name(value)


def _record_call(
    g: Graph, module: str, name: str, function: Function | None, given: Mapping[str, Output],
    after: After,
) -> ModuleOutputs:  # fmt: skip
    """Record a call; a function that is not recorded yet accepts any inputs."""
    called = function or Function(inputs=list(given))
    for formal in called.inputs:
        if called.home_of_input(formal) is not None:
            raise BadArgument(
                f"input {formal!r} is given to another class of peer (home="
                f"{called.home_of_input(formal)!r}), which only the inputs of the program itself "
                "are; take it by a net_out",
                module,
            )
    call_name = g.call_name(module)
    _check_inputs(module, called.inputs, given)
    outputs = g.emit(
        keys.MODULE_DOMAIN,
        name,
        inputs=[given[formal] for formal in called.inputs],
        outputs=[(port, called.kind_of(port) or types.ANY) for port in called.outputs],
        after=after,
        metadata={keys.CALL_KEY: call_name},
    )
    return ModuleOutputs(g, module, dict(zip(called.outputs, outputs, strict=True)))


def _check_inputs(module: str, wanted: Sequence[str], given: Mapping[str, Output]) -> None:
    for name in given:
        if name not in wanted:
            raise UnknownName(f"Module {module!r} has no input {name!r}{hint(str(name), wanted)}")
    missing = [name for name in wanted if name not in given]
    if missing:
        raise BadArgument(
            f"Module {module!r} needs the input {missing[0]!r}; add "
            f".input({missing[0]!r}, value) to the call"
        )


class ModuleOutputs:
    """Outputs of a called Module, by name."""

    __slots__ = ("_graph", "_module", "_outputs")

    def __init__(self, graph: Graph, module: str, outputs: Mapping[str, Output]) -> None:
        self._graph = graph
        self._module = module
        self._outputs = dict(outputs)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the outputs, in the order in which the body recorded them."""
        return tuple(self._outputs)

    def output(self, name: str) -> Output:
        """Return one output. Raises UnknownName if the Module has no such output."""
        output = self._outputs.get(name)
        if output is None:
            raise self._graph.error(
                UnknownName,
                f"Module {self._module!r} has no output {name!r}{hint(str(name), self._outputs)}",
            )
        return output
