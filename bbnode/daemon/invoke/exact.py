"""Values as exact JSON, for clients that compute with outputs.

Rule: an object has `type`, the name of the value's type, and the content of the value: for a tensor
`dtype`, `shape` and `data` (base64 of its elements in C order, little-endian; texts as a list), for
anything else `value`. A float without a JSON form is a text ("nan"). A value that no longer fits
into the answer has `omitted` instead of its content.
"""

from __future__ import annotations

import base64
import math
from typing import Any, Final

import numpy as np
from multiaddr import Multiaddr

from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal
from bbnode.ir.types import OPTIONAL_OF, SEQUENCE_OF, TENSOR_BY_ELEM
from bbnode.ir.values import (
    TRIGGER,
    U64,
    AddressVec,
    CommandId,
    Composite,
    CorrelationToken,
    EventKind,
    Metadata,
    MetadataVec,
    OptionalValue,
    PeerIdVec,
    RequestId,
    ResponseBatch,
    SearchResults,
    TensorSequence,
    Timestamp,
    Trigger,
    Value,
    WireRequestId,
    dtype_of,
    is_text,
    size_of,
    type_of,
)

_NUMBERS: Final[dict[str, type[int]]] = {
    type_of(made(0)).name: made
    for made in (
        *(U64, RequestId, WireRequestId, CommandId),
        *(Timestamp, EventKind, CorrelationToken),
    )
}
_TENSORS: Final = {node.name: node for node in TENSOR_BY_ELEM.values()}
_SEQUENCES: Final = {made.name: element for element, made in SEQUENCE_OF.items()}
_OPTIONALS: Final = {made.name: element for element, made in OPTIONAL_OF.items()}
# Bytes of all values in one answer; base64 turns 3 bytes into 4, and a command reads 16 MiB.
MAX_EXACT_BYTES: Final = 11 << 20


class ValueOmitted(DecodeError):
    """The value was too large for its answer."""


class Encoder:
    """Encodes the values of one answer as JSON, as long as they fit into it together."""

    def __init__(self, max_bytes: int = MAX_EXACT_BYTES) -> None:
        """Create an encoder for at most `max_bytes` of values."""
        self._left = max_bytes

    def __call__(self, value: Value) -> dict[str, Any]:
        """Return a value as JSON."""
        size = size_of(value)
        name = type_of(value).name
        if size > self._left:
            encoded: dict[str, Any] = {
                "type": name,
                "omitted": f"{size} bytes; an answer takes {MAX_EXACT_BYTES} with all its values. "
                "Read it in the process that runs the node (bbnode.api), or have the program "
                "return less",
            }
            if isinstance(value, np.ndarray):
                encoded |= {"dtype": str(value.dtype), "shape": list(value.shape)}
            return encoded
        self._left -= size
        return _encoded(value)


def _encoded(value: Value) -> dict[str, Any]:
    return {"type": type_of(value).name, **_content(value)}


def _content(value: Value) -> dict[str, Any]:
    match value:
        case np.ndarray() | np.generic():
            return _tensor(np.asarray(value))
        case Trigger():
            return {}
        case PeerId() | Multiaddr():
            return {"value": str(value)}
        case bytes() | Metadata() | MetadataVec() | PeerIdVec() | AddressVec():
            return {"value": _plain(value)}
        case SearchResults():
            return {
                "value": [_tensor(value.ids), _tensor(value.distances)],
                "metadata": _plain(value.metadata),
                "senders": _plain(value.senders),
            }
        case ResponseBatch():
            return {
                "value": [{"peer": str(p), "value": _encoded(v)} for p, v in value.responses],
                "missing": [str(peer) for peer in value.missing],
                "reasons": {
                    str(peer): {"kind": why.kind, "detail": why.detail, "where": why.where}
                    for peer, why in value.reasons
                },
            }
        case Composite() | TensorSequence():
            return {"value": [_encoded(child) for child in value]}
        case OptionalValue():
            return {"value": None if value.value is None else _encoded(value.value)}
        case int():
            return {"value": int(value)}
    return {"omitted": "a value of a component's own type"}


