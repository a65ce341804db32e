"""The table of decoders under a fuzzer that is guided by coverage: `python -m … [RUNS] [SEED]`.

Rule: the first byte of an input chooses the decoder, by its place in the table. A fault is written
to a file and ends the run; put it into `corpus/<decoder>/` without its first byte.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["bbnode.ir", "bbnode.access", "bbnode.transport"]):
    from tests.hostile.fuzz.decoders import DECODERS, check, corpus

DEFAULT_RUNS = 20_000
_NAMES = tuple(DECODERS)


def one(data: bytes) -> None:
    """Give one input to the decoder that it names."""
    if data:
        check(DECODERS[_NAMES[data[0] % len(_NAMES)]], data[1:])


def main(runs: int, seed: int) -> None:
    """Fuzz for a number of runs, from all that is known to be read or to have done harm."""
    with tempfile.TemporaryDirectory() as folder:
        for index, name in enumerate(_NAMES):
            for number, data in enumerate([*DECODERS[name].seeds, *corpus(name)]):
                (Path(folder) / f"{name}-{number}").write_bytes(bytes((index,)) + data)
        options = [f"-runs={runs}", f"-seed={seed}", "-max_len=4096", f"-artifact_prefix={folder}/"]
        atheris.Setup([sys.argv[0], *options, folder], one)
        atheris.Fuzz()


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    main(*(*given, *(DEFAULT_RUNS, 1)[len(given) :]))
