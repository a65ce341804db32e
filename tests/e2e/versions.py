"""A program that real daemons run beside another version of it."""

from __future__ import annotations

from bbnode.examples.federated_digits import FederatedRound


class OtherRound(FederatedRound):
    """The round under another name: it is another program, and agrees nowhere."""
