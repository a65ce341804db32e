"""Averaging without a server: exchanges of pairs, rounds on a graph, a coordinator that changes."""
