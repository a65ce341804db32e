"""Eight owners of vectors, and who asks them."""

from __future__ import annotations

from bbnode.programs import ShardedSearch


class Search(ShardedSearch):
    """The ten nearest by cosine."""

    metric = "cosine"
    k = 10
    quorum = 0
    deadline_s = 60.0
    numbered = True
