"""Indexes from Python: one in a directory or in memory, and that of a node.

Rule: a directory belongs to one process at a time. The index of a running node is asked through
the inputs of its program, so that a search of a program for shards asks the other shards, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bbnode.api.blocking_methods import BlockingMethods
from bbnode.components.indexes.collection import Collection as Collection
from bbnode.ir.errors import DeploymentError, MissingFile
from bbnode.ir.types import TENSOR_STRING
from bbnode.ir.values import Scalar, SearchResults

# The names of inputs and outputs in programs of search.
_VECTORS, _TEXTS, _METADATA, _IDS, _REMOVE = "vectors", "texts", "metadata", "ids", "remove"
_QUERY, _WHERE, _RESULTS, _MISSING = "query", "where", "results", "missing"


class NoSuchIndex(DeploymentError):
    """A node has no index, or its program has no input for the operation."""


def open_index(
    path: str | os.PathLike[str] | None = None,
    *,
    kind: str = "",
    metric: str = "",
    dimensions: int = 0,
    create: bool = True,
) -> Collection:
    """Return the index in a directory, or a new one; use it as a context manager, or `close()` it.

    Changes by `add` and `remove` are on disk when these return. Another process that has the
    directory open, such as a running node, locks it until it closes it.

    Args:
        path: of the directory; None is a new index in memory.
        kind: "flat" (exact), "hnsw" or "ivf_pq"; left out, as the directory says, or "flat".
        metric: "l2" (Euclidean distance), "ip" (minus the inner product) or "cosine" (1 - cosine);
            left out, as the directory says, or "l2".
        dimensions: of its vectors; 0: those of the first.
        create: make an index where there is none.

    Raises:
        MissingFile: there is none, and `create` is False.
        IndexInUse: another process has it open.
        IndexMismatch: it is of another kind, metric or dimension, or the directory is of something
            else.
        IndexDamaged, IndexUnavailable: its files can't be used.
    """
    if path is None:
        return Collection.in_memory(kind=kind, metric=metric, dimensions=dimensions)
    folder = Path(path).expanduser()
    if not create and not folder.is_dir():
        what = "is no directory" if folder.exists() else "is not there"
        raise MissingFile(f"{folder} {what}; `bbnode index add {folder} FILE…` makes an index")
    return Collection.open(folder, kind=kind, metric=metric, dimensions=dimensions, create=create)


def index_of(node: BlockingMethods, target: str | None = None) -> NodeIndex:
    """Return the index of a node that `bbnode.open` or `bbnode.connect` returned.

    Args:
        target: class, or class#hash, of the part of the program that is asked; left out, the one
            that has the input that a method needs.
    """
    return NodeIndex(node, target)


class NodeIndex:
    """The index of a node, through the inputs of its program; made by `bbnode.index_of`.

    The accepted arguments depend on the program: one whose shards number their items takes no ids.
    """

    def __init__(self, node: BlockingMethods, target: str | None = None) -> None:
        """Wrap a node; made by `bbnode.index_of`."""
        self._node, self._target = node, target
        self._found: dict[str, Mapping[str, str | None]] | None = None

    def add(
        self,
        vectors: Any,
        metadata: Sequence[Mapping[str, Scalar]] | None = None,
        ids: Any | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> npt.NDArray[np.int64]:
        """Add vectors [N, D] (or one: [D]), and return their ids, int64 [N].

        A program that encodes texts takes texts [N] instead. Raises NoSuchIndex, and the errors of
        the node's `invoke`.
        """
        target, inputs = self._filled
        values: dict[str, Any]
        if _are_texts(vectors):
            if _TEXTS not in inputs:
                raise NoSuchIndex(
                    f"{target} takes vectors and no texts; encode them first, "
                    "with `bbnode.components.SentenceEncoder` for one"
                )
            values = {_TEXTS: np.atleast_1d(np.asarray(vectors, object))}
        elif _VECTORS not in inputs:
            raise NoSuchIndex(f"{target} takes texts, of which it makes vectors itself")
        else:
            values = {_VECTORS: np.atleast_2d(np.asarray(vectors, np.float32))}
        if _METADATA in inputs:
            values[_METADATA] = [dict(each) for each in metadata or ()]
        elif metadata is not None and any(metadata):
            raise NoSuchIndex(f"{target} takes no metadata with its vectors")
        if _IDS in inputs:
            if ids is None:
                raise NoSuchIndex(f"{target} takes items with ids alone; give one for each")
            values[_IDS] = np.atleast_1d(np.asarray(ids, np.int64))
        elif ids is not None:
            raise NoSuchIndex(
                f"{target} numbers its items itself, and takes no ids; leave them out, or "
                "compile its program with `numbered=True`"
            )
        outcome = self._node.invoke(target, values, timeout_s=timeout_s)
        return np.atleast_1d(np.asarray(outcome["added"], np.int64))

    def search(
        self, query: Any, where: Mapping[str, Scalar] | None = None, *, timeout_s: float = 60.0
    ) -> tuple[SearchResults, tuple[str, ...]]:
        """Return the nearest items to a query [D], or to each of [Q, D], and the missing shards.

        A program that encodes texts takes a text, or texts [Q]. The number of items is the
        program's `k`. Raises NoSuchIndex, and the errors of the node's `invoke`.
        """
        target, inputs = self._with(_QUERY, "nothing can be searched from here")
        takes_texts = inputs[_QUERY] == TENSOR_STRING.name
        if takes_texts != _are_texts(query):
            takes = "a text, not a vector" if takes_texts else "a vector; encode the text first"
            raise NoSuchIndex(f"a query of {target} is {takes}")
        values: dict[str, Any] = {_QUERY: np.asarray(query, object if takes_texts else np.float32)}
        if _WHERE in inputs:
            values[_WHERE] = dict(where or {})
        elif where:
            raise NoSuchIndex(
                f"{target} takes no conditions; compile its program with `filtered=True`"
            )
        outcome = self._node.invoke(target, values, timeout_s=timeout_s)
        results = outcome[_RESULTS]
        if not isinstance(results, SearchResults):
            raise NoSuchIndex(f"{target} gave no search results as {_RESULTS!r}")
        return results, tuple(map(str, outcome.outputs.get(_MISSING, ())))

    def remove(self, ids: Any, *, timeout_s: float = 60.0) -> None:
        """Remove the items with these ids; unknown ids are ignored."""
        target, _ = self._with(_REMOVE, "items can't be removed from here")
        values = {_REMOVE: np.atleast_1d(np.asarray(ids, np.int64))}
        self._node.invoke(target, values, timeout_s=timeout_s)

    def stats(self) -> list[dict[str, Any]]:
        """Return the facts that the node's indexes report, each with its slot and type.

        Raises NoSuchIndex if the node has no index.
        """
        indexes = [dict(each) for each in self._node.status()["components"] if "items" in each]
        if not indexes:
            raise NoSuchIndex("this node has no index; `bbnode status` shows what it runs")
        return indexes

    @property
    def takes_ids(self) -> bool:
        """True if items are added with ids; False where the index numbers them."""
        return _IDS in self._filled[1]

    @property
    def takes_texts(self) -> bool:
        """True if items are added as texts, which the program encodes."""
        return _TEXTS in self._filled[1]

    @property
    def _filled(self) -> tuple[str, Mapping[str, str | None]]:
        """The target that takes items, and its inputs."""
        name = _TEXTS if any(_TEXTS in inputs for inputs in self._targets.values()) else _VECTORS
        return self._with(name, "items can't be added from here")

    @property
    def _targets(self) -> dict[str, Mapping[str, str | None]]:
        """The node's targets, or the one that is asked, with their inputs."""
        if self._found is None:
            installed = self._node.installed()["targets"]
            self._found = {
                each["target"]: each["inputs"]
                for each in installed
                if self._target in (None, each["target"], each["target"].partition("#")[0])
            }
        return self._found

    def _with(self, name: str, otherwise: str) -> tuple[str, Mapping[str, str | None]]:
        """Return the one target that has the input `name`, and all of its inputs."""
        known = self._targets
        having = {target: inputs for target, inputs in known.items() if name in inputs}
        if len(having) == 1:
            return next(iter(having.items()))
        listed = ", ".join(
            f"{target} ({', '.join(inputs) or 'none'})" for target, inputs in known.items()
        )
        if having:
            raise NoSuchIndex(
                f"several targets have the input {name!r}: {', '.join(having)}; name one"
            )
        raise NoSuchIndex(
            f"{otherwise}: no target of this node has an input {name!r}; its targets with their "
            f"inputs: {listed or 'none'}"
        )


def _are_texts(value: Any) -> bool:
    return np.asarray(value).dtype.kind in "OUT"
