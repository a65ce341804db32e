"""Parts of training programs, by the arguments that they are given by.

```python
FederatedTraining(model=…, client=Proximal(0.5), server=Adam(tau=1e-2), combine=Krum(byzantine=1))
```

- `train`: `LocalTraining`
- `client`: `Proximal`, `ControlVariates`, `Normalised`, `Fair`, `InnerSteps`
- `server`: `SGD`, `Momentum`, `Adagrad`, `Adam`, `Yogi`
- `combine`: `Aggregated`, `Median`, `TrimmedMean`, `Krum`, `MultiKrum`, `Bulyan`,
  `GeometricMedian`, `NormClipping`, `Trusted`
- `privacy`: `Masks`, `ClientPrivacy`, `ExamplePrivacy`
- `compress`: `Coded`
- `personal`: `Layers`, `Alternating`, `OwnModel`
- `course`: `AllAtOnce`, `InTurn`, `TwoLevels`, `Mixed`, `Buffered`

Rule: two that take the same step of a round, or of which one does not bear what the other changes,
are refused by name when a program is made; all others go together.
"""

from __future__ import annotations

from bbnode.programs.composing import Inner, RoundPart
from bbnode.programs.local import LocalTraining
from bbnode.programs.parts.asynchronous import Asynchronous, Buffered, Mixed
from bbnode.programs.parts.clients import ControlVariates, Fair, InnerSteps, Normalised, Proximal
from bbnode.programs.parts.combining import (
    Bulyan,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormClipping,
    TrimmedMean,
    Trusted,
)
from bbnode.programs.parts.courses import InTurn, TwoLevels
from bbnode.programs.parts.masks import Masks
from bbnode.programs.parts.personal import Alternating, Layers, OwnModel
from bbnode.programs.parts.plain import Aggregated, AllAtOnce, Coded, Combine, Course
from bbnode.programs.parts.privacy import ClientPrivacy, ExamplePrivacy
from bbnode.programs.parts.servers import SGD, Adagrad, Adam, Momentum, Yogi

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Aggregated",
    "Alternating",
    "Asynchronous",
    "Buffered",
    "Bulyan",
    "ClientPrivacy",
    "Coded",
    "Combine",
    "ControlVariates",
    "Course",
    "ExamplePrivacy",
    "Fair",
    "GeometricMedian",
    "InTurn",
    "Inner",
    "InnerSteps",
    "Krum",
    "Layers",
    "LocalTraining",
    "Masks",
    "Median",
    "Mixed",
    "Momentum",
    "MultiKrum",
    "NormClipping",
    "Normalised",
    "OwnModel",
    "RoundPart",
    "Proximal",
    "AllAtOnce",
    "TrimmedMean",
    "Trusted",
    "TwoLevels",
    "Yogi",
]
