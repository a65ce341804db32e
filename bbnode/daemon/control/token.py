"""The bearer token that guards the TCP sockets: the control plane, and metrics.

Rule: a file that only its owner can read; created once with 256 bits of the system's randomness,
compared in constant time, never logged.
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path

from bbnode.daemon import paths
from bbnode.ir.caps import MAX_TOKEN_CHARS
from bbnode.ir.errors import EnvironmentFault

TOKEN_BYTES = 32


class TokenFileUnsafe(EnvironmentFault):
    """Others can read the control plane's token."""


def token_file(state_dir: Path) -> Path:
    """Return the path of a node's token."""
    return state_dir / "control.token"


def load_or_create_token(path: Path) -> str:
    """Return the token in a file, created if there is none.

    Raises `TokenFileUnsafe` for a file that others can read or that holds no token, and
    `StorageError`.
    """
    try:
        mode = path.stat().st_mode & 0o777
        text = path.read_text("ascii")[: MAX_TOKEN_CHARS + 1].strip()
    except FileNotFoundError:
        token = secrets.token_urlsafe(TOKEN_BYTES)
        paths.write_atomically(path, f"{token}\n".encode("ascii"), mode=0o600)
        return token
    except (OSError, ValueError) as error:
        raise TokenFileUnsafe(f"{path}: can't be read: {error}; remove it") from error
    if mode & 0o077:
        raise TokenFileUnsafe(f"{path} has mode {mode:04o}: run `chmod 600 {path}`")
    if not TOKEN_BYTES <= len(text) <= MAX_TOKEN_CHARS:
        raise TokenFileUnsafe(f"{path} holds no token; remove it, and the next start makes one")
    return text


def accepts(token: str, header: str | None) -> bool:
    """Return True for an `Authorization` header that carries the token."""
    scheme, _, sent = (header or "").partition(" ")
    matches = hmac.compare_digest(sent.strip().encode("utf-8"), token.encode("utf-8"))
    return matches and scheme.lower() == "bearer"
