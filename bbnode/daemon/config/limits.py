"""Every bound, cap and deadline of bbnode in one list: what it bounds, and how to change it.

Rule: a value is defined with the thing that it bounds (`ir.caps`, `Limits`, `TransportLimits`, an
argument of a program, a setting of a component, a constant of a module) and is read from there;
this module adds its meaning for a job. A constant of the package that bounds something and is in
none of these places is in `ELSEWHERE`; a test looks for others. docs/limits.md is this list.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import textwrap
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Final, TypeAlias

from bbnode.daemon.config import LimitsSection, RelaySection, Section, keys
from bbnode.daemon.config.reference import component_settings, number, table, unit_of
from bbnode.ir import caps
from bbnode.ir.caps import Cap
from bbnode.transport.limits import TransportLimits

_WIDTH: Final = 100

# Name, unit and meaning of a constant.
Constant: TypeAlias = tuple[str, str, str]

# Bounds that are defined beside their use, by title and module.
ELSEWHERE: Final[Mapping[str, Mapping[str, tuple[Constant, ...]]]] = {
    "Programs and models": {
        "bbnode.ir.intake": (
            ("MAX_MODEL_BYTES", "bytes", "a model that a program is made of, weights included"),
            ("MAX_GRAPH_DEPTH", "levels", "graphs in graphs of such a model"),
        ),
        "bbnode.dsl.onnx.load": (("MAX_OPS", "ops", "of a model, its functions inlined"),),
        "bbnode.dsl.onnx.cuts": (
            ("MAX_STAGES", "stages", "that a model is cut into, each for one peer"),
        ),
        "bbnode.dsl.core.graph": (
            ("MAX_VARIADIC_OUTPUTS", "outputs", "of one op"),
            ("MAX_HOPS", "hops", "of a chain of messages that an author says"),
        ),
        "bbnode.dsl.core.names": (
            ("MAX_NAME_LENGTH", "characters", "a name that an author gives"),
        ),
        "bbnode.dsl.core.recorder": (("MAX_MODULE_DEPTH", "levels", "Modules in Modules"),),
        "bbnode.dsl.backend.control": (("MAX_BRANCH_DEPTH", "levels", "branches in branches"),),
        "bbnode.ir.shapes": (("MAX_AXES", "axes", "of a declared shape"),),
        "bbnode.compiler.passes.inline_for_partition": (
            ("MAX_COPIED_NODES", "ops", "that inlining makes of one program"),
        ),
        "bbnode.compiler.rewriting.instances": (
            ("MAX_COPIED_NODES", "ops", "that calls of Modules make of one program"),
        ),
        "bbnode.compiler.analysis.chain_depth": (
            ("MAX_CHAIN_DEPTH", "hops", "of a chain of messages that deadlines are counted over"),
        ),
        "bbnode.compiler.driver.compiler": (
            ("MAX_PER_HOP_BUDGET_NS", "ns", "that a compile gives a hop"),
        ),
        "bbnode.components.autodiff.own_weights": (
            ("_MOST_ELEMENTS", "numbers", "of a sparse weight, which is trained as a dense one"),
        ),
        "bbnode.daemon.artifacts.picture.content": (
            ("MAX_PASSED_ROWS", "rows", "that the edges of a picture of a program pass"),
        ),
        "bbnode.components.models.dry_run": (
            ("MOST_PARAMETERS", "numbers", "of a model that a node tries before it is ready"),
        ),
        "bbnode.daemon.artifacts.dry_run": (
            ("MOST_PARAMETERS", "numbers", "of a model that is tried while it is compiled"),
        ),
        "bbnode.components.models.lora": (("_MOST_RANK", "rank", "of an adapter"),),
        "bbnode.components.models.torch_model": (
            ("_MAX_EXAMPLE", "numbers", "of the example that a module is exported with"),
            ("_MAX_THREADS", "threads", "of PyTorch"),
        ),
        "bbnode.components.models.trees": (
            ("_MAX_CLASSES", "classes", "that trees tell apart"),
            ("_MAX_LEAVES", "leaves", "of one tree"),
        ),
        "bbnode.components.models.weights": (
            ("_MAX_LAYOUT_BYTES", "bytes", "names and shapes of a saved model's parameters"),
        ),
    },
    "Data": {
        "bbnode.components.data.arrow_files": (
            ("MAX_FILES", "files", "of one table, each of which stays open"),
            ("MAX_JSON_BYTES", "bytes", "a description beside such files"),
        ),
        "bbnode.components.data.arrow_sizes": (
            ("_MAX_HEADER_BYTES", "bytes", "the head of one batch of rows of an Arrow file"),
            ("_MAX_ENTRIES", "entries", "of one list in such a head: columns, and buffers"),
            ("_MAX_MESSAGES", "batches", "of rows of an Arrow file"),
        ),
        "bbnode.components.data.columns": (
            ("MAX_CATEGORIES", "categories", "of a column of words whose categories nobody gives"),
            ("_MOST_AXES", "axes", "of one example in a column of lists"),
        ),
        "bbnode.components.data.csv_files": (("_MAX_BLOCK_BYTES", "bytes", "a line of CSV"),),
        "bbnode.components.data.images": (
            ("_MAX_FILES", "files", "of a folder of images"),
            ("_MAX_DEPTH", "levels", "folders in the folder of a class"),
            ("_MAX_SIDE", "pixels", "width or height of an example"),
        ),
        "bbnode.components.data.item_files.sources": (
            ("_MAX_LINE_BYTES", "bytes", "a line of a file of items for an index"),
        ),
        "bbnode.components.data.numpy_files": (
            ("_MOST_HEADER_BYTES", "bytes", "the head of an array in a file of numpy"),
        ),
        "bbnode.components.data.partition": (
            ("MAX_DRAWS", "draws", "of a Dirichlet partition: peers times classes"),
        ),
        "bbnode.components.data.statistics": (
            (
                "MAX_LABELS",
                "classes",
                "whose examples federated statistics count; of more, they have no label_counts",
            ),
            ("_MAX_FEATURES", "columns", "that statistics are taken of"),
            ("_MAX_FILE_BYTES", "bytes", "a file of statistics"),
        ),
        "bbnode.components.data.text": (
            ("_MAX_TOKENIZER_BYTES", "bytes", "a tokenizer.json"),
            ("_MAX_LENGTH", "tokens", "of an example"),
        ),
        "bbnode.components.encoders.files": (
            ("_MAX_JSON_BYTES", "bytes", "a settings file of an encoder"),
        ),
        "bbnode.daemon.predicting.inputs": (
            ("_MAX_TEXT_BYTES", "bytes", "a file of texts that `bbnode predict` reads"),
        ),
        "bbnode.programs.statistics": (
            ("MAX_BINS", "bins", "of a federated histogram"),
            ("MAX_COUNTING_ROUNDS", "rounds", "that federated quantiles take"),
        ),
    },
    "Codes, secrets and aggregation": {
        "bbnode.components.codecs.base": (
            ("_MAX_HEADER_BYTES", "bytes", "the head of a code"),
            ("_MAX_HEADER_VALUES", "values", "in it"),
            ("_MAX_RANK", "axes", "of a tensor that is encoded"),
            ("_MAX_VALUES", "values", "of a code's tensor where no program says its size"),
        ),
        "bbnode.components.codecs.integers": (("_MAX_BLOCK", "values", "that share one scale"),),
        "bbnode.components.codecs.power_sgd": (
            ("_MAX_RANK", "rank", "of a code"),
            ("_MAX_MATRICES", "matrices", "of one tensor: a model's parameters"),
        ),
        "bbnode.components.codecs.quantizers": (
            ("_MAX_PART", "numbers", "of the part of a vector that a word stands for"),
            ("_MAX_WORDS", "words", "of a codebook"),
            ("_MAX_DIMENSIONS", "dimensions", "of a vector"),
        ),
        "bbnode.components.secure_aggregation.plan": (
            ("MAX_CLIENTS", "clients", "of one round of secure aggregation"),
        ),
        "bbnode.components.secure_aggregation.client": (
            ("MAX_USED", "rounds", "that a client remembers not to answer twice"),
        ),
        "bbnode.components.secure_aggregation.server": (
            ("MAX_LIARS", "clients", "that lied and are remembered"),
        ),
        "bbnode.components.secure_aggregation.noise": (
            ("MAX_DEVIATION", "steps", "standard deviation of the noise of secure aggregation"),
        ),
        "bbnode.components.privacy.accounting": (
            ("MAX_LEDGER_BYTES", "bytes", "the file of what privacy has been spent"),
        ),
        "bbnode.components.privacy.release": (
            ("MAX_ROUNDS", "rounds", "that were charged and are not yet released"),
        ),
    },
    "Indexes and overlays": {
        "bbnode.components.indexes.collection": (
            ("MAX_DIMENSIONS", "dimensions", "of a vector of an index"),
            ("_MOST_WAITED_S", "s", "that a snapshot waits for a search in another thread"),
        ),
        "bbnode.components.indexes.approximate": (("MAX_THREADS", "threads", "of an index"),),
        "bbnode.components.indexes.directory": (
            ("_MAX_MANIFEST_BYTES", "bytes", "the manifest of an index on disk"),
        ),
        "bbnode.components.indexes.filters": (
            ("_MAX_LISTED", "values", "of one list in a filter"),
            ("_MAX_COLUMNS", "names", "of metadata that filters keep by column"),
        ),
        "bbnode.components.indexes.hnsw": (
            ("MAX_LINKS", "links", "of an item of an HNSW index"),
            ("MAX_EXPANSION", "items", "that a search of it looks at"),
        ),
        "bbnode.components.indexes.ivf_pq": (
            ("MAX_LISTS", "lists", "of an IVF index"),
            ("MAX_PART", "parts", "of a vector of it"),
            ("MAX_RERANK", "items", "for each that is found, whose score is computed again"),
        ),
        "bbnode.components.indexes.summary": (
            ("MAX_CENTROIDS", "centroids", "that a shard says of itself"),
        ),
        "bbnode.components.selectors.centroids": (
            ("_MAX_CENTROIDS", "centroids", "that are kept of a shard"),
            ("_MAX_PEERS", "peers", "of which they are kept"),
            ("_MAX_WIDTH", "dimensions", "of one"),
        ),
        "bbnode.components.selectors.cyclon": (("_MAX_VIEW", "peers", "of a view"),),
        "bbnode.components.selectors.hyparview": (
            ("_MAX_ACTIVE", "peers", "of the active view"),
            ("_MAX_PASSIVE", "peers", "of the passive view"),
            ("_MAX_WALK", "hops", "of a walk"),
        ),
        "bbnode.components.selectors.kademlia": (
            ("_MAX_K", "peers", "of a bucket"),
            ("_MAX_CALLERS", "peers", "that asked and are remembered"),
            ("_MAX_LOOKUPS", "look-ups", "at once"),
        ),
        "bbnode.components.selectors.random_walk": (
            ("_MAX_HOPS", "hops", "of a walk"),
            ("_MAX_WALKS", "walks", "at once"),
            ("_MAX_POOL", "peers", "that walks ended at and are kept"),
            ("_MAX_PASSED_ON", "walks", "of others at once"),
        ),
        "bbnode.components.placement.rendezvous": (("_MAX_REPLICAS", "replicas", "of an item"),),
        "bbnode.components.topics": (
            ("MAX_WAITING", "messages", "that a component of a topic keeps until they are taken"),
        ),
        "bbnode.components.peer_registry.server": (
            ("MAX_TTL_S", "s", "that an entry of a registry lives without being renewed"),
        ),
        "bbnode.components.wire_records": (
            ("_MAX_MESSAGE_BYTES", "bytes", "a message of a registry"),
        ),
        "bbnode.programs.retrieval.peers": (("_MAX_BITS", "bits", "of a prefix of a shard"),),
    },
    "Graphs that run": {
        "bbnode.components.backends.ort": (
            ("_MAX_RANKS", "combinations", "of ranks that one graph is kept prepared for"),
        ),
        "bbnode.components.backends.isolation.shared": (
            ("_MAX_HEAD_BYTES", "bytes", "what travels beside the values to a process of graphs"),
            ("_MAX_HEAD_VALUES", "values", "in it"),
            ("_MAX_AXES", "axes", "of a tensor that travels so"),
        ),
        "bbnode.components.backends.isolation.supervisor": (
            ("_MAX_TRIES", "tries", "of a run whose process ended for another one"),
        ),
        "bbnode.engine.ops.graphs": (
            ("MAX_VARIANTS", "dtypes", "that a graph of open types is kept prepared for"),
            ("MAX_SINGLES", "ops", "of a graph that failed, which are kept prepared alone"),
        ),
        "bbnode.engine.peers.backoff_table": (
            ("MAX_DELAY_NS", "ns", "that a peer whose sends failed is left alone for"),
        ),
        "bbnode.engine.peers.round_trips": (
            ("MAX_ESTIMATE_NS", "ns", "a round trip that is believed"),
        ),
    },
    "Commands and history": {
        "bbnode.api.on_trio": (
            ("MAX_WAITING_OUTPUTS", "outputs", "that wait for a slow reader; the oldest go"),
            ("MAX_WAITING_BYTES", "bytes", "the same"),
        ),
        "bbnode.cli.values": (("MAX_FILE_BYTES", "bytes", "a file that `bbnode invoke` sends"),),
        "bbnode.cli.stages": (("MAX_STAGE_CHARS", "characters", "the argument of a stage"),),
        "bbnode.cli.commands.up": (
            ("MAX_INPUT_NUMBERS", "numbers", "of an input that `bbnode up` writes down"),
        ),
        "bbnode.cli.commands.network": (("MAX_DAYS", "days", "of a network's membership"),),
        "bbnode.cli.commands.rounds": (("MAX_LAST", "rounds", "that `bbnode rounds` shows"),),
        "bbnode.daemon.control.client": (
            ("DEFAULT_TIMEOUT_S", "s", "that a command waits for an answer that needs no work"),
        ),
        "bbnode.daemon.control.feed": (
            ("MAX_IN_TRANSIT", "lines", "of the log from other threads; more are counted"),
        ),
        "bbnode.daemon.control.routes": (
            ("MAX_ROUNDS", "rounds", "of one answer"),
            ("MAX_ROUNDS_BYTES", "bytes", "the same; the newest, of small rounds some 20,000"),
            ("PING_TIMEOUT_S", "s", "of a ping"),
        ),
        "bbnode.daemon.history.recorder": (("MAX_QUEUED", "rounds", "that wait for the disk"),),
        "bbnode.daemon.history.scalars": (
            ("MAX_METRICS", "metrics", "of one round"),
            ("MAX_METRIC_NAME_BYTES", "bytes", "the name of one"),
        ),
        "bbnode.daemon.history.store": (
            ("MAX_ROUND_BYTES", "bytes", "one round in the history; of more, outputs go"),
            ("BUSY_TIMEOUT_MS", "ms", "that the history waits for another writer"),
        ),
        "bbnode.daemon.history.tracking": (("MAX_QUEUED", "rounds", "that wait for a tracker"),),
        "bbnode.daemon.invoke.exact": (
            ("MAX_EXACT_BYTES", "bytes", "outputs of one invocation that a command gets whole"),
        ),
        "bbnode.daemon.invoke.rounds": (
            ("MAX_PEERS_OF_A_ROUND", "peers", "of a round, of which it says what they sent"),
        ),
        "bbnode.daemon.join.artifact": (
            ("MAX_ATTEMPTS", "connections", "that may break while an artifact is fetched"),
        ),
        "bbnode.daemon.join.dial": (
            ("CONNECT_TIMEOUT_S", "s", "for a first connection"),
            ("ACCEPT_TIMEOUT_S", "s", "from it to the first answer"),
        ),
        "bbnode.daemon.lifecycle.preparing": (
            ("LONGEST_PAUSE_S", "s", "between two tries of a component that is not ready"),
        ),
        "bbnode.daemon.network.dial_plan": (
            ("MAX_TURNED_AWAY_S", "s", "between two dials of a peer that turns us away"),
        ),
        "bbnode.daemon.network.dial_back": (("MAX_ASKED", "peers", "that are asked to dial back"),),
        "bbnode.transport.schema_exchange": (
            ("_MAX_MESSAGE_BYTES", "bytes", "what a peer says that its data mean"),
        ),
        "bbnode.daemon.network.introductions": (
            ("MAX_ASK_AGAIN_S", "s", "between two requests for introductions"),
        ),
        "bbnode.daemon.network.restarts": (
            ("_MOST_WAITING", "peers", "that were restarted and wait to be asked"),
        ),
        "bbnode.daemon.observing.doctor": (
            ("MAX_CLOCK_ERROR_US", "us", "of the clock's own estimate, for `bbnode doctor`"),
        ),
        "bbnode.daemon.paths": (
            ("SOCKET_PATH_MAX_BYTES", "bytes", "the path of a control socket"),
        ),
        "bbnode.daemon.testbed.plan": (("MAX_NODES", "nodes", "of a testbed"),),
        "bbnode.daemon.testbed.run": (
            ("START_TIMEOUT_S", "s", "for a testbed's daemons to start"),
            ("JOIN_TIMEOUT_S", "s", "for them to find one another"),
            ("GONE_TIMEOUT_S", "s", "for one that was killed to be started again"),
            ("STOP_TIMEOUT_S", "s", "for them to stop"),
        ),
        "bbnode.sim.network": (
            ("DEFAULT_LIMIT_NS", "ns", "of virtual time, of a run whose caller gives no limit"),
            ("MAX_EVENTS_AT_ONCE", "events", "at one moment of a simulation"),
        ),
        "bbnode.transport.libp2p.relay.client": (
            ("MAX_RELAYS", "relays", "that a node keeps a place on"),
        ),
        "bbnode.transport.libp2p.tcp": (("CONNECT_TIMEOUT_S", "s", "of a dial"),),
    },
}

# The largest job that a bound allows, in the terms of its user.
JOBS: Final[Mapping[str, str]] = {
    "max_artifact_bytes": "a program with 1.9 GiB of weights; a model that the server's slot and "
    "the clients' each hold can have 0.99 GiB",
    "MAX_MODEL_BYTES": "a model of 1.9 GiB",
    "max_envelope_bytes": "a model of 67 million parameters, whole; of more with `envelope_bytes`",
    "envelope_bytes": "weights of 67 million parameters at once; 1.9 GiB with 2147483648",
    "ingress_bytes": "one such message on its way, or many small ones",
    "invoke_bytes": "an input of 2.6 million float32 of one `invoke`",
    "completion_bytes": "a result of one million float32 that a component hands in later",
    "max_message_bytes": "a model of one billion parameters",
    "max_children": "a cohort of 65,536 clients",
    "max_list_items": "a cohort of 65,536 clients",
    "max_deadline_s": "a round of a month",
    "default_wait_s": "a round of a day, where no author says more",
    "wait_s": "a round of a day, where no author says more",
    "max_wait_s": "a command that waits for a day of training",
    "max_gathered": "a join of 65,536 deliveries",
    "max_checkpoint_bytes": "a node of 4 GiB of weights, optimizer and messages",
    "max_kept_unsent_bytes": "an unsent answer of 16 million parameters over a restart",
    "max_description_bytes": "20,000 columns with names of 50 characters",
    "max_settings_values": "16,000 categories or layers named in one slot",
    "max_control_answer_bytes": "what a command prints",
    "max_flat_ops": "a program of 260,000 ops",
    "MAX_OPS": "a model of 200,000 ops",
    "MAX_CATEGORIES": "a column of 10,000 different words; more with `categories`",
    "_MAX_FEATURES": "statistics of 1,000,000 columns",
    "_MAX_FILES": "5,000,000 images of a client",
    "MAX_LAST": "100,000 rounds shown at once, as far as an answer of 12 MiB holds them",
    "keep_rounds": "a history of so many rounds; older ones go",
    "MAX_CLIENTS": "4,096 clients of one secure round",
    "FedAvg.max_samples": "1,000,000 examples of a client; more with "
    "`aggregator=concrete(FedAvg, max_samples=…)`",
    "FedAvg.max_contributors": "1,024 clients; a program makes it as many as it asks",
    "MetricsMean.max_contributors": "1,024 clients; a program makes it as many as it asks",
    "SecureTraining.max_samples": "10,000 examples of a client; more weigh as many, and it says so",
    "MAX_METRICS": "128 metrics of a round",
}


def every_limit() -> list[Cap]:
    """Return all bounds, by section: those of the package, of the configuration, of programs."""
    return [
        *caps.TABLE,
        *_constants(),
        *caps.settable("Connections and queues", TransportLimits()),
        *_counting_keys("limits", LimitsSection(), LimitsSection().effective()),
        *_counting_keys("relay", RelaySection(), RelaySection().model_dump()),
        *_other_keys(),
        *_arguments(),
        *_settings(),
    ]


def job_of(cap: Cap) -> str:
    """Return the largest job that a bound allows, in a user's words."""
    if cap.value == 0:  # 0 of arguments and settings: no bound, or as much as the machine has
        return "as it says"
    _, _, last = cap.name.rpartition(".")
    return JOBS.get(cap.name) or JOBS.get(last) or in_words(cap.value, cap.unit)


