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
    from bbnode.components.aggregators.clusters import PooledClusters as PooledClusters
    from bbnode.components.aggregators.clusters import PooledClustersConfig as PooledClustersConfig
    from bbnode.components.aggregators.collecting import (
        CollectingAggregator as CollectingAggregator,
    )
    from bbnode.components.aggregators.collecting import CollectingConfig as CollectingConfig
    from bbnode.components.aggregators.collecting import Contribution as Contribution
    from bbnode.components.aggregators.fedavg import FedAvg as FedAvg
    from bbnode.components.aggregators.fedavg import FedAvgConfig as FedAvgConfig
    from bbnode.components.aggregators.krum import Bulyan as Bulyan
    from bbnode.components.aggregators.krum import Krum as Krum
    from bbnode.components.aggregators.krum import MultiKrum as MultiKrum
    from bbnode.components.aggregators.krum import MultiKrumConfig as MultiKrumConfig
    from bbnode.components.aggregators.metrics import MetricsMean as MetricsMean
    from bbnode.components.aggregators.metrics import MetricsMeanConfig as MetricsMeanConfig
    from bbnode.components.aggregators.pooled_statistics import PooledCounts as PooledCounts
    from bbnode.components.aggregators.pooled_statistics import (
        PooledCountsConfig as PooledCountsConfig,
    )
    from bbnode.components.aggregators.pooled_statistics import PooledRanges as PooledRanges
    from bbnode.components.aggregators.pooled_statistics import (
        PooledRangesConfig as PooledRangesConfig,
    )
    from bbnode.components.aggregators.pooled_statistics import PooledStatistics as PooledStatistics
    from bbnode.components.aggregators.pooled_statistics import (
        PooledStatisticsConfig as PooledStatisticsConfig,
    )
    from bbnode.components.aggregators.pooling import PoolingAggregator as PoolingAggregator
    from bbnode.components.aggregators.pooling import PoolingConfig as PoolingConfig
    from bbnode.components.aggregators.robust import ByzantineConfig as ByzantineConfig
    from bbnode.components.aggregators.robust import Median as Median
    from bbnode.components.aggregators.robust import TrimmedMean as TrimmedMean
    from bbnode.components.aggregators.running import RunningMean as RunningMean
    from bbnode.components.aggregators.running import RunningMeanConfig as RunningMeanConfig
    from bbnode.components.aggregators.trees import PooledTrees as PooledTrees
    from bbnode.components.aggregators.trees import PooledTreesConfig as PooledTreesConfig
    from bbnode.components.aggregators.weighted import FLTrust as FLTrust
    from bbnode.components.aggregators.weighted import GeometricMedian as GeometricMedian
    from bbnode.components.aggregators.weighted import (
        GeometricMedianConfig as GeometricMedianConfig,
    )
    from bbnode.components.aggregators.weighted import NormClipping as NormClipping
    from bbnode.components.aggregators.weighted import NormClippingConfig as NormClippingConfig
    from bbnode.components.asynchronous.buffer import StaleUpdate as StaleUpdate
    from bbnode.components.asynchronous.buffer import UpdateBuffer as UpdateBuffer
    from bbnode.components.asynchronous.buffer import UpdateBufferConfig as UpdateBufferConfig
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
    from bbnode.components.codecs.base import CodecConfig as CodecConfig
    from bbnode.components.codecs.base import FloatCodec as FloatCodec
    from bbnode.components.codecs.casts import BFloat16Codec as BFloat16Codec
    from bbnode.components.codecs.casts import Float16Codec as Float16Codec
    from bbnode.components.codecs.integers import Int4Codec as Int4Codec
    from bbnode.components.codecs.integers import Int4CodecConfig as Int4CodecConfig
    from bbnode.components.codecs.integers import Int8Codec as Int8Codec
    from bbnode.components.codecs.integers import Int8CodecConfig as Int8CodecConfig
    from bbnode.components.codecs.integers import NF4Codec as NF4Codec
    from bbnode.components.codecs.power_sgd import PowerSGDCodec as PowerSGDCodec
    from bbnode.components.codecs.power_sgd import PowerSGDCodecConfig as PowerSGDCodecConfig
    from bbnode.components.codecs.quantizers import ProductQuantizer as ProductQuantizer
    from bbnode.components.codecs.quantizers import ProductQuantizerConfig as ProductQuantizerConfig
    from bbnode.components.codecs.quantizers import ScalarQuantizer as ScalarQuantizer
    from bbnode.components.codecs.quantizers import ScalarQuantizerConfig as ScalarQuantizerConfig
    from bbnode.components.codecs.signs import SignCodec as SignCodec
    from bbnode.components.codecs.signs import SignCodecConfig as SignCodecConfig
    from bbnode.components.codecs.sparse import RandomKCodec as RandomKCodec
    from bbnode.components.codecs.sparse import RandomKCodecConfig as RandomKCodecConfig
    from bbnode.components.codecs.sparse import TopKCodec as TopKCodec
    from bbnode.components.codecs.sparse import TopKCodecConfig as TopKCodecConfig
    from bbnode.components.codecs.zstd import ZstdCodec as ZstdCodec
    from bbnode.components.codecs.zstd import ZstdCodecConfig as ZstdCodecConfig
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
    from bbnode.components.contracts import ModelShapes as ModelShapes
    from bbnode.components.contracts import NoConfig as NoConfig
    from bbnode.components.contracts import OpContext as OpContext
    from bbnode.components.contracts import PeerSelector as PeerSelector
    from bbnode.components.contracts import PeersView as PeersView
    from bbnode.components.contracts import PreparedGraph as PreparedGraph
    from bbnode.components.contracts import ProtocolComponent as ProtocolComponent
    from bbnode.components.contracts import WritingGraph as WritingGraph
    from bbnode.components.contracts import inbound as inbound
    from bbnode.components.contracts import offload as offload
    from bbnode.components.contracts import waits as waits
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
    from bbnode.components.data.shared_schema import ColumnMeaning as ColumnMeaning
    from bbnode.components.data.shared_schema import Scaling as Scaling
    from bbnode.components.data.shared_schema import SchemaRefused as SchemaRefused
    from bbnode.components.data.shared_schema import SharedSchema as SharedSchema
    from bbnode.components.data.sklearn import SklearnDataSource as SklearnDataSource
    from bbnode.components.data.sklearn import SklearnDataSourceConfig as SklearnDataSourceConfig
    from bbnode.components.data.statistics import Moments as Moments
    from bbnode.components.data.statistics import StandardizedConfig as StandardizedConfig
    from bbnode.components.data.statistics import StandardizedDataSource as StandardizedDataSource
    from bbnode.components.data.tables import TableDataSource as TableDataSource
    from bbnode.components.data.tables import TableDataSourceConfig as TableDataSourceConfig
    from bbnode.components.data.text import TextDataSource as TextDataSource
    from bbnode.components.data.text import TextDataSourceConfig as TextDataSourceConfig
    from bbnode.components.encoders.files import sentence_encoder as sentence_encoder
    from bbnode.components.encoders.passages import passages as passages
    from bbnode.components.encoders.sentences import SentenceEncoder as SentenceEncoder
    from bbnode.components.encoders.text_encoder import TextEncoder as TextEncoder
    from bbnode.components.encoders.text_encoder import TextEncoderConfig as TextEncoderConfig
    from bbnode.components.errors import BackendError as BackendError
    from bbnode.components.errors import BackendUnavailable as BackendUnavailable
    from bbnode.components.errors import CodeRefused as CodeRefused
    from bbnode.components.errors import ComponentError as ComponentError
    from bbnode.components.errors import ContributionRefused as ContributionRefused
    from bbnode.components.errors import DataDiffers as DataDiffers
    from bbnode.components.errors import DataDoesNotFit as DataDoesNotFit
    from bbnode.components.errors import DataUnavailable as DataUnavailable
    from bbnode.components.errors import ExchangeRefused as ExchangeRefused
    from bbnode.components.errors import GraphKilled as GraphKilled
    from bbnode.components.errors import InvalidComponentConfig as InvalidComponentConfig
    from bbnode.components.errors import MismatchedShapes as MismatchedShapes
    from bbnode.components.errors import NobodyTrusted as NobodyTrusted
    from bbnode.components.errors import NonFiniteAggregate as NonFiniteAggregate
    from bbnode.components.errors import NotEncodable as NotEncodable
    from bbnode.components.errors import NotEnoughContributions as NotEnoughContributions
    from bbnode.components.errors import NotEnoughPeers as NotEnoughPeers
    from bbnode.components.errors import NotExportable as NotExportable
    from bbnode.components.errors import NothingToAggregate as NothingToAggregate
    from bbnode.components.errors import ParameterMismatch as ParameterMismatch
    from bbnode.components.errors import StatisticsMissing as StatisticsMissing
    from bbnode.components.errors import StatisticsRefused as StatisticsRefused
    from bbnode.components.errors import TextRefused as TextRefused
    from bbnode.components.errors import TrainingFailed as TrainingFailed
    from bbnode.components.errors import UnsupportedByDataSource as UnsupportedByDataSource
    from bbnode.components.errors import UnsupportedByModel as UnsupportedByModel
    from bbnode.components.errors import UnsupportedSelection as UnsupportedSelection
    from bbnode.components.errors import WeightsNotFinite as WeightsNotFinite
    from bbnode.components.gossip.base import RoundUnderWay as RoundUnderWay
    from bbnode.components.gossip.base import StaleRound as StaleRound
    from bbnode.components.gossip.mixing import RoundMixing as RoundMixing
    from bbnode.components.gossip.mixing import RoundMixingConfig as RoundMixingConfig
    from bbnode.components.gossip.pairwise import PairwiseMean as PairwiseMean
    from bbnode.components.gossip.pairwise import PairwiseMeanConfig as PairwiseMeanConfig
    from bbnode.components.gossip.swarm import SwarmRounds as SwarmRounds
    from bbnode.components.gossip.swarm import SwarmRoundsConfig as SwarmRoundsConfig
    from bbnode.components.gossip.topology import TooManyPeers as TooManyPeers
    from bbnode.components.indexes.base import VectorIndex as VectorIndex
    from bbnode.components.indexes.base import VectorIndexConfig as VectorIndexConfig
    from bbnode.components.indexes.collection import Collection as Collection
    from bbnode.components.indexes.errors import FilterRefused as FilterRefused
    from bbnode.components.indexes.errors import IndexDamaged as IndexDamaged
    from bbnode.components.indexes.errors import IndexInUse as IndexInUse
    from bbnode.components.indexes.errors import IndexMismatch as IndexMismatch
    from bbnode.components.indexes.errors import IndexUnavailable as IndexUnavailable
    from bbnode.components.indexes.errors import InvalidSearch as InvalidSearch
    from bbnode.components.indexes.errors import ItemRefused as ItemRefused
    from bbnode.components.indexes.errors import NotTrained as NotTrained
    from bbnode.components.indexes.errors import SearchRefused as SearchRefused
    from bbnode.components.indexes.errors import TrainingRefused as TrainingRefused
    from bbnode.components.indexes.errors import VectorRefused as VectorRefused
    from bbnode.components.indexes.errors import WrongDimensions as WrongDimensions
    from bbnode.components.indexes.flat import FlatIndex as FlatIndex
    from bbnode.components.indexes.hnsw import HnswIndex as HnswIndex
    from bbnode.components.indexes.hnsw import HnswIndexConfig as HnswIndexConfig
    from bbnode.components.indexes.ivf_pq import IvfPqIndex as IvfPqIndex
    from bbnode.components.indexes.ivf_pq import IvfPqIndexConfig as IvfPqIndexConfig
    from bbnode.components.indexes.searchers import Rows as Rows
    from bbnode.components.indexes.searchers import Searcher as Searcher
    from bbnode.components.models.lora import Lora as Lora
    from bbnode.components.models.mlp import mlp_forward as mlp_forward
    from bbnode.components.models.onnx_model import HeldModel as HeldModel
    from bbnode.components.models.onnx_model import OnnxModel as OnnxModel
    from bbnode.components.models.onnx_model import OnnxModelConfig as OnnxModelConfig
    from bbnode.components.models.state_vector import StateVector as StateVector
    from bbnode.components.models.state_vector import StateVectorConfig as StateVectorConfig
    from bbnode.components.models.torch_model import TorchModel as TorchModel
    from bbnode.components.models.torch_model import TorchModelConfig as TorchModelConfig
    from bbnode.components.models.trees import BoostedTrees as BoostedTrees
    from bbnode.components.models.trees import BoostedTreesConfig as BoostedTreesConfig
    from bbnode.components.models.trees import HeldTrees as HeldTrees
    from bbnode.components.peer_registry.client import GlobalRegistryClient as GlobalRegistryClient
    from bbnode.components.peer_registry.client import (
        GlobalRegistryClientConfig as GlobalRegistryClientConfig,
    )
    from bbnode.components.peer_registry.client import GlobalRegistryView as GlobalRegistryView
    from bbnode.components.peer_registry.server import GlobalRegistryServer as GlobalRegistryServer
    from bbnode.components.peer_registry.server import (
        GlobalRegistryServerConfig as GlobalRegistryServerConfig,
    )
    from bbnode.components.placement.guests import GuestItems as GuestItems
    from bbnode.components.placement.guests import GuestItemsConfig as GuestItemsConfig
    from bbnode.components.placement.rendezvous import ItemPlacement as ItemPlacement
    from bbnode.components.placement.rendezvous import ItemPlacementConfig as ItemPlacementConfig
    from bbnode.components.privacy.accounting import epsilon_after as epsilon_after
    from bbnode.components.privacy.model import PrivateModel as PrivateModel
    from bbnode.components.privacy.model import PrivateModelConfig as PrivateModelConfig
    from bbnode.components.privacy.release import PrivateSum as PrivateSum
    from bbnode.components.privacy.release import PrivateSumConfig as PrivateSumConfig
    from bbnode.components.registry import ConfigTypeMismatch as ConfigTypeMismatch
    from bbnode.components.registry import UnknownComponentType as UnknownComponentType
    from bbnode.components.registry import concrete as concrete
    from bbnode.components.registry import register_component as register_component
    from bbnode.components.secure_aggregation.client import SecAggClient as SecAggClient
    from bbnode.components.secure_aggregation.graph import neighbours_for as neighbours_for
    from bbnode.components.secure_aggregation.plan import RoundPlan as RoundPlan
    from bbnode.components.secure_aggregation.plan import SecAggConfig as SecAggConfig
    from bbnode.components.secure_aggregation.server import SecAggServer as SecAggServer
    from bbnode.components.selectors.centroids import CentroidSelector as CentroidSelector
    from bbnode.components.selectors.centroids import (
        CentroidSelectorConfig as CentroidSelectorConfig,
    )
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
    from bbnode.components.settings import host_setting as host_setting
    from bbnode.components.settings import local_setting as local_setting
    from bbnode.components.settings import path_setting as path_setting
    from bbnode.components.topics import BytesTopic as BytesTopic
    from bbnode.components.topics import NothingPublished as NothingPublished
    from bbnode.components.topics import Topic as Topic
    from bbnode.components.topics import TopicConfig as TopicConfig
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
    from bbnode.ir.values import Hit as Hit
    from bbnode.ir.values import Metadata as Metadata
    from bbnode.ir.values import MetadataVec as MetadataVec
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
