"""Codecs: tensors as shorter codes, with error feedback where a codec loses much."""
