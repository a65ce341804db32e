"""Rounds that a node starts by itself, and the numbers that inputs are made of."""
