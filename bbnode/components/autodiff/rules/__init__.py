"""Gradient rules, one function per op; importing this package fills the table."""