_PARTS: Final = ((86_400.0, "day"), (3600.0, "hour"), (60.0, "minute"), (1.0, "second"))
_SECONDS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def in_words(value: float | None, unit: str) -> str:
    """Return a number with its unit for people: "64 KiB", "30 days", "1,024 peers"."""
    if value is None:
        return "no bound"
    if unit == "bytes":
        for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
            if value >= 1 << power:
                return f"{value / (1 << power):.4g} {name}"
        return f"{value:g} bytes"
    if unit in _SECONDS and value >= 1 / _SECONDS[unit]:
        seconds = value * _SECONDS[unit]
        size, name = next(each for each in _PARTS if seconds >= each[0])
        count = f"{seconds / size:.4g}"
        return f"{count} {name}" + ("" if count == "1" else "s")
    return f"{number(value)} {unit}".strip()


def limits_text() -> str:
    """Return all bounds as text, by section: name, value, unit, reason, change and job of each."""
    lines: list[str] = []
    for section, limits in groupby(every_limit(), key=lambda cap: cap.section):
        lines += ["", section]
        for cap in limits:
            lines.append(f"  {cap.name} = {number(cap.value)} {cap.unit}".rstrip())
            about = [cap.reason, f"largest: {job_of(cap)}", f"change: {cap.setting or 'fixed'}"]
            for part in about:
                lines += textwrap.wrap(
                    part, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
                )
    return "\n".join(lines).strip("\n") + "\n"


