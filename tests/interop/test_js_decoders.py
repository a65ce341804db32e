"""Our messages in js-libp2p's decoders, and what is damaged in both."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path

from multiaddr import Multiaddr

from bbnode.transport.errors import HandshakeError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.handshake import NoiseKeys, decode_payload
from bbnode.transport.libp2p.identify import identify_message
from bbnode.transport.libp2p.keys import decode_all_fields, encode_field
from tests.interop.installed import JS_FOLDER, needs
from tests.patience import PATIENCE_S

pytestmark = needs("js-libp2p", JS_FOLDER)


def decoded_by_js(**messages: list[bytes]) -> dict[str, list]:
    script = Path(JS_FOLDER) / "decode.mjs"
    shutil.copy(Path(__file__).parent / script.name, script)
    asked = {kind: [each.hex() for each in all_of] for kind, all_of in messages.items()}
    done = subprocess.run(
        ["node", str(script)],
        input=json.dumps(asked) + "\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    found: dict[str, list] = json.loads(done.stdout)
    return found


def test_js_reads_our_identify_and_takes_every_payload_that_we_take():
    draw = random.Random(26)
    identify, said = [], []
    for number in range(50):
        own = Identity.from_seed(draw.randbytes(32)).peer_id
        listening = [
            Multiaddr(f"/ip4/127.0.0.{n + 1}/tcp/{draw.randrange(1, 65_536)}")
            for n in range(number % 4)
        ]
        protocols = [f"/{chr(draw.randrange(0x61, 0x17F))}/{n}" for n in range(number % 30)]
        observed = Multiaddr(f"/ip6/::1/udp/{number + 1}")
        message = identify_message(own, listening, protocols, observed)
        # Behind its length.
        identify.append(message[2 if message[0] & 0x80 else 1 :])
        said.append(
            [
                own.to_bytes()[2:].hex(),
                [each.to_bytes().hex() for each in listening],
                protocols,
                observed.to_bytes().hex(),
                "ipfs/0.1.0",
                "bbnode",
            ]
        )
    keys = NoiseKeys(Identity.from_seed(b"k" * 32))
    payloads = [keys.payload]
    for _ in range(2_000):
        more = encode_field(draw.choice([3, 5, 99]), draw.randbytes(draw.randrange(12)))
        if draw.random() < 0.5:
            more += encode_field(4, encode_field(2, b"/yamux/1.0.0"))
        made = bytearray(keys.payload + more if draw.random() < 0.5 else more + keys.payload)
        if draw.random() < 0.7:
            made[draw.randrange(len(made))] ^= 1 << draw.randrange(8)
        payloads.append(bytes(made[: draw.choice([None, None, draw.randrange(len(made))])]))
    by_js = decoded_by_js(identify=identify, payloads=payloads)
    assert by_js["identify"] == said
    taken = 0
    for payload, theirs in zip(payloads, by_js["payloads"], strict=True):
        try:
            assert decode_payload(payload, keys.public).to_bytes() is not None
        except HandshakeError:
            continue
        fields = dict(decode_all_fields(payload))
        assert theirs == [fields[1].hex(), fields[2].hex()]
        taken += 1
    # Some of what was damaged is damaged where nobody looks.
    assert 200 < taken < len(payloads)
