"""Reading what a request asks for: path parameters, query fields, JSON bodies.

Rule: every wrong argument is a `Problem` (400) that names it and says what to give; a field that
is not known is one too, so that a misspelt one is not silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multiaddr import Multiaddr

from bbnode.daemon.control.errors import ControlProtocolError, Problem
from bbnode.daemon.control.host import Host
from bbnode.daemon.control.http import Request
from bbnode.daemon.control.json_lines import parse_object, short
from bbnode.ir.address import parse_address
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId

# Of a PeerId's end: fewer characters are a guess and no name.
MIN_SUFFIX_CHARS = 4


def body(request: Request, **fields: type | tuple[type, ...]) -> dict[str, Any]:
    """The JSON body with exactly these fields, each optional and of its type (or null).

    An empty body is an empty object.
    """
    if not request.body:
        return {}
    try:
        given = parse_object(request.body)
    except ControlProtocolError as error:
        raise Problem(400, "BadRequest", f"the body is {error}") from error
    for name, value in given.items():
        if name not in fields:
            known = ", ".join(fields) or "none"
            raise Problem(400, "UnknownField", f"unknown field {short(name)}; there is: {known}")
        expected = fields[name]
        # bool is an int to Python, not to whoever writes JSON.
        wrong = isinstance(value, bool) and not _takes(expected, bool)
        if value is not None and (wrong or not isinstance(value, expected)):
            raise Problem(400, "InvalidField", f"{name!r} can't be {short(value)}")
    return {name: value for name, value in given.items() if value is not None}


def require(given: Mapping[str, Any], name: str) -> Any:
    """A field that has to be there."""
    if name not in given:
        raise Problem(400, "MissingField", f"the body has to have the field {name!r}")
    return given[name]


def number(
    request: Request, name: str, *, default: int, lowest: int = 0, highest: int = 2**64 - 1
) -> int:
    """A whole number of the query."""
    texts = request.query.get(name)
    if not texts:
        return default
    return whole(name, texts[-1], lowest=lowest, highest=highest)


def whole(name: str, text: str, *, lowest: int = 0, highest: int = 2**64 - 1) -> int:
    """A text as a whole number within bounds."""
    # Longer texts are no number of ours, and int() of a long one takes long.
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise Problem(400, "InvalidField", f"{name!r} has to be a whole number, not {short(text)}")
    value = int(text)
    if not lowest <= value <= highest:
        raise Problem(400, "InvalidField", f"{name!r} has to be from {lowest} to {highest}")
    return value


def flag(request: Request, name: str) -> bool:
    """Whether a field of the query is set: `?name`, `?name=1` or `?name=true`."""
    texts = request.query.get(name)
    if not texts:
        return False
    if texts[-1] not in ("", "1", "true", "0", "false"):
        raise Problem(400, "InvalidField", f"{name!r} has to be 1 or 0, not {short(texts[-1])}")
    return texts[-1] in ("", "1", "true")


def peer_id(host: Host, text: str) -> PeerId:
    """A PeerId, or the end of one that fits one connected or wanted peer alone."""
    try:
        return PeerId.parse(text)
    except BbnodeError as error:
        known = {p.peer for p in host.backend.peers()} | {w.peer for w in host.backend.wanted()}
        fitting = [peer for peer in known if str(peer).endswith(text)]
        if len(text) >= MIN_SUFFIX_CHARS and len(fitting) == 1:
            return fitting[0]
        if len(fitting) > 1 and len(text) >= MIN_SUFFIX_CHARS:
            raise Problem(
                400, "AmbiguousPeer", f"{short(text)} is the end of {len(fitting)} peers"
            ) from error
        raise Problem(
            400,
            "InvalidPeerId",
            f"{short(text)} is no PeerId, and not the end of one of a known peer; "
            "`bbnode peers` lists them",
        ) from error


def addresses(texts: list[Any]) -> list[Multiaddr]:
    """Multiaddrs of a body."""
    found = []
    for text in texts:
        if not isinstance(text, str):
            raise Problem(400, "InvalidAddress", f"an address can't be {short(text)}")
        try:
            found.append(parse_address(text))
        except BbnodeError as error:
            raise Problem(400, "InvalidAddress", str(error)) from error
    return found


def _takes(expected: type | tuple[type, ...], wanted: type) -> bool:
    return wanted in (expected if isinstance(expected, tuple) else (expected,))
