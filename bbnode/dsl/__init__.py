"""The DSL: programs are recorded by running Python.

Rule: this is the whole of what an author imports. A Module's body records nodes into a Graph;
`Module.build()` gives them as a plain ONNX ModelProto, which the compiler takes.
"""

from __future__ import annotations

from bbnode.dsl import peer_lists, syscalls
from bbnode.dsl.backend.control import Branch, LoopResult, LoopStep
from bbnode.dsl.backend.slot import BackendSlot
from bbnode.dsl.compiled import CompiledModule
from bbnode.dsl.core.graph import After, Graph, Output, Request
from bbnode.dsl.core.module import Module, ModuleCall, ModuleOutputs
from bbnode.dsl.core.slot import Slot
from bbnode.dsl.errors import (
    BadArgument,
    BadName,
    BranchMismatch,
    BranchMisuse,
    DuplicateName,
    ForeignOutput,
    GraphClosed,
    NoSuchOp,
    NotReceived,
    OnnxImportError,
    RecordingError,
    RecursiveModule,
    SlotConflict,
    UnknownName,
)
from bbnode.dsl.onnx.module import OnnxModule, OnnxPart, OnnxPipeline
from bbnode.dsl.protocol_ops import protocol_op
from bbnode.dsl.roles import (
    AggregatorSlot,
    CodecSlot,
    DataSourceSlot,
    IndexSlot,
    ModelSlot,
    PeerSelectorSlot,
    ProtocolSlot,
)
from bbnode.ir import types, values
from bbnode.ir.peer import PeerId
from bbnode.ir.slots import ConcreteSpec

__all__ = [
    "Module",
    "ModuleCall",
    "ModuleOutputs",
    "CompiledModule",
    "OnnxModule",
    "OnnxPart",
    "OnnxPipeline",
    "Graph",
    "Output",
    "After",
    "Request",
    "Branch",
    "LoopStep",
    "LoopResult",
    "Slot",
    "AggregatorSlot",
    "BackendSlot",
    "CodecSlot",
    "DataSourceSlot",
    "IndexSlot",
    "ModelSlot",
    "PeerSelectorSlot",
    "ProtocolSlot",
    "protocol_op",
    "ConcreteSpec",
    "PeerId",
    "peer_lists",
    "syscalls",
    "types",
    "values",
    "RecordingError",
    "BadArgument",
    "BadName",
    "BranchMismatch",
    "BranchMisuse",
    "DuplicateName",
    "ForeignOutput",
    "GraphClosed",
    "NotReceived",
    "OnnxImportError",
    "RecursiveModule",
    "SlotConflict",
    "UnknownName",
    "NoSuchOp",
]
