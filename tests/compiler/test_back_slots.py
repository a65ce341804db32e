"""Slots, bindings, dependencies and the stamps that install reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from onnx import ModelProto

from bbnode.compiler.driver.compiler import Compiler
from bbnode.compiler.errors import (
    AmbiguousRole,
    BindingMismatch,
    MalformedSlotMetadata,
    MissingBinding,
    UnboundDependency,
    UnboundSlot,
)
from bbnode.compiler.unit import CompileOptions, SlotBinding
from bbnode.components.contracts import Backend, Component, Model
from bbnode.ir import keys, types
from bbnode.ir.onnx_file import program_of
from tests.compiler.back_units import meta, sole, unit_until
from tests.compiler.programs import (
    BINDINGS,
    Body,
    FakeModel,
    FakeSelector,
    _fake,
    federated_program,
    model_of,
    nested_program,
    node_making,
    run,
)


def _depending(contract: type, name: str, depends: Mapping[str, str]) -> Any:
    cls = _fake(contract, name)
    cls.depends = depends
    return cls


Compute = _fake(Backend, "SlotsCompute")
Trainer = _depending(Model, "SlotsTrainer", {"backend": "compute"})
Chained = _depending(Model, "SlotsChained", {"model": "inner"})
Ring = _depending(Model, "SlotsRing", {"model": "other"})
Misspelled = _depending(Model, "SlotsMisspelled", {"backed": "compute"})


def options(**bound: type[Component]) -> CompileOptions:
    return CompileOptions(
        bindings=tuple(
            SlotBinding(slot=slot, role=cls.ROLE, component=cls) for slot, cls in bound.items()
        )
    )


def one_slot(slot: str = "m", **more: Any) -> Body:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.role("Model", "ApplyDelta", slot, [x], ["applied"], **more)
    return body


def bindings_of(model: ModelProto) -> dict[str, dict[str, str]]:
    """By class, then by slot."""
    found: dict[str, dict[str, str]] = {}
    for entry in model.metadata_props:
        if entry.key.startswith(keys.BINDING_PREFIX):
            target, _, slot = entry.key.removeprefix(keys.BINDING_PREFIX).rpartition(".")
            found.setdefault(target.split("#")[0], {})[slot] = entry.value
    return found


# --- resolve_slots --------------------------------------------------------------------------


def test_slots_are_counted_as_resolved_or_unbound() -> None:
    bound = options(**{b.slot: b.component for b in BINDINGS if b.slot != "fedavg"})
    unit = unit_until("partition_by_wire_ops", federated_program(), options=bound)
    assert run(unit, "resolve_slots", options=bound) == {"slots_resolved": 3, "slots_unbound": 1}


def test_a_slot_that_is_concrete_and_generic_is_ambiguous() -> None:
    body = one_slot(concrete="test.FakeModel")
    body.role("Model", "Step", "m", [], ["stepped"], after=["applied"])
    with pytest.raises(AmbiguousRole) as caught:
        unit_until("resolve_slots", body, options=options())
    error = caught.value
    assert (error.slot, error.role, error.concrete_type) == ("m", "Model", "test.FakeModel")
    assert error.generic_slot_id == 0
    assert "different names" in str(error)


def test_two_slots_of_one_role_may_differ_in_kind() -> None:
    body = one_slot("one", concrete="test.FakeModel")
    body.role("Model", "Step", "two", [], ["stepped"], after=["applied"])
    unit_until("resolve_slots", body, options=options(two=FakeModel))


def test_one_slot_of_two_concrete_types_is_malformed() -> None:
    body = one_slot(concrete="test.FakeModel")
    body.role("Model", "Step", "m", [], ["s"], after=["applied"], concrete="test.DoubleModel")
    with pytest.raises(MalformedSlotMetadata, match="DoubleModel"):
        unit_until("resolve_slots", body, options=options(), without=("type_solver",
                   "refine_polymorphic_value_info"))  # fmt: skip


def test_a_concrete_slot_takes_no_bind_call() -> None:
    with pytest.raises(BindingMismatch, match="concrete component"):
        unit_until("resolve_slots", one_slot(concrete="test.FakeModel"),
                   options=options(m=FakeModel))  # fmt: skip


def test_a_concrete_component_of_another_role_does_not_fit() -> None:
    with pytest.raises(BindingMismatch) as caught:
        unit_until("resolve_slots", one_slot(concrete="test.FakeSelector"), options=options(),
                   without=("refine_polymorphic_value_info",))  # fmt: skip
    assert (caught.value.slot, caught.value.role) == ("m", "Model")


def test_a_concrete_type_that_is_not_installed_is_named() -> None:
    with pytest.raises(MissingBinding, match=r"no\.Such"):
        unit_until("resolve_slots", one_slot(concrete="no.Such"), options=options(),
                   without=("refine_polymorphic_value_info",))  # fmt: skip


# --- validate_all_slots_bound ---------------------------------------------------------------


def test_an_unbound_slot_is_named_with_its_target_and_the_call_that_mends_it() -> None:
    bound = options(**{b.slot: b.component for b in BINDINGS if b.slot != "fedavg"})
    unit = unit_until("resolve_component_dependencies", federated_program(), options=bound)
    with pytest.raises(UnboundSlot) as caught:
        run(unit, "validate_all_slots_bound", options=bound)
    error = caught.value
    assert (error.slot, error.role) == ("fedavg", "Aggregator")
    assert error.target == unit.partitions["server"].name
    assert ".bind_aggregator('fedavg', " in str(error)


def test_slots_of_called_functions_and_bootstraps_count() -> None:
    boot = Body("Nested__bootstrap", home="server")
    boot.function.metadata[keys.MODULE_PHASE_KEY] = keys.BOOTSTRAP_PHASE
    boot.role("Model", "Step", "warm", [], ["stepped"])
    names = ("pick_client", "compute", "global", "warm")
    have: dict[str, Any] = dict(
        zip(names, (FakeSelector, Compute, FakeModel, FakeModel), strict=True)
    )
    for missing in ("global", "warm"):
        bound = options(**{k: v for k, v in have.items() if k != missing})
        unit = unit_until("resolve_component_dependencies", *nested_program(), boot, options=bound)
        with pytest.raises(UnboundSlot) as caught:
            run(unit, "validate_all_slots_bound", options=bound)
        assert caught.value.slot == missing
        assert caught.value.target == unit.partitions["server"].name


# --- resolve_component_dependencies ---------------------------------------------------------


def test_a_dependency_has_to_be_there() -> None:
    bound = options(m=Trainer)
    unit = unit_until("validate_runtime_complete", one_slot(), options=bound)
    with pytest.raises(UnboundDependency) as caught:
        run(unit, "resolve_component_dependencies", options=bound)
    error = caught.value
    assert (error.component, error.bound_at_slot) == ("test.SlotsTrainer", "m")
    assert (error.required_role, error.required_slot) == ("Backend", "compute")
    assert ".bind_backend('compute', " in str(error)


def test_a_dependency_may_be_bound_or_concrete() -> None:
    bound = options(m=Trainer, compute=Compute)
    unit = unit_until("validate_runtime_complete", one_slot(), options=bound)
    assert run(unit, "resolve_component_dependencies", options=bound) == {"dependencies": 1}
    body = one_slot()
    body.onnx("Relu", ["x"], ["r"], concrete="test.SlotsCompute")
    unit = unit_until("validate_runtime_complete", body, options=options(m=Trainer))
    run(unit, "resolve_component_dependencies", options=options(m=Trainer))


def test_a_concrete_components_dependencies_count_too() -> None:
    unit = unit_until("validate_runtime_complete", one_slot(concrete="test.SlotsTrainer"),
                      options=options())  # fmt: skip
    with pytest.raises(UnboundDependency):
        run(unit, "resolve_component_dependencies", options=options())


@pytest.mark.parametrize("component", [Trainer, Misspelled])
def test_a_dependency_of_another_role_does_not_fit(component: type[Component]) -> None:
    bound = options(m=component, compute=FakeModel)
    unit = unit_until("validate_runtime_complete", one_slot(), options=bound)
    with pytest.raises(BindingMismatch) as caught:
        run(unit, "resolve_component_dependencies", options=bound)
    assert caught.value.slot == "compute"


def test_components_that_depend_on_each_other_are_refused() -> None:
    bound = options(m=Ring, other=Ring)
    unit = unit_until("validate_runtime_complete", one_slot(), options=bound)
    with pytest.raises(BindingMismatch, match="other -> other"):
        run(unit, "resolve_component_dependencies", options=bound)


# --- stamps ---------------------------------------------------------------------------------


def test_each_target_has_its_own_binding_table() -> None:
    compiled = Compiler(options=CompileOptions(bindings=BINDINGS)).compile(
        model_of(federated_program())
    )
    assert bindings_of(compiled) == {
        "client": {"local": "Model|test.FakeModel|2"},
        "server": {
            "pick_client": "PeerSelector|test.FakeSelector|0",
            "global": "Model|test.FakeModel|1",
            "fedavg": "Aggregator|test.FakeAggregator|3",
        },
    }


def test_dependencies_are_bound_with_their_id_or_with_minus_one() -> None:
    bound = options(m=Chained, inner=Trainer, compute=Compute, unused=FakeModel)
    compiled = Compiler(options=bound).compile(model_of(one_slot()))
    assert bindings_of(compiled)["@self"] == {
        "m": "Model|test.SlotsChained|0",
        "inner": "Model|test.SlotsTrainer|-1",
        "compute": "Backend|test.SlotsCompute|-1",
    }
    body = Body("P", home="a", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.onnx("Relu", [x], ["r"])
    got, _ = body.send("r", body.sample("b", "bs", slot="pick", after=[x]), "got")
    body.role("Model", "ApplyDelta", "m", [got], ["applied"])
    bound = options(m=Trainer, compute=Compute, pick=FakeSelector)
    table = bindings_of(Compiler(options=bound).compile(model_of(body)))
    assert table["b"] == {
        "m": "Model|test.SlotsTrainer|2",
        "compute": "Backend|test.SlotsCompute|0",
    }


def test_concrete_slots_stand_in_the_table() -> None:
    compiled = Compiler().compile(model_of(one_slot(concrete="test.FakeModel")))
    assert bindings_of(compiled)["@self"] == {"m": "Model|test.FakeModel|0"}
    (main,) = program_of(compiled).functions
    assert main.metadata.get(keys.CONCRETE_TYPE_SLOT_PREFIX + "m") == "test.FakeModel"
    assert list(main.defaults) == ["m"]


def test_a_receiver_says_which_slot_takes_its_payload() -> None:
    unit = unit_until("stamp_compilation_metadata", federated_program())
    client = unit.partitions["client"]
    recv, load = sole(client, "RecvReq"), sole(client, "LoadParameters")
    assert meta(recv, keys.RECV_SLOT_ID_KEY) == meta(load, keys.SLOT_ID_KEY) == "2"


def test_a_payload_that_no_slot_takes_is_left_unstamped_and_a_backend_is_a_slot() -> None:
    body = Body("P", home="a", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    peers = body.sample("b", "bs", slot="pick", after=[x])
    got, _ = body.send(x, peers, "got")
    body.output("plain", got)
    other, _ = body.send(x, peers, "other")
    body.onnx("Relu", [other], ["r"])
    body.output("result", "r")
    bound = options(pick=FakeSelector, compute=Compute)
    b = unit_until("stamp_compilation_metadata", body, options=bound).partitions["b"]
    assert meta(node_making(b, "got"), keys.RECV_SLOT_ID_KEY) is None
    assert meta(node_making(b, "other"), keys.RECV_SLOT_ID_KEY) == "1"
