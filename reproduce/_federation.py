"""A federation in the simulator: real nodes of one program, a server and its clients."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import values
from bbnode.components.registry import component_class
from bbnode.engine import ProgramPlan, plan_program
from bbnode.programs import DPFedAvg, FederatedTraining, ReadyProgram, SecureTraining
from bbnode.sim import Network, SimNode

Slots = Mapping[str, Mapping[str, Any]]  # the settings of a node, by slot

KEPT_STEPS = 1_000  # of each node: more than one round makes
# One peer may weigh all that there is: who takes part, and who is dropped, is the experiment's.
MAX_SHARE = {"max_share": 1.0}


class RoundFailed(Exception):
    """A round of an experiment did not give what it has to; the message has each op that failed."""


class Federation:
    """A server and its clients, which are connected with it alone."""

    def __init__(
        self,
        program: ReadyProgram,
        clients: Sequence[Slots],
        server: Slots | None = None,
        *,
        seed: int = 0,
        others: Mapping[int, ReadyProgram] | None = None,
        keys: bool = False,
    ) -> None:
        """Compile the program and install it.

        `clients` and `server` are the settings of the nodes; `seed` is that of the draws of the
        cohorts, and of all else that nodes draw; client i runs `others[i]`, if it is there; `keys`:
        nodes have keys to sign with. Raises BbnodeError for what can't be installed.
        """
        self.network = Network(seed, mesh=False, kept_steps=KEPT_STEPS, keys=keys)
        slots = {name: dict(settings) for name, settings in (server or {}).items()}
        own_sums = isinstance(program, DPFedAvg | SecureTraining)  # in the place of an aggregator
        asks = program.home == "server"  # where clients ask, there is no cohort
        if asks and isinstance(program, FederatedTraining) and not own_sums:
            combines = program.aggregator_slot().concrete
            assert combines is not None
            config = component_class(combines.type_name).Config
            if "max_share" in {field.name for field in fields(config)}:
                slots["aggregator"] = {**MAX_SHARE, **slots.get("aggregator", {})}
        if asks:
            slots["cohort"] = {"seed": seed, **slots.get("cohort", {})}
        self.server: SimNode = self.network.add("server", _planned(program, "server"), config=slots)
        self.clients: list[SimNode] = []
        for number, settings in enumerate(clients):
            plan = _planned((others or {}).get(number, program), "client")
            client = self.network.add(f"client-{number}", plan, config=settings)
            self.network.connect(self.server, client)
            self.clients.append(client)
        self.network.run_until_idle()

    def online(self, numbers: Container[int]) -> None:
        """Connect the clients of these numbers with the server, and no others."""
        for number, client in enumerate(self.clients):
            if number in numbers:
                self.network.connect(self.server, client)
            else:
                self.network.disconnect(self.server, client)

    def round(self) -> dict[str, Any]:
        """Make a round; return the server's outputs. Raises RoundFailed for one without any."""
        execution = self.server.invoke("server", {"tick": values.TRIGGER})
        self.network.run_until_idle()
        found = self.server.outputs(execution)
        if not found:
            failed = [str(each) for node in self.network.nodes for each in node.failures()]
            raise RoundFailed("; ".join(failed) or "the round gave no outputs")
        return found

    def rounds(self, count: int) -> Iterator[dict[str, Any]]:
        """Make so many rounds, each when it is asked for; yield what each gives."""
        for _ in range(count):
            yield self.round()


# An experiment runs one program with many data and seeds.
@lru_cache(maxsize=64)
def _planned(program: ReadyProgram, target: str) -> ProgramPlan:
    return plan_program(_compiled(program), (target,))


@lru_cache(maxsize=64)
def _compiled(program: ReadyProgram) -> ModelProto:
    """Compile a program, once however many federations run it."""
    return Compiler().bind_all(program.bindings()).compile(program.build())


def rounds_to(curve: Sequence[float], target: float) -> float:
    """Return the rounds after which a curve, one value a round, comes to a target; inf: never.

    As McMahan et al. (2017, section 3) count: on the best value so far, and between two rounds by
    linear interpolation.
    """
    before = best = -math.inf
    for number, value in enumerate(curve, start=1):
        before, best = best, max(best, value)
        if best >= target:
            part = (target - before) / (best - before) if math.isfinite(before) else 1.0
            return number - 1 + part
    return math.inf
