"""Indexes: nearest-neighbour search over the vectors that a node keeps."""
