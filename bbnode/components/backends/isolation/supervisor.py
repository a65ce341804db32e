"""Keeps a child running, and blames the right run when it dies.

Rule: a death costs the run that caused it and no other. A run that was alone is to blame. Where
several were under way, each is tried again in a child of its own, one after the other: the one that
kills that too is to blame. A run changes nothing but its outputs, so that it may be made twice.

Restarts are immediate at first; one that follows many deaths waits, and runs fail meanwhile.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from bbnode.components.backends.graphs import check_count
from bbnode.components.backends.isolation import shared
from bbnode.components.backends.isolation.child import Child, ChildDied, ChildRefused, Places
from bbnode.components.errors import BackendError, BackendUnavailable, GraphKilled
from bbnode.ir.values import Value

_FREE_DEATHS: Final = 3  # within `_CALM_S`; from then on a restart waits
_CALM_S: Final = 60.0
_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 10.0
_MAX_TRIES: Final = 4  # of a run whose child died of others
_MOST_OPS: Final = 8  # that a message names


class Supervisor:
    """The children of one backend: the one that runs graphs, and one at a time for trials."""

    def __init__(
        self,
        type_name: str,
        settings: Mapping[str, Any],
        max_run_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not hasattr(os, "memfd_create"):
            raise BackendUnavailable(
                f'{type_name}: isolation = "process" needs Linux; set isolation = "none"'
            )
        self._type_name = type_name
        self._settings = settings
        self._max_run_s = max_run_s
        self._clock = clock
        self._lock = threading.Lock()  # of the fields; starting a child happens under it
        self._trial = threading.Lock()
        self._child: Child | None = None
        self._closed = False
        self._numbers = itertools.count(1)
        self._dropped: list[int] = []
        self._last_death = -_CALM_S
        self._recent = 0
        self._not_before = 0.0
        self.deaths = 0

    @property
    def confined(self) -> str:
        """The filter that confines the child: "seccomp", or why none; "" before it runs."""
        child = self._child
        return child.confined if child is not None else ""

    def add(self, model: ModelProto) -> IsolatedGraph:
        """Return a graph, prepared in the child. Raises BackendError."""
        graph = IsolatedGraph(self, next(self._numbers), model)
        graph.prepare()
        # A graph that nobody has any more is dropped with the next one that is prepared.
        weakref.finalize(graph, self._dropped.append, graph.number)
        return graph

    def call(
        self, graph: IsolatedGraph, inputs: Sequence[Value] | None, places: Places | None = None
    ) -> list[Value]:
        """Run a graph, or only prepare it where `inputs` is None.

        Raises GraphKilled, BackendError and BackendUnavailable.
        """
        for _ in range(_MAX_TRIES):
            child = self._running()
            try:
                return self._in_child(child, graph, inputs, places)
            except ChildDied as died:
                self._note_death(child)
                if died.to_blame:
                    raise graph.killed(died) from died
                if died.to_blame is None:
                    return self._tried_alone(graph, inputs, places)
        raise BackendUnavailable(
            f"{graph.label}: the process that runs it ended {_MAX_TRIES} times for other runs"
        )

    def close(self) -> None:
        """End the children."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None:
            child.close()

    def _tried_alone(
        self, graph: IsolatedGraph, inputs: Sequence[Value] | None, places: Places | None
    ) -> list[Value]:
        with self._trial:
            child = self._start()
            try:
                return self._in_child(child, graph, inputs, places)
            except ChildDied as died:
                raise graph.killed(died) from died
            finally:
                child.close()

    def _in_child(
        self,
        child: Child,
        graph: IsolatedGraph,
        inputs: Sequence[Value] | None,
        places: Places | None,
    ) -> list[Value]:
        try:
            if graph.number not in child.prepared:
                dropped, self._dropped[:] = list(self._dropped), []
                model = np.frombuffer(graph.model, np.uint8)
                child.call(shared.PREPARE, graph.number, [model], dropped=dropped)
                child.prepared.add(graph.number)
            if inputs is None:
                return []
            return child.call(shared.RUN, graph.number, inputs, places=places)
        except ChildRefused as error:
            if error.unavailable:
                raise BackendUnavailable(str(error)) from error
            if error.memory:
                raise graph.out_of_memory(str(error), error.node) from error
            raise BackendError(str(error), node=error.node) from error
        except MemoryError as error:
            raise graph.out_of_memory(str(error), "") from error

    def _running(self) -> Child:
        with self._lock:
            if self._child is not None and self._child.is_alive:
                return self._child
            waits = self._not_before - self._clock()
            if waits > 0:
                raise BackendUnavailable(
                    f"{self._type_name}: the process that runs graphs died {self._recent} times "
                    f"within {_CALM_S:g} s; it is started again in {waits:.1f} s"
                )
            self._child = self._start()
            return self._child

    def _start(self) -> Child:
        if self._closed:
            raise BackendUnavailable(f"{self._type_name}: the backend is stopped")
        try:
            return Child(self._settings, self._max_run_s)
        except OSError as error:
            raise BackendUnavailable(
                f"{self._type_name}: the process that runs graphs can't be started: {error}; let "
                'this user start processes, or set isolation = "none"'
            ) from error

    def _note_death(self, child: Child) -> None:
        with self._lock:
            if self._child is not child:
                return  # another run has noted it
            self._child = None
            now = self._clock()
            self._recent = self._recent + 1 if now - self._last_death < _CALM_S else 1
            self._last_death = now
            self.deaths += 1
            beyond = self._recent - _FREE_DEATHS
            waits = min(_FIRST_WAIT_S * 2 ** (beyond - 1), _MAX_WAIT_S) if beyond > 0 else 0.0
            self._not_before = now + waits


