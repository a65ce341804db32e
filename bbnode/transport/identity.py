"""Identity: the node's Ed25519 key and its file.

Rule: the key file is that of `bbnode.access.keys`, with mode 0600 and never replaced. This module
does not import libp2p, so that `bbnode id` starts quickly.
"""

from __future__ import annotations

import os
from pathlib import Path

from bbnode.access.errors import IdentityError
from bbnode.access.keys import SigningKey, create_key_file, read_key_file


class Identity(SigningKey):
    """The key that proves the node's PeerId."""

    __slots__ = ()


def load_identity(path: str | os.PathLike[str]) -> Identity:
    """Return the identity kept in `path`; raises IdentityError as `read_key_file` does."""
    return Identity.from_seed(read_key_file(path))


def create_identity(path: str | os.PathLike[str]) -> Identity:
    """Create an identity in `path`, which must not exist; raises IdentityError."""
    identity = Identity.generate()
    create_key_file(path, identity.seed)
    return identity


def load_or_create_identity(path: str | os.PathLike[str]) -> Identity:
    """Return the identity kept in `path`, created on the first call; raises IdentityError."""
    file = Path(path)
    if not os.path.lexists(file):
        try:
            return create_identity(file)
        except IdentityError as error:
            # Another process created the file first: use its key.
            if not isinstance(error.__cause__, FileExistsError):
                raise
    return load_identity(file)
