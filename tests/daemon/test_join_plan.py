"""What would run here, before it does."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components.data.arrays import ArrayDataSource, ArrayDataSourceConfig
from bbnode.components.registry import component_class, concrete
from bbnode.daemon.artifacts.artifact import Artifact
from bbnode.daemon.config import sources
from bbnode.daemon.join.invitation import ComponentsMissing, SlotsNotConfigured, TargetNeeded
from bbnode.daemon.join.plan import Plan, choose_target, make_plan, with_absolute_paths
from bbnode.dsl import DataSourceSlot, Graph, Module, types
from bbnode.engine.errors import UnknownTarget, UnsupportedOps
from bbnode.ir.seal import seal
from tests.daemon.live import compiled


class Feed(Module):
    """A client with a source that it sets itself, and one that the program sets."""

    home = "client"

    def body(self, g: Graph) -> None:
        tick = g.input("tick", types.TRIGGER)
        config = ArrayDataSourceConfig(path="/etc/secret.npz", features="f" * 200)
        for name, slot in (
            ("own", DataSourceSlot("own")),
            ("set", DataSourceSlot("set", concrete=concrete(ArrayDataSource, config))),
        ):
            g.output(name, slot.on_data_loaded(g, after=tick))


@cache
def feed() -> ModelProto:
    return Compiler().bind_data_source("own", ArrayDataSource).compile(Feed().build())


def planned(model: ModelProto, target: str = "client", **flags: Any) -> Plan:
    resolved = sources.resolve(
        None, environ={}, flags={"artifact.path": "a", "artifact.targets": [target], **flags}
    )
    return make_plan(Artifact(model=model, sha256="0" * 64, size=1), resolved.config)


def artifact(model: ModelProto) -> Artifact:
    return Artifact(model=model, sha256="0" * 64, size=1)


def test_slots_show_what_the_artifact_sets_and_what_is_to_be_set_here() -> None:
    plan = planned(feed())
    assert plan.classes == ("client",)
    own, given = plan.slots
    assert (own.slot, own.component, own.installed) == ("own", "bbnode.ArrayDataSource", True)
    assert own.given == {}
    assert own.settings == tuple(field.name for field in fields(ArrayDataSourceConfig))
    assert {"path", "features", "batch_size"} < set(own.settings)
    assert given.given["path"] == "/etc/secret.npz"
    assert (own.files, given.files) == ((), ("path",))
    assert given.given["features"] == "f" * 80 + "…"
    assert given.settings == ("statistics", "path", "max_memory_mib")
    assert "'/etc/secret.npz', which names something of this machine" in given.fault
    shown = plan.as_json()
    assert shown["slots"][1]["files"] == {"path": "/etc/secret.npz"}
    assert shown["slots"][0]["fault"] == own.fault
    assert shown["limits"]["envelope_bytes"] == 256 * 2**20


def test_a_slot_without_a_setting_that_it_needs_stops_the_join() -> None:
    with pytest.raises(SlotsNotConfigured, match=r"--set slots\.own\.path=…") as caught:
        planned(feed()).check()
    assert "'path'" in str(caught.value)
    plan = planned(feed(), **{"slots.own.path": "/data.npz", "slots.set.path": "/b.npz"})
    plan.check()
    with pytest.raises(SlotsNotConfigured, match="no setting 'pth'; did you mean 'path'"):
        planned(feed(), **{"slots.own.pth": "/data.npz"}).check()


def test_what_is_not_installed_is_listed_and_never_fetched() -> None:
    model = ModelProto()
    model.CopyFrom(feed())
    for entry in model.metadata_props:
        entry.value = entry.value.replace("bbnode.ArrayDataSource", "acme.Lake")
    seal(model)
    plan = planned(model, **{"slots.own.path": "/data.npz"})
    assert {slot.component: slot.installed for slot in plan.slots} == {"acme.Lake": False}
    with pytest.raises(ComponentsMissing, match=r"acme\.Lake; install the packages"):
        plan.check()


# Of each component that needs a library: settings with which it does.
LIBRARIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bbnode.SklearnDataSource": ("sklearn", "bbnode[demo]", {}),
    "bbnode.TableDataSource": ("pyarrow", "bbnode[tables]", {"path": "/a.csv"}),
    "bbnode.ImageFolderDataSource": ("PIL", "bbnode[images]", {"path": "/a"}),
    "bbnode.TextDataSource": (
        *("tokenizers", "bbnode[text]"),
        {"path": "/a.txt", "tokenizer": "file", "tokenizer_file": "/t.json"},
    ),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_missing_is_named_with_its_extra_before_it_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, extra, settings = LIBRARIES[name]
    model = Compiler().bind_data_source("own", component_class(name)).compile(Feed().build())
    given = {f"slots.own.{key}": value for key, value in settings.items()}
    given["slots.set.path"] = "/b.npz"
    planned(model, **given).check()
    monkeypatch.setitem(sys.modules, library, None)
    plan = planned(model, **given)
    own = plan.slots[0]
    assert (own.installed, own.lacks) == (True, (library,))
    assert own.fault.startswith(f"slot 'own': {name} needs a library: {library} (extra {extra})")
    assert "install" in own.fault
    assert plan.as_json()["slots"][0]["fault"] == own.fault
    assert not plan.can_run()
    with pytest.raises(ComponentsMissing, match=f"extra {re.escape(extra)}"):
        plan.check()


def test_text_without_a_file_of_tokens_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    source = component_class("bbnode.TextDataSource")
    model = Compiler().bind_data_source("own", source).compile(Feed().build())
    planned(model, **{"slots.own.path": "/a.txt", "slots.set.path": "/b.npz"}).check()


def test_ops_that_this_engine_lacks_stop_the_join() -> None:
    model = ModelProto()
    model.CopyFrom(compiled())
    for function in model.functions:
        if function.name.startswith("client#"):
            function.node[0].op_type = "FromTheFuture"
    seal(model)
    with pytest.raises(UnsupportedOps, match="FromTheFuture"):
        planned(model).check()


def test_a_target_is_named_or_the_only_one() -> None:
    assert choose_target(artifact(feed()), None).startswith("client#")
    assert choose_target(artifact(compiled()), "server") == "server"
    with pytest.raises(TargetNeeded, match="client#"):
        choose_target(artifact(compiled()), None)
    with pytest.raises(UnknownTarget, match="there is"):
        planned(feed(), "server")


def test_a_path_of_the_artifact_counts_only_when_this_node_gives_it() -> None:
    with pytest.raises(SlotsNotConfigured, match=r"--set slots\.set\.path=…"):
        planned(feed(), **{"slots.own.path": "/data.npz"}).check()


def test_paths_are_counted_from_where_they_were_typed(tmp_path: Path) -> None:
    flags = {"slots.own.path": "mine.npz", "slots.set.path": "/b.npz"}
    resolved = sources.resolve(
        None, environ={}, flags={"artifact.path": "a", "artifact.targets": ["client"], **flags}
    )
    plan = make_plan(artifact(feed()), resolved.config)
    settled = with_absolute_paths(resolved.config, plan, tmp_path)
    assert settled.slots["own"]["path"] == str(tmp_path / "mine.npz")
    assert settled.slots["set"]["path"] == "/b.npz"
