"""Analyses: what passes find out about a program without changing it."""
