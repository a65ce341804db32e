"""`bbnode`: finds the command, runs it, and turns errors into one line and an exit code.

Rule: this is the one boundary at which errors become text. A `BbnodeError` is one line on
stderr, and so is whatever a package's command raises; anything else is a fault of bbnode and shows
its traceback.
"""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import sys
import traceback as tb
from collections.abc import Sequence
from functools import cache
from pathlib import PurePath
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import Abort, TyperException

from bbnode.cli import commands, exits, output
from bbnode.cli.common import expanded
from bbnode.ir import plugins
from bbnode.ir.errors import BbnodeError, EnvironmentFault

# Entry points of this group are commands: a function, a `typer.Typer`, or a module that has a
# `command` or an `app`, like those of `bbnode.cli.commands`.
GROUP = "bbnode.commands"
TRACEBACK = "--traceback"
# The commands as the help lists them.
HELP_GROUPS = {
    "Begin": ("demo", "new", "up", "compile", "check", "init", "run"),
    "Run": (
        *("invoke", "emit", "export", "predict", "data", "index", "snapshot", "reload", "config"),
        *("id", "paths"),
    ),
    "Watch": ("status", "rounds", "peers", "logs", "wait"),
    "Share": ("network", "invite", "join", "upgrade"),
    "Debug": (
        *("doctor", "inspect", "trace", "replay", "ping", "verify", "components", "bugreport"),
        "version",
    ),
}
_EXAMPLES = """\b
Examples:
  bbnode demo                                a server and four clients, here
  bbnode new own && cd own && bbnode up      a project of your own
  bbnode status -c up-out/nodes/server/node.toml
  bbnode join TICKET                         take part in somebody's network
  bbnode COMMAND --help
"""
# Characters of the first sentence of a command's help: it fits beside the name on 80 columns.
_SUMMARY_CHARS = 64
# Characters of a name that is not UTF-8.
_SHOWN_NAME = 200


@cache
def shipped() -> list[str]:
    """Return the names of our commands: one for each module of `bbnode.cli.commands`."""
    return sorted(module.name for module in pkgutil.iter_modules(commands.__path__))


@cache
def added() -> dict[str, str]:
    """Return the commands that installed packages add, each with its package's name.

    A package can't replace a shipped command.
    """
    return {name: pkg for name, pkg in plugins.names(GROUP).items() if name not in shipped()}


@cache
def shadowed() -> dict[str, str]:
    """Return the commands of packages that never run, since shipped ones have their names."""
    return {name: pkg for name, pkg in plugins.names(GROUP).items() if name in shipped()}


class MachineRefused(EnvironmentFault):
    """The machine could not do what a command needed, for example because its disk is full."""


# Errors of the system that any command can meet, with a remedy.
_CURES = {
    errno.ENOSPC: "free space on that file system",
    errno.EDQUOT: "free space in that quota",
    errno.EROFS: "it is read-only; choose another place",
    errno.EIO: "the device fails; see the system's log",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close other programs",
}


class CommandFailed(BbnodeError):
    """A command that an installed package brings raised something unexpected."""


def command_names() -> list[str]:
    """Return the names of all commands, without importing any."""
    return sorted([*shipped(), *added()])


