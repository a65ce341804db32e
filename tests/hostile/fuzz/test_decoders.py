"""Each decoder of what a peer sent gives a value or its own error, whatever the bytes are."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hostile.fuzz.decoders import CORPUS, DECODERS, check, corpus, mutate


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_written_is_read(name: str) -> None:
    for seed in DECODERS[name].seeds:
        DECODERS[name].call(seed)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=30, deadline=None)
@given(data=st.binary(max_size=300))
def test_random_bytes(name: str, data: bytes) -> None:
    check(DECODERS[name], data)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), changes=st.integers(1, 4))
def test_changed_encodings(name: str, seed: int, changes: int) -> None:
    decoder, draw = DECODERS[name], random.Random(seed)
    known = [*decoder.seeds, *corpus(name)] or [b""]
    data = draw.choice(known)
    for _ in range(changes):
        data = mutate(data, draw.choice(known), draw)
    check(decoder, data)


@pytest.mark.parametrize("name", DECODERS)
def test_inputs_of_past_faults(name: str) -> None:
    for data in corpus(name):
        check(DECODERS[name], data)


def test_the_corpus_is_of_decoders_that_are_there() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} <= DECODERS.keys()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed: pip install 'bbnode[fuzz]'",
)
def test_guided_by_coverage() -> None:
    """A bounded number of inputs in a process of its own; a longer run is for an operator's day."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.fuzz.fuzz_atheris"],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
