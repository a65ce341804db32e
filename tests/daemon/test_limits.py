"""Limits: all are in one list, and each is reached by a test that sees its typed failure."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import re
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import trio
from onnx import ModelProto, StringStringEntryProto, helper
from trio.testing import MockClock

from bbnode.cli.main import main
from bbnode.cli.stages import StageRefused, parse_stage
from bbnode.compiler import Compiler
from bbnode.components.autodiff.errors import InvalidForwardModel
from bbnode.components.data import partition
from bbnode.components.data.shared_schema import SchemaRefused
from bbnode.components.errors import ComponentError, InvalidComponentConfig
from bbnode.components.indexes.filters import FilterRefused, conditions
from bbnode.components.indexes.summary import centroids_of
from bbnode.components.models.lora import Lora
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.registry import component_class
from bbnode.components.settings import UnreadableSettings, stored_settings
from bbnode.daemon.config.limits import every_limit, in_words, job_of
from bbnode.dsl import BadArgument, Graph, Module, OnnxModule, PeerSelectorSlot, types
from bbnode.dsl.core.names import check_name
from bbnode.dsl.errors import BadCut, BadName, RecursiveModule
from bbnode.engine.errors import InstallError
from bbnode.engine.limits import InvalidLimit, Limits
from bbnode.engine.peers.references import schemas_from_json
from bbnode.ir.address import address_from_bytes, parse_address
from bbnode.ir.bounds import OutOfBounds, check_bounds
from bbnode.ir.codec import decode_value, encode_value
from bbnode.ir.envelope import (
    EdgeRttReport,
    SlotFill,
    WireEnvelope,
    decode_envelope,
    encode_envelope,
)
from bbnode.ir.errors import DecodeError
from bbnode.ir.intake import GraphsTooDeep, check_form
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Composite
from bbnode.programs import FederatedHistograms, FederatedQuantiles, SecureTraining
from bbnode.transport import schema_exchange
from bbnode.transport.schema_exchange import SchemaUnanswered
from tests.daemon import (
    limits_components,
    limits_daemon,
    limits_data,
    limits_engine,
    limits_network,
    limits_programs,
)
from tests.daemon.limits_reach import Place, Reach, config, refused, refusing
from tests.engine.builder import Partition, model
from tests.engine.support import bring_up

ROOT = Path(__file__).parents[2]
LIMITS = {cap.name: cap for cap in every_limit()}

# --- the list ---------------------------------------------------------------------------------

# Constants whose names are those of bounds, and that bound nothing that a job could meet.
_WORDS = re.compile("^_?[A-Z_]*(MAX|MOST|LONGEST|TIMEOUT)", re.M)
_BOUND = re.compile(r"_?(\w+_)?(MAX|MOST|LONGEST|TIMEOUT)(_\w+)?")
# Of texts for people, of numbers of other formats (64 bits), of the compiler's and the runtime's
# own work where more is slower or wider and nothing is refused, and of tests and simulations.
_FOR_PEOPLE = re.compile(
    r"_?(MAX|MOST)_(\w*SHOWN\w*|TOLD|NAMED|NAMES|LISTED\w*|SAID\w*|REASONS?\w*|DETAIL|CHARS|"
    r"TEXT|FRAMES|FILES|CAUSES|LEFT_OUT|ARGUMENT\w*|BOXES|OPS|\w*_CHARS|EXCEPTION\w*|PLAIN_INTEGER|"
    r"PARAMETERS_SHOWN|LEFT_SHOWN|HASHED_BYTES|LOG_BYTES_AT_ONCE|PID_DIGITS|PORT_TRIES)|"
    r"SHOWN_\w+|MOST_TOLD"
)
_OF_FORMATS = re.compile(
    r"_?(MAX|MOST)_(INT64|U64|SITE|SITE_ID|SERIAL|SEED|SETTING|COUNT|COUNTED|LABEL|LABEL_CHARS|"
    r"NS|VERSION|KIND|EXPONENT|VARINT_BYTES|UNIX_S|ID_DIGITS|DECIMALS|ABS_LOSS|STEPS|LENGTH|"
    r"FIELD|WINDOW_BYTES|DEADLINE_NS|STRING_BYTES|IMPORTS|UTILITY)|OP_\w+|DEADLINE_\w+"
)
_OF_WORK = {
    # Wider or slower beyond, or forgotten: nothing is refused.
    "_LONGEST_PAUSE_S", "_MOST_QUESTIONS", "_MOST_WORDS", "_MOST_LEVELS", "MAX_BOX_WIDTH",
    "MAX_HEADER_WIDTH", "MAX_LABEL_WIDTH",
    "LONGEST_INLINE", "_LONGEST_INLINE_BYTES", "MAX_COPIED_CONSTANT_BYTES", "MAX_REPEATED_NODES",
    "MAX_INFERRED_ELEMENTS", "MAX_SQUARED", "_MOST_CANCELLED", "_MOST_NODES", "_MOST_ELEMENTS",
    "_MOST_POSITIONS", "_MOST_ONES", "_MAX_FORMS", "_MOST_ARRANGED_BYTES", "DIGITS_MAX",
    "_MAX_CENTROIDS_KEPT", "_MOST_GROWN_BYTES", "_MAX_MASKS", "MOST_LEVELS", "_MAX_AGE",
    "_MAX_FINISHED", "_MAX_FAILURES", "_MAX_MISSES", "_MAX_LOOKED_AT", "_MOST_ROUNDS",
    "MAX_RECV", "_MAX_BATCH", "_MAX_LEARNED_BYTES", "_MAX_LAYOUTS", "_MAX_PEER_BYTES",
    "_MAX_FLAG_BYTES", "_MAX_READ_BYTES", "_MAX_SCOPES", "MAX_PLACES", "MAX_FULL_MESH",
    "MAX_EVENTS_PER_TURN", "_USER_TIMEOUT_MS", "MAX_WRITING_S", "_MAX_NESTED", "PROBE_TIMEOUT_S",
    "TIMEOUT_S", "FIRST_STOP_TIMEOUT_S", "ASK_TIMEOUT_S", "_MAX_REASON_BYTES", "TIMEOUT",
    "_TIMEOUT",
    "_MAX_RANK", "_MAX_HEAD_DEPTH", "_MAX_HEAD_BYTES", "_MAX_INPUT_DEPTH", "_MAX_PEERS",
    # Derived from others in the list.
    "_MAX_VALUES", "MAX_MEMBERSHIP_BYTES", "MAX_REFUSAL_BYTES", "MAX_QUIET_NS", "MAX_SAMPLES",
    "MAX_ROUNDS",
    # Of simulations.
    "_MAX_LATENCY_NS", "_MAX_JITTER_NS", "_MAX_PER_MILLE", "_MAX_DRIFT_PPM", "MAX_DRIFT_PPM",
    "_MAX_BYTES", "_MAX_DEPTH", "_MAX_PASSED_OVER",
}  # fmt: skip


def constants() -> list[tuple[str, str]]:
    """Module and name of each constant that is called as a bound."""
    found = []
    for path in sorted((ROOT / "bbnode").rglob("*.py")):
        if path.name == "caps.py":
            continue
        text = path.read_text("utf-8")
        if not _WORDS.search(text):  # parsing all takes seconds
            continue
        module = ".".join(path.relative_to(ROOT / "bbnode").with_suffix("").parts)
        for node in ast.parse(text).body:
            target = node.target if isinstance(node, ast.AnnAssign) else None
            if isinstance(node, ast.Assign):
                target = node.targets[0]
            if isinstance(target, ast.Name) and target.id.isupper() and _BOUND.fullmatch(target.id):
                found.append((module, target.id))
    return found


def test_every_constant_that_bounds_is_in_the_list() -> None:
    """One more is put into `limits.ELSEWHERE`, or into `ir.caps`, where it is a stranger's."""
    missing = [
        f"{module}.{name}"
        for module, name in constants()
        if f"{module}.{name}" not in LIMITS
        and not (_FOR_PEOPLE.fullmatch(name) or _OF_FORMATS.fullmatch(name) or name in _OF_WORK)
    ]
    assert not missing


