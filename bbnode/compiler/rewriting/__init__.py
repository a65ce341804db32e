"""TODO: say what this room is."""

from __future__ import annotations
