"""Peer selectors: who a program's values go to.

Rule: public names are importable from here.
"""

from __future__ import annotations

from bbnode.components.selectors.centroids import CentroidSelector as CentroidSelector
from bbnode.components.selectors.centroids import CentroidSelectorConfig as CentroidSelectorConfig
from bbnode.components.selectors.cyclon import Cyclon as Cyclon
from bbnode.components.selectors.cyclon import CyclonConfig as CyclonConfig
from bbnode.components.selectors.hyparview import HyParView as HyParView
from bbnode.components.selectors.hyparview import HyParViewConfig as HyParViewConfig
from bbnode.components.selectors.kademlia import Kademlia as Kademlia
from bbnode.components.selectors.kademlia import KademliaConfig as KademliaConfig
from bbnode.components.selectors.learned import ByDataSize as ByDataSize
from bbnode.components.selectors.learned import ByDataSizeConfig as ByDataSizeConfig
from bbnode.components.selectors.learned import Oort as Oort
from bbnode.components.selectors.learned import OortConfig as OortConfig
from bbnode.components.selectors.random_walk import RandomWalk as RandomWalk
from bbnode.components.selectors.random_walk import RandomWalkConfig as RandomWalkConfig
from bbnode.components.selectors.turns import PowerOfTwoChoices as PowerOfTwoChoices
from bbnode.components.selectors.turns import PowerOfTwoChoicesConfig as PowerOfTwoChoicesConfig
from bbnode.components.selectors.turns import RoundRobin as RoundRobin
from bbnode.components.selectors.views import ConnectedView as ConnectedView
from bbnode.components.selectors.views import ConstantView as ConstantView
from bbnode.components.selectors.views import ConstantViewConfig as ConstantViewConfig
from bbnode.components.selectors.views import DrawingConfig as DrawingConfig
from bbnode.components.selectors.views import DrawingSelector as DrawingSelector
from bbnode.components.selectors.views import draw as draw
