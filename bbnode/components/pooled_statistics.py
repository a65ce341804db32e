"""The statistics of many peers' features, merged into those of all their examples together.

Rule: what a peer says is checked before it counts, and a refusal names the peer. The result
depends on the contributions and their peers, never on the order of arrival: they are merged in
PeerId order. Contributions belong to the execution that asked for them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np

from bbnode.components.contracts import Aggregator, OpContext
from bbnode.components.data.statistics import Moments, merged_moments, read_label_counts
from bbnode.components.errors import (
    ContributionRefused,
    MismatchedShapes,
    NothingToAggregate,
)
from bbnode.components.registry import register_component
from bbnode.ir import codec, types
from bbnode.ir.peer import PeerId
from bbnode.ir.texts import listed
from bbnode.ir.values import Composite, Metadata, ResponseBatch, Value
