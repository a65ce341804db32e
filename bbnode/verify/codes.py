"""Codecs of moves, with the memory of what a code lost; and Oort's utilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bbnode.components import (
    Float16Codec,
    Int4Codec,
    Int8Codec,
    Oort,
    SignCodec,
    TopKCodec,
    concrete,
)
from bbnode.programs import FederatedTraining
from bbnode.verify import reference as numpy_
from bbnode.verify.check import Compared, checked
from bbnode.verify.reference import RATE, Client, Vector
from bbnode.verify.rounds import ROUNDS, made
from bbnode.verify.runs import Star


def _levels(most: int) -> Callable[[Vector], Vector]:
    """Return the codec of whole steps of max|x| / most, in one block."""

    def rounded(v: Vector) -> Vector:
        scale = np.float32(np.abs(v).max() / most)
        return np.asarray(np.rint(v / scale) * scale)

    return rounded


def _largest(count: int) -> Callable[[Vector], Vector]:
    def kept(v: Vector) -> Vector:
        at = np.argsort(-np.abs(v), kind="stable")[:count]
        made = np.zeros_like(v)
        made[at] = v[at]
        return made

    return kept


def _signs(v: Vector) -> Vector:
    return np.asarray(np.where(v >= 0, np.abs(v).mean(), -np.abs(v).mean()))


def _codec(name: str, about: str, codec: Any, code: Callable[[Vector], Vector]) -> None:
    @checked(f"codec: {name}", "compression", about)
    def _(folder: Path) -> Iterator[Compared]:
        star = Star(folder, made(FederatedTraining, deltas=True, codec=codec), numpy_.clients())
        w, counts = star.start, [each.count for each in star.peers]
        lost: list[Any] = [0.0] * len(counts)
        for number, found in enumerate(star.rounds(ROUNDS), start=1):
            sent = []
            for at, client in enumerate(star.peers):
                move = client.trained(w) - w + lost[at]
                sent.append(code(move))
                lost[at] = move - sent[-1]
            w = w + numpy_.mean(sent, counts)
            yield Compared(found["model"], w, f"round {number}")


_codec("float16", "moves in half precision; what was lost is sent later", Float16Codec,
       lambda v: v.astype(np.float16).astype(np.float64))  # fmt: skip
_codec("int8", "127 steps either way; what was lost is sent later", Int8Codec, _levels(127))
_codec("int4", "7 steps either way; what was lost is sent later", Int4Codec, _levels(7))
_codec("top-k", "the largest values; what was left out is sent later",
       concrete(TopKCodec, fraction=0.2), _largest(3))  # fmt: skip
_codec("sign", "the mean size with each sign; what was lost is sent later", SignCodec, _signs)


@checked("Oort", "oort", "utilities after a round: examples times loss, scaled, less for the slow")
def _(folder: Path) -> Iterator[Compared]:
    clients = [numpy_.table(count, count) for count in (20, 50, 30, 40)]
    clients[1] = Client(clients[1].x, (clients[1].y + 1) % 3)  # so that two lose much
    clients[2] = Client(clients[2].x, (clients[2].y + 2) % 3)
    program = made(FederatedTraining, clients=4, epochs=1, batch=50, selector=Oort)
    star = Star(folder, program, clients)
    seconds = (1, 3, 2, 4)
    for node, each in zip(star.nodes, seconds, strict=True):
        node.task_ns = each * 1_000_000_000
    w, heard = star.start, [0.0] * 4
    for number, _ in enumerate(star.rounds(2), start=1):
        heard = [each.count * each.loss(w) for each in clients]
        w = numpy_.mean(
            [each.trained(w, 1, RATE) for each in clients], [each.count for each in clients]
        )
        limit = min(sorted(heard)[int(3 * 0.95)], 10 * sorted(heard)[1])
        clipped = np.minimum(heard, limit)
        scaled = (clipped - clipped.min()) / (clipped.max() - clipped.min())
        scores = scaled + math.sqrt(0.1 * math.log(number) / number)
        # The preferred time is the 30th percentile, here the least; alpha is 2.
        times = [each * 1e9 + 2e6 for each in seconds]  # and a millisecond each way
        scores = scores * (min(times) / np.array(times)) ** 2
        found = star.server.component("cohort").utilities()
        yield Compared([found[node.peer_id] for node in star.nodes], scores, f"round {number}")
