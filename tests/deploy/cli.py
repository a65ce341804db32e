"""The command lines in a text, each looked up in the CLI with its options; nothing runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

import typer

from bbnode.cli.main import app


def calls_in(text: str) -> list[list[str]]:
    """Every call of bbnode in the sh blocks of a text, those within $(…) as well."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            text = re.sub(r"docker (?:run|compose)\b.*?\s(?=bbnode )", "", line)
            inner = re.findall(r"\$\((bbnode [^)]*)\)", text)
            found.extend(shlex.split(words)[1:] for words in inner)
            outer = re.sub(r'"\$\([^)]*\)"', "x", text)
            match = re.match(r"(?:runuser -u bbnode -- |\((?:umask 077; )?)?bbnode (\w.*)", outer)
            if match is not None:
                words = shlex.split(match[1].partition(" > ")[0], comments=True)
                found.append([word for word in words if word != "…"])
    return found


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