@pytest.mark.parametrize("call", ["maxlen=", "CapacityLimiter(", "Semaphore("])
def test_no_queue_has_a_number_of_its_own(call: str) -> None:
    bare = re.compile(re.escape(call) + r"\s*([2-9]|\d\d)\d*[,)]")
    found = [
        str(path)
        for path in (ROOT / "bbnode").rglob("*.py")
        if bare.search(path.read_text("utf-8"))
    ]
    assert not found


def test_every_limit_says_what_it_is_of_and_how_it_is_changed() -> None:
    places = [(cap.section, cap.name) for cap in every_limit()]
    assert len({*places}) == len(places)
    for cap in every_limit():
        assert cap.reason, cap
        assert job_of(cap), cap
        if cap.section.startswith("[") or cap.section in ("Arguments of programs",):
            assert cap.setting, cap


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (None, "bytes", "no bound"), (300, "bytes", "300 bytes"), (64 << 10, "bytes", "64 KiB"),
        ((1 << 31) - 1, "bytes", "2 GiB"), (86_400, "s", "1 day"), (0.02, "s", "0.02 s"),
        (86_400 * 10**9, "ns", "1 day"), (1500, "ms", "1.5 seconds"),
        (4096, "peers", "4,096 peers"),
        (90.0, "s", "1.5 minutes"), (2, "", "2"),
    ],
)  # fmt: skip
def test_a_limit_is_told_in_words(value: Any, unit: str, words: str) -> None:
    assert in_words(value, unit) == words


