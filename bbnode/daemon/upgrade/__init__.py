"""Upgrades of a node that peers offer: the offers, the candidate program, and the switch to it."""
