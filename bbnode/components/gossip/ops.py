"""The ops of gossip's protocols, in the order of a round's way."""

from __future__ import annotations

from functools import partial
from typing import Final

from bbnode.ir.opset import protocol_op

PAIRWISE: Final = "pairwise"
MIXING: Final = "mixing"
SWARM: Final = "swarm"

_op = partial(protocol_op, PAIRWISE)

_op("Take", "initial:float", "current:float",
    doc="What is held, to be changed here; `initial` where nothing is held yet.")  # fmt: skip
_op("Contribute", "value:float", "done:trigger",
    doc="Add what the value changed by since it was taken or contributed last.")  # fmt: skip
_op("Offer", "peers:peers", "offer:float head:int64",
    doc="Begin an exchange with a peer: what is held, and the exchange's numbers.")  # fmt: skip
_op("Answer", "offer:float head:int64", "move:float",
    doc="On the peer: move by half of the difference, and say so; nothing: not now.")  # fmt: skip
_op("Settle", "answers:responses", "closing:int64 held:float stats:metadata",
    doc="Move by as much the other way; `closing` tells the peer if it was.")  # fmt: skip
_op("Close", "closing:int64", "closed:trigger",
    doc="On the peer: the exchange is done, or its move is taken back.")  # fmt: skip

_op = partial(protocol_op, MIXING)

_op("Begin", "view:peers", "round:int64 neighbours:bool",
    doc="Begin the next round; the mask says who is a neighbour in it.")  # fmt: skip
_op("Own", "weights:float", "full:bool",
    doc="What this peer brings into its round; `full`: all for the round is there.")  # fmt: skip
_op("Arrive", "weights:float round:int64", "full:bool",
    doc="What a neighbour brings into a round; `full` as of Own.")  # fmt: skip
_op("Overdue", "round:int64", "late:bool",
    doc="The time of a round is over; true where it waits yet.")  # fmt: skip
_op("Mix", "", "mixed:float stats:metadata",
    doc="The weighted mean of what is there; the round is over.")  # fmt: skip

_op = partial(protocol_op, SWARM)

_op("Begin", "view:peers initial:float", "weights:float round:int64 coordinator:bool",
    doc="Begin the next round; the mask says who coordinates it.")  # fmt: skip
_op("Keep", "weights:float told:metadata", "kept:trigger",
    doc="Keep an update until its round is over: another peer may coordinate it yet.")  # fmt: skip
_op("Next", "view:peers round:int64",
    "late:bool coordinator:bool weights:float told:metadata again:int64 failed:bool",
    doc="A coordinator's time is over: who is next, and its update; or nobody.")  # fmt: skip
_op("Admit", "view:peers weights:float told:metadata round:int64", "fits:bool",
    doc="On a coordinator: an update; true where it is of the round's batch.")  # fmt: skip
_op("Publish", "mean:float", "round:int64",
    doc="On a coordinator: the batch is combined; the round that it was of.")  # fmt: skip
_op("Accept", "view:peers mean:float stats:metadata round:int64", "over:bool",
    doc="New weights from a coordinator; true where they end this peer's round.")  # fmt: skip
_op("Result", "", "weights:float stats:metadata",
    doc="The weights that the round ended with.")  # fmt: skip