def _tensor(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    if is_text(array):
        texts = [str(text) for text in array.reshape(-1).tolist()]
        return {"dtype": "string", "shape": list(array.shape), "data": texts}
    little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    data = base64.b64encode(little.tobytes()).decode("ascii")
    return {"dtype": str(array.dtype.newbyteorder("=")), "shape": list(array.shape), "data": data}


def _plain(value: Any) -> Any:
    match value:
        case bytes():
            return {"bytes": base64.b64encode(value).decode("ascii")}
        case float() if not math.isfinite(value):
            return {"float": str(value)}
        case Metadata():
            return {name: _plain(item) for name, item in value.items()}
        case PeerIdVec() | AddressVec():
            return [str(each) for each in value]
        case tuple():
            return [_plain(each) for each in value]
    return value


def decoded(encoded: Any) -> Value:
    """Return the value that `Encoder` encoded. Raises DecodeError; ValueOmitted if it was left out.

    It comes from a daemon of this user, which may be of another version.
    """
    try:
        if "omitted" in encoded:
            raise ValueOmitted(f"a {encoded['type']} was left out: {encoded['omitted']}")
        return _value(encoded["type"], encoded)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DecodeError(f"an output can't be read: {type(error).__name__}: {error}") from error


def _value(name: str, encoded: Any) -> Value:
    if name in _TENSORS:
        return _array(name, encoded)
    if name in _NUMBERS:
        return _NUMBERS[name](encoded["value"])
    content = encoded.get("value")
    match name:
        case "Trigger":
            return TRIGGER
        case "PeerId":
            return PeerId.parse(content)
        case "Multiaddress":
            return Multiaddr(content)
        case "PeerIdVec":
            return PeerIdVec(PeerId.parse(each) for each in content)
        case "address_vec":
            return AddressVec(Multiaddr(each) for each in content)
        case "Bytes":
            return _read(content)
        case "Metadata":
            return _metadata(content)
        case "MetadataVec":
            return MetadataVec(_metadata_list(content))
        case "SearchResults":
            ids, distances = content
            return SearchResults(
                _array("Tensor.INT64", ids),
                _array("Tensor.FLOAT", distances),
                _metadata_list(encoded["metadata"]),
                [PeerId.parse(each) for each in encoded["senders"]],
            )
        case "ResponseBatch":
            return ResponseBatch(
                responses=tuple((PeerId.parse(e["peer"]), decoded(e["value"])) for e in content),
                missing=tuple(PeerId.parse(peer) for peer in encoded["missing"]),
                reasons=tuple(
                    (PeerId.parse(peer), WireRefusal(**why))
                    for peer, why in encoded["reasons"].items()
                ),
            )
        case "Composite":
            return Composite(decoded(each) for each in content)
    if name in _SEQUENCES:
        return TensorSequence((decoded(each) for each in content), _SEQUENCES[name])
    return OptionalValue(None if content is None else decoded(content), _OPTIONALS[name])


def _array(name: str, encoded: Any) -> Value:
    shape = tuple(int(extent) for extent in encoded["shape"])
    if encoded["dtype"] == "string":
        return np.array(encoded["data"], object).reshape(shape)
    dtype = dtype_of(_TENSORS[name]).newbyteorder("<")
    data = base64.b64decode(encoded["data"], validate=True)
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _metadata(entries: Any) -> Metadata:
    return Metadata({key: _read(item) for key, item in entries.items()})


def _metadata_list(entries: Any) -> list[Metadata]:
    return [_metadata(each) for each in entries]


def _read(entry: Any) -> Any:
    match entry:
        case {"bytes": str() as text}:
            return base64.b64decode(text, validate=True)
        case {"float": str() as text}:
            return float(text)
    return entry
