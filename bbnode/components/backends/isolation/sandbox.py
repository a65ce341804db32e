"""Limits that a process that runs strangers' numbers sets itself, on Linux.

Rule: nothing here is a promise alone: memory is bounded by the kernel, and system calls that make
sockets, start programs, open files for writing or touch other processes fail with EPERM. The filter
is written out here: it needs no library.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import platform
import resource
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_SECCOMP_MODE_FILTER = 2
# Classic BPF: load a word of the call, compare, return.
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_AT_NUMBER, _AT_ARCH, _AT_ARGUMENTS = 0, 4, 16
_X32_CALLS = 0x40000000  # the other ABI of x86-64, with numbers of its own

_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# 0 where an architecture has no such call.
_NUMBERS: Final[Mapping[str, tuple[int, Mapping[str, int]]]] = {
    "x86_64": (
        0xC000003E,
        {"socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "accept4": 288,
         "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "kill": 62, "tkill": 200,
         "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_open": 434,
         "pidfd_getfd": 438, "pidfd_send_signal": 424, "rename": 82, "renameat": 264,
         "renameat2": 316, "mkdir": 83, "mkdirat": 258, "rmdir": 84, "creat": 85, "link": 86,
         "linkat": 265, "unlink": 87, "unlinkat": 263, "symlink": 88, "symlinkat": 266,
         "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93, "lchown": 94,
         "fchownat": 260, "truncate": 76, "mknod": 133, "mknodat": 259, "mount": 165,
         "unshare": 272, "setns": 308, "bpf": 321, "io_uring_setup": 425, "userfaultfd": 323,
         "perf_event_open": 298, "keyctl": 250, "add_key": 248, "request_key": 249,
         "setxattr": 188, "lsetxattr": 189, "utimensat": 280, "chroot": 161, "prlimit64": 302,
         "open": 2, "openat": 257, "openat2": 437, "clone3": 435, "clone": 56},
    ),
    "aarch64": (
        0xC00000B7,
        {"socket": 198, "connect": 203, "accept": 202, "bind": 200, "listen": 201, "accept4": 242,
         "execve": 221, "execveat": 281, "kill": 129, "tkill": 130, "ptrace": 117,
         "process_vm_readv": 270, "process_vm_writev": 271, "pidfd_open": 434,
         "pidfd_getfd": 438, "pidfd_send_signal": 424, "renameat": 38, "renameat2": 276,
         "mkdirat": 34, "linkat": 37, "unlinkat": 35, "symlinkat": 36, "fchmod": 52,
         "fchmodat": 53, "fchown": 55, "fchownat": 54, "truncate": 45, "mknodat": 33, "mount": 40,
         "unshare": 97, "setns": 268, "bpf": 280, "io_uring_setup": 425, "userfaultfd": 282,
         "perf_event_open": 241, "keyctl": 219, "add_key": 217, "request_key": 218,
         "setxattr": 5, "lsetxattr": 6, "utimensat": 88, "chroot": 51, "prlimit64": 261,
         "openat": 56, "openat2": 437, "clone3": 435, "clone": 220},
    ),
}  # fmt: skip
# Calls that say by an argument whether they are harmless: its number, and bits of which one has to
# be set (True), or none may be (False).
_BY_ARGUMENT: Final[Mapping[str, tuple[int, int, bool]]] = {
    "open": (1, _WRITES, False),
    "openat": (2, _WRITES, False),
    "clone": (0, 0x00010000, True),  # CLONE_THREAD
}
# The C library does without these where the kernel has none: their arguments can't be looked at.
_AS_IF_ABSENT: Final = frozenset({"clone3", "openat2"})


def limit(max_bytes: int) -> None:
    """Bound the memory that this process takes from now on, and let no crash leave a core.

    Raises OSError or ValueError, where the kernel refuses.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    bound = _data_bytes() + max_bytes
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        bound = min(bound, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))


def give_back() -> None:
    """Return freed memory to the system, where the C library can do so."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def confine() -> str:
    """Deny this thread, and those that it starts, what no graph needs; return what stands in force.

    "seccomp", or why there is none.
    """
    machine = platform.machine()
    if machine not in _NUMBERS:
        return f"no system call filter for {machine}"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return f"no system call filter: {os.strerror(ctypes.get_errno())}"
    program = _filter(machine)
    code = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(
        struct.pack("@HP", len(program) // 8, ctypes.addressof(code)), struct.calcsize("@HP")
    )
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0):
        return f"no system call filter: {os.strerror(ctypes.get_errno())}"
    return "seccomp"


def _filter(machine: str) -> bytes:
    """Return a BPF program: EPERM for the calls above, ENOSYS for those that count as absent."""
    arch, numbers = _NUMBERS[machine]
    made = [
        _step(_LOAD, _AT_ARCH),
        _step(_EQUAL, arch, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _AT_NUMBER),
    ]
    if machine == "x86_64":
        made += [_step(_ANY_BIT, _X32_CALLS, 0, 1), _step(_RETURN, _FAIL | errno.EPERM)]
    for name, number in numbers.items():
        if name in _BY_ARGUMENT:
            argument, bits, wanted = _BY_ARGUMENT[name]
            fails = (1, 0) if wanted else (0, 1)
            made += [
                _step(_EQUAL, number, 0, 4),
                _step(_LOAD, _AT_ARGUMENTS + 8 * argument),
                _step(_ANY_BIT, bits, *fails),
                _step(_RETURN, _FAIL | errno.EPERM),
                _step(_RETURN, _ALLOW),
            ]
            continue
        code = errno.ENOSYS if name in _AS_IF_ABSENT else errno.EPERM
        made += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _FAIL | code)]
    made.append(_step(_RETURN, _ALLOW))
    return b"".join(made)


def _step(code: int, operand: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_so, if_not, operand)


def _data_bytes() -> int:
    """Return what counts against RLIMIT_DATA now."""
    with Path("/proc/self/status").open(encoding="ascii") as status:
        for line in status:
            if line.startswith("VmData:"):
                return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmData")
