"""Programs that are taken as they are: Modules with arguments, each in one line of one's own.

```python
class Training(FederatedTraining):
    model = "model.onnx"
    clients = 3
```

Rule: they are written with the public API alone, as the examples are; an argument that is wrong
is a `BadArgument` that names it.
"""

from __future__ import annotations

from bbnode.programs.agreement import AgreeOnSchema
from bbnode.programs.arguments import ReadyProgram
from bbnode.programs.asynchronous import AsynchronousTraining, FedAsync, FedBuff
from bbnode.programs.clustering import FederatedKMeans
from bbnode.programs.federated import FederatedSGD, FederatedTraining
from bbnode.programs.gossip import (
    DecentralizedSGD,
    GossipTraining,
    MoshpitAveraging,
    MoshpitTraining,
    PairwiseAveraging,
    SwarmTraining,
)
from bbnode.programs.metrics import Metric, metric
from bbnode.programs.pipeline import Pipeline
from bbnode.programs.private import DPFedAvg, DPSGDTraining
from bbnode.programs.retrieval import (
    EmbedAndSearch,
    PeerToPeerSearch,
    RoutedSearch,
    ShardedSearch,
    VectorStore,
)
from bbnode.programs.robust import FLTrustTraining
from bbnode.programs.secure import SecureTraining
from bbnode.programs.split import SplitLearning, VerticalLearning
from bbnode.programs.statistics import (
    FederatedHistograms,
    FederatedQuantiles,
    FederatedStatistics,
)
from bbnode.programs.strategies.drift import FedNova, FedProx, QFedAvg, Scaffold
from bbnode.programs.strategies.personal import Ditto, FedBN, FedPer, FedRep
from bbnode.programs.strategies.server_optimizers import (
    DiLoCo,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedOpt,
    FedYogi,
)
from bbnode.programs.strategies.topologies import CyclicTraining, HierarchicalTraining
from bbnode.programs.training import TrainingProgram
from bbnode.programs.trees import FederatedTrees

__all__ = [
    "AgreeOnSchema",
    "AsynchronousTraining",
    "CyclicTraining",
    "DPFedAvg",
    "DPSGDTraining",
    "DecentralizedSGD",
    "DiLoCo",
    "Ditto",
    "EmbedAndSearch",
    "FLTrustTraining",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvgM",
    "FedBN",
    "FedBuff",
    "FedNova",
    "FedOpt",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedYogi",
    "FederatedHistograms",
    "FederatedKMeans",
    "FederatedQuantiles",
    "FederatedSGD",
    "FederatedStatistics",
    "FederatedTraining",
    "FederatedTrees",
    "GossipTraining",
    "HierarchicalTraining",
    "Metric",
    "MoshpitAveraging",
    "MoshpitTraining",
    "PairwiseAveraging",
    "PeerToPeerSearch",
    "Pipeline",
    "QFedAvg",
    "ReadyProgram",
    "RoutedSearch",
    "Scaffold",
    "SecureTraining",
    "ShardedSearch",
    "SplitLearning",
    "SwarmTraining",
    "TrainingProgram",
    "VectorStore",
    "VerticalLearning",
    "metric",
]
