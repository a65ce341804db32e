"""The daemons that are attacked."""

from __future__ import annotations

from tests.chaos.conftest import cluster, make_cluster

__all__ = ["cluster", "make_cluster"]
