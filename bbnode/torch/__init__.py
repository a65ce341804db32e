"""PyTorch models as forward models of bbnode, and trained weights back into them.

`export(module, example)` gives an ONNX model that is trained like any other; `load_weights(module,
model)` puts weights that bbnode trained into the module. PyTorch and onnxscript are imported when
one of the two is called.
"""

from __future__ import annotations

from bbnode.components.models.torch_export import ExportFailed as ExportFailed
from bbnode.components.models.torch_export import TorchMissing as TorchMissing
from bbnode.components.models.torch_export import WeightsDoNotFit as WeightsDoNotFit
from bbnode.components.models.torch_export import export as export
from bbnode.components.models.torch_export import load_weights as load_weights

__all__ = ["export", "load_weights", "ExportFailed", "TorchMissing", "WeightsDoNotFit"]
