"""Peer selectors: who a program's values go to."""
