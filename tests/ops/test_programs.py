"""Custom ops in programs: compiled, installed, run by peers, and told when they are missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from bbnode.compiler import Compiler
from bbnode.compiler.errors import TypeConstraintFailed, UnknownOp
from bbnode.components import ConnectedView
from bbnode.daemon.artifacts.inspect import describe
from bbnode.dsl import Graph, Module, PeerSelectorSlot, types
from bbnode.dsl.errors import BadArgument
from bbnode.engine import Node, install, steps
from bbnode.engine.errors import InvalidArtifact, MissingCustomOps, UnsupportedOps
from bbnode.ir import keys, opset
from bbnode.ir.peer import PeerId
from bbnode.ir.plugins import BrokenPlugin
from bbnode.ops import custom as registry
from bbnode.ops import custom_op
from bbnode.sim import Network
from tests.plugin_packages import Install, package_folder

T = TypeVar("T", bound=np.generic)
DOMAIN = "org.bbnode_tests.programs"


@custom_op(DOMAIN, version=7)
def clip_norm(x: NDArray[np.float32], *, max_norm: float = 1.0) -> NDArray[np.float32]:
    """Scale a tensor down to a norm."""
    norm = np.linalg.norm(x)
    return x if norm <= max_norm else np.asarray(x * (max_norm / norm), np.float32)


@custom_op(DOMAIN, version=7, offload=True)
def top_k(x: NDArray[T], *, k: int) -> tuple[NDArray[T], NDArray[np.int64]]:
    """Return the largest values, and where they stand."""
    order = np.argsort(x)[::-1][:k]
    return x[order], order.astype(np.int64)


@custom_op(DOMAIN, version=7)
def misbehaves(x: NDArray[np.float32], *, how: str) -> NDArray[np.float32]:
    """Do what a careless function does."""
    if how == "raises":
        raise RuntimeError("no such luck")
    made: Any = {"dtype": x.astype(np.float64), "count": (x, x), "writes": x}[how]
    if how == "writes":
        made[0] = 3
    return made  # type: ignore[no-any-return]


def recorded(body: Any) -> onnx.ModelProto:
    class Made(Module):
        def body(self, g: Graph) -> None:
            body(g)

    return Made().build()


def compiled(body: Any) -> onnx.ModelProto:
    model = Compiler().compile(recorded(body))
    onnx.checker.check_model(model)
    return model


def node_of(model: onnx.ModelProto) -> Node:
    return install(model, ["@self"], peer_id=PeerId.from_seed(1))


def invoke(node: Node, **inputs: Any) -> list[Any]:
    node.invoke("@self", inputs)
    made = node.poll(0)
    for task in [step for step in made if isinstance(step, steps.RunTask)]:
        node.complete(task.token, task.fn())
        made += node.poll(1)
    return made


def outputs(made: list[Any]) -> dict[str, Any]:
    return {step.topic: step.value for step in made if isinstance(step, steps.AppEvent)}


def clipping(g: Graph) -> None:
    x = g.input("x", types.TENSOR_FLOAT)
    g.output("y", clip_norm(g, x, max_norm=2.5))


def test_an_op_keeps_its_domain_version_and_package_and_runs() -> None:
    model = compiled(clipping)
    assert {o.domain: o.version for o in model.opset_import}[DOMAIN] == 7
    (main,) = [f for f in model.functions if f.name.startswith("@self")]
    assert {o.domain: o.version for o in main.opset_import}[DOMAIN] == 7
    (node,) = [n for n in main.node if n.domain == DOMAIN]
    assert (node.op_type, node.attribute[0].f) == ("ClipNorm", 2.5)
    assert {e.key: e.value for e in node.metadata_props}[keys.PACKAGE_KEY] == "tests"
    made = outputs(invoke(node_of(model), x=np.array([3, 4], np.float32)))["y"]
    assert made.tolist() == [1.5, 2.0]


def test_an_offloaded_op_runs_in_a_thread_of_the_host_with_a_deadline() -> None:
    def body(g: Graph) -> None:
        largest, where = top_k(g, g.input("x", types.TENSOR_DOUBLE), k=2)
        g.output("largest", largest)
        g.output("where", where)

    model = compiled(body)
    (main,) = [f for f in model.functions if f.name.startswith("@self")]
    assert "DeadlineCheck" in {n.op_type for n in main.node}
    assert {i.name: i.type.tensor_type.elem_type for i in main.value_info}["TopK_0.out_1"] == 7
    found = outputs(invoke(node_of(model), x=np.array([1.0, 9.0, 4.0])))
    assert found["largest"].tolist() == [9, 4]
    assert found["where"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("how", "kind", "told"),
    [
        ("raises", "CustomOpFailed", "RuntimeError: no such luck"),
        ("writes", "CustomOpFailed", "read-only"),
        ("dtype", "SchemaMismatch", "output 'out' is Tensor.DOUBLE, not Tensor.FLOAT"),
        ("count", "SchemaMismatch", "output 'out'"),
    ],
)
def test_a_function_that_misbehaves_fails_its_op_and_nothing_else(
    how: str, kind: str, told: str
) -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.output("bad", misbehaves(g, x, how=how))
        g.output("good", clip_norm(g, x))

    made = invoke(node_of(compiled(body)), x=np.array([3, 4], np.float32))
    (failed,) = [step for step in made if isinstance(step, steps.OpFailed)]
    assert failed.kind == kind
    assert told in failed.detail
    assert "Misbehaves" in failed.detail
    assert "package tests" in failed.detail
    # What the function itself raised has its line.
    assert ("(raised at test_programs.py:" in failed.detail) == (kind == "CustomOpFailed")
    assert failed.line.startswith("test_programs.py:")
    assert list(outputs(made)) == ["good"]


def test_the_compiler_types_it_by_its_schema() -> None:
    with pytest.raises(TypeConstraintFailed, match="ClipNorm"):
        compiled(lambda g: g.output("y", clip_norm(g, g.input("x", types.TENSOR_INT64))))


@pytest.mark.parametrize(
    "record",
    [
        lambda g, x: clip_norm(g, x, size=1),
        lambda g, x: clip_norm(g, x, max_norm="a"),
        lambda g, x: clip_norm(g, x, x),
        lambda g, _: clip_norm(g),
        lambda g, x: top_k(g, x),
    ],
)
def test_a_wrong_call_is_refused_where_it_stands(record: Any) -> None:
    with pytest.raises(BadArgument, match=r"test_programs\.py"):
        compiled(lambda g: record(g, g.input("x", types.TENSOR_FLOAT)))


def test_attributes_that_do_not_fit_are_refused_by_install() -> None:
    model = compiled(clipping)
    for function in model.functions:
        for node in function.node:
            if node.domain == DOMAIN:
                node.attribute[0].CopyFrom(onnx.helper.make_attribute("max_norm", "much"))
    for entry in model.metadata_props:
        if entry.key == keys.SEAL_KEY:
            model.metadata_props.remove(entry)
            break
    with pytest.raises(InvalidArtifact, match="which has to be float"):
        node_of(model)


def test_two_peers_run_it() -> None:
    class Rounds(Module):
        home = "server"

        def body(self, g: Graph) -> None:
            update = g.input("x", types.TENSOR_FLOAT)
            workers = PeerSelectorSlot("workers", peer_class="worker").current_view(g)
            received = g.net_out("raw", workers, update)
            clipped = clip_norm(g, received, max_norm=1.0)
            largest, where = top_k(g, clipped, k=1)
            g.output("largest", g.net_out("clipped", received.sender, largest))
            g.output("where", where)

    model = Compiler().bind_peer_selector("workers", ConnectedView).compile(Rounds().build())
    onnx.checker.check_model(model)
    net = Network(0)
    server, worker = net.add("s", model, ["server"]), net.add("w", model, ["worker"])
    net.run_until_idle()
    server.invoke("server", {"x": np.array([3, 4], np.float32)})
    net.run_until_idle()
    assert not server.failures()
    assert not worker.failures()
    found = {step.topic: step.value for step in server.seen(steps.AppEvent)}
    assert found["largest"] == pytest.approx([0.8])
    found = {step.topic: step.value for step in worker.seen(steps.AppEvent)}
    assert found["where"].tolist() == [1]


def test_a_snapshot_hands_an_offloaded_op_out_again() -> None:
    def body(g: Graph) -> None:
        g.output("y", top_k(g, g.input("x", types.TENSOR_FLOAT), k=1)[0])

    model = compiled(body)
    node = node_of(model)
    node.invoke("@self", {"x": np.array([1, 5], np.float32)})
    assert any(isinstance(step, steps.RunTask) for step in node.poll(0))
    saved = node.snapshot(1)
    again = install(model, ["@self"], peer_id=PeerId.from_seed(1), incarnation=2)
    again.restore(saved)
    (task,) = [step for step in again.poll(2) if isinstance(step, steps.RunTask)]
    again.complete(task.token, task.fn())
    assert outputs(again.poll(3))["y"].tolist() == [5]


def test_inspect_and_the_commands_list_custom_ops(tmp_path: Path) -> None:
    expected = [{"domain": DOMAIN, "op": "ClipNorm", "version": 7, "package": "tests", "nodes": 1}]
    assert describe(compiled(clipping))["custom_ops"] == expected
    (tmp_path / "clipped.py").write_text(textwrap.dedent(CLIPPED))
    made = tmp_path / "made.onnx"

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "bbnode", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout

    told = run("compile", "clipped:Clipped", "-o", str(made))
    assert "custom op org.bbnode_tests.cli::Halve (package clipped)" in told
    (found,) = json.loads(run("inspect", str(made), "--json"))["custom_ops"]
    assert (found["domain"], found["package"]) == ("org.bbnode_tests.cli", "clipped")
    assert "org.bbnode_tests.cli" in run("inspect", str(made))


CLIPPED = """
    from __future__ import annotations
    import numpy as np
    from numpy.typing import NDArray
    from bbnode.dsl import Graph, Module, types
    from bbnode.ops import custom_op

    @custom_op("org.bbnode_tests.cli")
    def halve(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.asarray(x / 2, np.float32)

    class Clipped(Module):
        def body(self, g: Graph) -> None:
            g.output("y", halve(g, g.input("x", types.TENSOR_FLOAT)))
"""


# --- packages --------------------------------------------------------------------------


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Forget the ops of this file, as a machine does that never had them."""

    def do(version: int | None = None) -> None:
        rows = {key: row for key, row in opset._TABLE.items() if key != DOMAIN}
        ops = {key: op for key, op in registry._OPS.items() if key[0] != DOMAIN}
        versions = {d: v for d, v in registry._VERSIONS.items() if d != DOMAIN}
        monkeypatch.setattr(opset, "_TABLE", rows)
        monkeypatch.setattr(registry, "_OPS", ops)
        monkeypatch.setattr(registry, "_VERSIONS", versions)

    return do


def test_a_missing_op_names_its_package_and_the_remedy(forget: Any) -> None:
    model = compiled(clipping)
    program = recorded(clipping)
    forget()
    with pytest.raises(MissingCustomOps) as told:
        node_of(model)
    assert isinstance(told.value, UnsupportedOps)
    (missing,) = told.value.missing
    assert (missing.domain, missing.op_type, missing.version) == (DOMAIN, "ClipNorm", 7)
    assert (missing.package, missing.installed) == ("tests", None)
    assert "install the package with the module 'tests' here" in str(told.value)
    with pytest.raises(UnknownOp, match="ClipNorm"):
        Compiler().compile(program)


def test_another_version_is_told(forget: Any) -> None:
    model = compiled(clipping)
    forget()
    custom_op(DOMAIN, version=8)(clip_norm.function)
    with pytest.raises(MissingCustomOps, match=f"with version 8 of {DOMAIN}"):
        node_of(model)


PACKAGE = """
    from __future__ import annotations
    import numpy as np
    from numpy.typing import NDArray
    from bbnode.ops import custom_op

    @custom_op("org.bbnode_tests.installed", version=2)
    def negate(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return -x
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    with package_folder(tmp_path, monkeypatch, opset.CUSTOM_OPS) as add:
        yield add


def test_an_installed_package_is_imported_when_a_program_uses_its_domain(packages: Install) -> None:
    domain, module = "org.bbnode_tests.installed", "ops_of_tests_plugin"
    packages("ops_of_tests", textwrap.dedent(PACKAGE), **{domain: module})
    assert module not in sys.modules
    assert opset.lookup_op(domain, "Nothing") is None
    negate = sys.modules[module].negate
    model = compiled(lambda g: g.output("y", negate(g, g.input("x", types.TENSOR_FLOAT))))
    assert outputs(invoke(node_of(model), x=np.ones(1, np.float32)))["y"].tolist() == [-1]


def test_a_package_that_cannot_be_imported_is_named(packages: Install) -> None:
    packages("broken_tests", "import nowhere", **{"org.bbnode_tests.broken": "broken_tests_plugin"})
    with pytest.raises(BrokenPlugin, match=r"package broken_tests.*No module named 'nowhere'"):
        opset.lookup_op("org.bbnode_tests.broken", "Any")


def test_the_package_of_the_docs_works() -> None:
    page = Path(__file__).parents[2] / "docs" / "ir.md"
    (source,) = re.findall(
        r"```python\n(# clipping\.py\n.*?)```", page.read_text("utf-8"), re.DOTALL
    )
    scope: dict[str, Any] = {"__name__": "clipping"}
    exec(source, scope)
    made = scope["clip_norm"](np.array([3, 4], np.float32), max_norm=2.5)
    assert made.tolist() == [1.5, 2.0]
    assert opset.lookup_op("org.example", "ClipNorm") is scope["clip_norm"].spec
