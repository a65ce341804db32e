"""Bootstraps: their plans, what they wait for, and how they run."""
