"""Artifacts that name files of the machine that runs them: weights in a file, paths in settings.

ONNX Runtime reads such a file from below the working directory, and the program may send it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import trio
from multiaddr import Multiaddr
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, TensorProto, helper

from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.compiler import Compiler
from bbnode.components import (
    ArrayDataSource,
    ArrayDataSourceConfig,
    OnnxModel,
    OnnxModelConfig,
    OrtBackend,
    OrtBackendConfig,
    ReferenceBackend,
    ReferenceBackendConfig,
    concrete,
    mlp_forward,
)
from bbnode.components.autodiff import InvalidForwardModel
from bbnode.components.errors import BackendError
from bbnode.daemon.artifacts.artifact import ArtifactRejected, parse_artifact, serialize
from bbnode.daemon.network import ping
from bbnode.dsl import BackendSlot, DataSourceSlot, Graph, ModelSlot, Module, types
from bbnode.engine import install
from bbnode.engine.errors import InvalidArtifact as NotInstalled
from bbnode.ir import bounds
from bbnode.ir.peer import PeerId
from bbnode.ir.seal import seal
from bbnode.transport import artifact_exchange
from bbnode.transport.base import Hello
from bbnode.transport.libp2p.transport import Libp2pTransport
from tests.hostile.stranger import identity_of
from tests.patience import PATIENCE_S

SECRET = b"a private key of this machine"


class Sum(Module):
    """A client that adds a constant to what it gets."""

    home = "client"

    def __init__(self) -> None:
        super().__init__()
        self.compute = BackendSlot("compute")

    def body(self, g: Graph) -> None:
        weight = self.compute.constant(g, np.ones(len(SECRET), np.uint8))
        g.output("sum", self.compute.add(g, g.input("x", types.TENSOR), weight))


@cache
def honest() -> bytes:
    return serialize(Compiler().bind_backend("compute", OrtBackend).compile(Sum().build()))


def artifact(change: Callable[[ModelProto], None]) -> bytes:
    """The compiled program, changed by somebody who can seal as well as the compiler."""
    model = onnx.load_model_from_string(honest())
    change(model)
    seal(model)
    return serialize(model)


def in_file(name: str = "w") -> TensorProto:
    """A tensor whose values are the secret, by its name below the working directory."""
    tensor = TensorProto(name=name, data_type=TensorProto.UINT8, dims=[len(SECRET)])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="secret")
    tensor.external_data.add(key="length", value=str(len(SECRET)))
    return tensor


def sparse_in_file() -> onnx.SparseTensorProto:
    return onnx.SparseTensorProto(values=in_file(), dims=[len(SECRET)])


def branch(depth: int = 1, **parts: list[object]) -> GraphProto:
    """A graph with these parts in an If of an If …"""
    graph = GraphProto(name="branch", **parts)
    for _ in range(depth - 1):
        nested = helper.make_node("If", ["c"], ["y"], then_branch=graph, else_branch=graph)
        graph = GraphProto(name="branch", node=[nested])
    return graph


def first_op(model: ModelProto) -> onnx.NodeProto:
    return client(model).node[0]


def client(model: ModelProto) -> FunctionProto:
    return next(f for f in model.functions if f.name.startswith("client#"))


def add(model: ModelProto, **value: object) -> None:
    first_op(model).attribute.append(AttributeProto(name="extra", **value))


def the_constant(model: ModelProto) -> None:
    found = [a for f in model.functions for n in f.node for a in n.attribute if a.HasField("t")]
    assert found, "the program has a constant"
    for attribute in found:
        attribute.t.CopyFrom(in_file())


PLACES: dict[str, Callable[[ModelProto], None]] = {
    "constant": the_constant,
    "attribute": lambda m: add(m, t=in_file()),
    "attribute of a wrong type": lambda m: add(m, type=AttributeProto.INT, t=in_file()),
    "tensors": lambda m: add(m, tensors=[in_file()]),
    "sparse tensor": lambda m: add(m, sparse_tensor=sparse_in_file()),
    "sparse tensors": lambda m: add(m, sparse_tensors=[sparse_in_file()]),
    "indices": lambda m: add(
        m, sparse_tensor=onnx.SparseTensorProto(values=TensorProto(), indices=in_file())
    ),
    "branch": lambda m: add(m, g=branch(initializer=[in_file()])),
    "deep branch": lambda m: add(m, g=branch(8, initializer=[in_file()])),
    "branches": lambda m: add(m, graphs=[branch(), branch(initializer=[in_file()])]),
    "constant in a branch": lambda m: add(
        m, g=branch(3, node=[helper.make_node("Constant", [], ["y"], value=in_file())])
    ),
    "sparse in a branch": lambda m: add(m, g=branch(sparse_initializer=[sparse_in_file()])),
    "slot": lambda m: client(m).attribute_proto.append(AttributeProto(name="s", t=in_file())),
    "branch of a slot": lambda m: client(m).attribute_proto.append(
        AttributeProto(name="s", g=branch(initializer=[in_file()]))
    ),
    "graph of the model": lambda m: m.graph.initializer.append(in_file()),
    "sparse in the graph": lambda m: m.graph.sparse_initializer.append(sparse_in_file()),
    "training": lambda m: m.training_info.append(
        onnx.TrainingInfoProto(algorithm=branch(initializer=[in_file()]))
    ),
    "location alone": lambda m: add(
        m, t=TensorProto(external_data=[{"key": "location", "value": "secret"}])
    ),
    "compiled code": lambda m: client(m).node.append(
        helper.make_node(
            "EPContext", [], [], domain="com.microsoft", embed_mode=0, ep_cache_context="secret"
        )
    ),
    "settings of ONNX Runtime": lambda m: helper.set_model_props(
        m, {"ort_config": '{"session_options": {"profile_file_prefix": "/tmp/x"}}'}
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_artifact_that_names_a_file_is_refused(place: str) -> None:
    data = artifact(PLACES[place])
    with pytest.raises(ArtifactRejected) as caught:
        parse_artifact(data, "what a peer offers")
    assert isinstance(caught.value.__cause__, bounds.FileReference), caught.value
    # An engine alone refuses it as well, whoever read the file.
    with pytest.raises(NotInstalled):
        install(onnx.load_model_from_string(data), ["client"], peer_id=PeerId.from_seed("a"))


def graph_with(**parts: list[object]) -> ModelProto:
    """`y = x + w`, or an If over two branches, ready for a runtime."""
    names = {"x": TensorProto.UINT8}
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "leak",
        [helper.make_tensor_value_info(n, t, [len(SECRET)]) for n, t in names.items()],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, [len(SECRET)])],
        **parts,
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


BACKENDS = {
    "onnxruntime": lambda: OrtBackend(OrtBackendConfig()),
    "reference": lambda: ReferenceBackend(ReferenceBackendConfig()),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", ["initializer", "constant"])
def test_no_backend_reads_a_file_that_a_graph_names(
    backend: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    monkeypatch.chdir(tmp_path)
    model = graph_with(initializer=[in_file()])
    if place == "constant":
        model = graph_with()
        model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=in_file()))
    with pytest.raises(BackendError, match=r"'secret'.*onnx\.load"):
        BACKENDS[backend]().prepare(model).run([np.zeros(len(SECRET), np.uint8)])


def test_no_model_to_train_names_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_bytes(bytes(4 * 4 * 3))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidForwardModel, match=r"'secret'"):
        OnnxModel(OnnxModelConfig(model=forward_in_file()))


def forward_in_file() -> bytes:
    """A model for `OnnxModel` with a weight in a file."""
    forward = mlp_forward((4, 3), seed=1)
    weight = forward.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="secret")
    return forward.SerializeToString()


# -- real processes --------------------------------------------------------------------------


class Trained(Module):
    """A client with a model whose bytes are a setting."""

    home = "client"

    def body(self, g: Graph) -> None:
        config = OnnxModelConfig(model=forward_in_file())
        model = ModelSlot("model", concrete=concrete(OnnxModel, config))
        g.output("params", model.params(g, after=g.input("tick", types.TRIGGER)))


class Fed(Module):
    """A client with data that is a file of whoever runs it."""

    home = "client"

    def body(self, g: Graph) -> None:
        config = ArrayDataSourceConfig(path="/etc/passwd")
        data = DataSourceSlot("data", concrete=concrete(ArrayDataSource, config))
        g.output("loaded", data.on_data_loaded(g, after=g.input("tick", types.TRIGGER)))


@asynccontextmanager
async def offering(data: bytes) -> AsyncIterator[Multiaddr]:
    """A stranger that offers an artifact to whoever joins."""
    sha256 = hashlib.sha256(data).hexdigest()
    backend = Libp2pTransport(
        identity_of(1),
        listen=[Multiaddr("/ip4/127.0.0.1/tcp/0")],
        hello=Hello(artifact_sha256=sha256, classes=("server",)),
    )
    artifact_exchange.serve(backend, lambda asked: io.BytesIO(data) if asked == sha256 else None)
    ping.register(backend)
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        yield backend.listen_addresses()[0]
        nursery.cancel_scope.cancel()


def written(folder: Path) -> str:
    """The configuration of the node that was made, or nothing."""
    return "".join(file.read_text() for file in folder.rglob("node.toml"))


async def bbnode(folder: Path, *words: object) -> tuple[int, str, str]:
    """A command, in a folder with a secret in it, as a user with no other files."""
    await trio.Path(folder / "secret").write_bytes(SECRET)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XDG_")}
    environment |= {"HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    with trio.fail_after(PATIENCE_S):
        done = await trio.run_process(
            [sys.executable, "-m", "bbnode", *map(str, words)],
            cwd=folder,
            env=environment,
            check=False,
            capture_stdout=True,
            capture_stderr=True,
        )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def test_joining_a_program_that_reads_files_ends_before_it_is_asked(tmp_path: Path) -> None:
    async with offering(artifact(the_constant)) as address:
        code, out, err = await bbnode(
            tmp_path, "join", address, "--target", "client", "--yes", "--no-run"
        )
    assert (code, out) == (exits.REFUSED, ""), err
    assert "is to be read from a file ('secret')" in err
    assert not written(tmp_path)


async def test_settings_that_name_files_are_shown_and_refused(tmp_path: Path) -> None:
    model = Compiler().compile(Fed().build())
    async with offering(serialize(model)) as address:
        words = ("join", address, "--target", "client", "--yes", "--no-run", "--json")
        code, out, err = await bbnode(tmp_path, *words)
        assert code == exits.USAGE
        assert "--set slots.data.path=" in err
        (slot,) = json.loads(out)["slots"]
        assert slot["files"] == {"path": "/etc/passwd"}
        # This user's own file counts, from where it was typed.
        code, _, err = await bbnode(tmp_path, *words, "--set", "slots.data.path=mine.npz")
        assert code == 0, err
    assert str(tmp_path / "mine.npz") in written(tmp_path)


@pytest.mark.parametrize("which", ["constant", "model", "path"])
async def test_a_node_does_not_start_with_such_an_artifact(which: str, tmp_path: Path) -> None:
    data = {
        "constant": lambda: artifact(the_constant),
        "model": lambda: serialize(
            Compiler()
            .bind_backend("compute", OrtBackend)
            .bind_data_source("data", ArrayDataSource)
            .compile(Trained().build())
        ),
        "path": lambda: serialize(Compiler().compile(Fed().build())),
    }[which]()
    (tmp_path / "a.onnx").write_bytes(data)
    (tmp_path / "node.toml").write_text(
        'node.state_dir = "state"\nartifact.path = "a.onnx"\nartifact.targets = ["client"]\n'
        + ('slots.data.path = "d.npz"\n' if which == "model" else "")
    )
    code, _, err = await bbnode(tmp_path, "run", "-c", "node.toml")
    assert code == (exits.USAGE if which == "path" else exits.REFUSED), err
    assert ("/etc/passwd" if which == "path" else "'secret'") in err


@pytest.mark.parametrize("words", [["--verbose"], ["--json"]])
def test_names_of_an_artifact_do_nothing_to_a_terminal(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rename(model: ModelProto) -> None:
        found = client(model)
        before, found.name = found.name, "client#\x1b[2J\x9b31m\u202e\nforged"
        for entry in model.metadata_props:
            entry.key = entry.key.replace(before, found.name)

    (tmp_path / "a.onnx").write_bytes(artifact(rename))
    assert main(["inspect", str(tmp_path / "a.onnx"), *words]) == exits.OK
    shown = capsys.readouterr().out
    assert "forged" in shown
    assert shown.replace("\n", "").isprintable()
