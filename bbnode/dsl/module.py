"""`Module`: one program, or one part of one, and how it is called and built.

Rule: a Module is a pure recording: `body` is run once for every call and every build, and has
to record the same each time. The names of its inputs and outputs are its whole interface.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import FunctionProto, ModelProto

from bbnode.dsl.errors import BadArgument, BadName, DuplicateName, RecordingError, UnknownName
from bbnode.dsl.graph import Graph
from bbnode.dsl.names import check_class, check_name, hint
from bbnode.dsl.output import After, Output
from bbnode.dsl.recorder import ModelRecorder, ModuleSource
from bbnode.dsl.source import author_line
from bbnode.ir import keys, protos, types


class Module:
    """Base of programs; a subclass overrides `body`.

    Attributes:
        name: of the Module in the artifact; the class name unless the subclass gives another.
        home: the class of peer on which inputs, and what nothing else places, live.
    """

    name: str = "Module"
    home: str = keys.SELF_CLASS

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    def body(self, g: Graph) -> None:
        """Record what the Module does. Every subclass overrides this."""
        raise g.error(
            RecordingError,
            f"Module {self.name!r} has no body; define `def body(self, g: Graph) -> None`",
        )

    def bootstrap(self, g: Graph) -> None:
        """Record what has to happen before the first execution; nothing, unless overridden.

        Its `g.input`s are handed in by who starts the bootstrap, and are not those of `body`.
        """

    def bindings(self) -> Mapping[str, Any]:
        """Component classes for generic slots: slot name to class.

        The command line binds these when it compiles the Module by name; a program that calls
        `Compiler` itself binds what it likes.
        """
        return {}

    def call(self) -> ModuleCall:
        """Start a call from another Module's body: `m.call().input("x", v).build(g)`."""
        return ModuleCall(self)

    def build(self) -> ModelProto:
        """Record the program; building twice gives equal bytes.

        Returns:
            The recorded form: functions[0] is this Module's body, then those it calls, then
            the bootstraps.

        Raises:
            RecordingError: one of its subclasses, naming the Module and the line.
        """
        return ModelRecorder().record_root(self._source())

    def _source(self) -> ModuleSource:
        name = check_name("Module name", self.name)
        if name.endswith(keys.BOOTSTRAP_SUFFIX):
            raise BadName(
                f"Module name {name!r} ends in {keys.BOOTSTRAP_SUFFIX!r}, which names the "
                "bootstraps; choose another",
                module=name,
                source=author_line(),
            )
        return ModuleSource(
            identity=self,
            name=name,
            home=check_class(self.home, module=name),
            body=self.body,
            bootstrap=self.bootstrap,
        )


class ModuleCall:
    """A call in the making; see `Module.call`."""

    __slots__ = ("_inputs", "_module")

    def __init__(self, module: Module) -> None:
        self._module = module
        self._inputs: dict[str, Output] = {}

    def input(self, name: str, value: Output) -> ModuleCall:
        """Hand a value in; gives the call itself.

        Raises:
            BadArgument: `value` is no recorded value.
            DuplicateName: the input has a value already.
        """
        if not isinstance(value, Output):
            raise BadArgument(
                f"{value!r:.60} for input {name!r} is no recorded value",
                module=self._module.name,
                source=author_line(),
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
            UnknownName: an input was given that the Module does not have.
            BadArgument: an input that the Module has was not given.
            RecordingError: what the Module's own body raises.
        """
        if not isinstance(g, Graph):
            raise BadArgument(
                f"build takes the caller's Graph, got {g!r:.60}",
                module=self._module.name,
                source=author_line(),
            )
        g.check_open()
        for value in self._inputs.values():
            g.value_name(value)
        function = g.recorder.record_call(self._module._source())
        self._check_inputs(g, function)
        known = protos.value_types(function)
        outputs = [(name, known.get(name, types.ANY)) for name in function.output]
        made = g.emit(
            function.domain,
            function.name,
            inputs=[self._inputs[name] for name in function.input],
            outputs=outputs,
            after=after,
        )
        return ModuleOutputs(g, self._module.name, dict(zip(function.output, made, strict=True)))

    def _check_inputs(self, g: Graph, function: FunctionProto) -> None:
        for name in self._inputs:
            if name not in function.input:
                raise g.error(
                    UnknownName,
                    f"Module {self._module.name!r} has no input {name!r}"
                    f"{hint(str(name), function.input)}",
                )
        missing = [name for name in function.input if name not in self._inputs]
        if missing:
            raise g.error(
                BadArgument,
                f"Module {self._module.name!r} needs the input {missing[0]!r}; add "
                f".input({missing[0]!r}, value) to the call",
            )


class ModuleOutputs:
    """What a called Module hands out, by name."""

    __slots__ = ("_graph", "_module", "_outputs")

    def __init__(self, graph: Graph, module: str, outputs: Mapping[str, Output]) -> None:
        self._graph = graph
        self._module = module
        self._outputs = dict(outputs)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs, in the order in which the body made them."""
        return tuple(self._outputs)

    def output(self, name: str) -> Output:
        """One output; UnknownName when the Module has none of that name."""
        found = self._outputs.get(name)
        if found is None:
            raise self._graph.error(
                UnknownName,
                f"Module {self._module!r} has no output {name!r}{hint(str(name), self._outputs)}",
            )
        return found