# --- each is reached ----------------------------------------------------------------------------


def _draws(count: int) -> None:
    """As many peers as there are draws, of one class."""
    partition._refuse_draws(count)


REACHED: dict[str, Reach] = {
    "components.models.lora._MOST_RANK": refusing(
        InvalidForwardModel, lambda n: Lora(targets=("w",), rank=n).check()
    ),
    "components.models.trees._MAX_CLASSES": config("BoostedTrees", features=3)("classes"),
    "components.models.trees._MAX_LEAVES": config("BoostedTrees", features=3)("leaves"),
    "components.data.partition.MAX_DRAWS": refusing(ValueError, _draws),
    "components.data.text._MAX_LENGTH": config("TextDataSource", path="t.txt")("length"),
    "components.codecs.integers._MAX_BLOCK": config("Int8Codec")("block"),
    "components.codecs.power_sgd._MAX_RANK": config("PowerSGDCodec")("rank"),
    "components.codecs.quantizers._MAX_PART": config("ProductQuantizer")("part"),
    "components.codecs.quantizers._MAX_WORDS": config("ProductQuantizer")("words"),
    "components.indexes.collection.MAX_DIMENSIONS": config("FlatIndex")("dimensions"),
    "components.indexes.hnsw.MAX_LINKS": config("HnswIndex", dimensions=4)("m"),
    "components.indexes.hnsw.MAX_EXPANSION": config("HnswIndex", dimensions=4)("ef_search"),
    "components.indexes.ivf_pq.MAX_LISTS": config("IvfPqIndex", dimensions=4)("lists"),
    "components.indexes.ivf_pq.MAX_RERANK": config("IvfPqIndex", dimensions=4)("rerank"),
    "components.indexes.approximate.MAX_THREADS": config("HnswIndex", dimensions=4)("threads"),
    "components.selectors.centroids._MAX_CENTROIDS": config("CentroidSelector")("max_centroids"),
    "components.selectors.cyclon._MAX_VIEW": config("Cyclon")("view_size"),
    "components.selectors.hyparview._MAX_ACTIVE": config("HyParView")("active_size"),
    "components.selectors.hyparview._MAX_PASSIVE": config("HyParView")("passive_size"),
    "components.selectors.hyparview._MAX_WALK": config("HyParView")("active_walk"),
    "components.selectors.kademlia._MAX_K": config("Kademlia")("k"),
    "components.selectors.random_walk._MAX_HOPS": config("RandomWalk")("hops"),
    "components.selectors.random_walk._MAX_WALKS": config("RandomWalk")("walks"),
    "components.selectors.random_walk._MAX_POOL": config("RandomWalk")("pool_size"),
    "components.peer_registry.server.MAX_TTL_S": config("GlobalRegistryServer")("ttl_s"),
    "components.secure_aggregation.plan.MAX_CLIENTS": refusing(
        BadArgument, lambda n: SecureTraining(model=(4, 2), clients=n, clip=1.0).check()
    ),
    "programs.statistics.MAX_BINS": refusing(
        BadArgument, lambda n: FederatedHistograms(bins=n).check()
    ),
    "compiler.driver.compiler.MAX_PER_HOP_BUDGET_NS": refusing(
        ValueError, lambda n: Compiler().with_per_hop_budget_ns(n)
    ),
    "dsl.core.names.MAX_NAME_LENGTH": refusing(BadName, lambda n: check_name("name", "a" * n)),
    "max_deadline_s": lambda n: _deadline(n),
    "max_peer_id_chars": lambda n: _peer_id(n),
    "max_settings_values": lambda n: _settings(n),
}


