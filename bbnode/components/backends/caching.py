"""The base of backends that prepare whole graphs: a bounded cache of them, by content.

Rule: a graph is prepared once per content, from whatever thread asks first; the least
recently used one goes when the cache is full.
"""

from __future__ import annotations

import hashlib
import threading
from abc import abstractmethod
from collections import OrderedDict
from typing import Any

from onnx import ModelProto

from bbnode.components.contracts import Backend, PreparedGraph
from bbnode.components.errors import BackendError
from bbnode.ir.bounds import OutOfBounds, check_bounds
from bbnode.ir.calls import InliningRefused, check_calls


class CachingBackend(Backend):
    """A backend that prepares whole graphs; subclasses say how in `build_graph`."""

    def __init__(self, config: Any, max_prepared: int) -> None:
        super().__init__(config)
        self.require(max_prepared >= 1, f"max_prepared is {max_prepared}; keep at least one graph")
        self._max_prepared = max_prepared
        self._prepared: OrderedDict[bytes, PreparedGraph] = OrderedDict()
        # Offloaded ops of different components share one backend, each on its own thread.
        self._lock = threading.Lock()

    @abstractmethod
    def build_graph(self, model: ModelProto) -> PreparedGraph:
        """Make a graph ready to run; BackendError when that fails."""

    def prepare(self, model: ModelProto) -> PreparedGraph:
        """Return a prepared graph, from the cache when one of the same content is there.

        Raises:
            BackendError: the graph is invalid, or has an op that this backend does not run.
        """
        key = hashlib.sha256(model.SerializeToString(deterministic=True)).digest()
        with self._lock:
            found = self._prepared.get(key)
            if found is not None:
                self._prepared.move_to_end(key)
                return found
        # Built outside of the lock: a big graph must not hold up the running of small ones.
        try:
            # Of any origin: a runtime would read the files that a model names.
            check_bounds(model)
            check_calls(model)
        except (OutOfBounds, InliningRefused) as error:
            raise BackendError(f"{self.TYPE_NAME}: graph {model.graph.name!r}: {error}") from error
        built = self.build_graph(model)
        with self._lock:
            self._prepared[key] = built
            while len(self._prepared) > self._max_prepared:
                self._prepared.popitem(last=False)
        return built
