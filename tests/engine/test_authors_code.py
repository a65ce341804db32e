"""Mistakes in the code of authors of components and ops: told with their lines, before a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from bbnode.components import ComponentError, ProtocolComponent, inbound
from bbnode.components.contracts import offload
from bbnode.engine import errors, steps
from bbnode.engine.errors import describe, raised_at
from bbnode.ir import keys
from tests.engine.builder import Partition, model
from tests.engine.support import Boom, ScriptModel, bring_up, component, of

MODEL = keys.role_domain("Model")
HERE = Path(__file__).name


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{HERE}:{next(n for n, line in enumerate(lines, 1) if line.endswith(text))}"


def deeper(kind: type[Exception]) -> None:
    raise kind("too much")  # the raise


class Raises(ScriptModel):
    TYPE_NAME: ClassVar[str] = "test.Raises"
    kind: type[Exception] = Boom

    def forward(self, ctx: Any, batch: Any) -> Any:
        if self.kind is ArithmeticError:
            np.broadcast_shapes((2,), (3,))  # numpy raises
        deeper(self.kind)

    @offload
    def train(self, ctx: Any, *, epochs: int, batch: int) -> Any:
        deeper(self.kind)


def forward(op_type: str = "Forward") -> Any:
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    inputs = ["x"] if op_type == "Forward" else []
    p.op(MODEL, op_type, inputs, ["y"], slot="m", after=["x"])
    p.output("out", "y")
    return bring_up(model(p), "server")


def plays(node: Any, cls: type[ScriptModel]) -> Any:
    """Let a component be of another class, as if its author had written that."""
    found = component(node, "m")
    found.__class__ = cls
    return found


@pytest.mark.parametrize("kind", [Boom, ComponentError])
def test_the_detail_ends_with_the_line_of_the_raise(kind: type[Exception]) -> None:
    node = forward()
    plays(node, Raises).kind = kind
    node.invoke("server", {"x": np.zeros(1, np.float32)})
    (failed,) = of(steps.OpFailed, node.poll(0))
    assert failed.detail.endswith(f"too much (raised at {line_of('# the raise')})")


def test_an_exception_of_a_library_has_the_line_that_called_it() -> None:
    node = forward()
    plays(node, Raises).kind = ArithmeticError
    node.invoke("server", {"x": np.zeros(1, np.float32)})
    (failed,) = of(steps.OpFailed, node.poll(0))
    assert failed.detail.startswith("ValueError: ")
    assert failed.detail.endswith(f"(raised at {line_of('# numpy raises')})")


def test_frames_of_a_host_that_runs_a_task_are_not_the_author() -> None:
    node = forward("Train")
    plays(node, Raises)
    node.invoke("server", {"x": np.zeros(1, np.float32)})
    (task,) = of(steps.RunTask, node.poll(0))
    with pytest.raises(Boom) as caught:
        task.fn()
    node.fail(task.token, caught.value)
    (failed,) = of(steps.OpFailed, node.poll(1))
    assert failed.detail.endswith(f"(raised at {line_of('# the raise')})")


def test_our_own_errors_name_no_line() -> None:
    with pytest.raises(errors.EntryError) as caught:
        forward().invoke("server", {})
    # Without this test's own frame, which is a host's.
    ours = caught.value.with_traceback(caught.value.__traceback__.tb_next)
    assert raised_at(ours) == ""
    assert raised_at(Boom("never raised")) == ""
    error = Boom("a ring")
    error.__cause__ = error
    assert describe(error) == ("UnexpectedException", "Boom: a ring")


class FewerParameters(ScriptModel):
    def forward(self, ctx):
        return ctx


class OtherNames(ScriptModel):
    def train(self, ctx, *, rounds, batch):
        return rounds, batch


class NoContext(ScriptModel):
    def forward(batch):  # noqa: N805 - the mistake
        return batch


class AsyncForward(ScriptModel):
    async def forward(self, ctx, batch):
        return batch


class TakesAll(ScriptModel):
    def forward(self, *anything):
        return anything[1]

    def train(self, ctx, **settings):
        return settings


@pytest.mark.parametrize(
    ("cls", "op_type", "said"),
    [
        (FewerParameters, "Forward", "forward(ctx) does not take"),
        (FewerParameters, "Forward", "def forward(self, ctx, input)"),
        (NoContext, "Forward", "def forward(self, ctx, input)"),
        (AsyncForward, "Forward", "forward is an `async def`, which nothing awaits"),
        (OtherNames, "Train", "argument: 'rounds'"),
        (OtherNames, "Train", "def train(self, ctx, *, epochs, batch)"),
        (TakesAll, "Forward", ""),
        (TakesAll, "Train", ""),
    ],
)
def test_a_method_with_other_parameters_is_told_at_install(
    cls: type[ScriptModel], op_type: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("forward", "train"):
        if name in vars(cls):
            monkeypatch.setattr(ScriptModel, name, vars(cls)[name])
    if not said:
        forward(op_type)
        return
    with pytest.raises(errors.WrongSignature) as caught:
        forward(op_type)
    assert said in str(caught.value)
    assert "slot 'm': test.ScriptModel." in str(caught.value)
    assert len(caught.value.methods) == 1


def test_hooks_and_inbound_ops_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    @inbound("Ask")
    def ask(self, ctx):
        return None

    monkeypatch.setattr(ScriptModel, "ask", ask, raising=False)
    monkeypatch.setattr(ScriptModel, "on_timer", lambda _self, _ctx: None, raising=False)
    monkeypatch.setattr(ScriptModel, "on_answer", ProtocolComponent.on_answer, raising=False)
    with pytest.raises(errors.WrongSignature) as caught:
        forward()
    told = str(caught.value)
    assert "def on_timer(self, ctx, key)" in told
    assert "def ask(self, ctx, payload)" in told
    assert len(caught.value.methods) == 2
