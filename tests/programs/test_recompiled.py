"""A compiled ready program compiles to itself, whatever slots its classes of peers share."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto

import bbnode.programs as programs
from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, HeldModel, OrtBackend, concrete
from bbnode.dsl import Graph, ModelSlot, Module, PeerSelectorSlot, types
from bbnode.ir.reopen import _merged
from bbnode.programs import ReadyProgram
from tests.programs.files import CLASSES, FEATURES, linear
from tests.programs.strategies.federation import normalised

READY: dict[str, type[Any]] = {
    name: each
    for name in programs.__all__
    if inspect.isclass(each := getattr(programs, name))
    and issubclass(each, ReadyProgram)
    and each not in (ReadyProgram, programs.TrainingProgram)  # bases
}
# What a program needs, or what brings more slots into it.
GIVEN: dict[str, dict[str, Any]] = {
    "AsynchronousTraining": {"evaluate": "server"},
    "DPFedAvg": {"epsilon": 1e3},
    "DPSGDTraining": {"example_epsilon": 1e3},
    "DiLoCo": {"inner_steps": 3, "epochs": 1},
    "EmbedAndSearch": {"model": "bbnode.TextEncoder"},
    "FedBN": {"model": normalised()},
    "FedPer": {"local": ("*.bias",)},
    "FedRep": {"local": ("*.bias",)},
    "FederatedKMeans": {"features": 3},
    "FederatedTrees": {"features": 3},
    "PeerToPeerSearch": {"dimensions": 4},
    "Pipeline": {"model": linear()},
    "SplitLearning": {"model": (FEATURES, 6, CLASSES), "cut": "layer0.out"},
    "VerticalLearning": {"model": (9, 8, CLASSES), "bottoms": ((4, 6, 5), (3, 6, 4))},
}


def same_again(program: Module, compiler: Compiler) -> bool:
    first = compiler.compile(program.build()).SerializeToString(deterministic=True)
    again = compiler.compile(ModelProto.FromString(first))
    return again.SerializeToString(deterministic=True) == first


def program_of(name: str) -> ReadyProgram:
    cls = READY[name]
    plain = {"model": (FEATURES, CLASSES)} if "model" in cls.arguments() else {}
    return cls(**{**plain, **GIVEN.get(name, {})})


@pytest.mark.parametrize("name", READY)
def test_a_compiled_ready_program_compiles_to_itself(name: str) -> None:
    program = program_of(name)
    assert same_again(program, Compiler().bind_all(program.bindings()))


@pytest.mark.parametrize("turned", [False, True])
def test_slots_that_classes_share_keep_their_order(turned: bool) -> None:
    held = {n: concrete(HeldModel, model=(2, 2), seed=n) for n in range(3)}
    slots = [ModelSlot(f"m{2 - n if turned else n}", concrete=held[n]) for n in range(3)]

    class Shared(Module):
        home = "teller"

        def body(self, g: Graph) -> None:
            tick = g.input("tick", types.TRIGGER)
            weights = tick
            for slot in slots:
                weights = slot.params(g, after=weights)
            members = PeerSelectorSlot("view", peer_class="member").current_view(g, after=weights)
            received = g.net_out("weights", members, weights)
            # The class that comes first has the slots that the root used last.
            for slot in slots[1:]:
                slot.load_parameters(g, received)

    compiler = (
        Compiler().bind_peer_selector("view", ConnectedView).bind_backend("compute", OrtBackend)
    )
    assert same_again(Shared(), compiler)


@given(st.permutations("abcdef"), st.lists(st.sets(st.sampled_from("abcdef")), max_size=4))
def test_orders_are_merged_into_one_that_agrees_with_each(
    order: list[str], parts: list[set[str]]
) -> None:
    orders = [[name for name in order if name in part] for part in parts]
    merged = _merged(orders)
    assert sorted(merged) == sorted(set().union(*parts))
    assert orders == [[name for name in merged if name in part] for part in parts]


def test_orders_that_contradict_each_other_lose_no_name() -> None:
    assert _merged(["ab", "ba", "bc"]) == ["a", "b", "c"]
