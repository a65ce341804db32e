"""Reverse-mode differentiation of ONNX graphs, into ONNX graphs.

Rule: the results are plain `ai.onnx`, and run in any ONNX runtime. There is one table of rules,
one per op; `vjp` adds to it.
"""

from __future__ import annotations

from bbnode.components.autodiff import rules  # importing them fills the table
from bbnode.components.autodiff.composition import pull_back_through
from bbnode.components.autodiff.errors import (
    AutodiffError,
    GradientRuleError,
    InvalidForwardModel,
    UnknownLoss,
    UnsupportedGradient,
)
from bbnode.components.autodiff.losses import LOSSES
from bbnode.components.autodiff.table import VjpContext, supported_by_family, supported_ops, vjp
from bbnode.components.autodiff.training import (
    TrainingGraphs,
    gradient_graph,
    training_graphs,
)

__all__ = [
    "LOSSES",
    "AutodiffError",
    "GradientRuleError",
    "InvalidForwardModel",
    "TrainingGraphs",
    "UnknownLoss",
    "UnsupportedGradient",
    "VjpContext",
    "gradient_graph",
    "pull_back_through",
    "rules",
    "supported_by_family",
    "supported_ops",
    "training_graphs",
    "vjp",
]
