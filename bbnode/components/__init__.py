"""The public face of components: all that the author of one needs is importable from here.

Contracts with their marks and context, errors, settings, values and types, helpers to build on,
and the components that ship. `docs/extending.md` shows each kind of component as a package.

Rule: importing this package imports none of it. Each name is loaded when it is first asked for,
because ONNX Runtime and the like take their time; the imports below are the one list of names.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bbnode.components.autodiff import VjpContext as VjpContext
    from bbnode.components.autodiff import gradient_graph as gradient_graph
    from bbnode.components.autodiff import supported_ops as supported_ops
    from bbnode.components.autodiff import training_graphs as training_graphs
    from bbnode.components.autodiff import vjp as vjp
    from bbnode.components.backends.caching import CachingBackend as CachingBackend
    from bbnode.components.backends.ort import OrtBackend as OrtBackend
    from bbnode.components.backends.ort import OrtBackendConfig as OrtBackendConfig
    from bbnode.components.backends.primitives import PRIMITIVES as PRIMITIVES
    from bbnode.components.backends.reference import ReferenceBackend as ReferenceBackend
    from bbnode.components.backends.reference import (
        ReferenceBackendConfig as ReferenceBackendConfig,
    )
    from bbnode.components.contracts import PENDING as PENDING
    from bbnode.components.contracts import Aggregator as Aggregator
    from bbnode.components.contracts import Backend as Backend
    from bbnode.components.contracts import CarriedOver as CarriedOver
    from bbnode.components.contracts import Codec as Codec
    from bbnode.components.contracts import Completion as Completion
    from bbnode.components.contracts import Component as Component
    from bbnode.components.contracts import DataSource as DataSource
    from bbnode.components.contracts import Index as Index
    from bbnode.components.contracts import Model as Model
    from bbnode.components.contracts import NoConfig as NoConfig
    from bbnode.components.contracts import OpContext as OpContext
    from bbnode.components.contracts import PeerSelector as PeerSelector
    from bbnode.components.contracts import PeersView as PeersView
    from bbnode.components.contracts import PreparedGraph as PreparedGraph
    from bbnode.components.contracts import ProtocolComponent as ProtocolComponent
    from bbnode.components.contracts import WritingGraph as WritingGraph
    from bbnode.components.contracts import inbound as inbound
    from bbnode.components.contracts import offload as offload
    from bbnode.components.data.arrays import ArrayDataSource as ArrayDataSource
    from bbnode.components.data.arrays import ArrayDataSourceConfig as ArrayDataSourceConfig
    from bbnode.components.data.base import MemoryDataSource as MemoryDataSource
    from bbnode.components.data.base import SplitConfig as SplitConfig
    from bbnode.components.data.base import SplitDataSource as SplitDataSource
    from bbnode.components.data.images import ImageFolderDataSource as ImageFolderDataSource
    from bbnode.components.data.images import (
        ImageFolderDataSourceConfig as ImageFolderDataSourceConfig,
    )
    from bbnode.components.data.iterable import IterableDataSource as IterableDataSource
    from bbnode.components.data.iterable import IterableDataSourceConfig as IterableDataSourceConfig
    from bbnode.components.data.iterable import provide as provide
    from bbnode.components.data.iterable import withdraw as withdraw
    from bbnode.components.data.partition import permutation as permutation
    from bbnode.components.data.schema import DataSchema as DataSchema
    from bbnode.components.data.schema import TensorSchema as TensorSchema
    from bbnode.components.data.sklearn import SklearnDataSource as SklearnDataSource
    from bbnode.components.data.sklearn import SklearnDataSourceConfig as SklearnDataSourceConfig
    from bbnode.components.data.statistics import Moments as Moments
    from bbnode.components.data.statistics import StandardizedConfig as StandardizedConfig
    from bbnode.components.data.statistics import StandardizedDataSource as StandardizedDataSource
    from bbnode.components.data.tables import TableDataSource as TableDataSource
    from bbnode.components.data.tables import TableDataSourceConfig as TableDataSourceConfig
    from bbnode.components.data.text import TextDataSource as TextDataSource
    from bbnode.components.data.text import TextDataSourceConfig as TextDataSourceConfig
    from bbnode.components.errors import BackendError as BackendError
    from bbnode.components.errors import BackendUnavailable as BackendUnavailable
    from bbnode.components.errors import ComponentError as ComponentError
    from bbnode.components.errors import ContributionRefused as ContributionRefused
    from bbnode.components.errors import DataDoesNotFit as DataDoesNotFit
    from bbnode.components.errors import DataUnavailable as DataUnavailable
    from bbnode.components.errors import InvalidComponentConfig as InvalidComponentConfig
    from bbnode.components.errors import MismatchedShapes as MismatchedShapes
    from bbnode.components.errors import NonFiniteAggregate as NonFiniteAggregate
    from bbnode.components.errors import NotEnoughPeers as NotEnoughPeers
    from bbnode.components.errors import NotExportable as NotExportable
    from bbnode.components.errors import NothingToAggregate as NothingToAggregate
    from bbnode.components.errors import ParameterMismatch as ParameterMismatch
    from bbnode.components.errors import StatisticsMissing as StatisticsMissing
    from bbnode.components.errors import StatisticsRefused as StatisticsRefused
    from bbnode.components.errors import TrainingFailed as TrainingFailed
    from bbnode.components.errors import UnsupportedByDataSource as UnsupportedByDataSource
    from bbnode.components.errors import UnsupportedByModel as UnsupportedByModel
    from bbnode.components.errors import UnsupportedSelection as UnsupportedSelection
    from bbnode.components.errors import WeightsNotFinite as WeightsNotFinite
    from bbnode.components.fedavg import FedAvg as FedAvg
    from bbnode.components.fedavg import FedAvgConfig as FedAvgConfig
    from bbnode.components.metrics import MetricsMean as MetricsMean
    from bbnode.components.metrics import MetricsMeanConfig as MetricsMeanConfig
    from bbnode.components.models.lora import Lora as Lora
    from bbnode.components.models.mlp import mlp_forward as mlp_forward
    from bbnode.components.models.onnx_model import HeldModel as HeldModel
    from bbnode.components.models.onnx_model import OnnxModel as OnnxModel
    from bbnode.components.models.onnx_model import OnnxModelConfig as OnnxModelConfig
    from bbnode.components.models.torch_model import TorchModel as TorchModel
    from bbnode.components.models.torch_model import TorchModelConfig as TorchModelConfig
    from bbnode.components.peer_registry.client import GlobalRegistryClient as GlobalRegistryClient
    from bbnode.components.peer_registry.client import (
        GlobalRegistryClientConfig as GlobalRegistryClientConfig,
    )
    from bbnode.components.peer_registry.client import GlobalRegistryView as GlobalRegistryView
    from bbnode.components.peer_registry.server import GlobalRegistryServer as GlobalRegistryServer
    from bbnode.components.peer_registry.server import (
        GlobalRegistryServerConfig as GlobalRegistryServerConfig,
    )
    from bbnode.components.pooled_statistics import PooledStatistics as PooledStatistics
    from bbnode.components.pooled_statistics import PooledStatisticsConfig as PooledStatisticsConfig
    from bbnode.components.registry import ConfigTypeMismatch as ConfigTypeMismatch
    from bbnode.components.registry import UnknownComponentType as UnknownComponentType
    from bbnode.components.registry import concrete as concrete
    from bbnode.components.registry import register_component as register_component
    from bbnode.components.selectors import ConnectedView as ConnectedView
    from bbnode.components.selectors import ConstantView as ConstantView
    from bbnode.components.selectors import ConstantViewConfig as ConstantViewConfig
    from bbnode.components.selectors import DrawingConfig as DrawingConfig
    from bbnode.components.selectors import DrawingSelector as DrawingSelector
    from bbnode.components.selectors import draw as draw
    from bbnode.components.settings import local_setting as local_setting
    from bbnode.components.settings import path_setting as path_setting
    from bbnode.ir import types as types
    from bbnode.ir import values as values
    from bbnode.ir.codec import decode_value as decode_value
    from bbnode.ir.codec import encode_value as encode_value
    from bbnode.ir.decoding import Boundary as Boundary
    from bbnode.ir.decoding import shown as shown
    from bbnode.ir.decoding import unpack as unpack
    from bbnode.ir.envelope import WireCorrelation as WireCorrelation
    from bbnode.ir.errors import AuthorError as AuthorError
    from bbnode.ir.errors import DecodeError as DecodeError
    from bbnode.ir.errors import DeploymentError as DeploymentError
    from bbnode.ir.errors import PeerError as PeerError
    from bbnode.ir.peer import PeerId as PeerId
    from bbnode.ir.values import TRIGGER as TRIGGER
    from bbnode.ir.values import CommandId as CommandId
    from bbnode.ir.values import Composite as Composite
    from bbnode.ir.values import Metadata as Metadata
    from bbnode.ir.values import OptionalValue as OptionalValue
    from bbnode.ir.values import PeerIdVec as PeerIdVec
    from bbnode.ir.values import ResponseBatch as ResponseBatch
    from bbnode.ir.values import SearchResults as SearchResults
    from bbnode.ir.values import TensorSequence as TensorSequence
    from bbnode.ir.values import Value as Value
    from bbnode.ir.values import register_carrier as register_carrier
else:
    # Hidden from type checkers, which would take any name for a good one.

    @cache
    def _exports() -> dict[str, str]:
        """Return the module of each public name, as the imports above say."""
        import ast

        tree = ast.parse(__spec__.loader.get_source(__name__))
        lists = next(node for node in tree.body if isinstance(node, ast.If))
        return {alias.asname: node.module for node in lists.body for alias in node.names}

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return sorted(_exports())
        if name.startswith("__") or name not in _exports():
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        import importlib

        module = _exports()[name]
        found = getattr(importlib.import_module(module), name, None)
        # A public name may be a module itself.
        value = importlib.import_module(f"{module}.{name}") if found is None else found
        return globals().setdefault(name, value)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_exports()})
