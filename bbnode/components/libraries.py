"""Libraries that some components need, and bbnode itself does not.

Rule: a component lists them in `libraries`, so that who is asked to run it learns of one that is
missing before it runs. pyproject.toml has them as extras; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from bbnode.ir.installation import install


@dataclass(frozen=True, slots=True)
class OptionalLibrary:
    """A library that a component needs.

    Attributes:
        module: its name in Python, without dots.
        requirement: its name and version for pip.
        extra: the extra of bbnode, as `bbnode[tables]`, that brings it; "" for none.
    """

    module: str
    requirement: str
    extra: str = ""

    @property
    def is_missing(self) -> bool:
        """True if nothing of this name can be imported here; it is not imported to find out."""
        return find_spec(self.module) is None

    @property
    def advice(self) -> str:
        """The sentence for somebody who lacks it: its name, its extra, and the command."""
        extra = f" (extra {self.extra})" if self.extra else ""
        return f"{self.module}{extra} is not installed here; run: {install(self.requirement)}"


DP_ACCOUNTING: Final = OptionalLibrary("dp_accounting", "dp-accounting>=0.6", "bbnode[privacy]")
# 1.15.0 makes another graph with other threads.
FAISS: Final = OptionalLibrary("faiss", "faiss-cpu>=1.15.1", "bbnode[indexes]")
LIGHTGBM: Final = OptionalLibrary("lightgbm", "lightgbm>=4.6", "bbnode[trees]")
PILLOW: Final = OptionalLibrary("PIL", "pillow>=11", "bbnode[images]")
PYARROW: Final = OptionalLibrary("pyarrow", "pyarrow>=18", "bbnode[tables]")
SAFETENSORS: Final = OptionalLibrary("safetensors", "safetensors>=0.5", "bbnode[text]")
SKLEARN: Final = OptionalLibrary("sklearn", "scikit-learn>=1.7.2", "bbnode[demo]")
TOKENIZERS: Final = OptionalLibrary("tokenizers", "tokenizers>=0.20.2", "bbnode[text]")
TORCH: Final = OptionalLibrary("torch", "torch>=2.9", "bbnode[torch]")
ONNXSCRIPT: Final = OptionalLibrary("onnxscript", "onnxscript>=0.5.4", "bbnode[torch]")
ZSTANDARD: Final = OptionalLibrary("zstandard", "zstandard>=0.23", "bbnode[zstd]")
