"""Every metadata key, domain and op name of the `ai.bytesandbrains.*` dialect.

Rule: these strings are written here and nowhere else in the package.
"""

from __future__ import annotations

from functools import lru_cache

PREFIX = "ai.bytesandbrains."

# --- opset domains (all version 1) -------------------------------------------------
ONNX_ML_DOMAIN = "ai.onnx.ml"  # classical models: what scikit-learn's exporters write
RUNTIME_DOMAIN = "com.microsoft"  # ONNX Runtime's own ops, in models that it optimized
ONNX_DOMAIN = "ai.onnx"  # upstream writes "" or "ai.onnx" for the same opset
SYSCALL_DOMAIN = PREFIX + "syscall"
WIRE_DOMAIN = PREFIX + "wire"
ADDRESS_BOOK_DOMAIN = PREFIX + "address_book"
COMPOSITE_DOMAIN = PREFIX + "composite"
TYPES_DOMAIN = PREFIX + "types"
RESPONSES_DOMAIN = PREFIX + "responses"
SEARCH_DOMAIN = PREFIX + "search"
MODULE_DOMAIN = PREFIX + "module"
ROLE_DOMAIN_PREFIX = PREFIX + "role."
PROTOCOL_DOMAIN_PREFIX = PREFIX + "protocol."
BACKEND_SUBGRAPH_DOMAIN = PREFIX + "backend_subgraph"

HOIST_PREFIX = "Hoist_"  # + Module name + "_" + body hash: a body that several calls share

BB_OPSET_VERSION = 1
RUNTIME_OPSET_VERSION = 1  # the only one that ONNX Runtime's domain has had
ONNX_OPSET_VERSION = 25  # what the DSL records; ONNX Runtime 1.32 and later run it
# The newest one that it runs, for models with ops that opset 25 lacks or has in another form.
NEWEST_OPSET_VERSION = 28
FRAMEWORK_IR_VERSION = 13  # ONNX IR version that goes with opset 25
OLDEST_IR_VERSION = 10  # of programs that are still taken: those recorded at opset 21
PRODUCER_NAME = "bbnode"

# --- wire ops ----------------------------------------------------------------------
OP_SEND = "Send"
OP_SEND_REQ_BATCHED = "SendReqBatched"
OP_SEND_RESP = "SendResp"
OP_RECV = "Recv"
OP_RECV_REQ = "RecvReq"
OP_RECV_RESP_BATCHED = "RecvRespBatched"
SEND_OPS = frozenset({OP_SEND, OP_SEND_REQ_BATCHED, OP_SEND_RESP})
RECV_OPS = frozenset({OP_RECV, OP_RECV_REQ, OP_RECV_RESP_BATCHED})
INBOUND_OPS = frozenset({OP_RECV, OP_RECV_REQ})  # those that start an execution

# --- gates and other compiler-made syscalls ----------------------------------------
OP_DEDUP_GATE_RX = "DedupGateRx"
OP_PEER_HEALTH_GATE_RX = "PeerHealthGateRx"
OP_BACKOFF_GATE_RX = "BackoffGateRx"
OP_PEER_HEALTH_GATE_TX = "PeerHealthGateTx"
OP_BACKOFF_GATE_TX = "BackoffGateTx"
OP_PULSE = "Pulse"
OP_THRESHOLD = "Threshold"
OP_ANY = "Any"
OP_CHOOSE = "Choose"
OP_PEERS_FILTER = "Peers.Filter"
OP_PEERS_WITHOUT = "Peers.Without"
OP_DEADLINE_MATCH = "DeadlineMatch"
OP_COLLECT = "Collect"
OP_DEADLINE_CHECK = "DeadlineCheck"
GATE_OPS = frozenset(
    {
        OP_DEDUP_GATE_RX,
        OP_PEER_HEALTH_GATE_RX,
        OP_BACKOFF_GATE_RX,
        OP_PEER_HEALTH_GATE_TX,
        OP_BACKOFF_GATE_TX,
    }
)
# Ends the name of a call of a backend subgraph, which begins like the last of its ops.
SUBGRAPH_CALL_SUFFIX = "#subgraph"
OP_BUNDLE = "Bundle"
OP_UNBUNDLE = "Unbundle"

