"""Secure aggregation: a server learns the weighted sum of its clients' vectors, and no vector.

The protocol of Bonawitz et al. (2017, doi:10.1145/3133956.3133982), against servers that lie, and
its form with fewer neighbours (SecAgg+, Bell et al., 2020, doi:10.1145/3372297.3417885). Layout,
lower ones first: `ring`, `shamir`, `graph`, `masking` and `messages`; `plan`, what all parties of
a round have agreed on; `client_round` and `server_round`, one round of either side, without
any I/O; `client` and `server`, the components.
"""

from __future__ import annotations
