"""Upgrades of a node that peers offer: what is offered, what it would run, and the switch to it."""
