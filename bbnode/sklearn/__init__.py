"""Models of scikit-learn as ONNX models of bbnode: to run, and the differentiable ones to train.

scikit-learn and skl2onnx are imported when `export` is called.
"""

from __future__ import annotations

from bbnode.components.models.sklearn_export import EstimatorNotExportable as EstimatorNotExportable
from bbnode.components.models.sklearn_export import SklearnMissing as SklearnMissing
from bbnode.components.models.sklearn_export import export as export

__all__ = ["export", "EstimatorNotExportable", "SklearnMissing"]
