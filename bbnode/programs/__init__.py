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
from bbnode.programs.presets import (
    AsynchronousTraining,
    CyclicTraining,
    DiLoCo,
    Ditto,
    DPFedAvg,
    DPSGDTraining,
    FedAdagrad,
    FedAdam,
    FedAsync,
    FedAvgM,
    FedBN,
    FedBuff,
    FedNova,
    FedOpt,
    FedPer,
    FedProx,
    FedRep,
    FedYogi,
    FLTrustTraining,
    HierarchicalTraining,
    QFedAvg,
    Scaffold,
    SecureTraining,
)
from bbnode.programs.retrieval import (
    EmbedAndSearch,
    PeerToPeerSearch,
    RoutedSearch,
    ShardedSearch,
    VectorStore,
)
from bbnode.programs.split import SplitLearning, VerticalLearning
from bbnode.programs.statistics import (
    FederatedHistograms,
    FederatedQuantiles,
    FederatedStatistics,
)
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