def _deadline(most: int) -> None:
    refusing(InvalidLimit, lambda n: Limits(wait_s=n))(most)
    for more in (0, 1):
        server = Partition("server")
        server.recv("update", node=types.TENSOR_FLOAT)
        server.sys("Collect", ["update"], "batch", n=2, until_ns=most * 10**9 + more)
        server.output("all", "batch")
        if not more:
            bring_up(model(server), server.name)
            continue
        with pytest.raises(InstallError, match="until_ns is"):
            bring_up(model(server), server.name)


def _graph(**parts: Any) -> ModelProto:
    made = ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", 21)])
    made.graph.name = "g"
    made.graph.node.add(op_type="Add", input=["x", "x"], output=["y"])
    for name, value in parts.items():
        getattr(made.graph.node[0], name).extend(value)
    return made


def _nested(depth: int) -> ModelProto:
    made = _graph()
    graph = made.graph
    for _ in range(depth):
        graph = graph.node.add(op_type="If").attribute.add(name="then_branch", type=5).g
    graph.node.add(op_type="Identity")
    return made


def _typed(depth: int) -> ModelProto:
    made = _graph()
    kind = made.graph.input.add(name="x").type
    for _ in range(depth - 1):
        kind = kind.sequence_type.elem_type
    kind.tensor_type.elem_type = 1
    return made


def _axes(count: int) -> ModelProto:
    made = _graph()
    shape = made.graph.input.add(name="x").type.tensor_type.shape
    for _ in range(count):
        shape.dim.add(dim_value=1)
    return made


def _noted(**parts: Any) -> ModelProto:
    made = _graph()
    for name, value in parts.items():
        getattr(made, name).extend(value)
    return made


def _entries(count: int) -> list[Any]:
    return [StringStringEntryProto(key=f"k{n}", value="v") for n in range(count)]


def _envelope(**fields: Any) -> None:
    fill = SlotFill(dest_suffix=fields.pop("suffix", b"x"), payload=b"", type_hash=1)
    given = {"dest_peer_addresses": (), "fills": (fill,), **fields}
    decode_envelope(b"".join(bytes(part) for part in encode_envelope(WireEnvelope(**given))))


def _metadata(count: int) -> None:
    raw = msgpack.packb({f"k{n}": n for n in range(count)})
    decode_value(types.METADATA, raw)


REACHED |= {
    "max_name_chars": refusing(OutOfBounds, lambda n: check_bounds(_graph(output=["n" * n]))),
    "max_text_chars": refusing(
        OutOfBounds,
        lambda n: check_bounds(
            _noted(metadata_props=[StringStringEntryProto(key="a", value="v" * n)])
        ),
    ),
    "max_ports": refusing(OutOfBounds, lambda n: check_bounds(_graph(input=["x"] * (n - 2)))),
    "max_node_parts": refusing(
        OutOfBounds, lambda n: check_bounds(_graph(metadata_props=_entries(n)))
    ),
    "max_function_parts": refusing(
        OutOfBounds, lambda n: check_bounds(_noted(metadata_props=_entries(n)))
    ),
    "max_graph_depth": refusing(OutOfBounds, lambda n: check_bounds(_nested(n))),
    "max_type_depth": refusing(OutOfBounds, lambda n: check_bounds(_typed(n))),
    "ir.shapes.MAX_AXES": refusing(OutOfBounds, lambda n: check_bounds(_axes(n))),
    "max_suffix_bytes": refusing(DecodeError, lambda n: _envelope(suffix=b"s" * n)),
    "max_metadata_items": refusing(DecodeError, _metadata),
    "dsl.core.recorder.MAX_MODULE_DEPTH": lambda n: _too_deep(n),
    "dsl.onnx.cuts.MAX_STAGES": lambda n: _stages(n),
    "components.data.images._MAX_SIDE": refusing(
        InvalidComponentConfig,
        lambda n: component_class("bbnode.ImageFolderDataSource")(
            component_class("bbnode.ImageFolderDataSource").Config(path="x", size=(n, 8))
        ),
    ),
    "cli.commands.rounds.MAX_LAST": lambda n: _too_much("rounds", "--last", str(n + 1)),
    "cli.commands.network.MAX_DAYS": lambda n: _too_much(
        "network", "grant", str(PeerId.from_seed(1)), "--days", str(n + 1)
    ),
    "cli.stages.MAX_STAGE_CHARS": lambda n: _stage(n),
}


