"""The ops of the protocol `placement`."""

from __future__ import annotations

from functools import partial
from typing import Final

from bbnode.ir.opset import protocol_op

PROTOCOL: Final = "placement"

_op = partial(protocol_op, PROTOCOL)

_op("Placed", "peers:peers vectors:float metadata:metadatas ids:int64", "chosen:bool",
    doc="The mask of the peers that keep one of the items.")  # fmt: skip
_op("Keep", "peers:peers vectors:float metadata:metadatas ids:int64",
    "vectors:float metadata:metadatas ids:int64",
    doc="The items that this peer keeps, of those peers.")  # fmt: skip

GUESTS: Final = "guests"

_op = partial(protocol_op, GUESTS)

_op("Admit", "owner:peer ids:int64", "ids:int64",
    doc="The ids, if items with these may be kept for who brings them.")  # fmt: skip
_op("Release", "owner:peer ids:int64", "ids:int64",
    doc="The ids, if their items are those of who wants them gone.")  # fmt: skip
