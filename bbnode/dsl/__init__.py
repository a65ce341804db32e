"""The DSL: programs are recorded by running Python.

Rule: an author of programs and of protocol ops imports from here alone. A Module's body records
nodes into a Graph; `Module.build()` returns them as a plain ONNX ModelProto, which the compiler
takes. The imports below are the one list of public names.
"""

from __future__ import annotations

from types import ModuleType as _ModuleType

from bbnode.dsl import peer_lists as peer_lists
from bbnode.dsl import syscalls as syscalls
from bbnode.dsl.backend.control import Branch as Branch
from bbnode.dsl.backend.control import LoopResult as LoopResult
from bbnode.dsl.backend.control import LoopStep as LoopStep
from bbnode.dsl.backend.slot import BackendSlot as BackendSlot
from bbnode.dsl.compiled import CompiledModule as CompiledModule
from bbnode.dsl.core.graph import After as After
from bbnode.dsl.core.graph import Graph as Graph
from bbnode.dsl.core.graph import Output as Output
from bbnode.dsl.core.graph import Request as Request
from bbnode.dsl.core.graph import ResultsOutput as ResultsOutput
from bbnode.dsl.core.module import Module as Module
from bbnode.dsl.core.module import ModuleCall as ModuleCall
from bbnode.dsl.core.module import ModuleOutputs as ModuleOutputs
from bbnode.dsl.core.slot import Slot as Slot
from bbnode.dsl.errors import BadArgument as BadArgument
from bbnode.dsl.errors import BadCut as BadCut
from bbnode.dsl.errors import BadName as BadName
from bbnode.dsl.errors import BranchMismatch as BranchMismatch
from bbnode.dsl.errors import BranchMisuse as BranchMisuse
from bbnode.dsl.errors import BrokenArtifact as BrokenArtifact
from bbnode.dsl.errors import BrokenModel as BrokenModel
from bbnode.dsl.errors import DuplicateName as DuplicateName
from bbnode.dsl.errors import ExternalDataMissing as ExternalDataMissing
from bbnode.dsl.errors import ForeignOutput as ForeignOutput
from bbnode.dsl.errors import GraphClosed as GraphClosed
from bbnode.dsl.errors import ModelTooLarge as ModelTooLarge
from bbnode.dsl.errors import NestingTooDeep as NestingTooDeep
from bbnode.dsl.errors import NoSuchOp as NoSuchOp
from bbnode.dsl.errors import NoSuchTarget as NoSuchTarget
from bbnode.dsl.errors import NotReceived as NotReceived
from bbnode.dsl.errors import OnnxImportError as OnnxImportError
from bbnode.dsl.errors import RecordingError as RecordingError
from bbnode.dsl.errors import RecursiveModule as RecursiveModule
from bbnode.dsl.errors import SlotConflict as SlotConflict
from bbnode.dsl.errors import TooManyStages as TooManyStages
from bbnode.dsl.errors import UnconvertibleModel as UnconvertibleModel
from bbnode.dsl.errors import UnknownName as UnknownName
from bbnode.dsl.errors import UnknownValue as UnknownValue
from bbnode.dsl.errors import UnsupportedDomain as UnsupportedDomain
from bbnode.dsl.errors import UnsupportedPort as UnsupportedPort
from bbnode.dsl.fences import Fence as Fence
from bbnode.dsl.onnx.module import OnnxModule as OnnxModule
from bbnode.dsl.onnx.module import OnnxPart as OnnxPart
from bbnode.dsl.onnx.module import OnnxPipeline as OnnxPipeline
from bbnode.dsl.roles import AggregatorSlot as AggregatorSlot
from bbnode.dsl.roles import CodecSlot as CodecSlot
from bbnode.dsl.roles import DataSourceSlot as DataSourceSlot
from bbnode.dsl.roles import IndexSlot as IndexSlot
from bbnode.dsl.roles import ModelSlot as ModelSlot
from bbnode.dsl.roles import PeerSelectorSlot as PeerSelectorSlot
from bbnode.dsl.roles import ProtocolSlot as ProtocolSlot
from bbnode.dsl.roles import protocol_op as protocol_op
from bbnode.ir import types as types
from bbnode.ir import values as values
from bbnode.ir.graph import Function as Function
from bbnode.ir.peer import PeerId as PeerId
from bbnode.ir.slots import ConcreteSpec as ConcreteSpec

_PUBLIC_MODULES = {peer_lists, syscalls, types, values}
__all__ = [  # all imported names above, without the subpackages
    name
    for name, value in list(globals().items())
    if name[0] != "_"
    and name != "annotations"
    and (not isinstance(value, _ModuleType) or value in _PUBLIC_MODULES)
]
