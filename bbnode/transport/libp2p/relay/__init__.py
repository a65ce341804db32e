"""Circuits through a third peer, for those that cannot reach each other."""
