"""Outcomes of executions that a caller waits for: outputs, skipped outputs, failures.

Rule: for its caller, an execution that the host starts is over when it has ended and

1. each output that may come later, through messages (`Reach.later`), has come at least once or was
   skipped, or
2. an op failed, in it or in a consequence of its messages, here or on another peer, or
3. it has sent nothing, so that nothing can come.

Answers are assigned to executions by the chain of their messages, which the engine carries along.
Values are kept as long as a caller waits, `MAX_KEPT_OUTPUTS` of each kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from bbnode.engine import steps
from bbnode.ir.caps import MAX_KEPT_OUTPUTS
from bbnode.ir.peer import PeerId
from bbnode.ir.texts import listed
from bbnode.ir.values import Value

# Steps whose chain is not known yet: an answer may overtake the end of the execution that asked.
_EARLY_STEPS: Final = 256
_NOTHING_SENT: Final = (
    "nothing was sent that it could come of: there was no peer to send to, or a condition of the "
    "program did not hold"
)
_NAMED: Final = 16  # peers that a message names
# The kind of a failure without an OpFailed of its own: a send that reached no peer.
NOBODY_REACHED: Final = "PeerResolveFailed"


@dataclass(slots=True, kw_only=True)
class InvokeOutcome:
    """The outcome of one execution so far.

    Attributes:
        execution: its number.
        later: outputs that may come through messages.
        ok: False once something has failed; None while it is waited for.
        outputs: the first value of each output, by name.
        more: further values of an output, each with the peer that it came from: of a send to
            several peers there is one from each.
        skipped: outputs that have no value this time, and why.
        failures: as `OpFailed.as_json`, with `peer`: the peer on which it failed, "" for this one.
        refused: peers that did not answer a request of it, or whose answer was not counted, and
            why; the execution went on without them.
        left_out: values and failures beyond MAX_KEPT_OUTPUTS.
        coded: `raw_bytes` of the tensors that codecs encoded or decoded in it, and `code_bytes` of
            their codes; empty without codecs.
    """

    execution: int
    later: frozenset[str] = frozenset()
    ok: bool | None = None
    outputs: dict[str, Value] = field(default_factory=dict)
    more: dict[str, list[tuple[str, Value]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    left_out: int = 0
    coded: dict[str, int] = field(default_factory=dict)
    over: trio.Event = field(default_factory=trio.Event)
    chain: int = 0
    _ended: bool = False
    _kept: int = 0

    @property
    def missing(self) -> list[str]:
        """Outputs that may still come, sorted."""
        if self.over.is_set() and not self.failures:
            return []
        return sorted(self.later - self.outputs.keys() - self.skipped.keys())

    async def wait(self, timeout_s: float) -> bool:
        """Wait until it is over; return False if it is not after `timeout_s`."""
        with trio.move_on_after(timeout_s):
            await self.over.wait()
        return self.over.is_set()

    def take(self, step: steps.Step) -> None:
        """Add a step of the execution, or of a consequence of its messages."""
        match step:
            case steps.ExecutionFinished():
                self._ended, self.chain = True, step.chain
                if not step.ok and not self.failures:
                    detail = "its failures were told before anybody waited for it"
                    self._fail({"op": step.target, "kind": "OpFailed", "detail": detail})
                if step.ok and not step.chain and self.missing:
                    self._nothing_sent()
            case steps.AppEvent():
                self._add(step.topic, step.value, step.source_peer)
            case steps.OutputSkipped() if self._has_room():
                self.skipped.setdefault(step.name, step.reason)
            case steps.OpFailed():
                self._fail(step.as_json())
            case steps.PeerResolveFailed() if self._has_room():
                self.refused[str(step.peer)] = step.reason
            case steps.Telemetry(name="request.closed", attributes=attributes):
                for peer in attributes["missing"]:
                    reason = attributes["reasons"].get(str(peer), "no answer by the deadline")
                    self._refuse(str(peer), reason)
            case steps.Telemetry(name="codec.encoded" | "codec.decoded", attributes=attributes):
                for name in ("raw_bytes", "code_bytes"):
                    self.coded[name] = self.coded.get(name, 0) + attributes[name]
            case steps.Telemetry(name="contribution.refused", attributes=attributes):
                self._refuse(str(attributes["peer"]), attributes["reason"])
            case steps.Telemetry(name="send.refused", attributes=attributes):
                failure = {
                    "op": attributes["where"],
                    "kind": attributes["kind"],
                    "detail": attributes["detail"],
                }
                self._fail(failure, peer=str(attributes["peer"]))
        if self._ended and (self.failures or not self.missing) and not self.over.is_set():
            self.ok = not self.failures
            self.over.set()

    def as_json(self, show: Callable[[Value], Any]) -> dict[str, Any]:
        """Return it in the control plane's form; `show` makes JSON of a value."""
        return {
            "execution": self.execution,
            "ok": self.ok,
            "outputs": {name: show(value) for name, value in self.outputs.items()},
            "more": {
                name: [{"peer": peer, "value": show(value)} for peer, value in values]
                for name, values in self.more.items()
            },
            "skipped": self.skipped,
            "failures": self.failures,
            "refused": self.refused,
            "missing": self.missing,
            "left_out": self.left_out,
            "coded": self.coded,
        }

    def _add(self, topic: str, value: Value, peer: PeerId | None) -> None:
        if not self._has_room():
            return
        self.skipped.pop(topic, None)
        if topic in self.outputs:
            self.more.setdefault(topic, []).append(("" if peer is None else str(peer), value))
        else:
            self.outputs[topic] = value

    def _nothing_sent(self) -> None:
        """End the wait for outputs through messages: no message was sent."""
        if self.refused and not self.failures:
            reasons = listed([f"{peer} ({why})" for peer, why in self.refused.items()], _NAMED)
            detail = f"nothing was sent, so that {', '.join(self.missing)} can't come: {reasons}"
            self._fail({"op": ", ".join(self.missing), "kind": NOBODY_REACHED, "detail": detail})
        for name in self.missing:
            self.skipped[name] = _NOTHING_SENT

    def _fail(self, failure: dict[str, str], peer: str = "") -> None:
        if self._has_room():
            blank = dict.fromkeys(("line", "module", "inner", "source_peer"), "")
            self.failures.append({**blank, **failure, "peer": peer})

    def _refuse(self, peer: str, reason: str) -> None:
        if self._has_room():
            self.refused[peer] = reason

    def _has_room(self) -> bool:
        if self._kept >= MAX_KEPT_OUTPUTS:
            self.left_out += 1
            return False
        self._kept += 1
        return True


