"""Envelopes: from bytes to executions, and from sends to bytes."""
