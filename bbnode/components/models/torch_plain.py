"""Functions of PyTorch that its exporter writes as loops, or wrongly, said in plain ones.

Rule: values and gradients are those of the function; what can't be said so is refused, not exported
otherwise.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

Tensor: TypeAlias = Any


def plain_ops(torch: Any) -> AbstractContextManager[None]:
    """Return a context in which PyTorch's functions of this file are others of the same result.

    - an embedding of a padding index whose row is zeros: a product with a mask, so that the row
      gets no gradient;
    - a bag of embeddings: rows that are looked up, and a sum, mean or maximum of them;
    - a mean by indices (`scatter_reduce`, `index_reduce`): sums and counts.
    """
    overrides = importlib.import_module("torch.overrides")
    functions = _plain(torch)

    class PlainOps(overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            plain = functions.get(func)
            made = NotImplemented if plain is None else plain(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {})) if made is NotImplemented else made

    return PlainOps()


def embedding_faults(
    torch: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """Return what of a call of an embedding ONNX can't say; none for any other function."""
    functional = torch.nn.functional
    if func not in (functional.embedding, functional.embedding_bag):
        return []
    call = inspect.signature(func).bind(*args, **kwargs)
    call.apply_defaults()
    found = []
    if call.arguments["scale_grad_by_freq"]:
        found.append("an embedding scales its gradient by the frequency of ids")
    if call.arguments["max_norm"] is not None:
        found.append("an embedding with max_norm changes its weight while it runs")
    padding, weight = call.arguments["padding_idx"], call.arguments["weight"]
    if func is functional.embedding and padding is not None and bool(weight[padding].any()):
        found.append(
            f"an embedding keeps the row of padding_idx={padding} from its gradient, and that row "
            "is not zeros"
        )
    return found


def _plain(torch: Any) -> dict[Any, Callable[..., Any]]:
    """Return a replacement for each function; it returns NotImplemented for a call to leave."""
    functional = torch.nn.functional

    def embedding(
        input: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, **more: Any
    ) -> Any:
        if padding_idx is None:
            return NotImplemented
        rows = functional.embedding(input, weight, None, *rest, **more)
        return rows * _kept(input, weight, padding_idx).to(rows.dtype)

    def embedding_bag(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(functional.embedding_bag).bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if given["max_norm"] is not None or given["scale_grad_by_freq"]:
            return NotImplemented  # refused before
        ids, weight, offsets = (given[name] for name in ("input", "weight", "offsets"))
        padding_idx, mode = given["padding_idx"], given["mode"]
        per_sample_weights = given["per_sample_weights"]
        rows = functional.embedding(ids, weight)
        kept = None if padding_idx is None else _kept(ids, weight, padding_idx)
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(-1)
        if ids.dim() == 2:
            return _rows_of_bags(torch, rows, kept, mode)
        if offsets is None:
            return NotImplemented
        places = torch.arange(ids.shape[0], device=ids.device)
        bags = (places.unsqueeze(1) >= offsets.unsqueeze(0)).sum(1) - 1
        made = _scattered_bags(torch, rows, kept, bags, offsets.shape[0], mode)
        # The last offset is then where the last bag ends.
        return made[:-1] if given["include_last_offset"] else made

    def scatter_reduce(
        self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *,
        include_self: bool = True,
    ) -> Any:  # fmt: skip
        if reduce != "mean":
            return NotImplemented
        ones = src.new_ones(src.shape)
        count = self.new_zeros(self.shape).scatter_add(dim, index, ones)
        total = self.new_zeros(self.shape).scatter_add(dim, index, src)
        if include_self:
            return (self + total) / (count + 1)
        return torch.where(count > 0, total / count.clamp(min=1), self)

    def index_reduce(
        self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *,
        include_self: bool = True,
    ) -> Any:  # fmt: skip
        shape = [1] * source.dim()
        shape[dim] = -1
        spread = index.reshape(shape).expand(source.shape)
        made = scatter_reduce(self, dim, spread, source, reduce, include_self=include_self)
        if made is not NotImplemented:
            return made
        return torch.scatter_reduce(self, dim, spread, source, reduce, include_self=include_self)

    def in_place(plain: Callable[..., Any]) -> Callable[..., Any]:
        def changed(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            made = plain(self, *args, **kwargs)
            return made if made is NotImplemented else self.copy_(made)

        return changed

    return {
        functional.embedding: embedding,
        functional.embedding_bag: embedding_bag,
        torch.scatter_reduce: scatter_reduce,
        torch.Tensor.scatter_reduce: scatter_reduce,
        torch.Tensor.scatter_reduce_: in_place(scatter_reduce),
        torch.index_reduce: index_reduce,
        torch.Tensor.index_reduce: index_reduce,
        torch.Tensor.index_reduce_: in_place(index_reduce),
    }


def _kept(ids: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Return a bool tensor like ids, [… , 1]: False for the padding id."""
    return (ids != padding % weight.shape[0]).unsqueeze(-1)


def _rows_of_bags(torch: Any, rows: Tensor, kept: Tensor | None, mode: str) -> Tensor:
    """Reduce rows [bags, size, D] to [bags, D]; a bag of padding alone is zeros."""
    if mode == "max":
        if kept is None:
            return rows.amax(1)
        lowest = torch.where(kept, rows, torch.finfo(rows.dtype).min).amax(1)
        return torch.where(kept.any(1), lowest, torch.zeros_like(lowest))
    if kept is not None:
        rows = rows * kept.to(rows.dtype)
    if mode == "sum":
        return rows.sum(1)
    return rows.mean(1) if kept is None else rows.sum(1) / kept.sum(1).clamp(min=1)


def _scattered_bags(
    torch: Any, rows: Tensor, kept: Tensor | None, bags: Tensor, count: int, mode: str
) -> Tensor:
    """Reduce rows [ids, D] by the bag number of each to [count, D]; an empty bag is zeros."""
    zeros = rows.new_zeros((count, rows.shape[-1]))
    index = bags.unsqueeze(-1).expand(-1, rows.shape[-1])
    each = rows.new_ones((rows.shape[0], 1)) if kept is None else kept.to(rows.dtype)
    counts = rows.new_zeros((count, 1)).scatter_add(0, bags.unsqueeze(-1), each)
    if mode == "max":
        if kept is not None:
            rows = torch.where(kept, rows, torch.finfo(rows.dtype).min)
        highest = zeros.scatter_reduce(0, index, rows, "amax", include_self=False)
        return highest if kept is None else torch.where(counts > 0, highest, zeros)
    total = zeros.scatter_add(0, index, rows if kept is None else rows * each)
    return total if mode == "sum" else total / counts.clamp(min=1)
