"""Aggregators: each is a rule that combines contributions; `collecting` checks and keeps these."""
