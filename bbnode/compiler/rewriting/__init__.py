"""Rewrites of a program that several passes share."""
