"""Components: contracts, registry and the concretes that ship with bbnode."""
