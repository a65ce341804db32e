"""Observing a node: logs, metrics, events, the watchdog, doctor and bug reports."""
