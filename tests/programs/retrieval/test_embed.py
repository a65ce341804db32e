"""Texts find texts, wherever the encoder is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from bbnode.components import (
    SentenceEncoder,
    TextEncoder,
    TextEncoderConfig,
    register_component,
    values,
)
from bbnode.dsl import BadArgument
from bbnode.programs import EmbedAndSearch
from bbnode.sim import Network, SimNode
from tests.components.encoders import tiny_encoder
from tests.programs.files import compiled
from tests.programs.retrieval.networks import NO_METADATA

PETS = ["the cat sat on the mat", "a dog ran under the tree", "the bird flew"]
NEWS = ["news of the market", "the market fell", "the market rose"]
ALL = [*PETS, *NEWS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_encoder(tmp_path_factory.mktemp("encoder"))


def texts(*given: str) -> np.ndarray:
    return np.array(given, object)


class Library:
    """An asker, two shards of texts, and an encoder where the program has that class."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        program = EmbedAndSearch(**{"k": 3, **arguments})
        artifact = compiled(program)
        self.net = Network(1)
        config: dict[str, Any] = {"encoder": {"model": str(folder)}}
        index = {"index": {"metric": "cosine"}}

        def add(name: str, peer_class: str, encodes: bool) -> SimNode:
            slots = {**(index if peer_class == "shard" else {}), **(config if encodes else {})}
            return self.net.add(name, artifact, [peer_class], config=slots)

        alone = program.encoder == ""
        self.asker = add("asker", "asker", alone or program.encoder == "asker")
        self.shards = [add(f"shard-{n}", "shard", alone) for n in range(2)]
        if program.encoder not in ("", "asker"):
            self.encoder = add("encoder", program.encoder, True)

    def run(self, node: SimNode, target: str, **inputs: Any) -> dict[str, Any]:
        number = node.invoke(target, inputs)
        self.net.run_until_idle()
        return node.outputs(number)

    def fill(self) -> None:
        for shard, some in zip(self.shards, (PETS, NEWS), strict=True):
            made = self.run(shard, "shard", texts=texts(*some), metadata=NO_METADATA)
            assert made["added"].tolist() == [0, 1, 2]

    def failures(self) -> list[str]:
        return [failure.detail for node in self.net.nodes for failure in node.failures()]


def expected(folder: Path, query: str, k: int = 3) -> list[str]:
    encode = SentenceEncoder.open(folder).encode
    away = 1 - encode(ALL) @ encode([query])[0]
    return [ALL[place] for place in np.argsort(away, kind="stable")[:k]]


@pytest.mark.parametrize("encoder", ["encoder", "asker", ""])
def test_the_passages_are_those_nearest_to_the_question(folder, encoder) -> None:
    library = Library(folder, encoder=encoder)
    library.fill()
    for query in ("the cat", "the dog on the tree", "a market"):
        found = library.run(library.asker, "asker", query=np.array(query, object))
        assert found["passages"].tolist() == expected(folder, query)
        assert found["missing"] == ()
        for hit, passage in zip(found["results"].hits(), found["passages"], strict=True):
            assert hit.metadata["text"] == passage
            kept = PETS if hit.sender == library.shards[0].peer_id else NEWS
            assert kept[hit.id] == passage
    assert not library.failures()


def test_several_questions_at_once(folder) -> None:
    library = Library(folder)
    library.fill()
    asked = ["the cat", "a market"]
    found = library.run(library.asker, "asker", query=texts(*asked))
    assert found["results"].ids.shape == (2, 3)
    wanted = [passage for query in asked for passage in expected(folder, query)]
    assert found["passages"].tolist() == wanted