def limits_markdown() -> str:
    """Return all bounds as Markdown, a table for each section."""
    lines = [
        "# Limits",
        "",
        "Every bound, cap and deadline that there is, made by `bbnode config reference --limits",
        "--markdown` from where each stands. Beyond one is a typed error that names it, or a",
        "counter; nothing is cut in silence. What can't be changed is fixed; keys of `node.toml`",
        "are set there or with `--set`, arguments where the program is written, settings of",
        "components in either.",
    ]
    for section, limits in groupby(every_limit(), key=lambda cap: cap.section):
        rows = [
            (f"`{cap.name}`", number(cap.value), cap.unit, cap.reason, job_of(cap),
             cap.setting or "fixed")
            for cap in limits
        ]  # fmt: skip
        lines += ["", f"## {section}", ""]
        lines += table(
            ("Bound", "Value", "Unit", "Of what, and why", "Largest job", "Change it"), rows
        )
    return "\n".join(lines) + "\n"


def _constants() -> Iterator[Cap]:
    for section, modules in ELSEWHERE.items():
        for module, constants in modules.items():
            place = importlib.import_module(module)
            for name, unit, meaning in constants:
                yield Cap(
                    section=section,
                    name=f"{module.removeprefix('bbnode.')}.{name}",
                    value=getattr(place, name),
                    unit=unit,
                    reason=meaning,
                )


