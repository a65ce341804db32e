"""`bbnode`: finds the command, runs it, and turns errors into one line and an exit code.

Rule: this is the one boundary at which errors become text. A `BbnodeError` is one line on
stderr; anything else is a fault of bbnode and shows its traceback.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import Abort, TyperException

from bbnode.cli import commands, exits, output
from bbnode.ir.errors import BbnodeError


def command_names() -> list[str]:
    """The commands there are: one for each module of `bbnode.cli.commands`."""
    return sorted(module.name for module in pkgutil.iter_modules(commands.__path__))


class CommandGroup(TyperGroup):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer's signature
        """All names, without importing anything."""
        return command_names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one command; None when there is none of that name."""
        if cmd_name not in self.commands and cmd_name in command_names():
            module = importlib.import_module(f"{commands.__name__}.{cmd_name}")
            self.commands[cmd_name] = _made(cmd_name, module)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As typer's; its suggestions for a misspelt command need the names there are."""
        if args and args[0] not in command_names():
            for name in command_names():
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)


def _made(name: str, module: ModuleType) -> Any:
    """The command of a module: its `app`, a group with commands of its own, or its `command`."""
    group = getattr(module, "app", None)
    if group is not None:
        return typer.main.get_command(group)
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name=name)(module.command)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=CommandGroup,
    # Rich would double the time that --help takes.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run one ONNX program across many peers.",
    epilog="\b\n" + exits.help_text(),
)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
) -> None:
    if version:
        from bbnode import __version__

        output.data(f"bbnode {__version__}")
        raise typer.Exit
    output.begin(ctx.invoked_subcommand or "bbnode")
    if ctx.invoked_subcommand is None:
        output.data(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (`exits.MEANINGS`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = app(args=arguments, prog_name="bbnode", standalone_mode=False)
        sys.stdout.flush()
    except TyperException as error:
        output.error(f"{error.format_message()} ({_help_hint(error)})")
        return error.exit_code
    except (KeyboardInterrupt, Abort):
        return exits.INTERRUPTED
    except BrokenPipeError:
        # Who reads us (head, less) has seen enough: no message, and the code that typer gives
        # when it notices first. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.FAILURE
    except BbnodeError as error:
        output.error(str(error))
        return exits.code_for(error)
    except BaseExceptionGroup as group:
        return _report_group(group)
    return code if isinstance(code, int) else exits.OK


def _report_group(group: BaseExceptionGroup[BaseException]) -> int:
    """Tasks of a daemon fail in groups: a line for each, the first one's code."""
    found = list(exits.leaves(group))
    if all(isinstance(error, KeyboardInterrupt) for error in found):
        return exits.INTERRUPTED
    faults = [error for error in found if not isinstance(error, KeyboardInterrupt)]
    if not all(isinstance(error, BbnodeError) for error in faults):
        raise group
    for message in dict.fromkeys(str(error) for error in faults):
        output.error(message)
    return exits.code_for(faults[0])


def _help_hint(error: TyperException) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "bbnode"
    return f"see `{path} --help`"


if __name__ == "__main__":
    sys.exit(main())
