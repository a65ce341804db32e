"""`import bbnode`: free, complete, and the same in its three faces."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bbnode
from bbnode.api import aio, on_trio
from bbnode.api.blocking_methods import BlockingMethods
from bbnode.api.methods import AsyncMethods
from bbnode.daemon.control.http import Endpoint
from bbnode.daemon.control.routes import ENDPOINTS

ROOT = Path(__file__).parents[2]
# Names that differ from the endpoint's: one request with two answers has two methods.
MORE_METHODS = {
    *("wait_for_peers", "finished_rounds", "publish_event", "fetch", "stream", "download"),
    "train",
}


def test_importing_it_loads_nothing() -> None:
    code = (
        "import sys, bbnode; dir(bbnode); "
        "print(sorted(m for m in sys.modules if m.startswith('bbnode.') or m in {'trio', 'onnx'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_every_name_can_be_had() -> None:
    names = bbnode.__all__
    assert {"open", "connect", "aio", "on_trio", "InvokeResult"} <= set(names) <= {*dir(bbnode)}
    for name in names:
        assert getattr(bbnode, name) is not None
    assert bbnode.aio is aio
    assert bbnode.on_trio is on_trio


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'opne'"):
        _ = bbnode.opne  # type: ignore[attr-defined]


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: f"{e.method} {e.path}")
def test_every_endpoint_has_its_method(endpoint: Endpoint) -> None:
    name = endpoint.act.__name__
    method = getattr(AsyncMethods, name)
    taken = set(inspect.signature(method).parameters) - {"self"}
    wanted: set[str] = set()
    for part, kind in endpoint.parameters.items():
        if part in ("body", "query"):
            wanted |= set(kind.model_fields)
        elif part != "host":
            wanted.add(part)
    # How long to wait is the caller's, the form of the values ours, `kind` publish_event's.
    wanted -= {"wait_s", "exact", "kind"}
    renamed = {"type": "types", "id": "execution"}
    assert {renamed.get(name, name) for name in wanted} <= taken
    assert hasattr(BlockingMethods, name)


def test_there_are_no_methods_beside_the_endpoints() -> None:
    own = {name for name in vars(AsyncMethods) if not name.startswith("_")}
    assert own - {e.act.__name__ for e in ENDPOINTS} == MORE_METHODS


def script() -> Any:
    path = ROOT / "scripts" / "blocking-methods"
    loader = importlib.machinery.SourceFileLoader("blocking_methods_script", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_blocking_half_is_made_of_the_asynchronous_one() -> None:
    made = script()
    for source, kept in made.MADE.items():
        text = made.blocking((made.API / source).read_text(encoding="utf-8"))
        assert text == (made.API / kept).read_text(encoding="utf-8"), f"run {made.__doc__}"
        assert not re.search(r"\basync\b|\bawait\b|\btrio\b", text.partition('"""\n\nfrom')[2])


def test_the_three_opens_take_the_same() -> None:
    blocking, asyncio_s, trio_s = (
        list(inspect.signature(each).parameters.values())
        for each in (bbnode.open, aio.open, on_trio.open)
    )
    assert blocking == asyncio_s == trio_s


@pytest.mark.parametrize(
    "name",
    ["outputs", "next_output", "invoke", "emit", "stop", "addresses", "libp2p_host", "with_libp2p"],
)
def test_the_three_nodes_have_the_same(name: str) -> None:
    found = [getattr(cls, name) for cls in (bbnode.BlockingNode, bbnode.AioNode, bbnode.TrioNode)]
    if not isinstance(found[0], property):
        first, *others = (list(inspect.signature(each).parameters) for each in found)
        assert all(first == other for other in others)
