"""The table of docs/methods/compression.md is what the codecs do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components.registry import component_class
from tests.components.fakes import Context, ort

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "compression.md"
VALUES = 1_000_000


def rows() -> list[tuple[str, float, float]]:
    """Name, bytes a value and relative error of each row."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [[c.strip(" `") for c in line.split("|")[1:-1]] for line in lines]
    return [
        (c[0], float(c[1]), float(c[2])) for c in cells if c and c[0].endswith(("Codec", "zer"))
    ]


def normal() -> np.ndarray:
    """Values of a normal distribution, from bits that numpy keeps for ever (Box and Muller)."""
    bits = np.random.PCG64(np.random.SeedSequence(0)).random_raw(2 * VALUES).reshape(2, -1)
    first, second = (bits + 0.5) / 2.0**64
    return (np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)).astype(np.float32)


def test_each_row_is_what_its_codec_does() -> None:
    x = normal()
    listed = rows()
    assert len(listed) == 12
    for name, bytes_a_value, error in listed:
        kind: Any = component_class(f"bbnode.{name}")
        codec = kind(kind.Config())
        codec.bind({"backend": ort()} if kind.depends else {})
        code = codec.encode(Context(), x)
        got = codec.decode(Context(), code)
        assert len(code) / VALUES == pytest.approx(bytes_a_value, rel=0.02), name
        found = float(np.linalg.norm(got - x) / np.linalg.norm(x))
        assert found == pytest.approx(error, rel=0.03, abs=1e-9), name