class IsolatedGraph:
    """A graph in a child; the parent keeps its bytes for the next child."""

    def __init__(self, supervisor: Supervisor, number: int, model: ModelProto) -> None:
        self._supervisor = supervisor
        self.number = number
        self.model = model.SerializeToString()
        self.label = f"{supervisor._type_name}: graph {model.graph.name!r}"
        self._inputs = [port.name for port in model.graph.input]
        ops = list(dict.fromkeys(node.op_type for node in model.graph.node))
        more = f" and {len(ops) - _MOST_OPS} more" if len(ops) > _MOST_OPS else ""
        self._ops = ", ".join(ops[:_MOST_OPS]) + more
        only = model.graph.node[0].name if len(model.graph.node) == 1 else ""
        self._only = only

    def prepare(self) -> None:
        """Prepare it in the child. Raises as `run`."""
        self._supervisor.call(self, None)

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        """Return the outputs in graph order for inputs in graph order."""
        check_count(self.label, self._inputs, inputs)
        return self._supervisor.call(self, inputs)

    def run_into(
        self, inputs: Sequence[Value], places: Mapping[int, npt.NDArray[Any]]
    ) -> list[Value]:
        """Return the outputs in graph order; those with a place are written there."""
        check_count(self.label, self._inputs, inputs)
        return self._supervisor.call(self, inputs, places)

    def killed(self, died: ChildDied) -> GraphKilled:
        """Return the failure of a run that ended the child."""
        return GraphKilled(
            f"{self.label} (of {self._ops}) ended the process that runs it: {died.what}",
            node=self._only,
            reason=died.reason,
        )

    def out_of_memory(self, text: str, node: str) -> GraphKilled:
        """Return the failure of a run that got no memory."""
        limit = self._supervisor._settings["max_memory_bytes"]
        return GraphKilled(
            f"{text or self.label + ' (of ' + self._ops + ')'}: it needs more memory than "
            f"max_memory_bytes, {limit}, leaves it",
            node=node or self._only,
            reason="memory",
        )
