"""Coverage-guided fuzzing of everything that a node takes from the wire; run by hand.

    python -m venv fuzz && fuzz/bin/pip install atheris -e .
    fuzz/bin/python -m tests.engine.fuzz_envelopes -max_total_time=600

Half of the inputs are bytes as they come, half are well-formed envelopes with wild content. Every
64 inputs the node has to come to rest with nothing left behind.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["bbnode"]):
    from bbnode.ir import types
    from tests.engine import fuzzing

_HASHES = (
    *{fuzzing.encoded(value)[1].wire_hash for value in fuzzing.VALUES},
    0,
    types.ANY.wire_hash,
    1 << 63,
)
_PAYLOADS = tuple(fuzzing.encoded(value)[0] for value in fuzzing.VALUES)


class _Under:
    node = fuzzing.node_under_test()
    now_ns = 0
    asked = 0
    count = 0


def _one(data: bytes) -> None:
    given = atheris.FuzzedDataProvider(data)
    source = fuzzing.PEERS[given.ConsumeIntInRange(0, len(fuzzing.PEERS) - 1)]
    if given.ConsumeBool():
        raw = given.ConsumeBytes(1 << 16)
    else:
        count = given.ConsumeIntInRange(0, 4)
        places = range(count)
        raw = fuzzing.envelope(
            suffixes=[
                fuzzing.SUFFIXES[given.ConsumeIntInRange(0, len(fuzzing.SUFFIXES) - 1)]
                if given.ConsumeBool() or given.ConsumeBool()
                else given.ConsumeBytes(32)
                for _ in places
            ],
            kind=given.ConsumeIntInRange(0, 2),
            wire_req_id=_Under.asked if given.ConsumeBool() else given.ConsumeInt(8) & (2**64 - 1),
            type_hash=_HASHES[given.ConsumeIntInRange(0, len(_HASHES) - 1)],
            trigger_only=given.ConsumeBool(),
            remaining_ns=given.ConsumeIntInRange(0, 2**64 - 1) if given.ConsumeBool() else 0,
            report=given.ConsumeIntInRange(0, 2**64 - 1) if given.ConsumeBool() else 0,
            source=source.to_bytes() if given.ConsumeIntInRange(0, 7) else given.ConsumeBytes(40),
            claimed=(given.ConsumeBytes(60),) if given.ConsumeBool() else (),
            payload=_PAYLOADS[given.ConsumeIntInRange(0, len(_PAYLOADS) - 1)]
            if given.ConsumeBool()
            else given.ConsumeBytes(1 << 16),
        )
    node = _Under.node
    node.deliver_inbound(source, raw)
    _Under.now_ns += given.ConsumeIntInRange(0, 1 << 32)
    fuzzing.poll(node, _Under.now_ns)
    _Under.count += 1
    if _Under.count % 64 == 0:
        _Under.now_ns = fuzzing.settle(node, _Under.now_ns)
        for other in fuzzing.PEERS:  # or all of them would stay in their cooldown
            node.peer_disconnected(other, "again")
            node.peer_connected(other, ["client"])
        node.poll(_Under.now_ns)
        _Under.asked = fuzzing.ask(node)


def main() -> None:
    """Run until told to stop, or something is found."""
    atheris.Setup(sys.argv, _one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
