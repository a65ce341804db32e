"""Differential privacy: what a release costs, and releases that keep to a budget.

Layout, lower ones first: `accounting`, epsilon by a maintained library, and the ledger of what is
spent; `release`, the component that sums updates up and adds noise; `gradients`, the graph of sums
of clipped gradients, and `model`, which trains by them.
"""

from __future__ import annotations
