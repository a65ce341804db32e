"""Exported models that describe their inputs and outputs, and predictions by that description."""
