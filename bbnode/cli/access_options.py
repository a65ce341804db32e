"""Durations, peers and classes on the command line, for `network` and `invite`.

Rule: a text from the command line becomes a value here, or a usage error.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from multiaddr import Multiaddr

    from bbnode.access.statement import Statement
    from bbnode.ir.peer import PeerId

_DURATION = re.compile(r"(\d{1,9})([smhd])\Z")
_UNIT_S = {"s": 1, "m": 60, "h": 60 * 60, "d": 24 * 60 * 60}
DAY_S = _UNIT_S["d"]

ClassesOption = Annotated[
    list[str] | None,
    typer.Option("--class", help="Class it may play (repeatable); default: all.", metavar="CLASS"),
]


def duration_s(text: str, option: str) -> int:
    """Return the seconds of a text like 90s, 30m, 24h or 7d; a usage error for any other text."""
    match = _DURATION.match(text.strip())
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not seconds:
        raise typer.BadParameter(f"{text!r} is not a time like 30m, 24h or 7d", param_hint=option)
    return seconds


def peer_id(text: str, option: str) -> PeerId:
    """Return the PeerId in a text; raises a usage error for any other text."""
    from bbnode.ir.errors import DecodeError
    from bbnode.ir.peer import PeerId

    try:
        return PeerId.parse(text)
    except DecodeError as error:
        raise typer.BadParameter(f"{error}; `bbnode id` prints one", param_hint=option) from error


def multiaddr(text: str, option: str) -> Multiaddr:
    """Return the multiaddr in a text; raises a usage error for any other text."""
    from bbnode.ir.address import parse_address
    from bbnode.ir.errors import DecodeError

    try:
        return parse_address(text)
    except DecodeError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def new_serial() -> int:
    """Return a serial number for a statement: 64 random bits, so that granters need no counter."""
    return secrets.randbits(64)


def date(unix_s: float) -> str:
    """Return a time in UTC for people."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def shown_statement(own: Statement) -> dict[str, Any]:
    """Return a statement as commands print it."""
    return {
        "serial": own.serial_text,
        "network": str(own.network),
        "member": str(own.member),
        "classes": None if own.classes is None else list(own.classes),
        "may_invite": own.may_grant,
        "not_before": date(own.not_before_s),
        "expires": date(own.expires_s),
        "granted_by": str(own.issuer),
    }
