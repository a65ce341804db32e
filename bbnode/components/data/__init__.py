"""Data sources that ship."""
