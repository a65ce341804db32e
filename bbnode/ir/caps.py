"""All bounds on the data, work and waits that others can cause in a node.

Rule: a bound is defined here once, with its unit and its reason, and imported by the code that
checks it; exceeding it is a typed error or counted. Bounds that a host or an operator sets are
defined with their defaults in `TransportLimits`, `Limits`, `RelaySettings` and the configuration.
`bbnode config reference --limits` prints them all; a bound of an author's or owner's own job may be
defined beside its use, and is then named in `daemon/config/limits.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar

Number = TypeVar("Number", int, float)
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """One bound, with its unit and its reason.

    Attributes:
        value: None means unbounded.
        setting: the setting that changes it; "" if there is none.
    """

    section: str
    name: str
    value: float | None
    unit: str
    reason: str
    setting: str = ""


_section = ""
_rows: list[tuple[str, float, str, str]] = []


def bound(value: Value, unit: str, reason: str) -> Value:
    """Return a dataclass field for a configurable bound, with this default."""
    configurable: Value = field(default=value, metadata={"unit": unit, "reason": reason})
    return configurable


def settable(section: str, limits: Any) -> list[Cap]:
    """Return the bounds among the fields of a dataclass instance, with its values."""
    return [
        Cap(
            section=section,
            name=each.name,
            value=getattr(limits, each.name),
            unit=each.metadata["unit"],
            reason=each.metadata["reason"],
            setting=f"an argument of {type(limits).__name__}",
        )
        for each in fields(limits)
        if "unit" in each.metadata
    ]


def _part(title: str) -> None:
    global _section
    _section = title


def _cap(value: Number, unit: str, reason: str) -> Number:
    _rows.append((_section, value, unit, reason))
    return value


_part("Addresses and ids")
# For everything that a peer states about itself or others.
MAX_ADDRESS_BYTES: Final = _cap(
    256, "bytes", "one multiaddr; an IP address, a port and two PeerIds are under 120"
)
MAX_ADDRESS_CHARS: Final = _cap(
    4 * MAX_ADDRESS_BYTES,
    "characters",
    "of one as text: no protocol writes more than four for a byte",
)
MAX_CLAIMED_ADDRESSES: Final = _cap(
    8, "addresses", "that a peer claims as its own, or a ticket names"
)
MAX_DIGEST_BYTES: Final = _cap(
    64, "bytes", "of a PeerId; libp2p inlines a key of up to 42, and a sha2-256 digest has 32"
)
MAX_PEER_ID_CHARS: Final = _cap(128, "characters", "of a PeerId as text: 66 bytes are 91 of base58")

_part("Payloads")
# Each bound holds for one payload, including everything nested in it.
MAX_DIMENSIONS: Final = _cap(
    32, "dimensions", "of a tensor; numpy's own bound for decades, ONNX sets none"
)
MAX_CHILDREN: Final = _cap(65_536, "children", "of a composite: a cohort's answers travel in one")
MAX_COMPOSITE_DEPTH: Final = _cap(16, "levels", "composites in composites")
MAX_METADATA_ITEMS: Final = _cap(256, "entries", "small named scalars beside a tensor")
MAX_SCALAR_BYTES: Final = _cap(1 << 20, "bytes", "one msgpack carrier, as one app event")
MAX_LIST_ITEMS: Final = _cap(
    65_536, "items", "of one list: the peers of a cohort, the results of a search"
)
MAX_SEARCH_BYTES: Final = _cap(
    16 << 20, "bytes", "metadata of many items, or of what a search found: texts of passages"
)
MAX_INTEGER_BYTES: Final = _cap(9, "bytes", "the kind of an integer, and 64 bit")
MAX_PEER_LIST_BYTES: Final = _cap(
    MAX_LIST_ITEMS * 40, "bytes", "as many PeerIds as a cohort has peers, each with its length"
)
MAX_TEXTS: Final = _cap(65_536, "texts", "of a tensor that travels")
MAX_VALUES: Final = _cap(
    1 << 18, "values", "four for each answer of the largest cohort; a value takes about 1 us"
)
MAX_PAYLOAD_ADDRESS_BYTES: Final = _cap(
    64 * 1024,
    "bytes",
    "an address takes 5 us a byte to check: 1,400 of 45 bytes are a third of a second",
)
MAX_MESSAGE_DEPTH: Final = _cap(
    8, "levels", "lists in lists of a message whose form is fixed; the deepest has three"
)
MAX_POLL_DECODE_US: Final = _cap(
    15_000, "us", "of a poll for what peers sent, by estimate; the rest waits for the next poll"
)
MAX_INLINE_DECODE_US: Final = _cap(
    2_000, "us", "of one payload in the poll itself, by estimate; longer ones go to a worker thread"
)

_part("Envelopes and frames")
MAX_ENVELOPE_BYTES: Final = _cap(
    256 << 20, "bytes", "one envelope, as much as the ingress takes; a large tensor is one"
)
MAX_FILLS: Final = _cap(64, "fills", "values for different places that travel together")
MAX_RTT_REPORTS: Final = _cap(64, "reports", "a program has tens of edges")
MAX_SUFFIX_BYTES: Final = _cap(256, "bytes", "the place that a value is for; ours have 9")
MAX_SOURCE_BYTES: Final = _cap(128, "bytes", "the PeerId that an envelope says it is from")
MAX_ENVELOPE_HEAD_BYTES: Final = _cap(
    16 * 1024,
    "bytes",
    "all beside the fills: twice what every list at its bound takes, for what may be added",
)
MAX_FILL_HEAD_BYTES: Final = _cap(1024, "bytes", "likewise of a fill, beside its payload")
MAX_REFUSAL_DETAIL_BYTES: Final = _cap(
    256, "bytes", "why a message was refused, as its sender is told"
)
MAX_REFUSAL_PLACE_BYTES: Final = _cap(128, "bytes", "the place of that: an op, or a site")
MAX_BATCH_REASONS: Final = _cap(
    256, "peers", "of a cohort's missing ones, of which a batch of answers says why"
)
MAX_CONTROL_ENVELOPE_BYTES: Final = _cap(
    64 * 1024, "bytes", "what is larger travels on the bulk stream in chunks, and holds up nobody"
)
MAX_MESSAGE_BYTES: Final = _cap(
    4096 * (1 << 20), "bytes", "the transport's own bound; a daemon's is its envelope_bytes"
)
MAX_CROSSINGS: Final = _cap(
    512, "sites", "that a hello tells of, so that versions of a program know where they differ"
)
MAX_CROSSING_TEXT_BYTES: Final = _cap(256, "bytes", "a port with its calls, a class, a type")
MAX_CROSSINGS_BYTES: Final = _cap(
    16 * 1024, "bytes", "the crossings of a hello: 150 with their texts, or all without"
)
MAX_HELLO_BYTES: Final = _cap(64 * 1024, "bytes", "a hello with every field at its bound")
MAX_BYE_BYTES: Final = _cap(64, "bytes", "the reason of a goodbye")
MAX_CHUNK_BYTES: Final = _cap(
    1024 * 1024, "bytes", "a part of a large message; ours are a quarter of it"
)
ROOM_STEP_BYTES: Final = _cap(
    2 * 1024 * 1024,
    "bytes",
    "in which a large message is charged as it comes: a large page of memory",
)

_part("The hello")
MAX_AGENT_BYTES: Final = _cap(128, "bytes", "the name and version of the software")
MAX_NAMES: Final = _cap(64, "names", "classes, and targets")
MAX_NAME_BYTES: Final = _cap(128, "bytes", "one name of a class or target")
MAX_CREDENTIALS_BYTES: Final = _cap(8 * 1024, "bytes", "a membership, or a ticket")

_part("Connections")
# Those that a backend can be given stand in TransportLimits.
MAX_NEGOTIATION_BYTES: Final = _cap(
    1024, "bytes", "one message of a negotiation: the id of a protocol; ours are under 40"
)
MAX_NEGOTIATION_MESSAGES: Final = _cap(
    16, "messages", "of one negotiation: its header, and protocols that we may not know"
)
MAX_UNSECURED_BYTES: Final = _cap(
    16 * 1024, "bytes", "all that is read of a connection before its handshake has ended"
)
MAX_STREAMS: Final = _cap(
    32,
    "streams",
    "of one connection: ours and others; twice as many while some are ending, and "
    "those of circuits",
)
MAX_OTHER_STREAMS: Final = _cap(
    64, "streams", "of one peer that py-libp2p's services have at a time"
)
MAX_KNOWN_PEERS: Final = _cap(
    4096, "peers", "that py-libp2p's services remember, beside those that are connected"
)
MAX_KNOWN_ADDRESSES: Final = _cap(32, "addresses", "of each of them")
MAX_KNOWN_PROTOCOLS: Final = _cap(128, "protocols", "of each of them")
MAX_PEER_RECORD_BYTES: Final = _cap(
    16 * 1024, "bytes", "of a record that a peer has signed about itself"
)
DIALLED_HANDSHAKE_S: Final = _cap(
    8.0, "s", "of a handshake with whom we dialled: a host that will not answer"
)
MAX_RECOGNISED: Final = _cap(
    4096,
    "peers",
    "that took what we sent, and find room before strangers; a PeerId takes 200 bytes",
)
OPEN_FILES: Final = _cap(4096, "files", "that the daemon asks the system for: sockets, and some")

_part("Who may talk")
MAX_LISTED_PEERS: Final = _cap(
    64 * 1024,
    "peers",
    "on the allow list, and on the block list; more belong into a private network",
)
MAX_ADMITTED: Final = _cap(
    8192, "peers", "of which what was decided is kept; those that were quiet for longest go"
)
MAX_REFUSED: Final = _cap(
    1024, "peers", "that were refused, likewise; what they showed is up to 5 KiB each"
)
MAX_OFFENDERS: Final = _cap(4096, "peers", "of which misbehaviour is kept, 300 bytes each")
MAX_PENDING_ASKED: Final = _cap(
    1024, "requests", "for which a peer that was restarted is asked at once"
)
PENDING_ANSWER_S: Final = _cap(5.0, "s", "for it to say which of them it has")
FORGOTTEN_AFTER_S: Final = _cap(
    3600.0, "s", "without a word and without a connection: what a peer left behind is given back"
)
MAX_OF_USE: Final = _cap(8192, "peers", "that are remembered for having been of use")
THROTTLED_AT: Final = _cap(
    50.0, "points", "of misbehaviour: from here on a peer has a rate of its own"
)
CUT_AT: Final = _cap(100.0, "points", "of misbehaviour: it is cut off")
HALF_LIFE_S: Final = _cap(60.0, "s", "after which a point counts half")
BACKOFF_S: Final = _cap(10.0, "s", "for which who was cut off is refused; twice as long each time")
MAX_BACKOFF_S: Final = _cap(600.0, "s", "at most")
FORGIVEN_AFTER_S: Final = _cap(3600.0, "s", "without an offence, after which a peer begins anew")

_part("Private networks and tickets")
CLOCK_SKEW_S: Final = _cap(
    300, "s", "by which clocks may differ; five minutes is what Kerberos tolerates"
)
MAX_REVOKED: Final = _cap(4096, "entries", "serials, and peers, of one revocation list: 250 kB")
MAX_CLASSES: Final = _cap(16, "classes", "that one statement names")
MAX_USES: Final = _cap(1024, "peers", "that may use one ticket; more are better granted one by one")
MAX_MEMBER_DAYS: Final = _cap(366, "days", "that a ticket makes somebody a member for")
MAX_TARGET_BYTES: Final = _cap(256, "bytes", "the name of a target in a ticket")
MAX_TICKETS: Final = _cap(1024, "tickets", "with a use that have not expired")
MAX_REDEEMERS: Final = _cap(16 * 1024, "peers", "that have used them")
MAX_DETAIL_BYTES: Final = _cap(1024, "bytes", "what a refusal says")
MAX_LISTS_WAITING: Final = _cap(4096, "peers", "whose revocation lists are still to be exchanged")

_part("Models")
# For models of any origin, checked before anything else is done with them.
MAX_NAME_CHARS: Final = _cap(
    16_384, "characters", "one name; names grow by one step per inlined call"
)
MAX_TEXT_CHARS: Final = _cap(
    1 << 20, "characters", "one text: lists of names, and a model's own notes"
)
MAX_PORTS: Final = _cap(66_000, "ports", "of one node: what a composite may hold, and some")
MAX_NODE_PARTS: Final = _cap(1_024, "parts", "attributes, and metadata entries, of one node")
MAX_FUNCTION_PARTS: Final = _cap(
    16_384, "parts", "ports, metadata entries, slots and opsets of one function or model"
)
MAX_GRAPH_DEPTH: Final = _cap(
    32, "levels", "graphs in graphs; a parsed protobuf nests about 30 at most"
)
MAX_TYPE_DEPTH: Final = _cap(16, "levels", "types in types")
MAX_ARTIFACT_BYTES: Final = _cap(
    (1 << 31) - 1, "bytes", "an artifact: protobuf's own limit on one message"
)
MAX_DESCRIPTION_BYTES: Final = _cap(
    1 << 20, "bytes", "what an exported model says of its examples: columns, categories, scaling"
)
MAX_SCHEMA_BYTES: Final = _cap(
    4 << 20, "bytes", "the meaning of a data source's examples, as peers compare it"
)
MAX_SCHEMAS_BYTES: Final = _cap(
    8 << 20, "bytes", "of all data slots of a peer in one message: those of two mostly"
)
SCHEMA_ANSWER_S: Final = _cap(30.0, "s", "for a peer to say what its data mean, or to take it")
MAX_SETTINGS_VALUES: Final = _cap(
    65_536, "values", "settings of one component, with all that nests in them"
)
MAX_FLAT_OPS: Final = _cap(262_144, "ops", "of one program, its functions inlined")
MAX_FLAT_CHARS: Final = _cap(
    1 << 28, "characters", "the names of these, which grow by a step per call"
)
MAX_INLINED_OPS: Final = _cap(
    32_768, "ops", "of an ONNX model, its functions inlined; a second's work"
)
MAX_INLINED_BYTES: Final = _cap(1 << 26, "bytes", "of these")
MAX_INLINED_GROWTH: Final = _cap(4, "times", "what the model itself has, where that is more")
MAX_CALL_DEPTH: Final = _cap(64, "levels", "functions in functions")

_part("The engine")
# Configurable bounds of the engine are in the node's configuration, [limits].
MAX_BOOK_PEERS: Final = _cap(16_384, "peers", "in the address book; one takes about 1 KB")
MAX_ADDRESSES_PER_PEER: Final = _cap(
    16, "addresses", "in the address book: twice what may be claimed, for what was observed"
)
MAX_TRACKED_PEERS: Final = _cap(8192, "peers", "whose health and cooldown are kept")
MAX_EDGES: Final = _cap(1024, "edges", "whose round trips are kept")
MAX_REPORTED: Final = _cap(16, "reports", "of round trips on one response")
MAX_CLOSED_REMEMBERED: Final = _cap(
    4096, "requests", "that have ended and are told from made-up ones"
)
MAX_CALLS: Final = _cap(1024, "calls", "of one component to other peers' components")
MAX_ENDED_REMEMBERED: Final = _cap(4096, "calls", "that have ended, likewise")
MAX_UNDER_WAY: Final = _cap(
    1024, "executions", "of one component that its peers and timers may have"
)
MAX_TIMERS: Final = _cap(16_384, "timers", "of one component")
MAX_KEY_CHARS: Final = _cap(256, "characters", "the key of a timer")
MAX_QUEUED: Final = _cap(1024, "values", "of one queue of a program")
MAX_TOPICS: Final = _cap(64, "topics", "that one node follows, or publishes to")
MAX_TOPIC_CHARS: Final = _cap(128, "characters", "the name of a topic, without its network's part")
MAX_TOPIC_BYTES: Final = _cap(
    64 * 1024, "bytes", "one message on a topic: each of those who follow it passes it on"
)
MAX_TOPIC_RPC_BYTES: Final = _cap(
    1 << 20, "bytes", "messages and what is said of others, in one frame of GossipSub"
)
MAX_TOPIC_CONTROLS: Final = _cap(
    4 * 64, "entries", "of what one frame says of topics: four for each of 64"
)
MAX_TOPIC_IDS: Final = _cap(8192, "ids", "of messages that one frame offers, or asks for")
MAX_TOPIC_QUEUE: Final = _cap(256, "messages", "of one node that wait to be published")
MAX_TOPIC_CACHE_BYTES: Final = _cap(
    8 << 20, "bytes", "messages that are kept for peers that missed them, for five seconds"
)
MAX_TOPIC_SEEN: Final = _cap(
    65_536, "messages", "that are remembered, so that each counts once, by whatever way it comes"
)
MAX_TOPIC_PUBLISHERS: Final = _cap(4096, "peers", "whose rates on topics are kept")
TOPIC_PUBLISHER_RATE: Final = _cap(
    50.0, "messages/s", "of one publisher, over two seconds; what is more is dropped and counted"
)
TOPIC_GIVER_RATE: Final = _cap(
    500.0, "messages/s", "new ones that one peer passes on, over two seconds; a check takes 0.2 ms"
)
MAX_DEADLINE_S: Final = _cap(
    30 * 86_400, "s", "of any deadline that somebody gives: a month; more is a typing error"
)
DEFAULT_WAIT_S: Final = _cap(
    86_400,
    "s",
    "of what neither its author nor its caller bounds, `limits.wait_s`: a day, so that what trains "
    "over night ends by itself, and what hangs is seen the next morning",
)
MAX_GATHERED: Final = _cap(
    65_536, "values", "of one batch of a join; a batch holds one value and one peer each"
)
MAX_RECORDS: Final = _cap(1024, "records", "of a program, to be looked at")
MAX_RECORD_BYTES: Final = _cap(16 << 20, "bytes", "all of them")
MAX_REFUSALS_PER_S: Final = _cap(
    256, "refusals", "per second that one peer is told, or tells, of what was refused on arrival"
)
MAX_REFUSED_PEERS: Final = _cap(1024, "peers", "of which that is counted")
MAX_ANSWERS_REMEMBERED: Final = _cap(
    4096, "answers", "that went out, whose requesters are told if they can't be delivered"
)
MAX_CAUSES_REMEMBERED: Final = _cap(
    4096, "messages", "that others brought about, whose senders are told if what they started fails"
)
DEDUP_WINDOW: Final = _cap(8192, "messages", "that are remembered, so that none is taken twice")
MAX_ASKED: Final = _cap(16_384, "effects", "of one call of a component's method")
MAX_FACTS: Final = _cap(32, "facts", "that one component tells of itself in the status")
MAX_FACT_CHARS: Final = _cap(256, "characters", "a text among them")

_part("Relays")
MAX_RELAY_MESSAGE_BYTES: Final = _cap(
    4 * 1024, "bytes", "a message to a relay, or of one, as go-libp2p has it"
)
MAX_RELAY_ADDRESSES: Final = _cap(
    16, "addresses", "of its own that a relay gives with a reservation"
)
MAX_RESERVATION_S: Final = _cap(
    30 * 86_400, "s", "that a reservation may last; what a relay promises beyond it is no promise"
)
MIN_CIRCUIT_BYTES: Final = _cap(
    64 * 1024, "bytes", "that a circuit has to carry: handshakes and hellos, and some"
)
MAX_PUNCH_ADDRESSES: Final = _cap(
    8, "addresses", "of its own that a peer may name for a direct connection"
)
MAX_PUNCHES: Final = _cap(3, "attempts", "to replace one circuit by a direct connection")
RELAY_BURST: Final = _cap(64.0, "requests", "of one peer to a relay, at once")
RELAY_PER_S: Final = _cap(8.0, "requests/s", "of one peer after that")
RELAY_REQUEST_S: Final = _cap(5.0, "s", "for a request to a relay, or for its offer, to come")
RELAY_ANSWER_S: Final = _cap(
    8.0, "s", "for its answer, for which it asks the other peer: that has as long as a request"
)

_part("Other protocols")
ARTIFACT_STALL_S: Final = _cap(30.0, "s", "without a byte, after which a fetch is given up")
ACCESS_STALL_S: Final = _cap(10.0, "s", "likewise, of a request for membership")
MAX_ECHOES: Final = _cap(1024, "echoes", "on one stream")
MAX_DIAL_BACK_REQUEST_BYTES: Final = _cap(4 * 1024, "bytes", "a request to be dialled back")
MAX_DIAL_BACK_ANSWER_BYTES: Final = _cap(8 * 1024, "bytes", "its answer")
REACHABILITY_EVERY_S: Final = _cap(
    1800.0, "s", "between two times that a node has itself dialled back"
)
DIAL_BACK_EVERY_S: Final = _cap(10.0, "s", "between two requests of one peer")
MAX_DIAL_BACKS: Final = _cap(4, "requests", "that are worked on at once")
MAX_DIAL_BACK_ASKERS: Final = _cap(1024, "peers", "that are remembered for having asked")
MAX_INTRODUCED: Final = _cap(32, "peers", "that one answer introduces")
MAX_INTRODUCTION_BYTES: Final = _cap(64 * 1024, "bytes", "such an answer")
INTRODUCTIONS_EVERY_S: Final = _cap(10.0, "s", "between two requests of one peer for it")
MAX_INTRODUCTION_ASKERS: Final = _cap(4096, "peers", "that are remembered for having asked")
MAX_ROUTING_REQUEST_BYTES: Final = _cap(64 * 1024, "bytes", "a question to a DHT")
MAX_ROUTING_ANSWER_BYTES: Final = _cap(1024 * 1024, "bytes", "its answer")
MAX_ROUTING_KEY_BYTES: Final = _cap(80, "bytes", "a key of a DHT")
MAX_ROUTING_STREAMS: Final = _cap(4, "streams", "on which one peer asks at once")
ROUTING_BURST: Final = _cap(64, "questions", "of one peer at once")
ROUTING_PER_S: Final = _cap(8.0, "questions/s", "of one peer after that")
ROUTING_ALL_PER_S: Final = _cap(
    64.0, "questions/s", "of all peers together: a tenth of a core, where the table is full"
)
MAX_ROUTING_PEERS: Final = _cap(512, "peers", "in the table of a DHT: 20 for each of 25 distances")
ROUTING_IDLE_S: Final = _cap(60.0, "s", "on a stream without a question")
ROUTING_LINGER_S: Final = _cap(10.0, "s", "that a connection made for a search stays after it")
ROUTING_ANSWER_S: Final = _cap(10.0, "s", "that an answer of a DHT may take")
FIND_S: Final = _cap(30.0, "s", "that a search in a DHT may take")
ROUTING_SETTLE_S: Final = _cap(
    0.25, "s", "from a new peer of a DHT to the search that makes this node known there"
)
ROUTING_REFRESH_S: Final = _cap(60.0, "s", "the same while peers keep coming")
MAX_CLOSER_PEERS: Final = _cap(20, "peers", "that an answer of a DHT tells of")
MAX_KEY_PROVIDERS: Final = _cap(20, "providers", "of one key, in an answer and on a node")
MAX_PROVIDER_RECORDS: Final = _cap(16_384, "records", "of providers that a node keeps for others")
MAX_PROVIDER_RECORDS_PER_PEER: Final = _cap(256, "records", "of them, of one provider")
PROVIDER_RECORD_S: Final = _cap(86_400.0, "s", "that such a record counts")
MAX_ROUTED_ADDRESSES: Final = _cap(
    16, "addresses", "of one peer that are tried when a DHT has found it"
)
MAX_FINDS: Final = _cap(4, "searches", "at once for peers that messages are for")
MAX_FIND_WAITING: Final = _cap(64, "peers", "that wait for such a search")
FOUND_EVERY_S: Final = _cap(60.0, "s", "between two such searches for one peer")
PROVIDE_EVERY_S: Final = _cap(3_600.0, "s", "between two times that a node says what it provides")
MAX_REGISTRIES: Final = _cap(16, "registries", "that one client uses")
MAX_REGISTRY_CLASS_CHARS: Final = _cap(64, "characters", "the name of a class in a registry")
MAX_PAGE_ROWS: Final = _cap(256, "rows", "of one page of a registry")
MAX_PAGE_BYTES: Final = _cap(
    48 * 1024, "bytes", "the same, so that a page fits the smallest envelope"
)
MAX_EXCHANGED: Final = _cap(
    32, "peers", "of one exchange between members of an overlay: 4 addresses each, 34 KiB"
)
MAX_LOCAL_NAMES: Final = _cap(256, "names", "on the local network that are kept account of")

_part("Whom a node dials")
MAX_HINTS: Final = _cap(4, "addresses", "of one peer that are dialled because somebody said so")
MAX_LEARNED: Final = _cap(
    64, "peers", "that are dialled at the same time because they were learned of"
)
OWN_WORD_EVERY_S: Final = _cap(
    10.0, "s", "after which a peer's own word on where it is counts again"
)
MAX_WORDS: Final = _cap(1024, "peers", "of which that is remembered")

_part("Operating")
MAX_QUERY_FIELDS: Final = _cap(32, "fields", "of one request to the control plane")
MAX_TOKEN_CHARS: Final = _cap(256, "characters", "the control plane's token")
MAX_CONTROL_ANSWER_BYTES: Final = _cap(
    16 * 1024 * 1024, "bytes", "an answer of the control plane that a command reads"
)
QUEUED_ITEMS: Final = _cap(1024, "lines", "that wait for one reader of a stream")
KEPT_ITEMS: Final = _cap(2048, "lines", "that are kept for those that ask later")
KEPT_STEPS: Final = _cap(8192, "steps", "that are kept of traces")
MAX_KEPT_OUTPUTS: Final = _cap(256, "outputs", "that are kept of one invocation")
MAX_WAIT_S: Final = _cap(
    86_400.0, "s", "that a request to the control plane may wait for its outcome: a day of training"
)
MAX_PEER_SERIES: Final = _cap(128, "peers", "with series of their own in the metrics")
LOG_BURST: Final = _cap(100, "lines", "of one kind in LOG_WINDOW_S")
LOG_WINDOW_S: Final = _cap(10.0, "s", "see LOG_BURST")
LOG_REPEAT_S: Final = _cap(60.0, "s", "in which a failure that says nothing new is written once")
MAX_LOG_KINDS: Final = _cap(256, "kinds", "of lines that are told apart")
MAX_LOG_VALUE_CHARS: Final = _cap(1024, "characters", "one value in a line of the log")
MAX_CONFIG_BYTES: Final = _cap(1024 * 1024, "bytes", "a configuration file")
MAX_KEPT_UNSENT_BYTES: Final = _cap(
    64 * 1024 * 1024, "bytes", "of envelopes without acknowledgement that a checkpoint keeps"
)
MAX_CHECKPOINT_BYTES: Final = _cap(
    1 << 33,
    "bytes",
    "a checkpoint; the node's state in it is one piece of msgpack, up to 4 GiB",
)
MAX_STATE_ENTRIES: Final = _cap(
    10_000, "files", "of a state directory that are looked through for what a killed process left"
)
MAX_GRANTED: Final = _cap(64 * 1024, "lines", "of what an owner has granted")
MIN_FREE_BYTES: Final = _cap(
    256 * 1024 * 1024,
    "bytes",
    "of disk, below which a node is not well: room for two checkpoints several times over",
)

# All bounds above, in order, each named like its constant.
TABLE: Final = [
    Cap(section=section, name=name.lower(), value=value, unit=unit, reason=reason)
    for name, (section, value, unit, reason) in zip(
        [name for name in dict(globals()) if name.isupper()], _rows, strict=True
    )
]
