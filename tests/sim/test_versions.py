"""Nodes of two versions of a program in one network."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.engine import steps
from bbnode.ir.values import ResponseBatch
from bbnode.sim import Network
from tests.sim.versions import version

X = np.array([1.0, 2.0], np.float32)

AGREEING = [(), ("client_body",), ("server_body",), ("added",), ("client_body", "server_body")]


@pytest.mark.parametrize("new", AGREEING)
@pytest.mark.parametrize("old", [(), ("added",)])
def test_versions_whose_crossings_agree_work_together(
    old: tuple[str, ...], new: tuple[str, ...]
) -> None:
    net = Network(0)
    server = net.add("server", version(*old), ["server"])
    net.add("client-old", version(*old), ["client"])
    net.add("client-new", version(*new), ["client"])
    net.run_until_idle()
    execution = server.invoke("server", {"x": X})
    net.run_until_idle()
    for name, factor in (("answers", 2), ("scaled", 3)):
        batch = server.outputs(execution)[name]
        assert isinstance(batch, ResponseBatch)
        assert len(batch.responses) == 2
        assert all(np.array_equal(answer, X * factor) for _, answer in batch.responses)
    assert len(server.values("back")) == 2
    if "added" not in old:
        assert all(not node.seen(steps.WireReceiveFailed) for node in net.nodes)


@pytest.mark.parametrize("edit", ["renamed_port", "changed_type", "bundled"])
def test_what_differs_is_refused_and_the_rest_works(edit: str) -> None:
    net = Network(0)
    server = net.add("server", version(), ["server"])
    client = net.add("client", version(edit), ["client"])
    net.run_until_idle()
    execution = server.invoke("server", {"x": X})
    net.run_until_idle()
    batch = server.outputs(execution)["answers"]
    assert isinstance(batch, ResponseBatch)
    assert len(batch.responses) == 1
    refusing = client if edit == "renamed_port" else server
    (failed,) = refusing.seen(steps.WireReceiveFailed)
    assert failed.kind == "UnknownSite"
