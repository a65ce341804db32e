"""Transport: moves envelopes between peers. `backend` is the seam, the rest implements it."""

from __future__ import annotations