def test_metadata_stay_beside_the_text_and_filter(folder) -> None:
    library = Library(folder, filtered=True)
    told = values.MetadataVec([values.Metadata(year=year) for year in (2019, 2021, 2023)])
    for shard, some in zip(library.shards, (PETS, NEWS), strict=True):
        library.run(shard, "shard", texts=texts(*some), metadata=told)
    found = library.run(
        library.asker, "asker", query=np.array("the cat", object),
        where=values.Metadata({"year >": 2021}),
    )  # fmt: skip
    assert sorted(found["passages"]) == ["the bird flew", "the market rose"]
    assert {hit.metadata["year"] for hit in found["results"].hits()} == {2023}
    one_short = values.MetadataVec([values.Metadata(year=1)])
    assert not library.run(library.shards[0], "shard", texts=texts("a", "b"), metadata=one_short)
    assert "2 value(s) for the metadata of 1" in library.failures()[-1]


def test_the_askers_texts_on_several_shards(folder) -> None:
    library = Library(folder, encoder="asker", replicas=2)
    added = library.run(
        library.asker, "asker", texts=texts(*ALL), metadata=NO_METADATA,
        ids=np.arange(6),
    )  # fmt: skip
    assert added["added"].tolist() == [*range(6)]
    library.net.crash(library.shards[0])
    found = library.run(library.asker, "asker", query=np.array("the cat", object))
    assert found["passages"].tolist() == expected(folder, "the cat")


def test_an_encoder_that_is_gone_and_one_that_cannot_read(folder, tmp_path) -> None:
    library = Library(folder)
    library.fill()
    assert not library.run(library.asker, "asker", query=texts("\ud800")[0:1])
    assert library.failures()
    library.net.crash(library.encoder)
    assert not library.run(library.asker, "asker", query=np.array("the cat", object))
    assert "encoder" in library.failures()[-1]

    nowhere = Library(tmp_path / "nowhere", encoder="asker")
    assert not nowhere.run(nowhere.asker, "asker", query=np.array("the cat", object))
    assert "there is no" in nowhere.failures()[-1]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"encoder": 3}, 'encoder=3 has to be a class of peers, or ""'),
        ({"model": "bbnode.Nothing"}, "model='bbnode.Nothing'"),
        ({"model": "bbnode.FlatIndex"}, "a Model, such as"),
        ({"k": 0}, "k=0"),
    ],
)
def test_wrong_arguments_are_named(arguments, problem) -> None:
    with pytest.raises(BadArgument, match=problem):
        EmbedAndSearch(**arguments).build()


@dataclass(frozen=True, kw_only=True)
class LiarConfig(TextEncoderConfig):
    lie: str = ""


@register_component
class Liar(TextEncoder):
    """An encoder that answers with what it should not."""

    TYPE_NAME: ClassVar[str] = "test.LyingEncoder"
    Config: ClassVar[type] = LiarConfig

    def forward(self, ctx: Any, batch: Any) -> Any:
        true = np.zeros((*np.shape(batch), 16), np.float32)
        match self.config.lie:
            case "nan":
                return true + np.nan
            case "more":
                return np.ones((5, 16), np.float32)
            case "wider":
                return np.ones((*np.shape(batch), 17), np.float32)
            case _:
                return np.ones((1, 1, 1), np.float32)


@pytest.mark.parametrize("lie", ["nan", "more", "wider", "deeper"])
def test_an_encoder_that_lies_spoils_nothing(folder, lie) -> None:
    """What it sends is checked where it is used; what was there stays, and is found."""
    library = Library(folder)
    library.fill()
    library.net.crash(library.encoder)
    liar = compiled(EmbedAndSearch(k=3, model=Liar))
    library.net.add("liar", liar, ["encoder"], config={"encoder": {"model": "x", "lie": lie}})
    shard = library.shards[0]
    texts_of = {"texts": texts("a cat", "a dog"), "metadata": NO_METADATA}
    assert not library.run(shard, "shard", **texts_of)
    found = library.run(library.asker, "asker", query=np.array("the cat", object))
    assert not found or lie == "more"
    assert library.failures()
    library.net.crash(library.net.find("liar"))
    library.net.add("other", compiled(EmbedAndSearch(k=3)), ["encoder"],
                    config={"encoder": {"model": str(folder)}})  # fmt: skip
    found = library.run(library.asker, "asker", query=np.array("the cat", object))
    assert found["passages"].tolist() == expected(folder, "the cat")
