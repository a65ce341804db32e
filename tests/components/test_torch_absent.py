"""bbnode without PyTorch and scikit-learn's exporter, which no default install has."""

from __future__ import annotations

import subprocess
import sys

HIDDEN = """
import sys
for name in ("torch", "onnxscript", "skl2onnx"):
    sys.modules[name] = None  # an import raises ImportError
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bbnode_is_imported_without_torch() -> None:
    code = """
import bbnode, bbnode.torch, bbnode.sklearn, bbnode.cli.main, bbnode.programs
from bbnode.components.registry import component_class, known_types
try:
    bbnode.torch.export(None, None)
except bbnode.torch.TorchMissing as error:
    print(error)
"""
    assert "pip install 'torch>=2.9'" in run(code)
