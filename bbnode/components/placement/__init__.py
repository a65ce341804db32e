"""Which peers keep which items: rendezvous hashing by the items' ids."""
