"""A vector that a node keeps from round to round: a control variate, a residual, a mean.

Rule: it is replaced, never changed, and what a peer sent is checked before it is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from bbnode.components.contracts import Model, ModelShapes, OpContext
from bbnode.components.errors import ParameterMismatch, UnsupportedByModel
from bbnode.components.registry import register_component
from bbnode.ir import codec
from bbnode.ir.types import TENSOR_FLOAT
from bbnode.ir.values import Value

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class StateVectorConfig:
    """Settings of `StateVector`.

    Attributes:
        size: numbers of the vector; it begins with zeros.
    """

    size: int


@register_component
class StateVector(Model):
    """A vector [size] float32 in the place of a model: it is loaded, added to and read.

    Whatever computes with data is refused (UnsupportedByModel).
    """

    TYPE_NAME: ClassVar[str] = "bbnode.StateVector"
    Config: ClassVar[type] = StateVectorConfig
    config: StateVectorConfig

    def __init__(self, config: StateVectorConfig) -> None:
        super().__init__(config)
        self.require(config.size >= 1, f"size is {config.size}; 1 or more")
        self._vector: Vector | None = None  # zeros

    @classmethod
    def shapes_of(cls, config: StateVectorConfig) -> ModelShapes:
        """Return its length."""
        return ModelShapes(config.size)

    def params(self, ctx: OpContext) -> Value:
        """Return the vector, read-only."""
        if self._vector is None:
            self._vector = np.zeros(self.config.size, np.float32)
            self._vector.flags.writeable = False
        return self._vector

    def load_parameters(self, ctx: OpContext, params: Value) -> None:
        """Replace the vector; ParameterMismatch for another size, NaN or infinity."""
        self._vector = self._checked(params)

    def apply_delta(self, ctx: OpContext, delta: Value) -> None:
        """Add to the vector; ParameterMismatch as `load_parameters`, also where the sum is so."""
        with np.errstate(over="ignore"):
            self._vector = self._checked(np.add(self.params(ctx), self._checked(delta)))

    def forward(self, ctx: OpContext, batch: Value) -> NoReturn:
        """Refuse."""
        raise UnsupportedByModel(component=self.TYPE_NAME, op="forward")

    def compute_loss(self, ctx: OpContext, batch: Value, target: Value) -> NoReturn:
        """Refuse."""
        raise UnsupportedByModel(component=self.TYPE_NAME, op="compute_loss")

    def backward(self, ctx: OpContext, grad: Value) -> NoReturn:
        """Refuse."""
        raise UnsupportedByModel(component=self.TYPE_NAME, op="backward")

    def step(self, ctx: OpContext, grads: Value | None) -> NoReturn:
        """Refuse."""
        raise UnsupportedByModel(component=self.TYPE_NAME, op="step")

    def train(self, ctx: OpContext, *, epochs: int, batch: int) -> NoReturn:
        """Refuse."""
        raise UnsupportedByModel(component=self.TYPE_NAME, op="train")

    def serialize(self) -> bytes:
        """Return the vector; nothing while it is zeros that nobody has read."""
        return b"" if self._vector is None else codec.encode_value(self._vector)

    def restore(self, data: bytes) -> None:
        """Load a saved vector; ComponentError for bytes of anything else."""
        if data:
            with self.restoring():
                found = codec.decode_value(TENSOR_FLOAT, data)
            self._vector = self._checked(found)

    def _checked(self, given: Any) -> Vector:
        """Return a vector that fits, read-only and no one else's to write."""
        size = self.config.size
        if not isinstance(given, np.ndarray) or given.dtype != np.float32 or given.shape != (size,):
            kind = given.dtype if isinstance(given, np.ndarray) else type(given).__name__
            raise ParameterMismatch(
                f"{self.TYPE_NAME}: float32 of the shape [{size}] is kept here, not {kind} of "
                f"{list(np.shape(given))}; let all peers run the same artifact"
            )
        if not np.isfinite(given).all():
            raise ParameterMismatch(f"{self.TYPE_NAME}: the vector would hold NaN or infinity")
        kept: Vector = given.copy() if given.flags.writeable else given
        kept.flags.writeable = False
        return kept
