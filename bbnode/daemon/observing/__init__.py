"""Seeing how a node does: logs, metrics, events, the watchdog, doctor and bug reports."""
