"""The report of a compile: time and counters per pass.

Rule: measuring changes nothing. Spans go to OpenTelemetry if that package is installed and
configured, and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter_ns
from typing import Any

from onnx import ModelProto

from bbnode.compiler.driver.history import ValueEvent
from bbnode.compiler.driver.seams import NodeHistory

NS_PER_MS = 1_000_000
SPAN_PREFIX = "compiler."


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """One pass: milliseconds of wall time, and its counters."""

    name: str
    ms: float
    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """One compile.

    `targets` are the names of the partition mains, in class order. `history` (by node),
    `values` (by value) and `snapshots` (by pass: the model as that pass left it) are empty unless
    the caller requested them.
    """

    passes: tuple[PassReport, ...]
    total_ms: float
    targets: tuple[str, ...]
    history: Mapping[str, NodeHistory] = field(default_factory=dict)
    values: Mapping[str, tuple[ValueEvent, ...]] = field(default_factory=dict)
    snapshots: Mapping[str, ModelProto] = field(default_factory=dict)

    def counters(self) -> dict[str, int]:
        """Return all counters as `compiler.<counter>`, summed over the passes that share one."""
        total: dict[str, int] = {}
        for report in self.passes:
            for name, value in report.counters.items():
                key = SPAN_PREFIX + name
                total[key] = total.get(key, 0) + value
        return total


class Stopwatch:
    """Collects the reports of one compile."""

    def __init__(self) -> None:
        self._started = perf_counter_ns()
        self.reports: list[PassReport] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[dict[str, int]]:
        """Time one pass; the caller puts the pass's counters into the yielded dict."""
        counters: dict[str, int] = {}
        with _span(SPAN_PREFIX + name) as span:
            started = perf_counter_ns()
            yield counters
            ms = (perf_counter_ns() - started) / NS_PER_MS
            if span is not None:
                for key, value in counters.items():
                    span.set_attribute(key, value)
        self.reports.append(PassReport(name=name, ms=ms, counters=counters))

    def total_ms(self) -> float:
        """Return the milliseconds since the compile began."""
        return (perf_counter_ns() - self._started) / NS_PER_MS


@cache
def _api() -> Any:
    try:
        return importlib.import_module("opentelemetry.trace")
    except ImportError:
        return None


def _tracer() -> Any:
    """Return the tracer of the configured provider, None without one: spans would be dropped."""
    trace = _api()
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return trace.get_tracer("bbnode.compiler")


@contextmanager
def _span(name: str) -> Iterator[Any]:
    tracer = _tracer()
    if tracer is None:
        yield None
        return
    with tracer.start_as_current_span(name) as span:
        yield span
