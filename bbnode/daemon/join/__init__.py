"""`bbnode join`: from a ticket to a node that takes part."""