def _name_of(size: int) -> bytes:
    """The address of a host whose name fills it up."""
    name = ".".join(["a" * 63] * 3) + "." + "a" * (size - 3 - 192)
    return bytes((54, len(name) & 0x7F | 0x80, len(name) >> 7)) + name.encode()


def _peer_id(most: int) -> None:
    for count, part in ((most, "not a PeerId"), (most + 1, f"{most + 1} characters")):
        with pytest.raises(DecodeError, match=part):
            PeerId.parse("1" * count)


def _hops(count: int) -> None:
    class Sends(Module):
        home = "peer"

        def body(self, g: Graph) -> None:
            peers = PeerSelectorSlot("peers", peer_class="peer").sample(
                g, n=1, after=g.input("tick", types.TRIGGER)
            )
            g.net_out("word", peers, peers, hops=count)

    Sends().build()


def _filter(count: int) -> None:
    conditions({"name in": json.dumps([*range(count)])})


REACHED |= {
    "max_digest_bytes": refusing(DecodeError, lambda n: PeerId(bytes((0, n)) + bytes(n))),
    "max_address_bytes": refusing(
        DecodeError, lambda n: address_from_bytes(_name_of(n)), "are taken"
    ),
    "max_address_chars": refused(DecodeError, lambda n: parse_address("/" * n)),
    "max_source_bytes": refused(DecodeError, lambda n: _envelope(src_peer_bytes=b"p" * n)),
    "max_rtt_reports": refusing(
        DecodeError,
        lambda n: _envelope(edge_rtt_reports=(EdgeRttReport(site=1, srtt_ns=1, rttvar_ns=1),) * n),
    ),
    "max_dimensions": refusing(
        DecodeError,
        lambda n: decode_value(types.TENSOR_FLOAT, encode_value(np.zeros((1,) * n, np.float32))),
    ),
    "max_children": refused(DecodeError, lambda n: encode_value(Composite([np.zeros(1)] * n))),
    "max_texts": refused(DecodeError, lambda n: encode_value(np.full(n, "a", object))),
    "max_scalar_bytes": refused(
        DecodeError, lambda n: decode_value(types.METADATA, msgpack.packb({"k": "v" * n}))
    ),
    "ir.intake.MAX_GRAPH_DEPTH": refusing(GraphsTooDeep, lambda n: check_form(_nested(n))),
    "dsl.core.graph.MAX_HOPS": refusing(BadArgument, _hops),
    "components.indexes.ivf_pq.MAX_PART": config("IvfPqIndex", dimensions=4)("part"),
    "components.indexes.filters._MAX_LISTED": refusing(FilterRefused, _filter),
    "components.indexes.summary.MAX_CENTROIDS": refused(
        ComponentError, lambda n: centroids_of(None, n)
    ),
    "components.placement.rendezvous._MAX_REPLICAS": refused(
        InvalidComponentConfig,
        lambda n: component_class("bbnode.ItemPlacement")(
            component_class("bbnode.ItemPlacement").Config(replicas=n)
        ),
    ),
    "components.models.torch_model._MAX_THREADS": refused(
        InvalidComponentConfig,
        lambda n: component_class("bbnode.TorchModel")(
            component_class("bbnode.TorchModel").Config(module="a:B", threads=n)
        ),
    ),
    "programs.statistics.MAX_COUNTING_ROUNDS": refused(
        BadArgument, lambda n: FederatedQuantiles(bins=2, tolerance=2.0 ** -(n + 2)).check()
    ),
    "default_wait_s": lambda n: _waits(n),
    "max_schemas_bytes": refusing(SchemaRefused, lambda n: schemas_from_json("{}" + " " * (n - 2))),
    "transport.schema_exchange._MAX_MESSAGE_BYTES": refusing(
        SchemaUnanswered, lambda n: trio.run(schema_exchange._receive, _Says(n))
    ),
}