class CommandGroup(TyperGroup):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer's signature
        """Return all names, without importing anything."""
        return command_names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one command; None if there is no command of that name."""
        if cmd_name not in self.commands:
            if cmd_name in shipped():
                module = importlib.import_module(f"{commands.__name__}.{cmd_name}")
                self.commands[cmd_name] = _made(cmd_name, module)
            elif cmd_name in added():
                try:
                    self.commands[cmd_name] = _loaded(cmd_name)
                except BbnodeError:
                    # Completion imports every command, and has nowhere to report an error.
                    if not ctx.resilient_parsing:
                        raise
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write our commands with their help, and those of packages with the package's name."""
        grouped = {name for names in HELP_GROUPS.values() for name in names}
        rest = tuple(name for name in shipped() if name not in grouped)
        for title, names in {**HELP_GROUPS, **({"More": rest} if rest else {})}.items():
            with formatter.section(title):
                formatter.write_dl([(name, self._summary(ctx, name)) for name in names])
        if added():
            with formatter.section("Commands of installed packages"):
                formatter.write_dl([(name, f"from {package}") for name, package in added().items()])
        if shadowed():
            with formatter.section("Commands of installed packages that can't be run"):
                why = "bbnode has a command of this name"
                rows = [(name, f"from {pkg}; {why}") for name, pkg in shadowed().items()]
                formatter.write_dl(rows)

    def _summary(self, ctx: Any, name: str) -> str:
        """Return the first sentence of a command's help."""
        return str(self.get_command(ctx, name).get_short_help_str(_SUMMARY_CHARS))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command like typer, with all command names for its suggestions."""
        if args and args[0] not in shipped() and args[0] not in added():
            for name in shipped():
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)


def _made(name: str, entry: Any) -> Any:
    """Return the command of a module, of a group with subcommands, or of a function."""
    if isinstance(entry, ModuleType):
        entry = getattr(entry, "app", None) or entry.command
    if isinstance(entry, typer.Typer):
        return typer.main.get_group(entry)
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name=name)(expanded(entry))
    return typer.main.get_command(single)


def _loaded(name: str) -> Any:
    entry = plugins.load(GROUP, name)
    try:
        return _made(name, entry)
    except Exception as error:
        # The code is another package's: whatever its fault, the command line keeps working.
        raise plugins.BrokenPlugin(
            GROUP, name, added()[name], f"it is not a command: {type(error).__name__}: {error}"
        ) from error


app = typer.Typer(
    cls=CommandGroup,
    # Rich would double the time that --help takes.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run one ONNX program across many peers.",
    epilog=f"{_EXAMPLES}\n\b\n{exits.help_text()}",
)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
    traceback: bool = typer.Option(  # noqa: ARG001 - `main` looks for it
        False, TRACEBACK, help="Show the traceback where a program or a package's command fails."
    ),
) -> None:
    if version:
        from bbnode import __version__

        output.data(f"bbnode {__version__}")
        raise typer.Exit
    output.begin(ctx.invoked_subcommand or "bbnode")
    package = shadowed().get(ctx.invoked_subcommand or "")
    if package is not None:
        output.note(
            f"note: the package {package} brings a command {ctx.invoked_subcommand!r} too, which "
            "bbnode's own stands before; ask its author for another name"
        )
    if ctx.invoked_subcommand is None:
        output.data(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (`exits.MEANINGS`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = app(args=arguments, prog_name="bbnode", standalone_mode=False)
        sys.stdout.flush()
    except TyperException as error:
        output.error(f"{error.format_message().rstrip('.')} ({_help_hint(error)})")
        return error.exit_code
    except (KeyboardInterrupt, Abort):
        return exits.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (head, less) has closed it: no message, and typer's own code for
        # this.
        _drop_output()
        return exits.FAILURE
    except BbnodeError as error:
        frames = getattr(error, "frames", ())
        if frames and TRACEBACK in arguments:
            raise
        more = [f"  {frame}" for frame in frames]
        if frames:
            more.append(f"  `bbnode {TRACEBACK} {arguments[0]} …` shows all calls")
        output.error(str(error), *more)
        return exits.code_for(error)
    except BaseExceptionGroup as group:
        return _report_group(group)
    except Exception as error:
        failed = _failed_command(arguments, error) or _failure_of_the_machine(error)
        if failed is None:
            raise
        output.error(str(failed))
        return exits.code_for(failed)
    return code if isinstance(code, int) else exits.OK


def _failure_of_the_machine(error: Exception) -> MachineRefused | None:
    """Return a system error that any command may meet as a typed error; None for any other."""
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        name = error.object[:_SHOWN_NAME]
        return MachineRefused(f"{name!r}: this name is not UTF-8; rename the file or folder")
    if not isinstance(error, OSError) or error.errno not in _CURES:
        return None
    if error.filename is None:
        _drop_output()
    where = error.filename or "standard output"
    return MachineRefused(f"{where}: {error.strerror}; {_CURES[error.errno]}")


def _drop_output() -> None:
    """Discard all further output: Python would otherwise complain when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed_command(arguments: Sequence[str], error: Exception) -> CommandFailed | None:
    """Return the failure of a package's command; None where ours failed, or for `--traceback`."""
    name = next((word for word in arguments if not word.startswith("-")), "")
    package = added().get(name)
    if package is None or TRACEBACK in arguments[: arguments.index(name)]:
        return None
    last = tb.extract_tb(error.__traceback__)[-1]
    return CommandFailed(
        f"the command {name!r} of the package {package} failed: {type(error).__name__}: {error} "
        f"({PurePath(last.filename).name}:{last.lineno}); `bbnode {TRACEBACK} {name} …` shows "
        "the traceback, for its author"
    )


def _report_group(group: BaseExceptionGroup[BaseException]) -> int:
    """Report the failures of a group, as daemons raise them: a line each, the first one's code."""
    errors = list(exits.leaves(group))
    if all(isinstance(error, KeyboardInterrupt) for error in errors):
        return exits.INTERRUPTED
    faults = [error for error in errors if not isinstance(error, KeyboardInterrupt)]
    faults = [
        (isinstance(error, Exception) and _failure_of_the_machine(error)) or error
        for error in faults
    ]
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
