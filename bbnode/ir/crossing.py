"""Crossings: what a program's targets send and take, by site, as peers tell each other.

Rule: two peers with different programs work together on the crossings that agree: those with the
same site and compatible sizes on both sides. Nothing is sent to a site with incompatible sizes, and
its peer is chosen for no work. Everything else is informative: it only determines which of the
other's crossings is shown as the counterpart of one's own. Sizes that one side does not state are
not compared; arriving values are checked in any case.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Final

import msgpack

from bbnode.ir import keys, opset
from bbnode.ir.address import parse_site_suffix, site_suffix
from bbnode.ir.caps import MAX_CROSSING_TEXT_BYTES, MAX_CROSSINGS, MAX_CROSSINGS_BYTES
from bbnode.ir.decoding import Boundary, shown, unpack
from bbnode.ir.errors import DecodeError
from bbnode.ir.graph import Function, OpNode, is_wire
from bbnode.ir.shapes import Dim, shape_text

KINDS: Final = ("send", "request", "response")
_KIND_OF: Final = {
    keys.OP_SEND: "send",
    keys.OP_RECV: "send",
    keys.OP_SEND_REQ_BATCHED: "request",
    keys.OP_RECV_REQ: "request",
    keys.OP_SEND_RESP: "response",
    keys.OP_RECV_RESP_BATCHED: "response",
}
_SENDS, _TAKES = 1, 2
# Ops that hand a value on unchanged.
_PASS_ON: Final = keys.GATE_OPS | {keys.OP_DEADLINE_CHECK, "PassThrough"}
_CODEC: Final = keys.role_domain("Codec")
_FIELDS = 6
# Separates type and shape in one text, which earlier releases display and accept.
_OF = " of "
_SHAPE = r"(?:\[[^][]*\]|\?)"
_SHAPES = re.compile(rf"{_SHAPE}(?:, {_SHAPE})*")
_NUMBER = re.compile(r"[0-9]+")
_SIZE = re.compile(r"[0-9]{1,18}")
_MAX_SITE = (1 << 64) - 1
# Decoded encodings of other versions in the cache; a network has two or three versions at a time.
_KEPT_VERSIONS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One site that a peer's targets send to, take from, or both.

    The texts are empty where a program has more than fits; `type` is empty also in an artifact of
    an earlier release. `shape` is what the program declares of the tensor, as `shape_text` writes
    it, of a bundle that of each part, with `?` for none; empty where it declares nothing. Of a
    code it is the shape of what the code stands for.

    The last three are a node's own and not told: `declared` is the shape that the program's author
    declares, `inferred` that which follows from the sizes of its models, and `models` names for
    each part the slot whose parameters it is, "" for none.
    """

    site: int
    sends: bool
    takes: bool
    kind: str
    port: str
    receiver: str
    type: str
    shape: str = ""
    declared: str = field(default="", compare=False)
    inferred: str = field(default="", compare=False)
    models: tuple[str, ...] = field(default=(), compare=False)

    @property
    def sized_type(self) -> str:
        """The type, with the shape if there is one: `Tensor.FLOAT of [4, 3]`."""
        return f"{self.type}{_OF}{self.shape}" if self.type and self.shape else self.type

    @property
    def counterpart(self) -> tuple[str, str, str]:
        """The key under which crossings of two versions that are meant to be one agree."""
        return self.receiver, self.port, self.kind


def crossings_of(
    mains: Iterable[Function], others: Iterable[Function] = ()
) -> tuple[Crossing, ...]:
    """Return the crossings of partition mains, by site. Malformed ones are left to the planner.

    `others` are the mains of the program's other classes: what they send or take here may be the
    only one to say its shape, as that of an answer.
    """
    by_site = _crossings_by_site(mains)
    known = _crossings_by_site(others)
    for site, each in by_site.items():
        if site in known:
            by_site[site] = _with_shapes(each, known[site])
    return tuple(by_site[site] for site in sorted(by_site))


def _with_shapes(crossing: Crossing, other: Crossing) -> Crossing:
    """Return a crossing with the shape that another end of its site declares."""
    declared = crossing.declared or other.declared
    inferred = crossing.inferred or other.inferred
    return replace(crossing, shape=inferred or declared, declared=declared, inferred=inferred)


