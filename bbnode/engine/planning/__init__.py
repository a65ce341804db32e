"""From an artifact to the plan of a node: flat ops, slices, sites, bindings and entry plans."""
