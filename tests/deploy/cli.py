"""Are these words a command line of bbnode? Every option is looked up; nothing runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from bbnode.cli.main import app


def check(words: Sequence[str]) -> None:
    """Raise the usage error of the CLI for an unknown command or option, or a wrong argument."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("bbnode", [], resilient_parsing=True)
    rest = list(words)
    while True:
        name = rest.pop(0)
        found = command.get_command(context, name)
        assert found is not None, f"no command {name!r} in: bbnode {' '.join(words)}"
        command = found
        if hasattr(command, "get_command") and rest and not rest[0].startswith("-"):
            context = command.make_context(name, [], resilient_parsing=True)
            continue
        command.make_context(name, rest)
        return
