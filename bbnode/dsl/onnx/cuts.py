"""The partition of an ONNX model into stages, and the values that cross each cut.

Rule: a stage is complete: the values that its ops read are made in it or cross into it. A cut by
weights follows the model's own order; of cuts with about the same balance, the one that the
fewest values cross is chosen. Weights never cross: each stage holds those that it reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from bbnode.dsl.errors import BadCut, TooManyStages
from bbnode.dsl.onnx.graph import OnnxGraph, Part, whole

# A stage is a peer; more than this is a typing error.
MAX_STAGES = 64
# The maximum of candidate places; beyond it, only the best of each neighbourhood is considered, so
# that the work stays at MAX_PLACES² per stage.
MAX_PLACES = 400
# Factor by which the heaviest stage may exceed that of the best split, if fewer values cross then.
BALANCE_SLACK = 1.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A model in stages.

    Attributes:
        parts: one per stage, in order.
        crossing: for each stage the values that travel to it, and last those that travel back.
    """

    parts: tuple[Part, ...]
    crossing: tuple[tuple[str, ...], ...]


def split_by_weight(graph: OnnxGraph, stages: int, module: str) -> Split:
    """Cut into `stages` parts with a nearly minimal weight of the heaviest one, in bytes.

    Raises TooManyStages if there are not enough places to cut at.
    """
    order = whole(graph).nodes
    if type(stages) is not int or not 1 <= stages <= MAX_STAGES:
        raise BadCut(f"stages={stages!r:.40} has to be a number from 1 to {MAX_STAGES}", module)
    _check_inputs(order, graph, module)
    crossed = _crossed(graph, order)
    places = [at for at, count in enumerate(crossed) if count]
    if stages > len(places) + 1:
        raise TooManyStages(
            f"the model has {len(places)} places to be cut at, which makes at most "
            f"{len(places) + 1} stages, not {stages}; ask for fewer",
            module,
        )
    weights = graph.new_weight_bytes(order)
    # A model without weights is balanced by its number of ops.
    sums = [0, *accumulate(weights if any(weights) else [1] * len(order))]
    places = _thinned(places, sums, crossed)
    cuts = _best_cuts([0, *places, len(order)], sums, crossed, stages)
    return _split(graph, [order[a:b] for a, b in pairwise(cuts)])


def split_at(graph: OnnxGraph, at: Sequence[str | Sequence[str]], module: str) -> Split:
    """Cut after named values: a stage has all ops that a value needs and no earlier stage has.

    An entry of `at` may also be a list of values, which then end one stage together.

    Raises:
        UnknownValue: the model has no such value.
        BadCut: a stage has nothing to do, or a value that crosses cannot travel.
    """
    if not isinstance(at, list | tuple) or not at or len(at) >= MAX_STAGES:
        raise BadCut(f"at={at!r:.60} has to be a list of names of values", module)
    order = whole(graph).nodes
    _check_inputs(order, graph, module)
    done: set[int] = set()
    groups: list[tuple[int, ...]] = []
    for entry in at:
        names = entry if isinstance(entry, list | tuple) else (entry,)
        wanted = [graph.check_value(name, module) for name in names]
        new = _needed(graph, wanted, done)
        if not new:
            raise BadCut(
                f"no op is left for the stage that ends at {entry!r:.80}: it is an input or a "
                "weight, or an earlier cut has all that it needs; name the cuts in the order in "
                "which the model computes them",
                module,
            )
        done |= new
        groups.append(tuple(index for index in order if index in new))
    rest = tuple(index for index in order if index not in done)
    if not rest:
        raise BadCut(
            f"no op is left behind the last cut, {at[-1]!r:.80}; leave it out, the result comes "
            "back by itself",
            module,
        )
    split = _split(graph, [*groups, rest])
    _check_crossing(graph, split, at, module)
    return split


def _check_inputs(order: Sequence[int], graph: OnnxGraph, module: str) -> None:
    if not any(
        name in graph.inputs for index in order for name in graph.nodes[index].computes_with
    ):
        raise BadCut(
            "no op of the model reads an input, so that there is nothing to send to a stage; use "
            "the model whole",
            module,
        )
    for name in (*graph.inputs, *graph.outputs):
        if name not in graph.kinds:
            raise BadCut(
                f"ONNX does not know the element type of {name!r}, so that it cannot travel; "
                "export the model with typed outputs",
                module,
            )


def _needed(graph: OnnxGraph, values: Sequence[str], done: set[int]) -> set[int]:
    needed: set[int] = set()
    todo = list(values)
    while todo:
        index = graph.maker.get(todo.pop())
        if index is None or graph.fixed[index] or index in done or index in needed:
            continue
        needed.add(index)
        todo.extend(graph.nodes[index].computes_with)
        # The inputs of a fixed op are fixed as well, so they are not followed.
    return needed


def _check_crossing(
    graph: OnnxGraph, split: Split, at: Sequence[str | Sequence[str]], module: str
) -> None:
    for index, names in enumerate(split.crossing[1:-1]):
        where = f"the cut at {at[index]!r:.80}"
        if not names:
            raise BadCut(f"nothing crosses {where}; cut at another value", module)
        for name in names:
            if name not in graph.kinds:
                raise BadCut(
                    f"{name!r} crosses {where} and is not a tensor of a known type that can "
                    "travel; cut at a value before or behind it",
                    module,
                )


