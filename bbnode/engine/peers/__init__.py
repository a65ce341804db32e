"""Tables about other peers: addresses, connections, backoff, health, round trips."""
