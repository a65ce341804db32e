"""Type and shape inference of values."""