def _crossings_by_site(mains: Iterable[Function]) -> dict[int, Crossing]:
    by_site: dict[int, Crossing] = {}
    for main in mains:
        for node in main.nodes:
            if not is_wire(node):
                continue
            for each in _crossings(main, node):
                known = by_site.get(each.site)
                if known is not None:
                    each = replace(
                        _with_shapes(known, each),
                        sends=known.sends or each.sends,
                        takes=known.takes or each.takes,
                        models=known.models or each.models,
                    )
                by_site[each.site] = each
    return by_site


def port_of(node: OpNode) -> str | None:
    """Return the port of a wire op, behind the calls of Modules that lead to it; None without."""
    port, scope = node.metadata.get(keys.PORT_KEY), node.metadata.get(keys.PORT_SCOPE_KEY)
    return f"{scope}/{port}" if scope and port else port


def _crossings(main: Function, node: OpNode) -> Iterator[Crossing]:
    metadata = node.metadata
    kind = _KIND_OF.get(node.op_type)
    if kind is None:
        return
    takes = node.op_type in keys.RECV_OPS
    sites: list[tuple[int | None, str]] = []
    if takes:
        text = metadata.get(keys.SITE_ID_KEY, "")
        name = node.outputs[0] if node.outputs else ""
        sites.append((int(text) if text.isascii() and text.isdigit() else None, name))
    else:
        for name, attribute in node.attributes.items():
            if name.startswith(keys.DEST_SUFFIX_PREFIX) and isinstance(attribute.value, bytes):
                data = name.removeprefix(keys.DEST_SUFFIX_PREFIX)
                value = metadata.get(keys.DEST_SITE_NAME_PREFIX + data, "")
                sites.append((parse_site_suffix(attribute.value), value))
    arrives = node.outputs if takes else node.inputs
    is_one = bool(arrives) and len(sites) == 1
    declared = _shape(main, arrives[0]) if is_one else ""
    inferred = "" if takes else metadata.get(keys.CROSSING_SHAPE_KEY, "")
    if metadata.get(keys.WIRE_TRANSPORT_KEY) == keys.TRANSPORT_TRIGGER_ONLY or not is_one:
        inferred = ""  # of several, or of no payload
    if len(inferred) > MAX_CROSSING_TEXT_BYTES or not _is_shapes(inferred):
        inferred = ""
    models: tuple[str, ...] = ()
    if is_one:
        models = _loaded(main, arrives[0]) if takes else _read(main, arrives[0])
    to = metadata.get(keys.HOME_KEY if takes else keys.PEER_CLASS_KEY, "")
    scope = metadata.get(keys.PORT_SCOPE_KEY)
    for site, value in sites:
        if site is None or site > _MAX_SITE:
            continue
        port = metadata.get(keys.PORT_KEY) or value
        yield Crossing(
            site=site,
            sends=not takes,
            takes=takes,
            kind=kind,
            port=f"{scope}/{port}" if scope else port,
            receiver=main.metadata.get(keys.HOME_KEY, "") if takes else to,
            type=metadata.get(keys.CROSSING_TYPE_KEY, ""),
            shape=inferred or declared,
            declared=declared,
            inferred=inferred,
            models=models,
        )


def _shape(main: Function, value: str) -> str:
    """Return the declared shape of a value, or of each part of a bundle."""
    maker = main.producer(value)
    seen: set[str] = set()
    while maker is not None and maker.op_type in _PASS_ON and maker.inputs and value not in seen:
        seen.add(value)
        if _declared(main, value) is not None:
            break
        value = maker.inputs[0]
        maker = main.producer(value)
    is_bundle = (
        maker is not None
        and maker.op_type == keys.OP_BUNDLE
        and maker.domain == keys.COMPOSITE_DOMAIN
    )
    names = maker.inputs if maker is not None and is_bundle else [value]
    shapes = [_declared(main, name) for name in names]
    if all(each is None for each in shapes):
        return ""
    return ", ".join("?" if each is None else shape_text(each) for each in shapes)


def _is_shapes(text: str) -> bool:
    return _SHAPES.fullmatch(text) is not None


def _read(main: Function, value: str) -> tuple[str, ...]:
    """Return the slots of the models whose parameters a value is, part by part; () for none."""
    name, maker = _source(main, value)
    is_bundle = maker is not None and maker.op_type == keys.OP_BUNDLE
    sources = [_source(main, each) for each in maker.inputs] if maker and is_bundle else []
    found = tuple(_slot_of(each, made, 1) for made, each in sources or [(name, maker)])
    return found if any(found) else ()


