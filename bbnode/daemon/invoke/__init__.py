"""Rounds that a node starts by itself, and tensors from numbers in inputs."""
