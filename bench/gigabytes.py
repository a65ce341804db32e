"""A model of gigabytes: compiled, trained and sent to another peer; time and peak of memory.

    python bench/gigabytes.py            # 1.9 GiB of weights; needs about 20 GiB of memory
    python bench/gigabytes.py 256        # MiB
    python bench/gigabytes.py refused    # how a program that holds 1.07 GiB twice is refused

Two peers that gossip run in this process, on the simulator's links, so that the peak is that of
two nodes and of their compiler. One trains and sends its weights to the other, which takes them
into its mean; they are compared with plain numpy's.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper

from bbnode.compiler import Compiler
from bbnode.components import values
from bbnode.engine.limits import Limits
from bbnode.ir.errors import ProgramTooLarge
from bbnode.programs import FederatedTraining, GossipTraining
from bbnode.sim import Network

MIB = 1 << 20
WIDTH = 1024
RATE = 0.5


def model_of(mib: int) -> ModelProto:
    """Return y = sum of x @ w over `mib` / 4 blocks of [WIDTH, WIDTH] as one matrix, of zeros."""
    rows = mib * MIB // 4 // WIDTH
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[rows, WIDTH])
    weight.raw_data = bytes(4 * rows * WIDTH)
    indices = helper.make_tensor_value_info("x", TensorProto.INT64, ["n"])
    graph = helper.make_graph(
        [helper.make_node("Gather", ["w", "x"], ["y"])],
        "large",
        [indices],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def peak_gib() -> float:
    """Return the most memory that this process has had, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def told(what: str, began: float) -> None:
    """Print a line of the report."""
    print(f"{what:32} {time.monotonic() - began:7.1f} s  peak {peak_gib():5.1f} GiB", flush=True)


def refused(mib: int) -> str:
    """Return how a program that has the model twice is refused."""
    program = FederatedTraining(
        model=model_of(mib), clients=1, quorum=1, loss="mse", evaluate="none"
    )
    try:
        program.build()
    except ProgramTooLarge as error:
        return str(error)
    return f"two models of {mib} MiB are one program"


def main() -> None:
    """Run the job, or show the refusal."""
    if sys.argv[1:] == ["refused"]:
        print(refused(1100))
        return
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 1945  # 1.9 GiB
    began = time.monotonic()
    program = GossipTraining(
        model=model_of(mib), loss="mse", evaluate=False, learning_rate=RATE, deadline_s=3600.0
    )
    artifact = Compiler().bind_all(program.bindings()).compile(program.build())
    del program
    told(f"compiled, {artifact.ByteSize() / (1 << 30):.2f} GiB", began)
    room = 3 * 1024 * MIB
    limits = Limits(
        envelope_bytes=room, ingress_bytes=2 * room, completion_bytes=room, invoke_bytes=room
    )
    rows = mib * MIB // 4 // WIDTH
    with tempfile.TemporaryDirectory() as folder:
        x = np.array([0, rows - 1, rows // 2])
        np.savez(Path(folder) / "d.npz", x=x, y=np.ones((3, WIDTH), np.float32))
        net = Network(seed=0)
        data = {"data": {"path": str(Path(folder) / "d.npz")}}
        peers = [net.add(name, artifact, ["peer"], limits=limits, config=data) for name in "ab"]
        del artifact
        told("installed on two peers", began)
        first, second = peers
        execution = first.invoke("peer", {"tick": values.TRIGGER})
        net.run_until_idle()
        for peer in peers:
            if peer.failures():
                raise SystemExit(f"{peer.name} failed: {peer.failures()[0]}")
        told("trained, and sent to the other", began)
        weights = np.asarray(first.outputs(execution)["model"]).reshape(rows, WIDTH)
        if second.counters()["envelopes.in"] != 1:
            raise SystemExit("nothing crossed")
    wanted = RATE * 2 / (3 * WIDTH)  # of the mean over all elements, one step from 0 towards 1
    np.testing.assert_allclose(weights[x], wanted, rtol=1e-5)
    assert np.count_nonzero(weights[1]) == 0
    told("the weights are numpy's", began)


if __name__ == "__main__":
    main()