def _source(main: Function, value: str) -> tuple[str, OpNode | None]:
    """Return the original of a value that was handed on or encoded, and the op that made it."""
    maker, seen = main.producer(value), {value}
    while maker is not None and _hands_on(maker, "Encode") and maker.inputs[0] not in seen:
        value = maker.inputs[0]
        seen.add(value)
        maker = main.producer(value)
    return value, maker


def _loaded(main: Function, value: str) -> tuple[str, ...]:
    """Return the slots of the models that load a value, part by part; () for none."""
    in_parts = [
        tuple(_loader(main, each) for each in node.outputs)
        for node, _ in _ends(main, value)
        if node.op_type == keys.OP_UNBUNDLE and node.domain == keys.COMPOSITE_DOMAIN
    ]
    loaders = max(in_parts, default=(_loader(main, value),))
    return loaders if any(loaders) else ()


def _loader(main: Function, value: str) -> str:
    """Return the slot of a model that loads a value, the last by name of several; "" for none."""
    return max((_slot_of(node, name, 0) for node, name in _ends(main, value)), default="")


def _ends(main: Function, value: str) -> Iterator[tuple[OpNode, str]]:
    """Yield the ops that read a value, past ops that pass it on or decode it, and the name read."""
    names, seen = [value], {value}
    while names:
        name = names.pop()
        for node in main.readers(name):
            if not _hands_on(node, "Decode") or node.inputs[0] != name:
                yield node, name
                continue
            fresh = [each for each in node.outputs[:1] if each not in seen]
            seen.update(fresh)
            names += fresh


def _hands_on(node: OpNode, coding: str) -> bool:
    """Return True if an op hands its first input on, or is this op of a codec."""
    is_coding = node.domain == _CODEC and node.op_type == coding
    return bool(node.inputs) and (node.op_type in _PASS_ON or is_coding)


def _slot_of(node: OpNode | None, value: str, side: int) -> str:
    """Return the slot of which a value is all parameters, that an op reads (0) or makes (1)."""
    if node is None:
        return ""
    vectors = opset.model_vectors(node.domain, node.op_type, node.inputs, node.outputs)
    return node.metadata.get(keys.SLOT_KEY, "") if value in vectors[side] else ""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The parameters of a model for which a program was compiled; `fixed`: for no other number."""

    parameters: int
    fixed: bool = False


def model_sizes(metadata: Mapping[str, str]) -> dict[str, ModelSize]:
    """Return what a program's metadata say of its models, by slot; malformed ones are left out."""
    sizes = {}
    for key, text in metadata.items():
        number = text.removesuffix(keys.MODEL_SIZE_FIXED)
        if key.startswith(keys.MODEL_SIZE_PREFIX) and _SIZE.fullmatch(number):
            slot = key.removeprefix(keys.MODEL_SIZE_PREFIX)
            sizes[slot] = ModelSize(int(number), fixed=number != text)
    return sizes


def at_node(
    crossings: Sequence[Crossing], sizes: Mapping[str, int], expected: Mapping[str, ModelSize]
) -> tuple[Crossing, ...]:
    """Return the crossings of a program as a node has them whose models have these sizes.

    Args:
        crossings: of the program.
        sizes: the parameters of each model, by slot, as far as they are known here.
        expected: those for which the program was compiled. Where all models that had one size have
            another one, what follows from it is of that one; and is not stated where only some do.
    """
    if not sizes:
        return tuple(crossings)
    moved: dict[int, set[int]] = {}
    for slot, size in sizes.items():
        if slot in expected:
            moved.setdefault(expected[slot].parameters, set()).add(size)
    is_one = all(len(now) == 1 for now in moved.values())
    others = {size: min(now) for size, now in moved.items()}
    by_size = {f"[{size}]": slot for slot, size in sizes.items()}
    found = []
    for each in crossings:
        follows = bool(each.inferred) and is_one
        text = _with_sizes(each.inferred, others) if follows else each.declared
        parts = re.findall(_SHAPE, text) or ["?"] * len(each.models)
        models = each.models if len(parts) == len(each.models) else ("",) * len(parts)
        for at, slot in enumerate(models):
            if slot in sizes:
                parts[at] = f"[{sizes[slot]}]"
        # Other vectors with the size of a model are taken for parameters, too.
        known = by_size if follows else {}
        named = tuple(s or known.get(part, "") for s, part in zip(models, parts, strict=True))
        shape = ", ".join(parts) if any(part != "?" for part in parts) else ""
        found.append(replace(each, shape=shape, models=named if any(named) else ()))
    return tuple(found)