# --- model metadata ----------------------------------------------------------------
COMPILED_KEY = PREFIX + "compiled"
COMPILED_CURRENT_VERSION = "v1"
BINDING_PREFIX = PREFIX + "binding."
MODEL_SIZE_PREFIX = PREFIX + "model_size."  # + slot: the parameters of its model
MODEL_SIZE_FIXED = ",fixed"  # behind that: the program can't do with another number
SCHEMA_PREFIX = PREFIX + "schema."  # + slot: what its examples mean, as the author says it
SEAL_KEY = PREFIX + "seal"  # sha256 of the compiled model without this entry

# --- metadata of exported models ----------------------------------------------------
EXPORT_PREFIX = PREFIX + "export."  # + name: where its weights are from

# --- snapshots as models: names of initializers ---------------------------------------
STATE_PREFIX = PREFIX + "state."  # + slot: the state of its component
TRANSIENT_STATE = PREFIX + "transient_state"  # what is under way

# --- function metadata -------------------------------------------------------------
MODULE_PHASE_KEY = PREFIX + "module_phase"
BOOTSTRAP_PHASE = "bootstrap"
BOOTSTRAP_SUFFIX = "__bootstrap"
INPUT_HOME_KEY = PREFIX + "input_home"  # of an input that lives on another class
HOME_KEY = PREFIX + "home"  # home class of the Module; on partitions: their class
CONCRETE_TYPE_SLOT_PREFIX = PREFIX + "concrete_type."  # + slot
SLOT_ROLE_PREFIX = PREFIX + "slot_role."  # + slot -> "<role>|<slot_id>"
TARGET_KEY = PREFIX + "target"  # marks a partition main: "true"
ROOT_KEY = PREFIX + "root"  # marks the root function of a recorded model: "true"

# --- node metadata -----------------------------------------------------------------
SLOT_KEY = PREFIX + "slot"
SLOT_ID_KEY = PREFIX + "slot_id"
REQUIRED_TRAIT_KEY = PREFIX + "required_trait"
CONCRETE_TYPE_KEY = PREFIX + "concrete_type"
INSTANCE_KEY = PREFIX + "instance"
ORIGINAL_OP_KEY = PREFIX + "original_op"
MODULE_INSTANCE_KEY = PREFIX + "module_instance"
PACKAGE_KEY = PREFIX + "package"  # of a custom op: the Python package that adds it
SOURCE_LINE_KEY = PREFIX + "source_line"  # "<file>:<line>" of the recording call
PEER_CLASS_KEY = PREFIX + "peer_class"
INCLUDE_SELF_KEY = PREFIX + "include_self"  # "true": a node of that class selects itself too
HOME_CLASS_KEY = PREFIX + "home_class"
PORT_KEY = PREFIX + "port"  # the author's name of a net_out or request
# On a wire op: the path of Module calls from the root to the Module that names the port.
PORT_SCOPE_KEY = PREFIX + "port_scope"
CALL_KEY = PREFIX + "call"  # on a call: its name there
FAN_IN_KEY = PREFIX + "fan_in"  # on a later send of a port: what its first send delivers
CHAIN_DEPTH_KEY = PREFIX + "chain_depth"  # hops from a send to the end of its chain
BUDGET_NS_KEY = PREFIX + "budget_ns"  # of a Send that begins a time budget of its own
DEADLINE_NS_KEY = PREFIX + "deadline_ns"
# Beside a `deadline_ns` that the author did not set on this op: DEADLINE_FROM_CHAIN or
# DEADLINE_FROM_NOBODY. The engine then uses the rest of the execution's time, if it is bounded.
DEADLINE_FROM_KEY = PREFIX + "deadline_from"
DEADLINE_FROM_CHAIN = "chain"  # the send or request that starts the execution
DEADLINE_FROM_NOBODY = "nobody"  # the limit `wait_s` of the node that runs it stands for it
DEADLINE_CHECK_SOURCE_KEY = PREFIX + "deadline_check_source"
WIRE_CORRELATION_KEY = PREFIX + "wire_correlation"
WIRE_TRANSPORT_KEY = PREFIX + "wire_transport"
TRANSPORT_DATA = "data"
TRANSPORT_TRIGGER_ONLY = "trigger_only"
BATCH_GROUP_KEY = PREFIX + "batch_group_id"
SYNTHESIZED_FROM_KEY = PREFIX + "synthesized_from"
SEND_SENTINEL_PREFIX = "__send_sentinel_"
DEST_SITE_NAME_PREFIX = PREFIX + "dest_site_name."  # + input
DEST_SUFFIX_PREFIX = PREFIX + "dest_suffix."  # + input; an attribute, multiaddr bytes
SITE_ID_KEY = PREFIX + "site_id"  # decimal NodeSiteId, on Recv-flavoured nodes
CROSSING_TYPE_KEY = PREFIX + "crossing_type"  # on both ends of a wire edge: what crosses, to read
# On a send, where the sizes of its program's models are known: the shape of what crosses, of a
# bundle of each part, as it is meant: of a code that of what it stands for.
CROSSING_SHAPE_KEY = PREFIX + "crossing_shape"
SENDER_CLASS_KEY = PREFIX + "sender_class"  # comma-joined classes that may send to a site
TYPE_HASH_KEY = PREFIX + "type_hash"  # decimal wire hash of a Recv's payload
RECV_SLOT_ID_KEY = PREFIX + "recv_slot_id"
RX_CHAIN_HEAD_KEY = PREFIX + "rx_chain_head"
AFTER_KEY = PREFIX + "after"  # comma-joined value names that must be there first
CONTROL_AFTER_KEY = PREFIX + "control_after"  # comma-joined node names that must have fired
# Parts of the recorded program that a compiled one keeps (`bbnode/ir/reopen.py`): on nodes,
# functions and the model; and on the call of a subgraph, for the ops that it replaces.
RECORDED_KEY = PREFIX + "recorded"
MEMBERS_KEY = PREFIX + "members"
# Of the quantization annotation of values that a node makes (or, of a function's inputs, reads
# first): {"<value>": {"SCALE_TENSOR": "<value>", ...}}
QUANTIZATION_KEY = PREFIX + "quantization"
# On a DecodeAll: ids of the types that its codes stand for, as far as they are known ("").
DECODED_TYPES_KEY = PREFIX + "decoded_types"
MADE_BY_KEY = PREFIX + "made_by"  # the pass that made a node; the author's have none

