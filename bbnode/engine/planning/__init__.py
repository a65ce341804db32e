"""What install makes of an artifact: slices, plans, sites and bindings, before a node is there."""