def with_size(shapes: str, size: int, other: int) -> str:
    """Return the shapes with all axes of length `size` changed to `other`."""
    return _with_sizes(shapes, {size: other})


def _with_sizes(shapes: str, moved: Mapping[int, int]) -> str:
    return _NUMBER.sub(lambda found: str(moved.get(int(found[0]), found[0])), shapes)


def unrunnable(
    sizes: Mapping[str, int], expected: Mapping[str, ModelSize]
) -> dict[str, tuple[int, int]]:
    """Return the slots whose models can't run the program, with their size and the fixed size."""
    return {
        slot: (size, expected[slot].parameters)
        for slot, size in sizes.items()
        if slot in expected and expected[slot].fixed and expected[slot].parameters != size
    }


def _declared(main: Function, value: str) -> Sequence[Dim] | None:
    declared = main.types.get(value)
    if declared is None or declared.shape is None:
        return None
    # Names of axes are arbitrary; only lengths are compared.
    return [a if isinstance(a, int) or str(a).isidentifier() else None for a in declared.shape]


# --- encoding --------------------------------------------------------------------------------


def encode_crossings(crossings: Sequence[Crossing]) -> bytes:
    """Return the encoded form, with fewer texts if it would be too long.

    The shapes are dropped first, then all texts; the result is empty if that is still too long.
    """
    if len(crossings) > MAX_CROSSINGS:
        return b""
    for sizes, texts in ((True, True), (False, True), (False, False)):
        raw: bytes = msgpack.packb([_row(each, sizes=sizes, texts=texts) for each in crossings])
        if len(raw) <= MAX_CROSSINGS_BYTES:
            break
    return raw


def _row(each: Crossing, *, sizes: bool, texts: bool) -> list[object]:
    named = (_clipped(each.port), _clipped(each.receiver), _typed(each, sizes=sizes))
    return [
        *(each.site, _SENDS * each.sends + _TAKES * each.takes, KINDS.index(each.kind)),
        *(named if texts else ("", "", "")),
    ]


