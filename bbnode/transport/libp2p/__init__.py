"""The transport over py-libp2p: the only place that imports it."""