GATE_STAMPS = {
    OP_DEDUP_GATE_RX: PREFIX + "dedup_rx_gated",
    OP_PEER_HEALTH_GATE_RX: PREFIX + "peer_health_rx_gated",
    OP_BACKOFF_GATE_RX: PREFIX + "backoff_rx_gated",
    OP_PEER_HEALTH_GATE_TX: PREFIX + "peer_health_tx_gated",
    OP_BACKOFF_GATE_TX: PREFIX + "backoff_tx_gated",
}
GATE_SOURCES = {
    OP_DEDUP_GATE_RX: PREFIX + "dedup_rx_source",
    OP_PEER_HEALTH_GATE_RX: PREFIX + "peer_health_rx_source",
    OP_BACKOFF_GATE_RX: PREFIX + "backoff_rx_source",
    OP_PEER_HEALTH_GATE_TX: PREFIX + "peer_health_tx_source",
    OP_BACKOFF_GATE_TX: PREFIX + "backoff_tx_source",
}
DEADLINE_STAMP_KEY = PREFIX + "deadline_checked"

# --- attributes --------------------------------------------------------------------
ATTR_PEER = "peer"
ATTR_PAYLOAD_TYPE = "payload_type"
ATTR_QUORUM = "quorum"
ATTR_DEADLINE_NS = "deadline_ns"
ATTR_COHORT_SIZE = "cohort_size"  # peers that a request asks at most; 0 when nothing says it
ATTR_VARIANT = "variant"  # of a wire op, chosen by `expand_ops`
VARIANT_ONE_SHOT = "one_shot"  # a request to one peer
VARIANT_COHORT = "cohort"

SELF_CLASS = "@self"


def role_domain(role: str) -> str:
    """Return the opset domain of a role, such as "ai.bytesandbrains.role.model" of "Model"."""
    return ROLE_DOMAIN_PREFIX + snake_case(role)


@lru_cache(maxsize=1024)
def snake_case(name: str) -> str:
    """Return a name in snake case: `DataSource` as `data_source`."""
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def binding_key(target: str, slot: str) -> str:
    """Return the model metadata key of one slot binding."""
    return f"{BINDING_PREFIX}{target}.{slot}"


def encode_binding_value(role: str, type_name: str, slot_id: int) -> str:
    """Return `<role>|<TYPE_NAME>|<slot_id>`; a slot that only dependencies use has id -1."""
    return f"{role}|{type_name}|{slot_id}"
