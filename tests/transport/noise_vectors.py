"""Published test vectors of Noise_XX_25519_ChaChaPoly_SHA256: values alone, in hexadecimal.

The first two are the vectors of that name without a prologue in `vectors.txt` of
github.com/flynn/noise (commit 06e2f3c6, where go-libp2p's Noise comes from); the third is that of
`vectors/cacophony.txt` in github.com/haskell-cryptography/cacophony (commit 36c1e5c3).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Vector:
    """A handshake of fixed keys, and the packets after it; each message is (payload, sent)."""

    name: str
    prologue: str
    init_static: str
    init_ephemeral: str
    resp_static: str
    resp_ephemeral: str
    messages: tuple[tuple[str, str], ...]
    # Who sends the first packet after the handshake; the sides take turns.
    next_is_initiator: bool


_FLYNN = {
    "prologue": "",
    "init_static": "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    "init_ephemeral": "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f",
    "resp_static": "0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20",
    "resp_ephemeral": "4142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f60",
}
_FLYNN_PACKETS = (
    (
        "79656c6c6f777375626d6172696e65",
        "a52ef02ba60e12696d1d6b9ef4245c88fca757b6134ad6e76b56e310a6adf6",
    ),
    (
        "7375626d6172696e6579656c6c6f77",
        "2445aa438ebd649281c636cc7269ca82f1d9023d72520943aeabf909cdf521",
    ),
)

VECTORS = (
    Vector(
        name="flynn/noise without payloads",
        **_FLYNN,
        messages=(
            (
                "",
                "358072d6365880d1aeea329adf9121383851ed21a28e3b75e965d0d2cd166254",
            ),
            (
                "",
                (
                    "64b101b1d0be5a8704bd078f9895001fc03e8e9f9522f188dd128d9846d48466"
                    "3414af878d3e46a2f58911a816d6e8346d4ea17a6f2a0bb4ef4ed56c133cff45"
                    "60a34e36ea82109f26cf2e5a5caf992b608d55c747f615e5a3425a7a19eefb8f"
                ),
            ),
            (
                "",
                (
                    "87f864c11ba449f46a0a4f4e2eacbb7b0457784f4fca1937f572c93603e9c4d9"
                    "7e5ea11b16f3968710b23a3be3202dc1b5e1ce3c963347491e74f5c0768a9b42"
                ),
            ),
            *_FLYNN_PACKETS,
        ),
        next_is_initiator=True,
    ),
    Vector(
        name="flynn/noise with payloads",
        **_FLYNN,
        messages=(
            (
                "746573745f6d73675f30",
                (
                    "358072d6365880d1aeea329adf9121383851ed21a28e3b75e965d0d2cd166254"
                    "746573745f6d73675f30"
                ),
            ),
            (
                "746573745f6d73675f31",
                (
                    "64b101b1d0be5a8704bd078f9895001fc03e8e9f9522f188dd128d9846d48466"
                    "3414af878d3e46a2f58911a816d6e8346d4ea17a6f2a0bb4ef4ed56c133cff45"
                    "72e7a2ba5123ac30618b3d205f5c2d17f50cbca216483ac56bcc78e33bf52030"
                    "3278db641e5e731b2e3a"
                ),
            ),
            (
                "746573745f6d73675f32",
                (
                    "87f864c11ba449f46a0a4f4e2eacbb7b0457784f4fca1937f572c93603e9c4d9"
                    "f27e318e43ba630594c4d08eeb3b36d97c7377a2f4f9144b2f0c8095ad921405"
                    "05b2ab53eff244b14138"
                ),
            ),
            *_FLYNN_PACKETS,
        ),
        next_is_initiator=True,
    ),
    Vector(
        name="cacophony",
        prologue="4a6f686e2047616c74",
        init_static="e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1",
        init_ephemeral="893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
        resp_static="4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893",
        resp_ephemeral="bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
        messages=(
            (
                "4c756477696720766f6e204d69736573",
                (
                    "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
                    "4c756477696720766f6e204d69736573"
                ),
            ),
            (
                "4d757272617920526f746862617264",
                (
                    "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
                    "81cbad1f276e038c48378ffce2b65285e08d6b68aaa3629a5a8639392490e5b9"
                    "bd5269c2f1e4f488ed8831161f19b7815528f8982ffe09be9b5c412f8a0db50f"
                    "8814c7194e83f23dbd8d162c9326ad"
                ),
            ),
            (
                "462e20412e20486179656b",
                (
                    "c7195ffacac1307ff99046f219750fc47693e23c3cb08b89c2af808b444850a8"
                    "0ae475b9df0f169ae80a89be0865b57f58c9fea0d4ec82a286427402f113e4b6"
                    "ae769a1d95941d49b25030"
                ),
            ),
            (
                "4361726c204d656e676572",
                "96763ed773f8e47bb3712f0e29b3060ffc956ffc146cee53d5e1df",
            ),
            (
                "4a65616e2d426170746973746520536179",
                "3e40f15f6f3a46ae446b253bf8b1d9ffb6ed9b174d272328ff91a7e2e5c79c07f5",
            ),
            (
                "457567656e2042f6686d20766f6e2042617765726b",
                "eb3f3515110702e047a6c9da4478b6ead94873c11c0f2d710ddb3f09fce024b3a58502ae3f",
            ),
        ),
        next_is_initiator=False,
    ),
)