class _Says:
    """A stream of a peer that announces so many bytes, and sends them."""

    peer = PeerId.from_seed("says")

    def __init__(self, count: int) -> None:
        self._left = count.to_bytes(4, "big") + bytes(count)

    async def read(self, most: int) -> bytes:
        await trio.lowlevel.checkpoint()
        part, self._left = self._left[:most], self._left[most:]
        return part


def _waits(most: int) -> None:
    assert Limits().wait_s == most
    assert Limits().wait_ns == most * 10**9


def _too_deep(most: int) -> None:
    class Deeper(Module):
        def body(self, g: Graph) -> None:
            Deeper().call().build(g)

    with pytest.raises(RecursiveModule, match=f"nests deeper than {most}"):
        Deeper().build()


def _stages(most: int) -> None:
    model = mlp_forward((4, 3))
    with pytest.raises(BadCut, match=f"from 1 to {most}"):
        OnnxModule(model).split(stages=most + 1)


def _too_much(*arguments: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main([*arguments]) == 2
    assert "less than or equal to" in said.getvalue()


def _stage(most: int) -> None:
    with pytest.raises(StageRefused, match=f"at most {most} are read"):
        parse_stage("a" * (most + 1))


def _settings(most: int) -> None:
    for count, fits in ((most - 8, True), (most + 1, False)):
        raw = msgpack.packb({"categories": [0] * count})
        if fits:
            assert len(stored_settings(raw)["categories"]) == count
            continue
        with pytest.raises(UnreadableSettings):
            stored_settings(raw)


ROOMS = (
    *(limits_programs, limits_data, limits_components),
    *(limits_engine, limits_network, limits_daemon),
)
for _room in ROOMS:
    REACHED |= _room.REACHED


@pytest.mark.parametrize("name", REACHED)
def test_beyond_a_limit_is_a_typed_failure(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach, most = REACHED[name], LIMITS[name].value
    wanted = len(inspect.signature(reach).parameters)
    given = (most, Place(tmp_path, monkeypatch))[:wanted]
    if inspect.iscoroutinefunction(reach):
        trio.run(reach, *given, clock=MockClock(autojump_threshold=0))
    else:
        reach(*given)


# Reached by tests of their rooms that say the number, not the name.
IN_OTHER_TESTS = {
    "daemon.control.feed.MAX_IN_TRANSIT": "daemon/test_control_server.py::"
    "test_a_flood_of_lines_from_a_thread_is_bounded",
    "cooling_s": "transport/test_admission.py::"
    "test_a_flooding_strangers_prefix_gets_no_connection_for_a_while",
    "max_cooling_s": "transport/test_admission.py::"
    "test_cooling_is_twice_as_long_each_time_up_to_a_bound_and_is_forgotten",
    "guest_s": "transport/test_link.py::test_a_guest_stays_for_30_s_and_few_are_there",
    "silence_s": "transport/test_link.py::test_silent_peer_is_gone_after_15_s",
    "remember_s": "transport/test_link.py::"
    "test_a_peer_that_does_not_come_back_fails_its_queue_in_order",
}


@pytest.mark.parametrize("name", IN_OTHER_TESTS)
def test_what_is_reached_in_another_test_is_there(name: str) -> None:
    path, _, test = IN_OTHER_TESTS[name].partition("::")
    assert f"def {test}(" in (ROOT / "tests" / path).read_text("utf-8")


def test_every_limit_has_a_test() -> None:
    """A new one is reached in `REACHED`, or by name in another test."""
    words: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if path.parent != Path(__file__).parent or "limits" not in path.name:
            words.update(re.findall(r"\w+", path.read_text("utf-8")))
    without = {
        cap.name
        for cap in every_limit()
        if cap.name not in REACHED
        and cap.name not in IN_OTHER_TESTS
        and {cap.name.rpartition(".")[2], cap.name.rpartition(".")[2].upper()}.isdisjoint(words)
    }
    assert not without
