"""Files of items for an index."""
