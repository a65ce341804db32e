"""Runs a program under what bbnode@.service asks of the kernel, where no systemd runs.

    python -m tests.deploy.sandbox UNIT WRITABLE… -- PROGRAM ARGUMENT…

Rule: what is enforced is read from the unit: no new privileges, MemoryDenyWriteExecute (prctl's
MDWE and the W^X rules of the filter), the system calls of SystemCallFilter by `systemd-analyze
syscall-filter`, the address families, namespaces, what /proc shows, the environment, and a
read-only root but for WRITABLE. Needs root for mounts, and libseccomp for the filters.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# From linux/prctl.h, linux/sched.h, sys/mman.h and seccomp.h.
PR_SET_NO_NEW_PRIVS, PR_SET_MDWE, PR_GET_MDWE, PR_CAPBSET_DROP = 38, 65, 66, 24
MDWE_REFUSE_EXEC_GAIN = 1
CLONE_NEWNS, MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    0x20000,
    1,
    32,
    4096,
    1 << 14,
    1 << 18,
)
SCMP_ACT_ALLOW = 0x7FFF0000
SCMP_CMP_EQ = 4
LAST_CAP = 40


def scmp_act_errno(number: int) -> int:
    return 0x00050000 | number


class Compare(ctypes.Structure):
    """struct scmp_arg_cmp."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


def settings(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.read_text("utf-8").splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def system_calls(filters: Sequence[str]) -> set[str]:
    """The calls that SystemCallFilter's lines leave, their groups resolved."""
    allowed: set[str] = set()
    for line in filters:
        calls = _group(line.removeprefix("~"))
        allowed = allowed - calls if line.startswith("~") else allowed | calls
    return allowed


def _group(name: str) -> set[str]:
    told = subprocess.run(
        ["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True
    ).stdout
    found: set[str] = set()
    for line in told.splitlines()[1:]:
        word = line.strip()
        if word.startswith("@"):
            found |= _group(word)
        elif word and not word.startswith("#"):
            found.add(word)
    return found


def confine(unit: Path, writable: Sequence[Path]) -> None:
    """Bind this process, and what it becomes, to the unit's rules."""
    asked = settings(unit)
    libc = ctypes.CDLL(None, use_errno=True)
    calls = system_calls(asked["SystemCallFilter"])
    if asked["ProtectSystem"] == ["strict"]:
        _read_only(libc, writable)
    if asked.get("ProcSubset") == ["pid"]:
        _check(libc.mount(b"proc", b"/proc", b"proc", 0, b"subset=pid"))
    for setting in asked["Environment"]:
        name, _, value = setting.partition("=")
        os.environ[name] = value
    limit = int(asked["LimitNOFILE"][0])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    assert asked["CapabilityBoundingSet"] == [""]
    for capability in range(LAST_CAP + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    assert asked["MemoryDenyWriteExecute"] == ["yes"]
    _check(libc.prctl(PR_SET_MDWE, MDWE_REFUSE_EXEC_GAIN, 0, 0, 0))
    families = {getattr(socket, name) for name in asked["RestrictAddressFamilies"][0].split()}
    _filter(calls, families)


def _read_only(libc: ctypes.CDLL, writable: Sequence[Path]) -> None:
    _check(libc.unshare(CLONE_NEWNS))
    _check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    for path in writable:
        _check(libc.mount(os.fsencode(path), os.fsencode(path), None, MS_BIND, None))
    _check(libc.mount(None, b"/", None, MS_REMOUNT | MS_BIND | MS_RDONLY, None))


def _filter(calls: set[str], families: set[int]) -> None:
    found = ctypes.util.find_library("seccomp")
    assert found is not None
    lib = ctypes.CDLL(found)
    lib.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(lib.seccomp_init(scmp_act_errno(errno.EPERM)))
    for name in sorted(calls - {"socket"}):
        number = lib.seccomp_syscall_resolve_name(name.encode())
        if number != -1:
            # A call that this machine's kernel does not have is left out.
            lib.seccomp_rule_add(context, SCMP_ACT_ALLOW, number, 0)
    number = lib.seccomp_syscall_resolve_name(b"socket")
    for family in sorted(families):
        only = Compare(0, SCMP_CMP_EQ, family, 0)
        lib.seccomp_rule_add_array(context, SCMP_ACT_ALLOW, number, 1, ctypes.byref(only))
    result = lib.seccomp_load(context)
    assert result == 0, os.strerror(-result)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main() -> None:
    words = sys.argv[1:]
    split = words.index("--")
    unit, *writable = (Path(word) for word in words[:split])
    confine(unit, writable)
    os.execvp(words[split + 1], words[split + 1 :])


if __name__ == "__main__":
    main()
