"""What a node keeps of other peers: addresses, connections, backoff, standing, round trips."""
