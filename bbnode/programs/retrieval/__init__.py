"""Search over vectors, on one node or on many: programs whose slot "index" is an Index.

Rule: an item is searched where it is kept; what travels are queries, and the hits that the owner of
an index lets a peer see.
"""

from __future__ import annotations

from bbnode.programs.retrieval.base import RetrievalProgram as RetrievalProgram
from bbnode.programs.retrieval.embed import EmbedAndSearch as EmbedAndSearch
from bbnode.programs.retrieval.peers import PeerToPeerSearch as PeerToPeerSearch
from bbnode.programs.retrieval.routed import RoutedSearch as RoutedSearch
from bbnode.programs.retrieval.sharded import ShardedSearch as ShardedSearch
from bbnode.programs.retrieval.store import VectorStore as VectorStore
