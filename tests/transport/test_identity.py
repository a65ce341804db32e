"""The key file: its bytes, its mode, and what is refused."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from bbnode.access.errors import IdentityError
from bbnode.access.keys import KEY_FILE_BYTES
from bbnode.transport.identity import (
    Identity,
    create_identity,
    load_identity,
    load_or_create_identity,
)


def test_created_once_then_loaded(tmp_path):
    path = tmp_path / "state" / "key"
    first = load_or_create_identity(path)
    assert load_or_create_identity(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == KEY_FILE_BYTES == 36
    # No draft stays behind.
    assert [each.name for each in path.parent.iterdir()] == ["key"]


def test_private_under_any_umask(tmp_path):
    old = os.umask(0)
    try:
        create_identity(tmp_path / "key")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_same_file_and_peer_id_as_libp2p(tmp_path):
    from libp2p.identity_utils import load_identity as libp2p_load
    from libp2p.identity_utils import save_identity as libp2p_save
    from libp2p.peer.id import ID

    ours = create_identity(tmp_path / "ours")
    pair = libp2p_load(tmp_path / "ours")
    theirs = ID.from_pubkey(pair.public_key)
    assert ours.peer_id.to_bytes() == theirs.to_bytes()
    assert str(ours.peer_id) == str(theirs)
    libp2p_save(pair, tmp_path / "theirs")
    assert (tmp_path / "theirs").read_bytes() == (tmp_path / "ours").read_bytes()
    assert load_identity(tmp_path / "theirs") == ours


def test_existing_file_is_never_replaced(tmp_path):
    path = tmp_path / "key"
    create_identity(path)
    before = path.read_bytes()
    with pytest.raises(IdentityError, match="exists already"):
        create_identity(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"", b"\x08\x01\x12\x20" + b"k" * 31, b"\x08\x02\x12\x20" + b"k" * 32, b"k" * 4096]
)
def test_wrong_content(tmp_path, content):
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="not an Ed25519 key") as caught:
        load_or_create_identity(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_readable_by_others(tmp_path, mode):
    path = tmp_path / "key"
    create_identity(path)
    path.chmod(mode)
    with pytest.raises(IdentityError, match="chmod 600"):
        load_identity(path)


def test_missing_directory_and_fifo(tmp_path):
    with pytest.raises(IdentityError, match="No such file"):
        load_identity(tmp_path / "nowhere")
    with pytest.raises(IdentityError, match="not a regular file"):
        load_identity(tmp_path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(IdentityError, match="not a regular file"):
        load_identity(tmp_path / "fifo")
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="cannot create the directory"):
        create_identity(tmp_path / "file" / "key")


def test_secret_stays_out_of_repr():
    identity = Identity.from_seed(b"s" * 32)
    assert "ssss" not in repr(identity)
    with pytest.raises(IdentityError):
        Identity.from_seed(b"short")


def test_needs_no_libp2p():
    code = "import sys, bbnode.transport.identity; sys.exit('libp2p' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
