"""The list of passes for docs/compiler.md, generated from the passes themselves.

Rule: `python -m bbnode.compiler.reference` prints it, and a test compares the page with it.
"""

from __future__ import annotations

import inspect
import sys

from bbnode.compiler.driver import pipeline


def passes_markdown() -> str:
    """Return a section for each pass, in the order of a compile: its name and its docstring."""
    parts = []
    shipped = pipeline.shipped_passes()
    for number, name in enumerate(pipeline.all_pass_names(), 1):
        parts.append(f"### {number}. `{name}`\n\n{inspect.getdoc(shipped[name])}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(passes_markdown())
