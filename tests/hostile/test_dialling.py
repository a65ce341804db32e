"""A node dials nobody on the word of strangers, but for a few attempts at where they came from."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bbnode.daemon.network.dial_plan import DIAL_RATES, HintSource
from bbnode.ir.caps import MAX_HINTS
from tests.chaos.cluster import Cluster
from tests.hostile.dialling import PORTS_VARIABLE
from tests.hostile.stranger import attack

LISTENERS = 4
# Of one stranger, in the seconds that it is dialled for (0.2 s, doubled each time).
MOST_ATTEMPTS = 6


class Dialled:
    """Counts who connects to some ports of this machine, by the address that they dialled."""

    def __init__(self) -> None:
        self.hosts: Counter[str] = Counter()
        self._stop = threading.Event()
        self._selector = selectors.DefaultSelector()
        self.ports = []
        for _ in range(LISTENERS):
            listener = socket.create_server(("0.0.0.0", 0), backlog=1024)
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
            self.ports.append(listener.getsockname()[1])
        self._thread = threading.Thread(target=self._take)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()

    def _take(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(timeout=0.1):
                with contextlib.suppress(BlockingIOError):
                    connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    self.hosts[connection.getsockname()[0]] += 1
                    connection.close()


@pytest.mark.slow
def test_addresses_that_strangers_claim(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = Dialled()
    monkeypatch.setenv(PORTS_VARIABLE, ",".join(map(str, dialled.ports)))
    cluster.start(*cluster.all)
    with dialled.counting(), cluster.events() as rounds:
        rounds.with_all()
        (address,) = cluster.server.get("status")["listen"]
        began_s = time.monotonic()
        with attack("dialling:vanish", address) as process:
            while process.poll() is None:
                rounds.next()
        # Whoever is still to be dialled is, meanwhile.
        rounds.for_seconds(5.0)
        lasted_s = time.monotonic() - began_s
        counters = cluster.server.get("status")["counters"]
    rate = DIAL_RATES[HintSource.STRANGER]
    strangers = rate.burst + rate.per_second * lasted_s + 1
    assert dialled.hosts["127.0.0.1"] <= strangers * MAX_HINTS * MOST_ATTEMPTS
    # Where they did not come from, never.
    assert set(dialled.hosts) <= {"127.0.0.1"}
    assert counters["discovery.over_budget"] > 0
