"""`TransportWrapper` hands on all that a Transport is asked."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from bbnode.transport import Capability, Transport, TransportWrapper

PUBLIC = {
    name: member
    for name, member in inspect.getmembers_static(Transport)
    if not name.startswith("_") and name != "capabilities"
}


class Noted:
    """A transport of which every member is there and notes how it was asked."""

    capabilities = frozenset({Capability.STREAMS})

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            self.asked.append((name, args, kwargs))
            return self._later() if inspect.iscoroutinefunction(PUBLIC[name]) else "answer"

        return "answer" if isinstance(PUBLIC[name], property) else note

    async def _later(self) -> None:
        return None


@pytest.mark.parametrize("name", sorted(PUBLIC))
async def test_every_public_member_is_handed_on(name: str) -> None:
    inner = Noted()
    wrapper = TransportWrapper(inner)  # type: ignore[arg-type]
    assert name in TransportWrapper.__dict__, (
        "inherited from Transport, so the inner one is not asked"
    )
    if isinstance(PUBLIC[name], property):
        assert getattr(wrapper, name) == "answer"
        return
    parameters = list(inspect.signature(PUBLIC[name]).parameters.values())[1:]
    given = {each.name: SimpleNamespace() for each in parameters}
    made = getattr(wrapper, name)(**given)
    if inspect.isawaitable(made):
        await made
    else:
        assert made in ("answer", None)
    ((asked, args, kwargs),) = inner.asked
    assert asked == name
    positional = [each.name for each in parameters][: len(args)]
    assert {**dict(zip(positional, args, strict=True)), **kwargs} == given


def test_capabilities_are_those_of_the_inner_one() -> None:
    wrapper = TransportWrapper(Noted())  # type: ignore[arg-type]
    assert wrapper.capabilities == {Capability.STREAMS}
