"""`bbnode ping`: round trips to a connected peer.

Rule: each ping is one message over the connection that the node's work uses; a peer that does not
answer is exit code 4.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from bbnode.cli import output
from bbnode.cli.common import RunningNode
from bbnode.cli.values import peer_text

# The daemon reports its own time-out; this is the time for that answer to arrive.
ANSWER_SLACK_S = 5.0


def command(
    peer: Annotated[
        str,
        typer.Argument(help="PeerId, the end of one, or an address with /p2p/ID.", metavar="PEER"),
    ],
    node: RunningNode = RunningNode(),
    count: Annotated[int, typer.Option("--count", "-n", help="How many.", min=1, max=10_000)] = 4,
    every_s: Annotated[
        float, typer.Option("--every", help="Seconds from one to the next.", min=0)
    ] = 1.0,
) -> None:
    """Measure round trips to a connected peer."""
    times_ms: list[float] = []
    with node.client(node.timeout_s + ANSWER_SLACK_S) as client:
        for number in range(count):
            if number and every_s:
                time.sleep(every_s)
            answer = client.post("/v1/ping", {"peer": peer_text(peer), "timeout_s": node.timeout_s})
            times_ms.append(answer["rtt_ms"])
            if not node.as_json:
                output.data(f"{answer['peer']}: {answer['rtt_ms']:.3f} ms")
    mean = sum(times_ms) / len(times_ms)
    if node.as_json:
        output.json_object(
            {
                "peer": answer["peer"],
                "rtt_ms": times_ms,
                "min_ms": min(times_ms),
                "mean_ms": round(mean, 3),
                "max_ms": max(times_ms),
            }
        )
    else:
        output.note(f"min {min(times_ms):.3f}, mean {mean:.3f}, max {max(times_ms):.3f} ms")
