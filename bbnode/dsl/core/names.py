"""Names that an author may give, and suggestions for near misses.

Rule: names are parts of value names, metadata lists and target names, where `.`, `/`, `,`, `|` and
`#` are separators, so a name contains none of them. Names that the recorder generates contain a
`.` or are made from an op's type, so they never clash with an author's name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from bbnode.dsl.errors import BadName
from bbnode.ir import keys

MAX_NAME_LENGTH = 128  # names are copied into metadata of many nodes

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


def check_name(kind: str, name: object, *, module: str = "") -> str:
    """Return the name, or raise BadName: letters, digits, `_` and `-`, no digit in front."""
    if isinstance(name, str) and len(name) <= MAX_NAME_LENGTH and _NAME.match(name):
        return name
    raise BadName(
        f"{name!r:.80} is not a valid {kind}; use letters, digits, '_' and '-', beginning with "
        f"a letter or '_', at most {MAX_NAME_LENGTH} characters",
        module,
    )


def check_class(name: object, *, module: str = "") -> str:
    """Return the name of a peer class, which is a name or `@self`, or raise BadName."""
    return keys.SELF_CLASS if name == keys.SELF_CLASS else check_name(
        "peer class", name, module=module
    )  # fmt: skip


def hint(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or a list of the known names."""
    choices = list(known)
    near = difflib.get_close_matches(name, choices, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    if not choices:
        return "; there is none"
    listed = ", ".join(choices[:12])
    return f"; there is: {listed}{', …' if len(choices) > 12 else ''}"
