"""The constraints on the types of values."""
