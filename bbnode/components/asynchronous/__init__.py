"""Training without rounds: a server's numbered weights, and the updates that come back to it."""
