"""The ops of the protocol `updates`, in the order of an update's way."""

from __future__ import annotations

from functools import partial
from typing import Final

from bbnode.ir.opset import protocol_op

PROTOCOL: Final = "updates"

_op = partial(protocol_op, PROTOCOL)

_op("Give", "weights:float", "weights:float version:int64",
    doc="Weights for who asks, with their version; none, and -1, if it has answered this version.",
)  # fmt: skip
_op("Begin", "responses:responses", "work:bool weights:float version:int64",
    doc="On a client: what the server gave; `work` is false where it gave none.")  # fmt: skip
_op("Take", "tensor:float metadata:metadata version:int64", "full:bool",
    doc="Add an update to the buffer; `full` says that it is time for a step.")  # fmt: skip
_op("Collect", "", "tensor:float kept:float stats:metadata",
    doc="Empty the buffer; `kept` is the part of the server's weights that mixing leaves.",
)  # fmt: skip
_op("Publish", "weights:float", "version:int64",
    doc="The server has new weights: the next version.")  # fmt: skip