def _counting_keys(name: str, section: Section, values: Mapping[str, Any]) -> list[Cap]:
    return [
        Cap(
            section=f"[{name}] of the configuration",
            name=key,
            value=values[key],
            unit=unit_of(field),
            reason=field.description or "",
            setting=f"`{name}.{key}` of node.toml",
        )
        for key, field in type(section).model_fields.items()
        if unit_of(field)
    ]


def _other_keys() -> Iterator[Cap]:
    """Yield the keys of other sections that count something."""
    for path, field in keys():
        if path[0] in ("limits", "relay") or not unit_of(field):
            continue
        name = ".".join(path)
        plain = isinstance(field.default, int | float)
        yield Cap(
            section="Other keys of the configuration",
            name=name,
            value=field.default if plain else None,
            unit=unit_of(field),
            reason=field.description or "",
            setting=f"`{name}` of node.toml",
        )


# Names of the arguments and settings that bound something.
_BOUNDS: Final = re.compile(r"max_\w+|\w+_(s|ms|bytes|mib)")
_UNITS: Final = (("_s", "s"), ("_ms", "ms"), ("_bytes", "bytes"), ("_mib", "MiB"))
_OF_ARGUMENTS: Final[Mapping[str, str]] = {
    "collect_s": "that a peer gathers what others send for a round",
    "deadline_s": "that a round waits for its answers; more are late, and not counted",
    "edge_deadline_s": "that an edge waits for its clients, within the round's",
    "max_depth": "of a tree; 0 is no bound",
    "max_leaf": "the greatest number of a leaf",
    "max_samples": "the largest weight of a client; more count as this",
    "max_staleness": "by which an answer may be late; older ones are left out",
    "max_steps": "that one training of a client makes; 0 is no bound",
    "max_train_s": "the same in seconds",
    "max_trees": "of a model",
    "refresh_s": "after which a shard is asked again what it has",
}


