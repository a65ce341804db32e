"""Components of other packages: every role is open to them, and broken ones are told by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from bbnode.components import UnknownComponentType, concrete, registry
from bbnode.components.contracts import CONTRACTS
from bbnode.components.registry import component_class, known_types, roles_of
from tests.plugin_packages import Install, package_folder

HEAD = """
from dataclasses import dataclass
import numpy as np
from bbnode.components import *

@dataclass(frozen=True)
class Config:
    level: int = 3
"""

# Role to a base class and the methods that it asks for, each as `name(arguments)`.
METHODS = {
    "Backend": "execute(self, model, inputs)",
    "Model": "forward(self, ctx, batch); compute_loss(self, ctx, batch, target); "
    "backward(self, ctx, grad); step(self, ctx, grads); apply_delta(self, ctx, delta); "
    "load_parameters(self, ctx, params); params(self, ctx); train(self, ctx, *, epochs, batch)",
    "Index": "add(self, ctx, vector); search(self, ctx, query, *, k); remove(self, ctx, item); "
    "train(self, ctx, training)",
    "Aggregator": "contribute(self, ctx, tensor, metadata); contribute_all(self, ctx, responses); "
    "aggregate(self, ctx); current_tensor(self, ctx)",
    "Codec": "encode(self, ctx, tensor); decode(self, ctx, code); train(self, ctx, training)",
    "DataSource": "next_batch(self, ctx); reset(self, ctx); on_data_loaded(self, ctx); "
    "epoch_batches(self, batch_size); num_samples(self)",
    "PeerSelector": "sample(self, ctx, *, n); current_view(self, ctx); "
    "select(self, ctx, key, *, mode, n)",
    "Protocol": "hello(self, ctx)",
}


def source(role: str, type_name: str) -> str:
    base = "ProtocolComponent" if role == "Protocol" else role
    lines = [HEAD, "@register_component", f"class Outside({base}):"]
    lines += [f"    TYPE_NAME = {type_name!r}", "    Config = Config"]
    lines += [f"    def {method.strip()}: pass" for method in METHODS[role].split(";")]
    return "\n".join(lines) + "\n"


@pytest.fixture
def install(tmp_path, monkeypatch) -> Iterator[Install]:
    known = dict(registry._REGISTERED)
    with package_folder(tmp_path, monkeypatch, registry.ENTRY_POINT_GROUP) as add:
        yield add
    for type_name, cls in list(registry._REGISTERED.items()):
        if type_name not in known and cls.__module__.endswith("_plugin"):
            del registry._REGISTERED[type_name]


@pytest.mark.parametrize("role", CONTRACTS)
def test_a_package_outside_adds_a_component_of_any_role(role: str, install: Install) -> None:
    type_name, package = f"outside.{role}", f"outside_{role.lower()}"
    install(package, source(role, type_name), **{type_name: f"{package}_plugin"})
    assert type_name in known_types()
    assert f"{package}_plugin" not in sys.modules
    cls = component_class(type_name)
    assert (cls.__module__, roles_of(cls)) == (f"{package}_plugin", (role,))
    spec = concrete(cls, cls.Config(level=5))
    assert (spec.role, spec.type_name, spec.config) == (role, type_name, b"\x81\xa5level\x05")
    assert cls(cls.Config()).config.level == 3


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("import no_such_module_at_all\n", "package outside brings.*No module named 'no_such"),
        ("1 / 0\n", "package outside brings.*ZeroDivisionError"),
        ("", "package outside has an entry point.*@register_component"),
    ],
)
def test_a_broken_package_is_told_by_name(module: str, problem: str, install: Install) -> None:
    install("outside", module, **{"outside.Broken": "outside_plugin"})
    with pytest.raises(UnknownComponentType, match=problem):
        component_class("outside.Broken")


def test_a_module_that_fails_half_way_registers_nothing(install: Install) -> None:
    half = source("Codec", "outside.Half") + "raise OSError('no disk')\n"
    install("outside", half, **{"outside.Half": "outside_plugin"})
    for _ in range(2):
        with pytest.raises(UnknownComponentType, match="OSError: no disk"):
            component_class("outside.Half")


def test_what_is_not_installed_is_unknown() -> None:
    with pytest.raises(UnknownComponentType, match=r"did you mean 'bbnode\.FedAvg'"):
        component_class("bbnode.FedAverage")
