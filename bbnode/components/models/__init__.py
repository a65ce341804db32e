"""Trainable models, and a forward graph to begin with."""
