"""What the values of a configuration may be, and how a key says what it is.

Rule: a value that can be seen to be wrong is refused when it is read, with the remedy.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import multiaddr
import multiaddr.exceptions
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId


def _check_multiaddr(text: Any) -> Any:
    if isinstance(text, str):
        try:
            multiaddr.Multiaddr(text)
        except (ValueError, multiaddr.exceptions.Error) as error:
            raise ValueError(f"{text!r} is not a multiaddr (like /ip4/127.0.0.1/tcp/4001)") from (
                error
            )
    return text


def _check_peer_address(text: Any) -> Any:
    _check_multiaddr(text)
    if isinstance(text, str) and "/p2p/" not in text:
        raise ValueError(f"{text!r} names no peer: it has to end with /p2p/ID (`bbnode id`)")
    return text


def _check_peer(text: Any) -> Any:
    if isinstance(text, str):
        try:
            PeerId.parse(text)
        except DecodeError as error:
            raise ValueError(f"{error}; `bbnode id` prints one") from error
    return text


def _check_module_class(text: Any) -> Any:
    if isinstance(text, str) and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text):
        raise ValueError(f"{text!r} does not name a class as package.module:Class")
    return text


# Strict everywhere else, but TOML has no paths.
FilePath = Annotated[Path, Field(strict=False)]
Address = Annotated[str, BeforeValidator(_check_multiaddr)]
PeerAddress = Annotated[str, BeforeValidator(_check_peer_address)]
PeerText = Annotated[str, BeforeValidator(_check_peer)]
ModuleClass = Annotated[str, BeforeValidator(_check_module_class)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Cap = Annotated[int, Field(ge=1)] | None
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
# A rate with a default: 0 is none.
RateOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of all tables: unknown keys are errors, values do not change once read."""

    # Strict: "3" is not 3, and true is not 1. A file says what it means.
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, strict=True)


def key(default: Any, description: str, *, unit: str = "", **extra: Any) -> Any:
    """One key of the file; `unit` is what its number counts.

    A list or table default is copied by pydantic for each instance.
    """
    return Field(
        default=default, description=description, json_schema_extra={"unit": unit}, **extra
    )
