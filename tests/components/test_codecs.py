"""Codecs: round trips within their bounds, bytes, error feedback, state, and codes that lie."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bbnode.components import (
    BFloat16Codec,
    Codec,
    CodeRefused,
    ComponentError,
    Float16Codec,
    Int4Codec,
    Int8Codec,
    InvalidComponentConfig,
    NF4Codec,
    NotEncodable,
    PowerSGDCodec,
    ProductQuantizer,
    RandomKCodec,
    ReferenceBackend,
    ReferenceBackendConfig,
    ScalarQuantizer,
    SignCodec,
    TopKCodec,
    ZstdCodec,
)
from bbnode.components.codecs.base import FloatCodec
from bbnode.components.codecs.integers import NF4_VALUES
from bbnode.components.codecs.sparse import drawn
from tests.components.fakes import PEERS, Context, ort

BACKEND = ort()
FLOAT_CODECS: list[type[FloatCodec]] = [
    Float16Codec, BFloat16Codec, Int8Codec, Int4Codec, NF4Codec, TopKCodec, RandomKCodec,
    SignCodec, PowerSGDCodec, ProductQuantizer, ScalarQuantizer,
]  # fmt: skip
FEEDBACK = [Int4Codec, NF4Codec, TopKCodec, RandomKCodec, SignCodec, PowerSGDCodec,
            ProductQuantizer]  # fmt: skip


def made(kind: type[Codec], backend: Any = BACKEND, **config: Any) -> Any:
    component = kind(kind.Config(**config))
    component.bind({"backend": backend} if kind.depends else {})
    return component


def once(kind: type[Codec], tensor: np.ndarray, **config: Any) -> np.ndarray:
    """What arrives of one tensor, at another node with default settings."""
    code = made(kind, **config).encode(Context(), tensor)
    assert code.dtype == np.uint8
    assert code.ndim == 1
    return made(kind).decode(Context(), code)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# --- round trips ----------------------------------------------------------------------------

TENSORS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9),
    elements=st.floats(-1e4, 1e4, width=32),
)


def per_block(x: np.ndarray, block: int) -> np.ndarray:
    """max|x| of the block of each value."""
    flat = np.abs(x.reshape(-1))
    return np.concatenate(
        [np.full(len(part), part.max()) for part in np.split(flat, range(block, len(flat), block))]
    ).reshape(x.shape)


@settings(max_examples=40, deadline=None)
@given(TENSORS)
def test_no_value_is_off_by_more_than_the_codec_says(x: np.ndarray) -> None:
    ulp = np.float32(1.0001)  # of the arithmetic in float32
    bounds = {
        Float16Codec: np.maximum(np.abs(x) * 2.0**-11, 2.0**-25),
        BFloat16Codec: np.maximum(np.abs(x) * 2.0**-8, 1e-40),
        ZstdCodec: np.zeros_like(x),
    }
    if x.size:
        largest = per_block(x, 64)
        bounds[Int8Codec] = per_block(x, 2048) / 254
        bounds[Int4Codec] = largest / 14
        bounds[NF4Codec] = largest * np.diff(NF4_VALUES).max() / 2
        columns = (*range(x.ndim - 1),) if x.ndim > 1 else None
        low, high = x.min(axis=columns, keepdims=True), x.max(axis=columns, keepdims=True)
        bounds[ScalarQuantizer] = (high - low) / 510 + np.maximum(-low, high) * 1e-6
    for kind, bound in bounds.items():
        got = once(kind, x)
        assert got.shape == x.shape
        assert got.dtype == np.float32
        assert (np.abs(got - x) <= bound * ulp + 1e-40).all(), kind


@settings(max_examples=25, deadline=None)
@given(TENSORS)
def test_every_codec_takes_every_shape_and_gives_it_back(x: np.ndarray) -> None:
    for kind in FLOAT_CODECS:
        got = once(kind, x)
        assert got.shape == x.shape
        assert got.dtype == np.float32
        assert np.isfinite(got).all()


@settings(max_examples=25, deadline=None)
@given(TENSORS)
def test_nothing_of_a_stream_is_lost_with_error_feedback(x: np.ndarray) -> None:
    for kind in FEEDBACK:
        codec = made(kind, error_feedback=True)
        sent = sum(
            codec.decode(Context(), codec.encode(Context(), x)).astype(np.float64) for _ in range(3)
        )
        if not x.size:
            continue
        (stream,) = codec._streams.values()
        left = 3.0 * x.reshape(-1) - sent.reshape(-1)
        assert np.allclose(stream.error, left, atol=1e-3 * (1 + np.abs(x).max())), kind


def test_the_formulas_by_numpy() -> None:
    x = normal(5000)
    k = 50
    at = np.sort(np.argsort(-np.abs(x), kind="stable")[:k])
    top = np.zeros_like(x)
    top[at] = x[at]
    assert np.array_equal(once(TopKCodec, x), top)

    chosen = drawn(5000, k, 3, 0)
    assert len(set(chosen)) == k
    random = np.zeros_like(x)
    random[chosen] = x[chosen]
    assert np.array_equal(once(RandomKCodec, x, seed=3), random)
    unbiased = once(RandomKCodec, x, seed=3, error_feedback=False)
    assert np.allclose(unbiased, random * 100)

    sign = np.where(x[:4096] >= 0, 1, -1) * np.abs(x[:4096]).mean()
    assert np.allclose(once(SignCodec, x)[:4096], sign, rtol=1e-6)

    scale = np.abs(x[:2048]).max() / np.float32(127)
    assert np.allclose(once(Int8Codec, x)[:2048], np.rint(x[:2048] / scale) * scale, rtol=1e-6)

    unit = x[:64] / np.abs(x[:64]).max()
    nearest = NF4_VALUES[np.abs(unit[:, None] - NF4_VALUES).argmin(axis=1)]
    assert np.allclose(once(NF4Codec, x)[:64], nearest * np.abs(x[:64]).max(), rtol=1e-6)


def test_power_sgd_keeps_a_matrix_of_its_rank_and_comes_near_the_best_one() -> None:
    low = normal(40, 3) @ normal(3, 60, seed=1)
    assert np.allclose(once(PowerSGDCodec, low, rank=3), low, atol=1e-4)
    # With the last Q the power iteration goes on, to the best approximation there is.
    x = normal(40, 60)
    codec = made(PowerSGDCodec, rank=4, error_feedback=False)
    for _ in range(40):
        got = codec.decode(Context(), codec.encode(Context(), x))
    values = np.linalg.svd(x, compute_uv=False)
    best = float(np.sqrt((values[4:] ** 2).sum()))
    assert np.linalg.norm(got - x) <= best * 1.05


def test_power_sgd_takes_the_matrices_of_a_flat_vector_apart() -> None:
    one, two, rest = normal(20, 2) @ normal(2, 30), normal(2, 2), normal(5)
    flat = np.concatenate([one.reshape(-1), two.reshape(-1), rest])
    code = made(PowerSGDCodec, rank=2, matrices=((20, 30), (2, 2))).encode(Context(), flat)
    got = made(PowerSGDCodec).decode(Context(), code)
    assert np.allclose(got[:600], flat[:600], atol=1e-4)
    assert np.array_equal(got[600:], flat[600:])  # too small to gain, and no matrix
    assert len(code) < 4 * (2 * 50 + 4 + 5) + 100
    with pytest.raises(ComponentError, match="count again"):
        made(PowerSGDCodec, matrices=((20, 30),)).encode(Context(), flat[:10])


def test_drawn_indices_are_those_of_every_version() -> None:
    assert drawn(20, 5, 7, 2).tolist() == drawn(20, 5, 7, 2).tolist()
    counts = np.bincount(np.concatenate([drawn(10, 3, 0, i) for i in range(2000)]), minlength=10)
    assert abs(counts - 600).max() < 90


@pytest.mark.parametrize("kind", [Int8Codec, Int4Codec, TopKCodec, PowerSGDCodec, Float16Codec])
def test_backends_give_the_same_code(kind: type[Codec]) -> None:
    x = normal(3000)
    reference = ReferenceBackend(ReferenceBackendConfig())
    other = made(kind, reference)
    code = other.encode(Context(), x)
    got = made(kind).decode(Context(), code)
    assert np.allclose(got, once(kind, x), atol=1e-5)
    assert np.allclose(other.decode(Context(), code), got, atol=1e-5)


# --- bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (Int8Codec, 0.2511), (Int4Codec, 0.1411), (NF4Codec, 0.1411), (Float16Codec, 0.501),
        (BFloat16Codec, 0.501), (TopKCodec, 0.0205), (RandomKCodec, 0.0105),
        (SignCodec, 0.0320), (PowerSGDCodec, 0.03), (ProductQuantizer, 0.08),
        (ScalarQuantizer, 0.2511), (ZstdCodec, 0.95),
    ],
)  # fmt: skip
def test_bytes_of_a_code_over_those_of_float32(kind: type[Codec], most: float) -> None:
    x = normal(100_000)
    assert made(kind).encode(Context(), x).nbytes / x.nbytes <= most


# --- error feedback and state ---------------------------------------------------------------


def test_streams_of_one_codec_do_not_mix() -> None:
    x = normal(100)
    codec = made(TopKCodec, fraction=0.1)
    first = codec.encode(Context(), x)
    for other in (Context(op="Encode_1"), Context(source_peer=PEERS[2])):
        assert np.array_equal(codec.encode(other, x), first)
    assert not np.array_equal(codec.encode(Context(), x), first)  # it goes on with what is left


def test_another_shape_in_a_stream_is_refused_and_says_the_way_out() -> None:
    codec = made(TopKCodec)
    codec.encode(Context(), normal(100))
    with pytest.raises(NotEncodable, match="set error_feedback = false"):
        codec.encode(Context(), normal(99))
    free = made(TopKCodec, error_feedback=False)
    free.encode(Context(), normal(100))
    free.encode(Context(), normal(99))


def test_error_memories_are_bounded() -> None:
    codec = made(TopKCodec, max_streams=2)
    for peer in PEERS[:5]:
        codec.encode(Context(source_peer=peer), normal(100))
    assert [peer for _, peer in codec._streams] == [str(PEERS[3]), str(PEERS[4])]


@pytest.mark.parametrize("kind", FLOAT_CODECS)
def test_a_restored_codec_goes_on_with_the_same_codes(kind: type[FloatCodec]) -> None:
    codec, x = made(kind, error_feedback=kind in FEEDBACK), normal(30, 50)
    codec.encode(Context(), x)
    saved = codec.freeze()
    data = codec.serialize()
    assert bool(data) is (kind in FEEDBACK)
    following = codec.encode(Context(), x)
    assert saved() == data  # whatever came after
    other = made(kind, error_feedback=kind in FEEDBACK)
    other.restore(data)
    assert np.array_equal(other.encode(Context(), x), following)
    if data:
        with pytest.raises(ComponentError):
            other.restore(data[:-3])
        carried = made(kind)
        assert carried.carry_over(data).left  # of another version's tensors


# --- codebooks ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ProductQuantizer, ScalarQuantizer])
def test_trained_codebooks_stay_at_home(kind: Any) -> None:
    x = normal(600, 16)
    sender, receiver = made(kind), made(kind)
    sender.train(Context(), x)
    code = sender.encode(Context(), x[:100])
    with pytest.raises(CodeRefused, match="train all sides on the same examples"):
        receiver.decode(Context(), code)
    receiver.train(Context(), x[::-1].copy())
    if kind is ProductQuantizer:
        with pytest.raises(CodeRefused, match="another codebook"):
            receiver.decode(Context(), code)
    receiver.train(Context(), x)
    got = receiver.decode(Context(), code)
    assert np.linalg.norm(got - x[:100]) < 0.6 * np.linalg.norm(x[:100])
    assert code.nbytes < 100 * 16 + 60  # no codebook in it
    again = made(kind)
    again.restore(receiver.serialize())
    assert np.array_equal(again.decode(Context(), code), got)
    with pytest.raises(NotEncodable, match="trained for vectors of 16"):
        sender.encode(Context(), x[:, :8].copy())


def test_product_quantisation_is_as_good_as_its_parts_allow() -> None:
    points = normal(16, 4)
    x = points[np.random.default_rng(1).integers(0, 16, 500)]
    assert np.allclose(once(ProductQuantizer, x), x, atol=1e-6)
    with pytest.raises(NotEncodable, match="a divisor of 6"):
        made(ProductQuantizer).train(Context(), normal(10, 6))


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FLOAT_CODECS)
@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (np.ones(4, np.float16), "takes float32 and got float16"),
        (np.ones(4, np.int64), "takes float32 and got int64"),
        (np.array([1, np.nan], np.float32), "NaN or infinity"),
        (np.array([1, -np.inf], np.float32), "NaN or infinity"),
        (np.array([1, 3e38], np.float32), "beyond 1e\\+38"),
        (np.ones(65, np.float32), "over max_values 64"),
        (b"bytes", "takes float32 and got bytes"),
    ],
)
def test_tensors_that_are_not_taken(kind: type[Codec], tensor: Any, said: str) -> None:
    with pytest.raises(NotEncodable, match=said):
        made(kind, max_values=64).encode(Context(), tensor)


def test_float16_refuses_what_it_can_not_hold() -> None:
    with pytest.raises(NotEncodable, match=r"bind bbnode\.BFloat16Codec"):
        made(Float16Codec).encode(Context(), np.array([1e5], np.float32))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Int8Codec, {"block": 0}), (TopKCodec, {"fraction": 0.0}), (TopKCodec, {"fraction": 1.5}),
        (TopKCodec, {"fraction": float("nan")}), (RandomKCodec, {"seed": -1}),
        (PowerSGDCodec, {"rank": 0}), (PowerSGDCodec, {"matrices": ((0, 2),)}),
        (ProductQuantizer, {"words": 257}), (ZstdCodec, {"level": 23}),
        (Int8Codec, {"max_values": 0}), (TopKCodec, {"max_streams": 0}),
    ],
)  # fmt: skip
def test_settings_out_of_range(kind: type[Codec], config: dict[str, Any]) -> None:
    with pytest.raises(InvalidComponentConfig):
        made(kind, **config)


def lie(kind: type[Codec], shape: Any, told: Any, body: bytes, name: str = "") -> np.ndarray:
    head = msgpack.packb([name or kind.TYPE_NAME, shape, told])
    raw = struct.pack("<2sH", b"bc", len(head)) + head + body
    return np.frombuffer(raw, np.uint8)


F = struct.Struct("<f").pack


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Int8Codec, np.zeros(0, np.uint8)),
        (Int8Codec, np.zeros(40, np.uint8)),
        (Int8Codec, np.zeros(40, np.float32)),
        (Int8Codec, np.zeros((2, 20), np.uint8)),
        (Int8Codec, lie(Int8Codec, [4], [4], F(1) + b"abcd", name="bbnode.TopKCodec")),
        (Int8Codec, lie(Int8Codec, [1 << 40], [1 << 20], b"")),
        (Int8Codec, lie(Int8Codec, [1 << 40, 0], [4], b"")),
        (Int8Codec, lie(Int8Codec, [-4], [4], F(1) + b"abcd")),
        (Int8Codec, lie(Int8Codec, [1] * 33, [4], F(1) + b"a")),
        (Int8Codec, lie(Int8Codec, [4], [], F(1) + b"abcd")),
        (Int8Codec, lie(Int8Codec, [4], [0], F(1) + b"abcd")),
        (Int8Codec, lie(Int8Codec, [4], [4], F(1) + b"abcde")),
        (Int8Codec, lie(Int8Codec, [4], [4], F(float("nan")) + b"abcd")),
        (Int8Codec, lie(Int8Codec, [4], [4], F(-1) + b"abcd")),
        (Int8Codec, lie(Int8Codec, [4], [4], F(3e38) + b"abcd")),
        (Int8Codec, lie(Int8Codec, [0], [], b"more")),
        (Int4Codec, lie(Int4Codec, [4], [4], F(1) + b"\xff\xff")),
        (Float16Codec, lie(Float16Codec, [2], [], b"\x00\x7c\x00\x3c")),
        (BFloat16Codec, lie(BFloat16Codec, [1], [], b"\xff\x7f")),
        (TopKCodec, lie(TopKCodec, [4], [9], b"\x00\x00" * 9 + F(1) * 9)),
        (TopKCodec, lie(TopKCodec, [4], [1], b"\x09\x00" + F(1))),
        (TopKCodec, lie(TopKCodec, [4], [2], b"\x01\x00\x01\x00" + F(1) * 2)),
        (TopKCodec, lie(TopKCodec, [4], [1], b"\x01\x00" + F(float("inf")))),
        (RandomKCodec, lie(RandomKCodec, [4], [1], F(1))),
        (RandomKCodec, lie(RandomKCodec, [4], [5, 0, 0], F(1) * 5)),
        (SignCodec, lie(SignCodec, [8], [8], F(1))),
        (PowerSGDCodec, lie(PowerSGDCodec, [100], [1, 10], b"")),
        (PowerSGDCodec, lie(PowerSGDCodec, [100], [1, 0, 10], b"")),
        (PowerSGDCodec, lie(PowerSGDCodec, [100], [1, 1 << 20, 1 << 20], b"")),
        (PowerSGDCodec, lie(PowerSGDCodec, [100], [1, 10, 10], F(1e30) * 20)),
        (ProductQuantizer, lie(ProductQuantizer, [8], [0, 1, 2, 4], F(0) * 8 + b"\x00\x02")),
        (ProductQuantizer, lie(ProductQuantizer, [8], [0, 1, 2, 4], F(0) * 8 + b"\x00")),
        (ProductQuantizer, lie(ProductQuantizer, [8], [0, 3, 2, 4], b"")),
        (ProductQuantizer, lie(ProductQuantizer, [8], [5, 1, 2, 4], b"\x00\x00")),
        (ScalarQuantizer, lie(ScalarQuantizer, [8], [0, 2, 3], b"")),
        (ScalarQuantizer, lie(ScalarQuantizer, [1], [0, 2, 1], F(3e38) * 2 + b"\xff")),
        (ZstdCodec, lie(ZstdCodec, [8], [1, 0], b"no frame")),
        (ZstdCodec, lie(ZstdCodec, [8], [999, 0], b"")),
        (Int8Codec, lie(Int8Codec, [4], [5], F(1) + b"abcde")),  # a block beyond its tensor
    ],
)  # fmt: skip
def test_codes_that_lie_are_refused(kind: type[Codec], code: np.ndarray) -> None:
    with pytest.raises(CodeRefused):
        made(kind).decode(Context(), code)


@pytest.mark.parametrize("kind", [*FLOAT_CODECS, ZstdCodec])
def test_a_damaged_code_is_refused_or_stands_for_a_finite_tensor(kind: type[Codec]) -> None:
    good = made(kind).encode(Context(), normal(12, 16))
    draws = np.random.default_rng(5)
    for _ in range(150):
        bad = good.copy()
        for at in draws.integers(0, len(bad), draws.integers(1, 4)):
            bad[at] = draws.integers(0, 256)
        bad = bad[: draws.integers(0, len(bad) + 1)] if draws.integers(2) else bad
        try:
            got = made(kind, max_values=4096).decode(Context(), bad)
        except CodeRefused:
            continue
        assert kind is ZstdCodec or np.isfinite(got).all()


def test_a_bomb_takes_no_memory() -> None:
    zstandard = pytest.importorskip("zstandard")
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    codes = [
        (ZstdCodec, lie(ZstdCodec, [8], [1, 0], frame)),  # 32 bytes that open to 256 MiB
        (ZstdCodec, lie(ZstdCodec, [1 << 27], [1, 0], frame)),
        (TopKCodec, lie(TopKCodec, [1 << 50], [1], F(1) * 3)),
        (ProductQuantizer, lie(ProductQuantizer, [1 << 26], [0, 1 << 20, 256, 1 << 16], b"")),
    ]
    tracemalloc.start()
    try:
        for kind, code in codes:
            with pytest.raises(CodeRefused):
                made(kind).decode(Context(), code)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.float16, np.int64, np.uint8, np.int16, np.bool_]
)
def test_zstd_keeps_every_bit(dtype: Any) -> None:
    x = (normal(33, 7) * 5).astype(dtype)
    for shuffle in (True, False):
        got = once(ZstdCodec, x, shuffle=shuffle)
        assert got.dtype == x.dtype
        assert np.array_equal(got, x)
    special = np.array([np.nan, np.inf, -0.0], np.float32)
    assert np.array_equal(once(ZstdCodec, special).view(np.uint32), special.view(np.uint32))
    with pytest.raises(NotEncodable):
        made(ZstdCodec).encode(Context(), np.array(["text"], object))


def test_zstd_without_its_library_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ComponentError, match=r"pip install 'zstandard>=0\.23'"):
        made(ZstdCodec).encode(Context(), normal(3))


def test_configs_are_settings_that_an_artifact_can_carry() -> None:
    for kind in (*FLOAT_CODECS, ZstdCodec):
        for each in dataclasses.fields(kind.Config):
            msgpack.packb(getattr(kind.Config(), each.name))


def test_codecs_of_independent_tensors_keep_nothing_of_the_last_one() -> None:
    for kind in (Float16Codec, BFloat16Codec, Int8Codec, Int4Codec, NF4Codec, ProductQuantizer,
                 ScalarQuantizer):  # fmt: skip
        codec = made(kind)
        codes = [codec.encode(Context(), normal(8, 16)) for _ in range(2)]
        assert np.array_equal(*codes)
        assert codec.serialize() == b""


def huge(kind: type[Codec]) -> np.ndarray:
    """Return a short code of this codec for as many values as it can say."""
    n = 1 << 26
    match kind.TYPE_NAME.removeprefix("bbnode."):
        case "RandomKCodec":
            return lie(kind, [n], [1, 0, 0], F(1))
        case "TopKCodec":
            return lie(kind, [n], [1], b"\x01\x00\x00\x00" + F(1))
        case "PowerSGDCodec":
            return lie(kind, [n], [1, 1 << 13, 1 << 13], F(1e-9) * (1 << 14))
        case "ProductQuantizer":
            return lie(kind, [n], [0, 1, 1, 1 << 16], F(0) * (1 << 16) + bytes(n >> 16))
        case "ZstdCodec":
            zstandard = pytest.importorskip("zstandard")
            return lie(kind, [n], [1, 0], zstandard.ZstdCompressor().compress(bytes(4 * n)))
        case _:  # a block that is longer than its tensor
            return lie(kind, [1], [1 << 24], F(1) + b"a")


@pytest.mark.parametrize(
    "kind",
    [TopKCodec, RandomKCodec, PowerSGDCodec, ProductQuantizer, ZstdCodec, Int8Codec, Int4Codec,
     NF4Codec, SignCodec],
)  # fmt: skip
def test_memory_costs_the_sender_of_a_code_something(kind: type[Codec]) -> None:
    code = huge(kind)
    large = code.size > 1 << 18  # a factor or codebook comes along: 256 values for each byte
    component = made(kind)
    component.decode(Context(), once_code(kind))  # what it prepares does not count
    tracemalloc.start()
    try:
        with (
            pytest.raises(CodeRefused, match=r"max_values|not 1 to 1")
            if not large
            else (contextlib.suppress(CodeRefused))
        ):
            component.decode(Context(), code)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (1 << 20) + 4096 * code.size


def once_code(kind: type[Codec]) -> np.ndarray:
    code: np.ndarray = made(kind).encode(Context(), normal(12, 16))
    return code


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (TopKCodec, {"fraction": 1e-6}),
        (RandomKCodec, {"fraction": 1e-6}),
        (ZstdCodec, {}),
    ],
)
def test_a_code_that_says_much_in_few_bytes_is_filled_up(
    kind: type[Codec], config: dict[str, Any]
) -> None:
    tensor = np.zeros((1 << 10, 1 << 10), np.float32)
    tensor[5, 7] = 0 if kind is ZstdCodec else 2
    encoder = made(kind, **config)
    code = encoder.encode(Context(), tensor)
    assert tensor.size <= 256 * code.size
    got = made(kind).decode(Context(), code)
    assert got.shape == tensor.shape
    if kind is TopKCodec:
        np.testing.assert_array_equal(got, tensor)
    again = made(kind, max_values=tensor.size, **config).encode(Context(), tensor)
    assert again.size < code.size
    with pytest.raises(CodeRefused, match="set max_values"):
        made(kind).decode(Context(), again)
    np.testing.assert_array_equal(made(kind, max_values=tensor.size).decode(Context(), again), got)


def test_the_programs_word_on_the_size_counts() -> None:
    code = lie(RandomKCodec, [1 << 20], [1, 0, 0], F(1))
    declared = Context(declared_shape=(1 << 10, 1 << 10))
    assert made(RandomKCodec).decode(declared, code).size == 1 << 20
    for shape, most in (((16, 16), 256), ((), 1)):
        with pytest.raises(CodeRefused, match=f"over the {most} that the program declares"):
            made(RandomKCodec).decode(Context(declared_shape=shape), code)
    with pytest.raises(CodeRefused, match="set max_values"):  # an open axis says nothing
        made(RandomKCodec).decode(Context(declared_shape=("n", 16)), code)


def test_error_memories_know_nothing_of_what_fills_a_code() -> None:
    encoder = made(TopKCodec, fraction=1e-6)
    tensor = normal(1 << 18, 1).reshape(-1)
    got = made(TopKCodec).decode(Context(), encoder.encode(Context(), tensor))
    (stream,) = encoder._streams.values()
    np.testing.assert_array_equal(stream.error, tensor - got)