# Units of bounds whose name does not end in one.
_COUNTED: Final[Mapping[str, str]] = {
    "max_abs": "in size", "max_depth": "levels", "max_leaf": "in size", "max_prepared": "graphs",
    "max_share": "of a mean", "max_staleness": "versions",
}  # fmt: skip


def _unit_by_name(name: str) -> str:
    if name in _COUNTED:
        return _COUNTED[name]
    return next((unit for end, unit in _UNITS if name.endswith(end)), name.removeprefix("max_"))


def _bound_of(name: str, value: object) -> float | None:
    """Return the default of an argument or field that bounds something; None for others."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if _BOUNDS.fullmatch(name) else None


def _arguments() -> Iterator[Cap]:
    """Yield the bounds among the arguments of ready programs, where each is defined first."""
    import bbnode.programs as programs

    seen: set[tuple[str, object]] = set()
    for name in programs.__all__:
        cls = getattr(programs, name)
        if not (isinstance(cls, type) and issubclass(cls, programs.ReadyProgram)):
            continue
        for argument, default in cls.arguments().items():
            value = _bound_of(argument, default)
            if value is None or (argument, value) in seen:
                continue
            seen.add((argument, value))
            yield Cap(
                section="Arguments of programs",
                name=f"{name}.{argument}",
                value=value,
                unit=_unit_by_name(argument),
                reason=_OF_ARGUMENTS[argument],
                setting=f"`{argument}=` of this program and of others with this default",
            )


def _settings() -> Iterator[Cap]:
    """Yield the bounds among the settings of components."""
    from bbnode.components.registry import component_class, known_types

    for type_name in known_types():
        if not type_name.startswith("bbnode."):
            continue
        config = component_class(type_name).Config
        meanings = {each.name: each.meaning for each in component_settings(config)}
        for field in dataclasses.fields(config):
            value = _bound_of(field.name, field.default)
            if value is not None:
                yield Cap(
                    section="Settings of components",
                    name=f"{type_name.removeprefix('bbnode.')}.{field.name}",
                    value=value,
                    unit=_unit_by_name(field.name),
                    reason=meanings.get(field.name) or "see the component",
                    setting=f"`{field.name}` of the slot",
                )
