"""Encoders of texts: a sentence becomes a vector that is near those of sentences like it."""

from __future__ import annotations
