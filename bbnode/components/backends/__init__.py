"""Backends, and the two ways in which one can be written: primitives, or whole graphs."""
