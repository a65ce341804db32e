"""Limits of codecs, indexes, selectors, registries, backends and privacy; what reaches each."""

from __future__ import annotations

import socket
from typing import Any

import msgpack
import numpy as np
import pytest
from onnx import helper

from bbnode.components import (
    CodeRefused,
    Collection,
    IndexDamaged,
    NotEncodable,
    PowerSGDCodec,
    ScalarQuantizer,
)
from bbnode.components.backends.isolation import shared
from bbnode.components.backends.ort import _GraphByRanks
from bbnode.components.codecs import base
from bbnode.components.codecs.base import Header
from bbnode.components.errors import (
    BackendUnavailable,
    ExchangeRefused,
    InvalidComponentConfig,
    NothingToAggregate,
    UnsupportedSelection,
)
from bbnode.components.indexes.directory import _MANIFEST
from bbnode.components.indexes.filters import FilterTable, conditions
from bbnode.components.indexes.searchers import Searcher
from bbnode.components.peer_registry import messages
from bbnode.components.peer_registry.client import (
    GlobalRegistryClient,
    GlobalRegistryClientConfig,
    TooManyRegistries,
)
from bbnode.components.privacy import release
from bbnode.components.privacy.accounting import LedgerUnavailable, PrivacyLedger
from bbnode.components.privacy.errors import NoSuchRelease
from bbnode.components.registry import component_class
from bbnode.components.selectors.centroids import CentroidSelector, CentroidSelectorConfig
from bbnode.components.wire_records import UnusableMessage
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Composite, Metadata, PeerIdVec, ResponseBatch
from tests.components import test_codecs, test_global_registry, test_isolation, test_kademlia
from tests.components.fakes import Context, Peers, ort
from tests.components.selectors.test_random_walk import called, peer, walk, walker
from tests.daemon.limits_reach import Place, Reach, refused, refused_for, refusing
from tests.programs import test_private

# --- graphs in a process of their own -----------------------------------------------------------


class _Raw(shared.Writer):
    """Writes a head alone."""


