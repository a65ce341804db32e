"""Vocabulary that every layer shares: keys, types, ids, addresses, values, the envelope.

Rule of this package: pure data and pure functions. It does no I/O, reads no clock and
imports nothing of bbnode outside itself.
"""
