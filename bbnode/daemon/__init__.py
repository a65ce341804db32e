"""The daemon: configuration, life cycle, control plane, and the wiring of all layers.

Rule of this package: it is the only one that may import every other; nothing below knows of it.
"""
