"""Exported models that say what they take and give, and predictions by what they say."""