def _said(head: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sends = shared.ChildLine(ours, 1 << 30)
        receives = shared.ChildLine(theirs, 1 << 30)
        sends.send(shared.RUN, 1, head, shared.Writer())
        receives.receive()


def _tries(most: int, place: Place) -> None:
    """A run whose child ran out of another's time is made again, so often and no more."""
    for deaths in (most - 1, most):
        scripts = [[test_isolation.died(False, "time")] for _ in range(deaths)]
        fakes = test_isolation.Fakes(*scripts, ["fine"])
        graph = test_isolation.supervised(place.patch, fakes)
        if deaths < most:
            assert graph.run([0]) == ["fine"]
            continue
        with pytest.raises(BackendUnavailable, match=f"ended {most} times for other runs"):
            graph.run([0])


class _Prepared:
    def run(self, inputs: Any) -> list[Any]:
        return []


def _ranks(most: int) -> None:
    """One more combination, and the first is prepared anew."""
    model = helper.make_model(
        helper.make_graph([], "g", [helper.make_tensor_value_info("x", 1, None)], [])
    )
    built = []
    graph = _GraphByRanks(model, "g", lambda made: built.append(made) or _Prepared())  # type: ignore[func-returns-value, arg-type]
    for rank in (*range(most), 0):
        graph.run([np.zeros((1,) * rank, np.float32)])
    assert len(built) == most
    graph.run([np.zeros((1,) * most, np.float32)])
    graph.run([np.zeros((), np.float32)])
    assert len(built) == most + 2


# --- codecs -------------------------------------------------------------------------------------

CTX = Context()


def _code(shape: list[int], settings: list[int], name: str = "bbnode.PowerSGDCodec") -> Any:
    head = msgpack.packb([name, shape, settings])
    return np.frombuffer(base._PREFIX.pack(b"bc", len(head)) + head, np.uint8)


def _opened(shape: list[int], settings: list[int]) -> None:
    test_codecs.made(PowerSGDCodec).open(CTX, _code(shape, settings))


def _header_bytes(size: int) -> None:
    """A head of settings of nine bytes each, and one that fills it up."""
    codec = test_codecs.made(PowerSGDCodec)
    rest = size - len(msgpack.packb([codec.TYPE_NAME, [0], [0] * 16])) + 16
    settings = (1 << 62,) * (rest // 9) + (1,) * (rest % 9)
    codec._head(Header((0,), settings), 0)


def _header_values(count: int) -> None:
    # The list, the name, two lists, and one extent.
    settings = [1] * (count - 5)
    test_codecs.made(PowerSGDCodec)._head(Header((0,), tuple(settings)), 0)
    _opened([0], settings)


def _values(most: int) -> None:
    """Without max_values: a tensor with no memory behind it, and a code that says more."""
    codec = test_codecs.made(PowerSGDCodec)
    codec.check_size(np.broadcast_to(np.float32(0), most))
    with pytest.raises(NotEncodable, match=f"over max_values {most}; set max_values"):
        codec.check_size(np.broadcast_to(np.float32(0), most + 1))
    assert base._values_of(most) == most


def _code_axes(most: int) -> None:
    _opened([1] * most, [])
    with pytest.raises(CodeRefused, match=f"{most + 1} axes"):
        _opened([1] * (most + 1), [])
    refusing(
        NotEncodable,
        lambda n: test_codecs.made(PowerSGDCodec).check_size(np.zeros((1,) * n, np.float32)),
        "reshape it",
    )(most)


def _matrices(most: int) -> None:
    refusing(
        InvalidComponentConfig,
        lambda n: test_codecs.made(PowerSGDCodec, matrices=((1, 1),) * n),
        f"over {most} matrices",
    )(most)
    refusing(
        CodeRefused,
        lambda n: test_codecs.made(PowerSGDCodec)._pairs(Header((n,), (1,) * (2 * n + 1))),
        "sizes of matrices",
    )(most)


def _dimensions(most: int) -> None:
    """A vector of so many dimensions, coded and read."""
    codec = test_codecs.made(ScalarQuantizer)
    for count in (most, most + 1):
        tensor = np.zeros((1, count), np.float32)
        header = Header((1, count), (0, 2, count))
        if count == most:
            codec.compress(tensor.reshape(-1), tensor.shape, base.Stream())
            codec.book_shape(header)
            continue
        with pytest.raises(NotEncodable, match="reshape the vectors"):
            codec.compress(tensor.reshape(-1), tensor.shape, base.Stream())
        with pytest.raises(CodeRefused, match=f"not 1 to {most}"):
            codec.book_shape(header)


# --- indexes and privacy ------------------------------------------------------------------------


def _waited(most: float) -> None:
    """A search in another thread goes on: the snapshot waits so long, and has no state of it."""
    held = Collection()
    methods = dict.fromkeys(Searcher.__abstractmethods__)
    held.searcher = type("Dumps", (Searcher,), {**methods, "dump": lambda _: b"state"})()
    assert held._dumped(held._version) == b"state"
    waited = []

    class Busy:
        def acquire(self, *, timeout: float) -> bool:
            waited.append(timeout)
            return False

    held._use = Busy()  # type: ignore[assignment]
    assert held._dumped(held._version) == b""
    assert waited == [most]


def _manifest(most: int, place: Place) -> None:
    path = place.folder / "index"
    with Collection.open(path, dimensions=2):
        pass
    text = (path / _MANIFEST).read_text()
    (path / _MANIFEST).write_text(text + " " * (most - len(text)))
    Collection.open(path).close()
    (path / _MANIFEST).write_text(text + " " * (most + 1 - len(text)))
    with pytest.raises(IndexDamaged, match=f"over {most} bytes"):
        Collection.open(path)


def _columns(most: int) -> None:
    """One name more, and the one that was asked for longest ago is read anew."""
    table, read = FilterTable(), []

    def ask(name: str) -> None:
        def rows(start: int, stop: int) -> list[bytes]:
            read.append(name)
            return [b""]

        table.mask(conditions({f"{name} ==": len(read)}), 1, rows)

    names = [f"n{at}" for at in range(most)]
    for name in (*names, names[1]):
        ask(name)
    assert read == names
    ask("more")
    ask(names[0])
    assert read == [*names, "more", names[0]]


def _ledger(most: int, place: Place) -> None:
    path = place.folder / "ledger.json"
    path.write_text("[]" + " " * (most - 2))
    PrivacyLedger(str(path))
    path.write_text("[]" + " " * (most - 1))
    with pytest.raises(LedgerUnavailable, match=f"more than {most} bytes; restore it"):
        PrivacyLedger(str(path))


def _charged(most: int, place: Place) -> None:
    """Rounds that were begun: of one more, the first can't be released."""
    place.patch.setattr(release, "epsilon_of", lambda *_: 0.0)  # which takes long
    made = test_private.component(epsilon=1e6)
    asked = PeerIdVec(test_private.PEERS[:3])
    answer = test_private.answers(*[np.zeros(4, np.float32)] * 3)
    for execution in range(most):
        made.begin(test_private.Context(execution), asked)
    made.release(test_private.Context(0), answer)
    for execution in (most, most + 1):
        made.begin(test_private.Context(execution), asked)
    with pytest.raises(NoSuchRelease, match=f"{most} others were begun after it"):
        made.release(test_private.Context(1), answer)
    made.release(test_private.Context(2), answer)


# --- selectors and registries -------------------------------------------------------------------


def _peers(count: int) -> list[PeerId]:
    return [PeerId.from_seed(n) for n in range(count)]


def _told(peers: list[PeerId], answer: Any) -> tuple[CentroidSelector, Context]:
    selector = CentroidSelector(CentroidSelectorConfig())
    ctx = Context(peer_class="shard", peers=Peers({"shard": peers}))
    selector.observed(ctx, ResponseBatch(responses=tuple((each, answer) for each in peers)))
    return selector, ctx


def _centres(most: int) -> None:
    """Of one peer more, the first is forgotten."""
    peers = _peers(most + 1)
    selector, _ = _told(peers, np.ones((1, 2), np.float32))
    assert list(selector.told) == peers[1:]


def _width(most: int) -> None:
    for width in (most, most + 1):
        selector, ctx = _told(_peers(1), np.ones((1, 1 + width), np.float32))
        assert len(selector.told) == (width == most)
        assert any("centroids of" in why for why in ctx.refused.values()) == (width > most)


def _asked(most: int) -> None:
    """A batch of queries, each of which wants another peer."""
    peers = _peers(most + 1)
    selector, ctx = _told(peers, np.ones((1, 2), np.float32))
    for at, each in enumerate(peers):
        selector.told[each] = np.array([[1, at]], np.float32)
    found = selector.select(ctx, np.arange(most + 1.0)[:, None], mode="near_key", n=1)
    assert len(found) == most


def _callers(most: int) -> None:
    component = test_kademlia.dht()
    for each in _peers(most):
        component._caller(_asking(each))
    with pytest.raises(ExchangeRefused, match=f"of up to {most}"):
        component._caller(_asking(PeerId.from_seed("one more")))


def _asking(who: PeerId) -> Any:
    request = test_kademlia.WireCorrelation(
        kind=test_kademlia.CorrelationKind.REQUEST, wire_req_id=1
    )
    return test_kademlia.Context(source_peer=who, correlation=request)


def _lookups(most: int) -> None:
    component = test_kademlia.dht()
    test_kademlia.asks(component, test_kademlia.MANY[0])
    for number in range(most):
        component.select(test_kademlia.Context(), f"{number}".encode(), mode="near_key", n=1)
    with pytest.raises(UnsupportedSelection, match=f"{most} lookups are under way; begin fewer"):
        component.select(test_kademlia.Context(), b"one more", mode="near_key", n=1)


def _walks(most: int) -> None:
    """Walks of others, none of which is answered: one more is lost, and that is counted."""
    one = walker()
    for number in range(most + 1):
        ctx = called(5 + number // 200, peers=Peers({"peer": [peer(4)]}))
        one.step(ctx, walk(2, degree=9, number=number))
        assert len(ctx.requests) == (number < most)
        assert any("handed on already" in why for _, why in ctx.refused) == (number == most)


def _view(most: int) -> None:
    client = GlobalRegistryClient(GlobalRegistryClientConfig())
    rows: dict[PeerId, Any] = {}
    for each in _peers(most + 2):
        row = messages.Row(peer=each, as_class="", addresses=(), gone=False)
        client._take(test_global_registry.Context(), rows, row)
    assert len(rows) == most
    assert client.facts()["beyond_max_view"] == 2


def _registries(most: int) -> None:
    client = GlobalRegistryClient(GlobalRegistryClientConfig())
    for each in _peers(most):
        client._server(each)
    client._server(PeerId.from_seed(0))
    with pytest.raises(TooManyRegistries, match="announce to the same few"):
        client._server(PeerId.from_seed("one more"))


def _announced(count: int) -> None:
    said = messages.Announcement(as_class="c" * count, addresses=())
    messages.Announcement.decode(said.encode())


REACHED: dict[str, Reach] = {
    "components.backends.isolation.shared._MAX_AXES": refusing(
        DecodeError, lambda n: shared._dims([1] * n), "axes"
    ),
    "components.backends.isolation.shared._MAX_HEAD_BYTES": refused(
        DecodeError, lambda n: _said({"a": bytes(n - 8)}), "are taken"
    ),
    "components.backends.isolation.shared._MAX_HEAD_VALUES": refused(
        DecodeError, lambda n: _said({"a": [0] * (n - 3)}), "values"
    ),
    "components.backends.isolation.supervisor._MAX_TRIES": _tries,
    "components.backends.ort._MAX_RANKS": _ranks,
    "components.codecs.base._MAX_HEADER_BYTES": refusing(
        NotEncodable, _header_bytes, "fewer, larger parts"
    ),
    "components.codecs.base._MAX_HEADER_VALUES": refusing(
        NotEncodable, _header_values, "fewer, larger parts"
    ),
    "components.codecs.base._MAX_RANK": _code_axes,
    "components.codecs.base._MAX_VALUES": _values,
    "components.codecs.power_sgd._MAX_MATRICES": _matrices,
    "components.codecs.quantizers._MAX_DIMENSIONS": _dimensions,
    "components.indexes.collection._MOST_WAITED_S": _waited,
    "components.indexes.directory._MAX_MANIFEST_BYTES": _manifest,
    "components.indexes.filters._MAX_COLUMNS": _columns,
    "components.privacy.accounting.MAX_LEDGER_BYTES": _ledger,
    "components.privacy.release.MAX_ROUNDS": _charged,
    "components.selectors.centroids._MAX_PEERS": _centres,
    "components.selectors.centroids._MAX_WIDTH": _width,
    "CentroidSelector.max_asked": _asked,
    "components.selectors.kademlia._MAX_CALLERS": _callers,
    "components.selectors.kademlia._MAX_LOOKUPS": _lookups,
    "components.selectors.random_walk._MAX_PASSED_ON": _walks,
    "components.wire_records._MAX_MESSAGE_BYTES": refused_for(
        UnusableMessage, lambda n: messages.Announcement.decode(bytes(n)), "are read"
    ),
    "GlobalRegistryClient.max_view": _view,
    "max_registries": _registries,
    "max_registry_class_chars": refusing(UnusableMessage, _announced, "a class"),
}
# --- aggregators --------------------------------------------------------------------------------

# Of those that hold tensors, and of those that hold what peers say of their data.
_HOLDING = (
    *("Bulyan", "FLTrust", "FedAvg", "GeometricMedian", "Krum", "Median", "MetricsMean"),
    *("MultiKrum", "NormClipping", "RunningMean", "TrimmedMean"),
)
_POOLING = ("PooledClusters", "PooledCounts", "PooledRanges", "PooledStatistics")


def _aggregator(name: str) -> Any:
    cls = component_class(f"bbnode.{name}")
    given = {"RunningMean": {"shape": (1,)}, "PooledClusters": {"clusters": 1, "features": 1}}
    made = cls(cls.Config(**given.get(name, {})))
    made.bind({"backend": ort()} if cls.depends else {})
    return made


def _answer(name: str, number: float = 1.0, samples: int = 1) -> Any:
    """Return what an aggregator of this kind takes: of one number, and of so many examples."""
    match name:
        case "MetricsMean":
            return np.array([samples, number], np.float32)
        case "PooledClusters":
            return np.array([[1.0, samples, 0.0, samples * number]])
        case "PooledCounts":
            return np.array([[samples]])
        case "PooledRanges":
            return np.array([[samples], [number], [number]], np.float64)
        case "PooledStatistics":
            rows = np.array([[samples], [number], [0.0], [number], [number]])
            return Composite((rows, Metadata(num_samples=samples)))
    return Composite((np.full(1, number, np.float32), Metadata(num_samples=samples)))


def _taken(name: str, *answers: Any, words: str) -> None:
    """See that of these answers the last one is refused, for this reason."""
    ctx, peers = Context(), _peers(len(answers))
    batch = ResponseBatch(responses=tuple(zip(peers, answers, strict=True)))
    _aggregator(name).contribute_all(ctx, batch)
    assert [*ctx.refused] == peers[-1:]
    assert words in ctx.refused[peers[-1]]


def _contributors(name: str) -> Reach:
    return lambda n: _taken(name, *[_answer(name)] * (n + 1), words="max_contributors")


def _samples(name: str) -> Reach:
    return lambda n: _taken(
        name, _answer(name, samples=n), _answer(name, samples=n + 1), words="max_samples"
    )


def _largest(name: str) -> Reach:
    def reach(most: float) -> None:
        kind = np.float32 if name in _HOLDING else np.float64
        more = float(np.nextafter(kind(most), kind(np.inf)) * (1 + (kind is np.float64) * 1e-6))
        least = float(np.nextafter(kind(most), kind(0)))
        _taken(name, _answer(name, least), _answer(name, more), words="max_abs")

    return reach


def _held(name: str) -> Reach:
    """Return what begins one execution more, of which the first has nothing any more."""

    def reach(most: int) -> None:
        made, peers = _aggregator(name), _peers(8)
        batch = ResponseBatch(responses=tuple((each, _answer(name)) for each in peers))
        for execution in range(most + 1):
            made.contribute_all(Context(execution=execution), batch)
        held = made._rounds if name in _HOLDING else made._pools
        assert [*held] == [*range(1, most + 1)]
        with pytest.raises(NothingToAggregate):
            made.aggregate(Context(execution=0))

    return reach


for _name in (*_HOLDING, *_POOLING):
    REACHED[f"{_name}.max_contributors"] = _contributors(_name)
    REACHED[f"{_name}.max_samples"] = _samples(_name)
    REACHED[f"{_name}.max_rounds"] = _held(_name)
    if _name != "PooledCounts":
        REACHED[f"{_name}.max_abs"] = _largest(_name)


# --- codecs that remember -----------------------------------------------------------------------

_CODECS = (
    *("BFloat16Codec", "Float16Codec", "Int4Codec", "Int8Codec", "NF4Codec", "PowerSGDCodec"),
    *("ProductQuantizer", "RandomKCodec", "ScalarQuantizer", "SignCodec", "TopKCodec"),
)


def _streams(name: str) -> Reach:
    """Return what encodes for one op more: what the first one's codes lost is forgotten."""

    def reach(most: int) -> None:
        codec = test_codecs.made(component_class(f"bbnode.{name}"), error_feedback=True)
        tensor = np.linspace(-1, 1, 64, dtype=np.float32)
        for number in range(most + 1):
            codec.encode(Context(op=f"Encode_{number}"), tensor)
        assert [op for op, _ in codec._streams] == [f"Encode_{n}" for n in range(1, most + 1)]

    return reach


for _name in _CODECS:
    REACHED[f"{_name}.max_streams"] = _streams(_name)


# --- overlays that look again -------------------------------------------------------------------


def _refreshes(most: float) -> None:
    """Once many are known, the table is looked through again after this time."""
    component = test_kademlia.dht(k=2)
    for each in test_kademlia.MANY[:40]:
        test_kademlia.asks(component, each)
    waits: list[int] = []
    ctx = test_kademlia.Context()
    ctx.set_timer = lambda key, after_ns: waits.append(after_ns) if key == "refresh" else None  # type: ignore[method-assign]
    for _ in range(20):
        component.on_timer(ctx, "refresh")
    assert waits[-1] == most * 10**9


REACHED["Kademlia.refresh_s"] = _refreshes


# --- vectors and counts that peers say ----------------------------------------------------------


def _vector(name: str, **fixed: Any) -> Reach:
    """Return what looks at a vector with a number at the bound, and beyond it."""

    def reach(most: float) -> None:
        cls = component_class(f"bbnode.{name}")
        made = cls(cls.Config(size=1, **fixed))
        look = made._problem if name == "UpdateBuffer" else made.problem
        assert look(np.full(1, most, np.float32)) is None
        more = np.nextafter(np.float32(most), np.float32(np.inf))
        assert "(max_abs)" in str(look(np.full(1, more, np.float32)))

    return reach


def _examples(most: int) -> None:
    cls = component_class("bbnode.UpdateBuffer")
    look = cls(cls.Config(size=1))._problem_of_count
    assert look(Metadata(num_samples=most)) is None
    assert "(max_samples)" in str(look(Metadata(num_samples=most + 1)))


def _counts_as(name: str) -> Reach:
    """Return what says more examples than count: they count as the bound."""

    def reach(most: int) -> None:
        cls = component_class(f"bbnode.{name}")
        made, who = cls(cls.Config()), PeerId.from_seed(1)
        said = Composite((b"", Metadata(num_samples=most + 1, loss=1.0)))
        made.observed(Context(), ResponseBatch(responses=((who, said),), took_ns=((who, 1),)))
        counted = made._sizes[who].samples if name == "ByDataSize" else made._arms[who].utility
        assert counted == most

    return reach


def _weighs(name: str) -> Reach:
    """Return what plans a round in which clients weigh their examples: at most so many each."""

    def reach(most: int) -> None:
        cls = component_class(f"bbnode.{name}")
        made = cls(cls.Config(clients=4, size=1, equal_weights=False))
        ring = made._plan.ring
        assert ring.max_weight == most
        one = np.ones(1, np.float32)
        assert [ring.words(one, weight)[-1] for weight in (most, most + 1)] == [most, most]

    return reach


REACHED |= {
    "SecAggClient.max_samples": _weighs("SecAggClient"),
    "SecAggServer.max_samples": _weighs("SecAggServer"),
    "UpdateBuffer.max_abs": _vector("UpdateBuffer"),
    "UpdateBuffer.max_samples": _examples,
    "PairwiseMean.max_abs": _vector("PairwiseMean"),
    "RoundMixing.max_abs": _vector("RoundMixing"),
    "SwarmRounds.max_abs": _vector("SwarmRounds"),
    "ByDataSize.max_samples": _counts_as("ByDataSize"),
    "Oort.max_samples": _counts_as("Oort"),
}