class Outcomes:
    """The executions of a node that callers wait for now."""

    def __init__(self) -> None:
        self._waited: dict[int, InvokeOutcome] = {}
        self._chains: dict[int, InvokeOutcome] = {}
        self._early: deque[tuple[int, steps.Step]] = deque(maxlen=_EARLY_STEPS)

    @contextmanager
    def collect(
        self, execution: int, later: frozenset[str] = frozenset()
    ) -> Iterator[InvokeOutcome]:
        """Collect an execution's outputs while the block runs; enter it before the next poll."""
        outcome = self._waited.setdefault(
            execution, InvokeOutcome(execution=execution, later=later)
        )
        try:
            yield outcome
        finally:
            self._waited.pop(execution, None)
            self._chains.pop(outcome.chain, None)
            if not self._waited:
                self._early.clear()

    def waits_for(self, step: steps.AppEvent) -> bool:
        """Return True if a caller waits for the execution of this value."""
        return step.execution in self._waited or step.chain in self._chains

    def observe(self, step: steps.Step) -> None:
        """Collect a step of the node if a caller waits for its execution."""
        if not self._waited:
            return
        if isinstance(step, steps.Telemetry):
            chain = step.attributes.get("chain", 0)
            outcome = self._waited.get(step.attributes.get("execution", 0))
        elif isinstance(step, steps.PeerResolveFailed):
            chain, outcome = 0, self._waited.get(step.execution)
        elif isinstance(
            step, steps.AppEvent | steps.OutputSkipped | steps.OpFailed | steps.ExecutionFinished
        ):
            chain, outcome = step.chain, self._waited.get(step.execution)
        else:
            return
        if outcome is not None:
            outcome.take(step)
            if isinstance(step, steps.ExecutionFinished) and step.chain:
                self._chains[step.chain] = outcome
                for _, early in [each for each in self._early if each[0] == step.chain]:
                    outcome.take(early)
        elif chain and chain in self._chains:
            self._chains[chain].take(step)
        elif chain and not isinstance(step, steps.ExecutionFinished):
            self._early.append((chain, step))
