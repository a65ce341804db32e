"""Options that several commands share, and the configuration or client that they name.

Rule: an option means the same in every command that has it. A parameter of a command whose type
is a `LocalNode` or `RunningNode` stands for all of its options; its default is theirs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperGroup

from bbnode.cli import output

if TYPE_CHECKING:
    from bbnode.daemon.artifacts.dry_run import ProgramDryRun
    from bbnode.daemon.config.sources import ResolvedConfig
    from bbnode.daemon.control.client import ControlClient

Act = TypeVar("Act", bound=Callable[..., Any])

# Long enough for the whole first sentence of a command's help.
_SUMMARY_CHARS = 300

DEFAULT_CONFIG = Path("node.toml")

ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config",
        "-c",
        envvar="BBNODE_CONFIG",
        help="Configuration of the node.",
        metavar="FILE",
    ),
]
StateDirOption = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        help="State directory of the node; then no configuration is read.",
        metavar="DIR",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Set a key of the configuration, as in network.listen=/ip4/0.0.0.0/tcp/4001.",
        metavar="KEY=VALUE",
    ),
]
# The columns of the table of peers, in order; --json has everything.
PEER_COLUMNS = ("peer", "classes", "via", "direction", "rtt_ms", "bytes_in", "bytes_out", "queued")
TimeoutOption = Annotated[
    float, typer.Option("--timeout", help="Seconds to wait for an answer.", min=0.01)
]
CheckOption = Annotated[
    bool,
    typer.Option(
        "--check/--no-check",
        help="Try the program's models on two and three made-up examples.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, kw_only=True)
class LocalNode:
    """The node on this machine that a command works on, and how the command prints."""

    config: ConfigOption = DEFAULT_CONFIG
    state_dir: StateDirOption = None
    as_json: JsonOption = False

    @property
    def directory(self) -> Path:
        """The state directory that an option names, else that of the configuration."""
        if self.state_dir is not None:
            return self.state_dir.expanduser().absolute()
        return load_config(self.config).state_dir

    def client(self, timeout_s: float) -> ControlClient:
        """Return a client for the node's daemon; use it in a `with`."""
        from bbnode.daemon import paths
        from bbnode.daemon.control.client import ControlClient

        return ControlClient(paths.control_socket(self.directory), timeout_s=timeout_s)

    def show(self, answer: Mapping[str, Any], text: str) -> None:
        """Print an answer as JSON, or as `text`."""
        if self.as_json:
            output.json_object(answer)
        else:
            output.data(text)


@dataclass(frozen=True, kw_only=True)
class RunningNode(LocalNode):
    """A node whose daemon a command asks."""

    timeout_s: TimeoutOption = 5.0

    def ask(self) -> ControlClient:
        """Return a client that waits for an answer for the command's time-out."""
        return self.client(self.timeout_s)


def expanded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function for typer: each `LocalNode` is replaced by its options."""
    hints = get_type_hints(function, include_extras=True)
    parameters: dict[str, inspect.Parameter] = {}
    nodes: dict[str, type[LocalNode]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints.get(name)
        if isinstance(kind, type) and issubclass(kind, LocalNode):
            nodes[name] = kind
            default = kind() if parameter.default is parameter.empty else parameter.default
            types = get_type_hints(kind, include_extras=True)
            options = {f.name: (types[f.name], getattr(default, f.name)) for f in fields(kind)}
        else:
            options = {name: (kind, parameter.default)}
        for option, (annotation, value) in options.items():
            parameters[option] = inspect.Parameter(
                option,
                inspect.Parameter.KEYWORD_ONLY,
                default=value,
                annotation=_with_metavar(annotation),
            )

    def call(**options: Any) -> Any:
        for name, kind in nodes.items():
            options[name] = kind(**{f.name: options.pop(f.name) for f in fields(kind)})
        return function(**options)

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    call.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    call.__annotations__ = {name: p.annotation for name, p in parameters.items()}
    return call


# The metavar of an option in --help if the option has none; all our floats are times.
_METAVARS = {int: "N", float: "SECONDS", str: "NAME", Path: "PATH"}


def _with_metavar(annotation: Any) -> Any:
    """Return an option's annotation with a metavar instead of the name of a type."""
    options = [each for each in getattr(annotation, "__metadata__", ()) if _is_option(each)]
    if not options or options[-1].metavar is not None:
        return annotation
    kind = get_args(annotation)[0]
    (word, *_) = (*(_METAVARS[t] for t in (kind, *get_args(kind)) if t in _METAVARS), None)
    option = copy(options[-1])
    option.metavar = word
    return Annotated[kind, option]


def _is_option(info: object) -> bool:
    return isinstance(info, typer.models.OptionInfo)


def _expanding(add: Callable[[Any], Any]) -> Callable[[Act], Act]:
    def decorate(function: Act) -> Act:
        add(expanded(function))
        return function

    return decorate


class WholeSentences(TyperGroup):
    """A group whose help has the whole first sentence of each command, however long."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with its help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, each.get_short_help_str(_SUMMARY_CHARS)) for name, each in commands if each]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class group(typer.Typer):  # noqa: N801 - called like the function that makes a command
    """A command with subcommands: `app = group("…")`, then `@app.command()`."""

    def __init__(self, help_text: str) -> None:
        super().__init__(
            cls=WholeSentences, help=help_text, add_completion=False, rich_markup_mode=None
        )

    def command(self, name: str | None = None, **options: Any) -> Callable[[Act], Act]:
        """Add the decorated function as a command."""
        return _expanding(super().command(name, **options))

    def callback(self, **options: Any) -> Callable[[Act], Act]:
        """Run the decorated function before any of the commands."""
        return _expanding(super().callback(**options))


def pairs(texts: Sequence[str] | None, option: str) -> dict[str, str]:
    """Return KEY=VALUE texts as a dictionary; raises a usage error for any other text."""
    texts_by_key = {}
    for text in texts or ():
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint=option)
        texts_by_key[key.strip()] = value
    return texts_by_key


def confirm(question: str, *, otherwise: str) -> None:
    """Ask for a yes on stderr; without it raise NotConfirmed, which says `otherwise`."""
    import sys

    from bbnode.daemon.join.invitation import NotConfirmed

    if not sys.stdin.isatty():
        raise NotConfirmed(
            "no terminal to ask on: review the program above, then run again with --yes"
        )
    # Not typer's own prompt, which writes to stdout as well.
    typer.echo(f"{question} [y/N] ", nl=False, err=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise NotConfirmed(otherwise)


def given_settings(settings: Sequence[str] | None) -> dict[str, str]:
    """Return the texts of `--set` by key. Raises ConfigError for a text that is no setting."""
    from bbnode.daemon.config.setting import parse_setting

    return {setting.key: setting.text for setting in map(parse_setting, settings or ())}


def load_config(
    config: Path, settings: Sequence[str] | None = None, flags: dict[str, Any] | None = None
) -> ResolvedConfig:
    """Return the configuration with `--set` and the command's own flags on top."""
    from bbnode.daemon import paths
    from bbnode.daemon.config import sources

    own = {key: value for key, value in (flags or {}).items() if value is not None}
    flags = {**given_settings(settings), **own}
    return sources.resolve(paths.find_config(config), flags=flags)


def show_dry_run_notes(dry_run: ProgramDryRun) -> None:
    """Print a line for each warning of a dry run, and for each check that its bounds postponed."""
    for line in dry_run.warnings:
        output.note(f"warning: {line}")
    for line in dry_run.postponed:
        output.note(f"note: {line}")


def toml_or_text(text: str) -> Any:
    """Return a TOML value, or the text itself if it is no TOML."""
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text
