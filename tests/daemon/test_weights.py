"""Models taken out of a node: while it trains, from its checkpoint, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import trio
from onnx import TensorProto, numpy_helper

from bbnode.api.remote import TrioRemoteNode
from bbnode.components.contracts import ComponentError
from bbnode.components.errors import NotExportable
from bbnode.components.models.onnx_model import OnnxModel
from bbnode.daemon.artifacts.artifact import Artifact, parse_artifact, serialize
from bbnode.daemon.control.async_client import AsyncControlClient
from bbnode.daemon.control.client import ControlClient
from bbnode.daemon.control.errors import ControlError, ControlProtocolError, NotRunning
from bbnode.daemon.paths import StorageError
from bbnode.daemon.state import weights
from bbnode.daemon.state.checkpoint import Checkpoint, CheckpointRefused
from bbnode.daemon.state.weights import (
    NoSuchModel,
    OtherVersionsWeights,
    WeightsOrigin,
    WouldOverwrite,
    check_output,
    exported,
    from_checkpoint,
    initial_component,
)
from bbnode.engine import Node, plan_program
from bbnode.ir.caps import MAX_CONTROL_ANSWER_BYTES
from tests.components.fakes import CTX
from tests.daemon.live import in_thread, running
from tests.daemon.trainer import SilentModel, X, node_of, train, trainer, training
from tests.patience import PATIENCE_S


def run(data: bytes) -> np.ndarray:
    onnx.checker.check_model(data)
    session = onnxruntime.InferenceSession(data)
    return np.asarray(session.run(["logits"], {"x": X})[0])


def forward(node: Node, slot: str = "net") -> np.ndarray:
    return np.asarray(node.component(slot).forward(CTX, X))


ORIGIN = WeightsOrigin(program="ab" * 32)


def artifact_of(model: onnx.ModelProto) -> Artifact:
    return parse_artifact(serialize(model), "a test's")


def saved_by(node: Node, artifact: Artifact) -> Checkpoint:
    return Checkpoint(artifact_sha256=artifact.sha256, node=node.snapshot(0), rounds_done={})


def exported_of(
    node: Node,
    slot: str = "net",
    make: Callable[[], Any] | None = None,
    origin: WeightsOrigin = ORIGIN,
) -> bytes:
    plans = {each.name: each for each in plan_program(trainer(("net", "net2")), ["trainer"]).slots}
    initial = partial(initial_component, plans[slot], {}, own_artifact=True)
    return exported(slot, make or node.copy_of(slot), initial, origin)


# --- of a node --------------------------------------------------------------------------------


def test_an_export_is_the_nodes_forward(tmp_path: Path) -> None:
    node = node_of(trainer(), tmp_path)
    before = forward(node)
    train(node)
    found = run(exported_of(node, "net"))
    np.testing.assert_allclose(found, forward(node), atol=1e-6)
    assert not np.allclose(found, before)


def origin_of(data: bytes) -> WeightsOrigin | None:
    return WeightsOrigin.of_model(onnx.load_model_from_string(data))


def test_an_export_says_where_its_weights_are_from(tmp_path: Path) -> None:
    node = node_of(trainer(), tmp_path)
    begun = origin_of(exported_of(node))
    assert begun == replace(ORIGIN, is_trained=False)
    assert str(begun) == "untrained: the weights that the program began with"
    train(node)
    rounds = [
        {"target": "t", "round": 7, "started_at": 2.0, "metrics": {"s.n": 1.0, "loss": 0.25}},
        {"target": "u", "round": 9, "started_at": 1.0, "metrics": {}},
    ]
    after = WeightsOrigin.of_rounds("cd" * 32, rounds)
    assert origin_of(exported_of(node, origin=after)) == after
    assert str(after) == "after round 7, loss 0.25, s.n 1"
    assert str(WeightsOrigin.of_rounds("cd" * 32, [])) == "trained"
    assert origin_of(onnx.ModelProto().SerializeToString()) is None


def test_an_export_during_training_has_the_weights_from_before(tmp_path: Path) -> None:
    node = node_of(trainer(), tmp_path)
    train(node)
    before = forward(node)
    task = training(node, 10)
    early = node.copy_of("net")
    result = task.fn()  # has changed the component, and the node does not know it yet
    late = node.copy_of("net")
    node.complete(task.token, result)
    done = node.copy_of("net")
    node.poll(11)
    for made in (early, late):
        np.testing.assert_allclose(run(exported_of(node, make=made)), before, atol=1e-6)
    np.testing.assert_allclose(run(exported_of(node, make=done)), forward(node), atol=1e-6)
    assert not np.allclose(before, forward(node))


def test_a_copy_changes_nothing_of_the_node(tmp_path: Path) -> None:
    node = node_of(trainer(), tmp_path)
    copy = node.copy_of("net")()
    copy.apply_delta = None  # type: ignore[attr-defined]
    assert copy is not node.component("net")
    np.testing.assert_array_equal(copy.params(CTX), node.component("net").params(CTX))  # type: ignore[attr-defined]


# --- of its author's code -----------------------------------------------------------------------


def _gives(value: Any) -> Any:
    class Odd(OnnxModel):
        TYPE_NAME = "tests.Odd"

        def export(self) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

    return lambda: Odd.__new__(Odd)


def _with_a_file() -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [])))
    tensor = TensorProto(name="w", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../../etc/passwd")
    model.graph.initializer.append(tensor)
    return model


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (b"bytes", NotExportable, "gave a bytes; return a ModelProto"),
        (_with_a_file(), NotExportable, "ONNX refuses"),
        (onnx.ModelProto(), NotExportable, "ONNX refuses"),
        (RuntimeError("boom"), ComponentError, "RuntimeError: boom"),
        (NotExportable("not today"), NotExportable, "can't be exported: not today"),
    ],
)
def test_what_a_component_exports_is_checked(value: Any, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        exported("net", _gives(value), _gives(value), ORIGIN)


def test_a_component_that_is_no_model_or_can_not_be_copied(tmp_path: Path) -> None:
    node = node_of(trainer(), tmp_path)
    with pytest.raises(NotExportable, match="is no model"):
        exported_of(node, "compute")

    def broken() -> Any:
        raise TypeError("__init__ wants more")

    with pytest.raises(ComponentError, match="wants more"):
        exported_of(node, make=broken)


@pytest.mark.parametrize(
    ("models", "slot", "says"),
    [
        ((), None, "has no model"),
        ((), "net", "has no model"),
        (("net", "net2"), None, "several models; choose one with --slot: net, net2"),
        (("net2", "network"), "net", "no model in slot 'net'; did you mean 'net2'"),
    ],
)
def test_a_model_is_chosen_by_its_whole_name(
    models: tuple[str, ...], slot: str | None, says: str
) -> None:
    with pytest.raises(NoSuchModel, match=says):
        weights.chosen(models, slot, where="the node")
    assert weights.chosen(("net", "net2"), "net", where="") == "net"
    assert weights.chosen(("net",), None, where="") == "net"


# --- of a checkpoint ----------------------------------------------------------------------------


def test_a_checkpoint_gives_the_model_that_the_node_had(tmp_path: Path) -> None:
    made_by = artifact_of(trainer(("net", "net2")))
    node = node_of(made_by.model, tmp_path)
    train(node)
    saved = saved_by(node, made_by)
    for slot in ("net", "net2"):
        name, data = from_checkpoint(saved, made_by, slot)
        assert name == slot
        np.testing.assert_allclose(run(data), forward(node, slot), atol=1e-6)
    with pytest.raises(NoSuchModel, match="several models"):
        from_checkpoint(saved, made_by, None)
    with pytest.raises(NoSuchModel, match="no model in slot 'compute'"):
        from_checkpoint(saved, made_by, "compute")


def test_another_versions_checkpoint_is_used_where_all_weights_agree(tmp_path: Path) -> None:
    made_by, tuned = artifact_of(trainer()), artifact_of(trainer(learning_rate=0.01))
    node = node_of(made_by.model, tmp_path)
    train(node)
    saved = saved_by(node, made_by)
    _, data = from_checkpoint(saved, tuned, None)
    np.testing.assert_allclose(run(data), forward(node), atol=1e-6)
    for sizes in ((4, 5, 5, 3), (4, 9, 7)):
        with pytest.raises((OtherVersionsWeights, NotExportable), match=r"differs in|agrees in"):
            from_checkpoint(saved, artifact_of(trainer(sizes=sizes)), None)
    other = artifact_of(trainer(model=SilentModel))
    with pytest.raises(OtherVersionsWeights, match="--artifact"):
        from_checkpoint(saved, other, None)
    with pytest.raises(NoSuchModel, match="has no model"):
        from_checkpoint(saved, artifact_of(trainer(("elsewhere",))), None)


def test_a_model_that_exports_nothing_says_so(tmp_path: Path) -> None:
    made_by = artifact_of(trainer(model=SilentModel))
    saved = saved_by(node_of(made_by.model, tmp_path), made_by)
    with pytest.raises(NotExportable, match=r"tests\.SilentModel does not export its weights"):
        from_checkpoint(saved, made_by, None)


def test_a_torn_state_in_a_checkpoint_is_a_typed_refusal(tmp_path: Path) -> None:
    made_by = artifact_of(trainer())
    saved = saved_by(node_of(made_by.model, tmp_path), made_by)
    for node in (b"", b"garbage", saved.node[:-1]):
        with pytest.raises(CheckpointRefused, match="can't be used"):
            from_checkpoint(replace(saved, node=node), made_by, None)


# --- the file -----------------------------------------------------------------------------------


def test_only_an_exported_model_is_written_over(tmp_path: Path) -> None:
    node = node_of(trainer(), tmp_path)
    good = exported_of(node, "net")
    files = {
        "node.toml": b"[node]\n",
        "artifact.onnx": serialize(trainer()),
        "empty": b"",
        "text.onnx": b"hello " * 100,
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(WouldOverwrite, match="--force"):
            check_output(tmp_path / name, force=False)
        check_output(tmp_path / name, force=True)
    (tmp_path / "good.onnx").write_bytes(good)
    check_output(tmp_path / "good.onnx", force=False)
    check_output(tmp_path / "new.onnx", force=False)
    for force in (False, True):
        with pytest.raises(WouldOverwrite, match="is a directory"):
            check_output(tmp_path, force=force)
        with pytest.raises(StorageError, match="is not there; make it"):
            check_output(tmp_path / "no" / "m.onnx", force=force)


# --- over the control plane ---------------------------------------------------------------------


async def test_a_running_node_sends_its_model(tmp_path: Path) -> None:
    node = node_of(trainer(("net", "net2")), tmp_path)
    train(node)
    async with running(tmp_path, client=False, node=node) as live:
        async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
            told = await client.get("/v1/models")
            assert told["schema"] == "bbnode/models/1"
            assert told["models"] == [
                {"slot": "net", "type_name": "bbnode.OnnxModel"},
                {"slot": "net2", "type_name": "bbnode.OnnxModel"},
            ]

        def download(slot: str, **more: Any) -> bytes:
            with ControlClient(live.socket, timeout_s=PATIENCE_S) as client:
                data = b"".join(client.download(f"/v1/models/{slot}", **more))
                assert client.get("/v1/models")["models"]  # the connection serves on
            return data

        for slot in ("net", "net2"):
            found = run(await in_thread(download, slot))
            np.testing.assert_allclose(found, forward(node, slot), atol=1e-6)
        for slot in ("compute", "ne", "net3", "n%2Fe"):
            with pytest.raises(ControlError) as caught:
                await in_thread(download, slot)
            assert caught.value.status == 404
        with pytest.raises(ControlProtocolError, match="is over 100 B"):
            await in_thread(lambda: download("net", max_bytes=100))


async def test_the_python_api_has_a_running_nodes_model(tmp_path: Path) -> None:
    """One that is larger than other answers may be."""
    node = node_of(trainer(sizes=(4, 600_000, 3)), tmp_path)
    async with running(tmp_path, client=False, node=node) as live:
        remote = TrioRemoteNode(live.socket, timeout_s=PATIENCE_S)
        assert [each["slot"] for each in (await remote.models())["models"]] == ["net"]
        data = await remote.model("net")
        assert len(data) > MAX_CONTROL_ANSWER_BYTES
        np.testing.assert_allclose(run(data), forward(node), rtol=1e-4, atol=1e-4)
        with pytest.raises(ControlError, match="no model in slot 'nett'; did you mean 'net'"):
            await remote.model("nett")


async def test_a_large_model_comes_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = node_of(trainer(sizes=(4, 120_000, 3)), tmp_path)
    async with running(tmp_path, client=False, node=node) as live:

        def download() -> list[int]:
            with ControlClient(live.socket, timeout_s=PATIENCE_S) as client:
                return [len(piece) for piece in client.download("/v1/models/net")]

        sizes = await in_thread(download)
        assert sum(sizes) > 3 * max(sizes)


async def test_models_are_exported_one_at_a_time_and_nothing_waits(tmp_path: Path) -> None:
    node = node_of(trainer(), tmp_path)
    async with running(tmp_path, client=False, node=node) as live, live.plane.host.exporting:
        with pytest.raises(ControlError, match="another model is being exported") as caught:
            async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
                await client.get("/v1/models/net")
        assert caught.value.status == 503


async def test_a_model_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    """The daemon dies in the middle of its answer."""
    path = tmp_path / "socket"
    listener = trio.socket.socket(trio.socket.AF_UNIX)
    await listener.bind(str(path))
    listener.listen(1)

    async def answer() -> None:
        connection, _ = await listener.accept()
        await connection.recv(4096)
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nfew")
        connection.close()

    def download() -> bytes:
        with ControlClient(path, timeout_s=PATIENCE_S) as client:
            return b"".join(client.download("/v1/models/net"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        with pytest.raises(NotRunning, match="closed the connection"):
            await in_thread(download)
    listener.close()


async def test_an_export_that_fails_leaves_the_node_running(tmp_path: Path) -> None:
    node = node_of(trainer(model=SilentModel), tmp_path)
    async with running(tmp_path, client=False, node=node) as live:
        with pytest.raises(ControlError, match="does not export its weights") as caught:
            async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
                await client.get("/v1/models/net")
        assert (caught.value.status, caught.value.kind) == (409, "NotExportable")
        async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
            assert (await client.get("/v1/status"))["phase"] == "ready"


def test_weights_are_those_of_the_node(tmp_path: Path) -> None:
    node = node_of(trainer(), tmp_path)
    train(node)
    model = onnx.load_model_from_string(exported_of(node, "net"))
    joined = np.concatenate([numpy_helper.to_array(t).reshape(-1) for t in model.graph.initializer])
    np.testing.assert_array_equal(joined, node.component("net").params(CTX))
