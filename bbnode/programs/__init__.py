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

from bbnode.programs.arguments import ReadyProgram
from bbnode.programs.federated import FederatedSGD, FederatedTraining
from bbnode.programs.gossip import GossipTraining
from bbnode.programs.metrics import Metric, metric
from bbnode.programs.pipeline import Pipeline
from bbnode.programs.statistics import FederatedStatistics
from bbnode.programs.training import TrainingProgram

__all__ = [
    "FederatedSGD",
    "FederatedStatistics",
    "FederatedTraining",
    "GossipTraining",
    "Metric",
    "Pipeline",
    "ReadyProgram",
    "TrainingProgram",
    "metric",
]
