"""Numbers that would end a node in native code: one execution fails, and its peer hears why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, PeerSelectorSlot, types
from bbnode.sim import Network


class Ratios(Module):
    """A worker divides whole numbers by the largest of them."""

    home = "asker"

    def body(self, g: Graph) -> None:
        numbers = g.input("numbers", types.TENSOR_INT64)
        workers = PeerSelectorSlot("workers", peer_class="worker").sample(g, n=1, after=numbers)
        compute = BackendSlot("compute")
        asked = g.request("ratios", workers, numbers, quorum=1)
        largest = compute.reduce_max(g, asked.received)
        asked.respond(compute.div(g, asked.received, largest))
        g.output("ratios", asked.responses)


def compiled() -> Any:
    made = Compiler().bind_peer_selector("workers", ConnectedView)
    return made.bind_backend("compute", OrtBackend).compile(Ratios().build())


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_a_quotient_that_traps_costs_the_asker_its_answer(isolation: str) -> None:
    artifact = compiled()
    net = Network(1)
    asker = net.add("asker", artifact, ["asker"])
    settings = {"compute": {"isolation": isolation}}
    worker = net.add("worker", artifact, ["worker"], config=settings)
    for numbers, answered in (([6, 3, 2], [1, 0, 0]), ([-(2**63), -1], None), ([8, 4], [1, 0])):
        before = len(worker.failures())
        execution = asker.invoke("asker", {"numbers": np.array(numbers)})
        net.run_until_idle()
        if answered is None:
            (failed,) = worker.failures()[before:]
            assert failed.kind == "BackendError"
            assert "least integer by -1" in failed.detail
            assert asker.failures()
        else:
            ((_, value),) = asker.outputs(execution)["ratios"].responses
            np.testing.assert_array_equal(value, answered)
    for cell in worker.node._rt.cells:
        cell.component.on_stop()
