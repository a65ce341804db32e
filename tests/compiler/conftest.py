"""Fixtures of the compiler's tests: the programs of `programs.py`, by name."""

from __future__ import annotations

import pytest
from onnx import ModelProto

from tests.compiler import programs


@pytest.fixture(params=sorted(programs.PROGRAMS))
def program(request: pytest.FixtureRequest) -> ModelProto:
    """Each recorded program in turn."""
    return programs.model_of(*programs.PROGRAMS[request.param]())


@pytest.fixture
def federated() -> ModelProto:
    """The federated round, as recorded."""
    return programs.model_of(programs.federated_program())
