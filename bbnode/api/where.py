"""The address of a running daemon's control plane, by any of the names that a user has for it.

Rule: the token is sent to this machine alone, since it travels in the clear.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from urllib.parse import urlsplit

from bbnode.daemon import paths
from bbnode.daemon.config import sources
from bbnode.daemon.config.sources import ConfigError
from bbnode.daemon.control.client import TcpAddress
from bbnode.ir.caps import MAX_TOKEN_CHARS

CONFIG_NAME = "node.toml"


def control_address(
    node: str | os.PathLike[str], token: str | os.PathLike[str] | None = None
) -> Path | TcpAddress:
    """Return the address of a daemon's control plane.

    `node` is its configuration, its folder, its state directory, its control socket, or the URL of
    `control.tcp`, which asks for the `token`: its text, or the path of its file.
    Raises ConfigError.
    """
    if isinstance(node, str) and "://" in node:
        return _tcp(node, token)
    if token is not None:
        raise ConfigError("a token goes with the URL of control.tcp, as http://127.0.0.1:PORT")
    path = Path(node).expanduser()
    if path.is_socket() or path.suffix == ".sock":
        return path.absolute()
    if path.is_dir():
        if not (path / CONFIG_NAME).is_file():
            return paths.control_socket(path.absolute())
        path /= CONFIG_NAME
    if path.suffix != ".toml":
        raise ConfigError(
            f"{path}: no configuration (.toml), folder, state directory or control socket of a "
            "daemon, and no URL like http://127.0.0.1:PORT"
        )
    return paths.control_socket(sources.resolve(paths.find_config(path)).state_dir)


def _tcp(url: str, token: str | os.PathLike[str] | None) -> TcpAddress:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        here = host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        here, host, port, parts = False, None, None, urlsplit("")
    if not here or host is None or port is None or parts.scheme != "http":
        raise ConfigError(
            f"{url!r}: write it as http://127.0.0.1:PORT; the control plane of another machine is "
            "reached through an ssh tunnel"
        )
    if token is None:
        raise ConfigError(f"{url} asks for a token: pass token=Path(STATE_DIR) / 'control.token'")
    return TcpAddress(host=host, port=port, token=_token(token))


def _token(token: str | os.PathLike[str]) -> str:
    text = token
    if not isinstance(token, str):
        path = Path(token).expanduser()
        try:
            text = path.read_text("ascii")[: MAX_TOKEN_CHARS + 1]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: the token can't be read: {error}") from error
    text = str(text).strip()
    # The token becomes a header.
    if not text or len(text) > MAX_TOKEN_CHARS or not text.isascii() or not text.isprintable():
        raise ConfigError("the token is not the content of a control.token file")
    return text
