"""Clusters that are ended whatever a test did to them, and whose files are looked at then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cluster import Cluster


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Make clusters; none runs when the test has ended."""
    made: list[Cluster] = []

    def make(**settings: Any) -> Cluster:
        made.append(Cluster(tmp_path / f"net-{len(made)}", **settings))
        return made[-1]

    try:
        yield make
    finally:
        for cluster in made:
            cluster.end()
    for cluster in made:
        cluster.check_files()


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    """A server and three clients; nothing runs yet."""
    return make_cluster()
