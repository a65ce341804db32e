"""Custom ops: stateless functions of other packages, as ops of a program.

    from bbnode.ops import custom_op

    @custom_op("org.example", version=1)
    def clip_norm(x: NDArray[np.float32], *, max_norm: float = 1.0) -> NDArray[np.float32]:
        '''Scale a tensor down to a norm.'''
        norm = np.linalg.norm(x)
        return x if norm <= max_norm else (x * (max_norm / norm)).astype(np.float32)

In a Module's body, `clip_norm(g, update, max_norm=2.0)` records the op; called with arrays, it is
the function. A package names the module that declares its ops in the entry points
`bbnode.custom_ops`, under their domain: `"org.example" = "my_package.ops"`.
"""

from __future__ import annotations

from bbnode.ops.custom import CustomOp, CustomOpFailed, SchemaMismatch, custom_op

__all__ = ["CustomOp", "CustomOpFailed", "SchemaMismatch", "custom_op"]
