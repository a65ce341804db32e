"""The rule for what peers send: read in one module, shown by it, and nowhere looped over freely."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import bbnode
from tests.hostile.fuzz import decoders

PACKAGE = Path(bbnode.__file__).parent
# The one module that reads msgpack of others, and the only one that may loop over it.
DECODING = "ir/decoding.py"
# What these read was written by this node itself: states of its own components, and snapshots.
OWN_STATE = {
    "components/topics.py",
    "sim/topics.py",
    "components/codecs/base.py",
    "components/data/base.py",
    "components/data/statistics.py",
    "components/indexes/filters.py",
    "components/placement/guests.py",
    "components/peer_registry/server.py",
    "components/peer_registry/client.py",
    "components/privacy/model.py",
    "components/privacy/release.py",
    "components/selectors/views.py",
    "daemon/state/checkpoint.py",
    "engine/snapshot/whole.py",
}
# Show names that stand in an artifact, which are texts of a bounded length.
SHOW_ARTIFACTS = {"components/registry.py", "engine/snapshot/names.py"}
# Reads what the processes of one simulation tell each other, of a bounded depth.
OWN_PROCESSES = {"sim/plain.py"}
# Names of functions that make something of bytes or text; `decode_all` is an op of codecs, each of
# which reads codes through `BytesCodec.open`.
_IS_DECODER = re.compile(
    r"(decode_(?!all)\w+|\w+_from_(bytes|text)|open_(membership|revocations)|peek)\Z"
)
# Where such functions read what the operator or the node itself wrote, or call another decoder.
OWN_DECODERS = {"membership_from_text", "revocations_from_text"}
# Bodies of frames: fixed structs, reached through `FrameDecoder`, which is fuzzed.
FRAME_BODIES = {"decode_ack", "decode_resume", "decode_open"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.name.endswith("_pb2.py"):
            yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text("utf-8"))


def decodes(tree: ast.Module) -> bool:
    """Whether a module handles what peers send: it uses the decoding module, or has a decoder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module == "bbnode.ir.decoding":
                return True
            if node.module == "bbnode.ir" and "decoding" in {a.name for a in node.names}:
                return True
        if isinstance(node, ast.FunctionDef) and _IS_DECODER.match(node.name):
            return True
    return False


def unpacks(tree: ast.Module) -> list[int]:
    """Lines that read msgpack by themselves."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("unpackb", "unpack", "loads", "Unpacker")
        and isinstance(node.value, ast.Name)
        and node.value.id == "msgpack"
    ]


def faults(tree: ast.Module) -> list[str]:
    """What a module must not do that handles what peers send."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and node.conversion in (ord("r"), ord("a")):
            found.append(f"{node.lineno}: shows a value by its repr; take `shown` or `clip`")
        if isinstance(node, ast.Name) and node.id in ("repr", "ascii"):
            found.append(f"{node.lineno}: repr recurses and has no bound; take `shown`")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = {a.arg for a in (*node.args.args, *node.args.kwonlyargs)}
            if calls_itself(node) and "depth" not in arguments:
                found.append(f"{node.lineno}: {node.name} recurses without a depth")
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and not ends(node):
            found.append(f"{node.lineno}: loops without an end")
        if isinstance(node, ast.ExceptHandler) and names_a_decoding_library(node):
            found.append(f"{node.lineno}: lists what a library raises; take `Boundary`")
    return found


def ends(loop: ast.While) -> bool:
    """Whether anything in a loop leaves it."""
    return any(isinstance(node, ast.Raise | ast.Return | ast.Break) for node in ast.walk(loop))


def calls_itself(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function calls its own name, as a function or as a method of its own object."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id == function.name:
            return True
        if (
            isinstance(called, ast.Attribute)
            and called.attr == function.name
            and isinstance(called.value, ast.Name)
            and called.value.id in ("self", "cls")
        ):
            return True
    return False


def names_a_decoding_library(handler: ast.ExceptHandler) -> bool:
    return handler.type is not None and any(
        isinstance(node, ast.Name) and node.id in ("msgpack", "MultiaddrError")
        for node in ast.walk(handler.type)
    )


def test_one_module_reads_the_msgpack_of_others() -> None:
    found = {where: lines for where, tree in modules() if (lines := unpacks(tree))}
    assert set(found) == OWN_STATE | {DECODING}, found


def test_modules_of_decoders_do_not_show_recurse_or_loop_freely() -> None:
    handling = {
        where: tree
        for where, tree in modules()
        if decodes(tree) and where not in SHOW_ARTIFACTS | OWN_PROCESSES | {DECODING}
    }
    # Those that are known to; a rename must not take them out of the test's sight.
    assert {
        "access/exchange.py", "access/sealed.py", "access/ticket.py", "ir/address.py",
        "ir/codec.py", "ir/envelope.py", "ir/peer.py", "transport/links/hello.py",
        "transport/links/framing.py", "transport/mdns.py", "transport/libp2p/relay/messages.py",
        "components/wire_records.py", "daemon/network/dial_back.py",
    } <= set(handling)  # fmt: skip
    assert {where: bad for where, tree in handling.items() if (bad := faults(tree))} == {}


def test_every_decoder_is_fuzzed() -> None:
    table = Path(decoders.__file__).read_text("utf-8")
    missing = [
        f"{where}: {node.name}"
        for where, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and _IS_DECODER.match(node.name)
        and node.name not in OWN_DECODERS | FRAME_BODIES
        and not re.search(rf"\b{node.name}\b", table)
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("source", "told"),
    [
        # As they stood when a message of a kilobyte could end a node.
        (
            "def _need_u64(item):\n    raise DecodeError(f'expected an integer, got {item!r:.40}')",
            "by its repr",
        ),
        ("def show(item):\n    return repr(item)[:40]", "repr recurses"),
        (
            "try:\n    read()\nexcept (ValueError, msgpack.exceptions.UnpackException):\n    pass",
            "lists what a library raises",
        ),
        (
            "def size_of(value):\n    return sum(size_of(child) for child in value)",
            "recurses without a depth",
        ),
        (
            "class A:\n    def _read(self, item):\n        return [self._read(i) for i in item]",
            "recurses without a depth",
        ),
        ("while True:\n    at += data[at]", "loops without an end"),
    ],
)
def test_the_test_finds_faults(source: str, told: str) -> None:
    (found,) = faults(ast.parse(source))
    assert told in found


def test_the_test_finds_who_unpacks() -> None:
    assert unpacks(ast.parse("import msgpack\nx = msgpack.unpackb(data)")) == [2]
    assert unpacks(ast.parse("import msgpack\nx = msgpack.Unpacker()")) == [2]


def test_what_is_bounded_passes() -> None:
    source = (
        "def read(view, depth):\n    if depth > 16:\n        raise DecodeError('deep')\n"
        "    return [read(part, depth + 1) for part in view]\n"
        "while True:\n    if at > end:\n        raise DecodeError('cut')\n"
    )
    assert faults(ast.parse(source)) == []