def _split(graph: OnnxGraph, groups: Sequence[tuple[int, ...]]) -> Split:
    """Return the parts of these groups of ops, which are in order and cover the model."""
    stage_of = {index: stage for stage, group in enumerate(groups) for index in group}
    maker_stage: dict[str, int] = dict.fromkeys(graph.inputs, -1)  # value -> stage that makes it
    for index, stage in stage_of.items():
        maker_stage.update((name, stage) for name in graph.nodes[index].outputs if name)
    outputs = [name for name in graph.outputs if not graph.is_fixed_value(name)]
    last = dict.fromkeys(outputs, len(groups))  # value -> last stage that needs it
    read: list[dict[str, None]] = [{} for _ in groups]
    for index, stage in stage_of.items():
        for name in graph.nodes[index].computes_with:
            if name in maker_stage:
                last[name] = max(last.get(name, -1), stage)
                read[stage][name] = None
    crossing = [
        tuple(n for n, home in maker_stage.items() if home < stage <= last.get(n, -1))
        for stage in range(len(groups))
    ]
    crossing.append(tuple(graph.outputs))
    parts = []
    for stage, group in enumerate(groups):
        handed = [n for n, home in maker_stage.items() if home == stage and last.get(n, -1) > stage]
        if (
            stage == len(groups) - 1
        ):  # outputs computed from weights alone are handed out by the last stage
            handed += [n for n in graph.outputs if graph.is_fixed_value(n)]
        inputs = tuple(n for n in crossing[stage] if n in read[stage])
        parts.append(Part(graph=graph, nodes=group, inputs=inputs, outputs=tuple(handed)))
    return Split(parts=tuple(parts), crossing=tuple(crossing))


# --- the search for the best cuts ----------------------------------------------------------


def _crossed(graph: OnnxGraph, order: Sequence[int]) -> list[int]:
    """Count the values that cross a cut before each op; 0 if the model cannot be cut there."""
    born: dict[str, int] = dict.fromkeys(graph.inputs, 0)
    last: dict[str, int] = {}
    for position, index in enumerate(order):
        last.update((name, position) for name in graph.nodes[index].computes_with if name in born)
        born.update((name, position + 1) for name in graph.nodes[index].outputs if name)
    last.update((name, len(order)) for name in graph.outputs if name in born)
    counts = [0] * (len(order) + 2)
    stuck = [0] * (len(order) + 2)
    for name, position in last.items():
        for changes, applies in ((counts, True), (stuck, name not in graph.kinds)):
            if applies and born[name] <= position:
                changes[born[name]] += 1
                changes[position + 1] -= 1
    crossed = list(accumulate(counts))
    blocked = list(accumulate(stuck))
    return [0 if at == 0 or blocked[at] else crossed[at] for at in range(len(order))]


def _thinned(places: list[int], sums: Sequence[int], crossed: Sequence[int]) -> list[int]:
    """Return about `MAX_PLACES` of the places: the least crossed one of each neighbourhood."""
    if len(places) <= MAX_PLACES:
        return places
    best: dict[int, int] = {}
    for rank, at in enumerate(places):
        # Half of the neighbourhoods are equal in weight, the other half in number of places.
        bucket = sums[at] * (MAX_PLACES // 2) // (sums[-1] + 1) + rank * (MAX_PLACES // 2) // len(
            places
        )
        known = best.get(bucket)
        if known is None or crossed[at] <= crossed[known]:
            best[bucket] = at
    return sorted(best.values())


def _best_cuts(
    ends: Sequence[int], sums: Sequence[int], crossed: Sequence[int], stages: int
) -> list[int]:
    """Return `stages` + 1 of `ends`, first and last included.

    The search minimises the weight of the heaviest stage first; among the splits that stay
    within `BALANCE_SLACK` of it, it takes the one with the fewest crossing values, and of those
    the most even one (least sum of squares), with its cuts as late as possible.
    """
    loads = [sums[at] for at in ends]
    cap = math.floor(_least_cap(loads, stages) * BALANCE_SLACK)
    n = len(ends)
    none = (math.inf, math.inf)
    cost: list[tuple[float, float]] = [(0, 0), *[none] * (n - 1)]
    came: list[list[int]] = []
    for stage in range(1, stages + 1):
        new = [none] * n
        back = [0] * n
        final = stage == stages
        for end in (n - 1,) if final else range(stage, n - stages + stage):
            for start in range(end - 1, stage - 2, -1):
                load = loads[end] - loads[start]
                if load > cap:
                    break
                if cost[start] is none:
                    continue
                crossings, squares = cost[start]
                option = (
                    crossings + (0 if final else crossed[ends[end]]), squares + float(load) ** 2
                )  # fmt: skip
                if option < new[end]:
                    new[end], back[end] = option, start
        cost = new
        came.append(back)
    cuts = [n - 1]
    for back in reversed(came):
        cuts.append(back[cuts[-1]])
    return [ends[index] for index in reversed(cuts)]


def _least_cap(loads: Sequence[int], stages: int) -> int:
    """Return the minimal weight of the heaviest of `stages` stages, each with at least one op."""
    low, high = 0, loads[-1]
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(loads, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_needed(loads: Sequence[int], cap: int) -> float:
    """Return the number of stages if none is heavier than `cap`; infinity if that is impossible."""
    needed, base = 1, loads[0]
    for previous, load in pairwise(loads):
        if load - previous > cap:
            return math.inf
        if load - base > cap:
            needed += 1
            base = previous
    return needed