def _clipped(text: str) -> str:
    """Return the text in an acceptable form: printable and short."""
    text = "".join(char if char.isprintable() else "?" for char in text)
    while len(text.encode("utf-8", "replace")) > MAX_CROSSING_TEXT_BYTES:
        text = text[: MAX_CROSSING_TEXT_BYTES // 4 - 1] + "…"
    return text


def _typed(each: Crossing, *, sizes: bool) -> str:
    """Return the text for the type, without the shape if both are too long."""
    text = _clipped(each.sized_type)
    return text if sizes and text == each.sized_type else _clipped(each.type)


@lru_cache(maxsize=_KEPT_VERSIONS)
def decode_crossings(raw: bytes) -> tuple[Crossing, ...] | None:
    """Return the crossings in a peer's hello; None if it states none. Raises DecodeError."""
    if not raw:
        return None
    with Boundary("a list of crossings is malformed", DecodeError):
        rows = unpack(
            raw,
            max_bytes=MAX_CROSSINGS_BYTES,
            max_values=1 + MAX_CROSSINGS * (1 + _FIELDS),
            max_depth=2,
        )
        if not isinstance(rows, list) or len(rows) > MAX_CROSSINGS:
            raise DecodeError(f"crossings that are no list of at most {MAX_CROSSINGS}")
        crossings = tuple(map(_decoded, rows))
    sites = [each.site for each in crossings]
    if any(one >= other for one, other in pairwise(sites)):
        raise DecodeError("crossings whose sites do not rise")
    return crossings


def _decoded(row: object) -> Crossing:
    if not isinstance(row, list) or len(row) != _FIELDS:
        raise DecodeError(f"a crossing that is no list of {_FIELDS}")
    site, roles, kind, *texts = row
    for value, least, most in ((site, 0, _MAX_SITE), (roles, 1, 3), (kind, 0, len(KINDS) - 1)):
        if type(value) is not int or not least <= value <= most:
            raise DecodeError("a crossing with a number that is out of its range")
    for text in texts:
        if not isinstance(text, str) or len(text.encode("utf-8", "replace")) > (
            MAX_CROSSING_TEXT_BYTES
        ):
            raise DecodeError(f"a crossing with a text of over {MAX_CROSSING_TEXT_BYTES} bytes")
        if not text.isprintable():
            raise DecodeError("a crossing with control characters")
    port, receiver, sized = texts
    kind_of_value, separator, shape = sized.rpartition(_OF)
    if not separator or not _SHAPES.fullmatch(shape):
        kind_of_value, shape = sized, ""
    return Crossing(
        site=site, sends=bool(roles & _SENDS), takes=bool(roles & _TAKES), kind=KINDS[kind],
        port=port, receiver=receiver, type=kind_of_value, shape=shape,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sites:
    """The sites that a peer sends to and takes from: its crossings, for comparing with many."""

    sends: frozenset[int]
    takes: frozenset[int]

    def talk_with(self, other: Sites) -> bool:
        """Return True if one of two peers sends what the other takes."""
        return not (self.sends.isdisjoint(other.takes) and self.takes.isdisjoint(other.sends))


def sites_of(raw: bytes) -> Sites:
    """Return the sites of encoded crossings, empty if a peer states none. Raises DecodeError."""
    crossings = decode_crossings(raw) or ()
    return Sites(
        sends=frozenset(each.site for each in crossings if each.sends),
        takes=frozenset(each.site for each in crossings if each.takes),
    )


# --- two versions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A crossing of one side that the other one has not, or not with that type or size.

    `sent` is the type that the sending side sends, `taken` that which the other takes; None: it has
    no such port. `ours` says if it is this side that sends. Both have the declared shape where
    there is one; `sized` is True where nothing but that differs. `models` are the parameters of
    the other's model and of ours where it is these that cross, and their numbers differ.
    `inferred`: our size follows from that of a model, and is no word of the author's on this port.
    """

    port: str
    receiver: str
    kind: str
    ours: bool
    sent: str
    taken: str | None
    sized: bool = False
    models: tuple[int, int] | None = None
    site: int = 0
    inferred: bool = False

    def __str__(self) -> str:
        """Return it as one line, for people."""
        if self.models is not None:
            theirs, ours = self.models
            return f"its model has {theirs:,} parameters, ours has {ours:,}"
        kind = "" if self.kind == "send" else f"{self.kind} "
        start = f"{kind}port {shown(self.port or '?')} of class {shown(self.receiver or '?')}: "
        sender, taker = ("we send", "it takes") if self.ours else ("it sends", "we take")
        start += f"{sender} {self.sent or 'a value'}, {taker} "
        if self.taken is None:
            return f"{start}nothing there"
        if self.taken == self.sent:
            return f"{start}it in a program of another name, or with other parts"
        return start + (self.taken or "another one")


def disagreements(
    ours: Sequence[Crossing], our_classes: Collection[str],
    theirs: Sequence[Crossing] | None, their_classes: Collection[str],
) -> tuple[Disagreement, ...]:  # fmt: skip
    """Return the crossings of which one side sends what the other does not take.

    Sends to a class that the other side does not play do not count; None for `theirs` means
    that the peer states no crossings, so that nothing is known.
    """
    if theirs is None or ours == theirs:
        return ()
    differing = [
        *_unmatched(ours, theirs, their_classes, ours=True),
        *_unmatched(theirs, ours, our_classes, ours=False),
    ]
    return tuple(
        sorted(differing, key=lambda each: (each.receiver, each.port, each.kind, each.ours))
    )


def _unmatched(
    senders: Sequence[Crossing], takers: Sequence[Crossing], classes: Collection[str], *, ours: bool
) -> Iterator[Disagreement]:
    taken = {each.site: each for each in takers if each.takes}
    named = {each.counterpart: each for each in takers if each.takes}
    for each in senders:
        if not each.sends or each.receiver not in classes:
            continue
        same = taken.get(each.site)
        if same is not None and shapes_fit(each.shape, same.shape):
            continue
        other = same or (named.get(each.counterpart) if each.port else None)
        own, its = (each, same) if ours else (same, each)
        models = None if own is None or its is None else _models(its, own)
        yield Disagreement(
            port=each.port, receiver=each.receiver, kind=each.kind, ours=ours,
            sent=each.sized_type if same else each.type,
            taken=None if other is None else other.sized_type if same else other.type,
            sized=same is not None, site=each.site, models=models,
            inferred=models is not None or (own is not None and own.shape != own.declared),
        )  # fmt: skip


def _models(theirs: Crossing, ours: Crossing) -> tuple[int, int] | None:
    """Return the parameter counts of the models on both sides of a crossing, if they differ."""
    pairs = zip(
        ours.models, re.findall(_SHAPE, ours.shape), re.findall(_SHAPE, theirs.shape), strict=False
    )
    for slot, one, other in pairs:
        lengths = [text[1:-1] for text in (other, one)]
        if slot and one != other and all(map(_SIZE.fullmatch, lengths)):
            return int(lengths[0]), int(lengths[1])
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """The work that a peer can't do with this node, because sizes do not fit.

    `suffixes` are sites that this node sends nothing to; `classes` those of the peer's for which it
    is chosen no more, as its model is another; `reason` is one line.
    """

    classes: tuple[str, ...]
    suffixes: tuple[bytes, ...]
    reason: str


def unfit(
    ours: Sequence[Crossing], our_classes: Collection[str],
    theirs: Sequence[Crossing] | None, their_classes: Sequence[str],
) -> Unfit | None:  # fmt: skip
    """Return the work that two sides can't share because of their sizes; None if there is none."""
    found = disagreements(ours, our_classes, theirs, their_classes)
    found = tuple(each for each in found if each.sized)
    if not found:
        return None
    requests = {each.port: each for each in ours if each.sends and each.kind == "request"}
    classes: list[str] = []
    suffixes: list[bytes] = []
    for each in found:
        asked = requests.get(each.port) if each.kind == "response" and not each.ours else None
        # It is unknown which class of a peer sends a one-way message.
        to: Sequence[str] = their_classes
        if each.ours:
            to, site = (each.receiver,), each.site
        elif asked is not None:
            to, site = (asked.receiver,), asked.site
        else:
            site = None
        suffixes += [] if site is None else [site_suffix(site)]
        classes += to if each.inferred else ()
    worst = min(found, key=lambda each: (each.models is None, not each.inferred))
    return Unfit(
        classes=tuple(name for name in their_classes if name in classes),
        suffixes=tuple(dict.fromkeys(suffixes)),
        reason=f"{worst}; let both run the same program{' and model' if worst.inferred else ''}",
    )


def shapes_fit(one: str, other: str) -> bool:
    """Return True unless two declared shapes (`Crossing.shape`) exclude each other."""
    ones, others = re.findall(_SHAPE, one), re.findall(_SHAPE, other)
    if len(ones) != len(others):
        return True  # one of them is not declared
    return all(_fits(_axes(a), _axes(b)) for a, b in zip(ones, others, strict=True))


def _axes(shape: str) -> list[str] | None:
    return None if shape == "?" else [axis for axis in shape[1:-1].split(", ") if axis]


def _fits(one: list[str] | None, other: list[str] | None) -> bool:
    """Compare two shapes; an axis without a length matches any."""
    if one is None or other is None:
        return True
    lengths = [(a, b) for a, b in zip(one, other, strict=False) if a.isdigit() and b.isdigit()]
    return len(one) == len(other) and all(a == b for a, b in lengths)


def not_taken(
    ours: Sequence[Crossing], theirs: Sequence[Crossing] | None, their_classes: Collection[str]
) -> tuple[bytes, ...]:
    """Return the suffixes of the sites that this side sends to and the other one cannot serve.

    Those are sites that it does not have, and sites of requests whose answer it would send to a
    site that this side does not have.
    """
    if theirs is None or ours == theirs:
        return ()
    taken = {each.site for each in theirs if each.takes}
    answered = {each.site for each in theirs if each.sends and each.kind == "response"}
    answers = {each.port: each.site for each in ours if each.takes and each.kind == "response"}
    suffixes = []
    for each in ours:
        if not each.sends or each.receiver not in their_classes:
            continue
        wanted = answers.get(each.port) if each.kind == "request" else None
        if each.site not in taken or (wanted is not None and wanted not in answered):
            suffixes.append(site_suffix(each.site))
    return tuple(suffixes)
