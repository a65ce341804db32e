"""A directory of the peers of a network: its server, its clients, and their messages."""
