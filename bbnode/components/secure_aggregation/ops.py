"""The ops of the protocol `secagg`, in the order of a round."""

from __future__ import annotations

from functools import partial
from typing import Final

from bbnode.ir.opset import protocol_op

PROTOCOL: Final = "secagg"

_op = partial(protocol_op, PROTOCOL)

# Of the server.
_op("Begin", "peers:peers", "round:bytes", doc="Begin a round with these clients.")
_op("CollectKeys", "responses:responses", "kept:bool listing:bytes",
    doc="The list of all keys; `kept` says of each peer that answered if its answer counts.",
)  # fmt: skip
_op("CollectLetters", "responses:responses", "kept:bool",
    doc="Take the letters of clients to others.")  # fmt: skip
_op("Mail", "round:bytes", "mail:bytes", doc="The letters to the client that asks.")
_op("CollectVectors", "responses:responses", "kept:bool listing:bytes",
    doc="Sum masked vectors up; the list of survivors.")  # fmt: skip
_op("CollectSignatures", "responses:responses", "kept:bool signatures:bytes",
    doc="The survivors' signatures of their list.")  # fmt: skip
_op("Unmask", "responses:responses", "mean:float stats:metadata",
    doc="The weighted mean of the survivors' vectors.")  # fmt: skip

# Of a client.
_op("AdvertiseKeys", "round:bytes", "keys:bytes", doc="Draw keys; the public ones, signed.")
_op("ShareKeys", "listing:bytes", "letters:bytes", doc="Sealed shares for neighbours.")
_op("CurrentRound", "", "round:bytes", doc="The round whose vector the server waits for.")
_op("Mask", "mail:bytes tensor:float metadata:metadata", "masked:uint8 metadata:metadata",
    doc="A vector under masks; its `num_samples` is its weight, and nothing of the metadata goes "
    "on.")  # fmt: skip
_op("Confirm", "listing:bytes", "signature:bytes", doc="Sign the list of survivors.")
_op("Reveal", "signatures:bytes", "shares:bytes", doc="Shares of each neighbour, of one kind.")
