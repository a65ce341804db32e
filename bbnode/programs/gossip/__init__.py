"""Programs without a server: all peers are of one class, and each tick is a peer's own.

Rule: public names are importable from here.
"""

from __future__ import annotations

from bbnode.programs.gossip.averaging import PairwiseAveraging as PairwiseAveraging
from bbnode.programs.gossip.rounds import DecentralizedSGD as DecentralizedSGD
from bbnode.programs.gossip.rounds import MoshpitAveraging as MoshpitAveraging
from bbnode.programs.gossip.rounds import MoshpitTraining as MoshpitTraining
from bbnode.programs.gossip.swarm import SwarmTraining as SwarmTraining
from bbnode.programs.gossip.training import GossipTraining as GossipTraining
