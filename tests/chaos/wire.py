"""Network namespaces, and wires between them that can be cut, lose packets, and delay them.

Rule: what a wire does to packets is done to real IP packets below TCP, by us and from one seed,
so that it works on a kernel without netem: each end is a TUN device in its namespace, and a thread
carries packets from one to the other.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest

TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU = 1500

NEEDS_NAMESPACES = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or not TUN.exists(),
    reason="needs root, iproute2 and /dev/net/tun",
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def namespaces(*names: str) -> Iterator[list[str]]:
    """Network namespaces of our own, with their loopback up."""
    made = [f"bbchaos-{os.getpid()}-{name}" for name in names]
    try:
        for name in made:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def tun_device(name: str, namespace: str) -> int:
    """A TUN device in a namespace, not yet up: a descriptor for its packets, which is ours."""
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    # The device goes into the namespace; what is written and read here stays here.
    ip("link", "set", name, "netns", namespace)
    return descriptor


class Wire:
    """A wire between two namespaces, `number` among those of one test."""

    def __init__(
        self, number: int, ends: tuple[str, str], *, delay_s: float = 0.0, loss: float = 0.0
    ) -> None:
        """`delay_s` each way; `loss` is the share of packets that never arrive."""
        self.addresses = (f"10.79.{number}.1", f"10.79.{number}.2")
        self.delay_s = delay_s
        self.loss = loss
        self.is_cut = False
        self.dropped = 0
        self._random = random.Random(number)
        self._stop_reads, self._stop_writes = os.pipe()
        self._devices = [
            self._device(f"bbw{number}{side}", namespace, address)
            for side, namespace, address in zip("ab", ends, self.addresses, strict=True)
        ]
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._stop_writes, b".")
        self._thread.join()
        for descriptor in (*self._devices, self._stop_reads, self._stop_writes):
            os.close(descriptor)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing goes through meanwhile, and nobody is told."""
        self.is_cut = True
        try:
            yield
        finally:
            self.is_cut = False

    def _device(self, name: str, namespace: str, address: str) -> int:
        descriptor = tun_device(name, namespace)
        ip("-n", namespace, "addr", "add", f"{address}/24", "dev", name)
        ip("-n", namespace, "link", "set", name, "mtu", str(_MTU), "up")
        return descriptor

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []  # due, order, to, packet
        order = 0
        while True:
            timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready, _, _ = select.select([*self._devices, self._stop_reads], [], [], timeout)
            if self._stop_reads in ready:
                return
            for side, device in enumerate(self._devices):
                for packet in _packets(device) if device in ready else ():
                    if self.is_cut or self._random.random() < self.loss:
                        self.dropped += 1
                        continue
                    order += 1
                    due = time.monotonic() + self.delay_s
                    heapq.heappush(waiting, (due, order, self._devices[1 - side], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(waiting)
                try:
                    os.write(to, packet)
                except OSError:
                    self.dropped += 1  # the device's own queue is full, or it is going down


def _packets(device: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(device, _MTU + 64)
        except OSError:
            return
