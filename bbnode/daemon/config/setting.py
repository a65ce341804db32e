"""One setting of a command line: KEY=VALUE, or CLASS.KEY=VALUE where several classes are set up.

Rule: the key is a dotted key of node.toml, as in `slots.data.path=data/0.npz`. Before it may stand
the class of peer that it is for, as in `client.slots.data.path=data/{i}.npz`, and one of its nodes,
as in `client.0.slots…`; without a class it is for all. The value stays text: `resolve` reads it by
the type of its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bbnode.daemon.config import NodeConfig
from bbnode.daemon.config.sources import ConfigError
from bbnode.engine.errors import did_you_mean
from bbnode.ir.decoding import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting on the command line: a dotted key, its text, and the class that it is for.

    `peer_class` is None for a setting of every node, `index` for one of all nodes of the class.
    """

    key: str
    text: str
    peer_class: str | None = None
    index: int | None = None


def parse_setting(text: str, classes: Sequence[str] = ()) -> Setting:
    """Return the setting in a text, which may name one of `classes`. Raises ConfigError."""
    name, separator, value = text.partition("=")
    key = name.strip()
    if not separator or not all(key.split(".")):
        example = f"{classes[0]}." if classes else ""
        raise ConfigError(
            f"--set: {shown(text)} is not KEY=VALUE, as in {example}slots.data.path=data/0.npz"
        )
    sections = [field.alias or name for name, field in NodeConfig.model_fields.items()]
    for peer_class in classes:
        rest = key.removeprefix(f"{peer_class}.")
        number, _, below = rest.partition(".")
        is_numbered = rest != key and number.isdecimal() and number.isascii()
        if is_numbered and below.partition(".")[0] in sections:
            return Setting(key=below, text=value, peer_class=peer_class, index=int(number))
        # A class may have the name of a section: node.log_level is the key, node.node.log_level
        # that of class `node`.
        if rest != key and rest.partition(".")[0] in sections:
            return Setting(key=rest, text=value, peer_class=peer_class)
    first = key.partition(".")[0]
    if classes and first not in sections:
        raise ConfigError(
            f"--set: {shown(text)}: {shown(first)} is neither a class ({', '.join(classes)}) nor a "
            f"section of node.toml ({', '.join(sections)})"
            f"{did_you_mean(first, [*classes, *sections])}"
        )
    return Setting(key=key, text=value)
