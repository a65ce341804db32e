"""Framework ops, as helpers: timers, triggers, queues, events, metrics, the address book.

Rule: one function per op of the op table, named like it in snake case (`any_of` for `Any`, since
`any` is a Python built-in); a test compares the two. The first argument is the Graph, then the
op's inputs, its attributes by name, and `after`. Times are in nanoseconds.
"""

from __future__ import annotations

from typing import Any, Final

from bbnode.dsl.core.calls import takes_graph, wants_graph
from bbnode.dsl.core.graph import NS_PER_S, After, Graph, Output, as_graph, spec_of
from bbnode.dsl.errors import BadArgument
from bbnode.ir import keys
from bbnode.ir.types import TypeNode

# Phases of LifecyclePhase.
SHUTDOWN: Final = 1
SNAPSHOT: Final = 2

# Prefixes of event names that are reserved for the node.
RESERVED_EVENTS: Final = ("bb.", keys.PREFIX)


def _record(
    g: Graph, op_type: str, *inputs: Output, after: After, domain: str = keys.SYSCALL_DOMAIN,
    variadic: int = 0, within_ns: int = 0, **attributes: Any,
) -> tuple[Output, ...]:  # fmt: skip
    spec = spec_of(domain, op_type)
    graph = as_graph(g, f"syscalls.{spec.method}(g, …)")
    return graph.record(
        spec, inputs, attributes, after=after, variadic=variadic, deadline=within_ns / NS_PER_S
    )


def _one(g: Graph, op_type: str, *inputs: Output, after: After, **attributes: Any) -> Output:
    return _record(g, op_type, *inputs, after=after, **attributes)[0]


def _event(g: Graph, op_type: str, value: Output, name: str, after: After) -> None:
    if str(name).startswith(RESERVED_EVENTS):
        as_graph(g, "syscalls.app_emit(g, …)")
        raise BadArgument(
            f"event name {name!r} begins like the node's own ({' and '.join(RESERVED_EVENTS)}); "
            "choose another"
        )
    _record(g, op_type, value, after=after, name=name)


# --- sources -------------------------------------------------------------------------------


def pulse(g: Graph, *, after: After = None) -> Output:
    """A trigger that fires once, at bootstrap."""
    return _one(g, "Pulse", after=after)


def interval(g: Graph, *, period_ns: int, after: After = None) -> Output:
    """A timestamp, every `period_ns`."""
    return _one(g, "Interval", after=after, period_ns=period_ns)


def event_source(g: Graph, *, kind: int, after: After = None) -> Output:
    """Each event of a kind on the node's bus."""
    return _one(g, "EventSource", after=after, kind=kind)


def lifecycle_phase(g: Graph, *, phase: int, after: After = None) -> Output:
    """A trigger when the node enters a phase: `SHUTDOWN` or `SNAPSHOT`."""
    return _one(g, "LifecyclePhase", after=after, phase=phase)


# --- triggers ------------------------------------------------------------------------------


def on_trigger(g: Graph, trigger: Output, *, after: After = None) -> Output:
    """Fires on each arrival."""
    return _one(g, "OnTrigger", trigger, after=after)


def threshold(
    g: Graph, *inputs: Output, n: int, per_peer: bool = False, until_ns: int = 0,
    after: After = None,
) -> Output:  # fmt: skip
    """A trigger once `n` of the inputs have arrived.

    If `n` exceeds the number of inputs, the op is a barrier over executions: a trigger after each
    `n` arrivals (of deliveries, say), in an execution of its own. It fails if fewer have arrived
    `until_ns` after the first (0: the node's limit `wait_s`). `per_peer` counts each peer once per
    round.
    """
    made = _one(
        g, "Threshold", *inputs, after=after, n=n, per_peer=int(per_peer), until_ns=until_ns
    )
    made.graph.check_join()
    return made


def collect(
    g: Graph, value: Output, *, n: int = 0, until_ns: int = 0, quorum: int = 0,
    per_peer: bool = True, after: After = None,
) -> Output:  # fmt: skip
    """Values of several deliveries as one batch: `g.collect`, with the time in nanoseconds."""
    graph = as_graph(g, "syscalls.collect(g, …)")
    return graph.collect(
        value, n=n, until=until_ns / NS_PER_S, quorum=quorum, per_peer=per_peer, after=after
    )


def after(g: Graph, trigger: Output, *, delay_ns: int, after: After = None) -> Output:
    """The trigger, `delay_ns` later."""
    return _one(g, "After", trigger, after=after, delay_ns=delay_ns)


def sleep(g: Graph, trigger: Output, *, duration_ns: int, after: After = None) -> Output:
    """The trigger, when a timer of `duration_ns` has matured."""
    return _one(g, "Sleep", trigger, after=after, duration_ns=duration_ns)


def deadline_match(g: Graph, then: Output, timeout: Output, *, after: After = None) -> Output:
    """The trigger that fires first of the two."""
    return _one(g, "DeadlineMatch", then, timeout, after=after)


def any_of(g: Graph, *inputs: Output, group: str = "", after: After = None) -> Output:
    """The first of its inputs to arrive (the op `Any`)."""
    return _one(g, "Any", *inputs, after=after, group=group)


def when(g: Graph, condition: Output, *, expect: bool = True, after: After = None) -> Output:
    """A trigger if the condition is as expected; else its readers are skipped: see `g.when`."""
    return _one(g, "When", condition, after=after, expect=int(expect))


def choose(
    g: Graph, condition: Output, first: Output, second: Output, *, after: After = None
) -> Output:
    """`first` if the condition, one bool, is true, else `second`: values of any one type."""
    return _one(g, "Choose", condition, first, second, after=after)


def gate(g: Graph, value: Output, trigger: Output, *, after: After = None) -> Output:
    """The value, once the trigger has fired."""
    return _one(g, "Gate", value, trigger, after=after)


def gate_dispatch(g: Graph, value: Output, *, after: After = None) -> Output:
    """An edge gate; the compiler inserts them where they are needed."""
    return _one(g, "GateDispatch", value, after=after)


def gate_many_dispatch(g: Graph, value: Output, *gates: Output, after: After = None) -> Output:
    """The value, once all gates have fired."""
    return _one(g, "GateManyDispatch", value, *gates, after=after)


# --- semaphores, queues, buffers -----------------------------------------------------------


def limit_acquire(
    g: Graph, trigger: Output, *, name: str, n: int, deadline_ns: int = 0, after: After = None
) -> Output:
    """The trigger, once one unit of the semaphore `name` of `n` units is acquired.

    It waits for `deadline_ns` at most; 0 for the rest of its execution's time.
    """
    return _one(g, "Limit.Acquire", trigger, after=after, within_ns=deadline_ns, name=name, n=n)


def limit_release(g: Graph, trigger: Output, *, name: str, after: After = None) -> None:
    """Return a unit to the semaphore `name`."""
    _record(g, "Limit.Release", trigger, after=after, name=name)


def serialize_enqueue(g: Graph, value: Output, *, queue: str, after: After = None) -> Output:
    """Put a value into a FIFO queue; a trigger once it is enqueued."""
    return _one(g, "Serialize.Enqueue", value, after=after, queue=queue)


def serialize_dequeue(
    g: Graph, trigger: Output, *, queue: str, deadline_ns: int = 0, after: After = None
) -> Output:
    """Take a queue's oldest value, waiting for `deadline_ns` at most (0: as `limit_acquire`)."""
    return _one(g, "Serialize.Dequeue", trigger, after=after, queue=queue, deadline_ns=deadline_ns)


def hold_stash(g: Graph, value: Output, *, slot: str, after: After = None) -> None:
    """Store a value under a name of this node."""
    _record(g, "Hold.Stash", value, after=after, slot=slot)


def hold_flush(g: Graph, trigger: Output, *, slot: str, after: After = None) -> Output:
    """The value stored under a name."""
    return _one(g, "Hold.Flush", trigger, after=after, slot=slot)


# --- state of the node ---------------------------------------------------------------------


def clock(g: Graph, trigger: Output, *, after: After = None) -> Output:
    """The node's clock, as a Timestamp."""
    return _one(g, "Clock", trigger, after=after)


def rng_u64(g: Graph, trigger: Output, *, after: After = None) -> Output:
    """A draw from the node's seeded generator, as a U64."""
    return _one(g, "RngU64", trigger, after=after)


def correlate_tag(g: Graph, trigger: Output, *, after: After = None) -> Output:
    """A fresh CorrelationToken."""
    return _one(g, "CorrelateTag", trigger, after=after)


def mint_dispatch(g: Graph, trigger: Output, *, after: After = None) -> Output:
    """A CorrelationToken minted for the compiler's own ops."""
    return _one(g, "MintDispatch", trigger, after=after)


# --- to the host ---------------------------------------------------------------------------


def app_emit(g: Graph, value: Output, *, name: str, after: After = None) -> None:
    """Hand a value to the host as the event `name`."""
    _event(g, "AppEmit", value, name, after)


def app_notify(g: Graph, trigger: Output, *, name: str, after: After = None) -> None:
    """Tell the host that `name` happened."""
    _event(g, "AppNotify", trigger, name, after)


def record(g: Graph, value: Output, *, name: str, after: After = None) -> None:
    """Append a value to the node's ring buffer `name`."""
    _record(g, "Record", value, after=after, name=name)


def incr_metric(
    g: Graph, trigger: Output, *, name: str, delta: int = 1, after: After = None
) -> None:
    """Add `delta` to the node's counter `name`."""
    _record(g, "IncrMetric", trigger, after=after, name=name, delta=delta)


# --- values --------------------------------------------------------------------------------


def pass_through(g: Graph, value: Output, *, after: After = None) -> Output:
    """The value itself."""
    return _one(g, "PassThrough", value, after=after)


def tee(g: Graph, value: Output, *, fanout: int, after: After = None) -> tuple[Output, ...]:
    """The value, `fanout` times."""
    return _record(g, "Tee", value, after=after, variadic=fanout, fanout=fanout)


def constant(g: Graph, value: Any, *, after: After = None) -> Output:
    """A constant value of the program: the same as `g.constant`."""
    return as_graph(g, "syscalls.constant(g, …)").constant(value, after=after)


def metadata_number(g: Graph, metadata: Output, *, key: str, after: After = None) -> Output:
    """An entry of Metadata as float32 []; the op fails if it is missing or no number."""
    return _one(g, "Metadata.Number", metadata, key=key, after=after)


def peers_filter(g: Graph, peers: Output, mask: Output, *, after: After = None) -> Output:
    """The peers at whose position `mask` is true: the same as `peer_lists.filter_list`."""
    return _one(g, "Peers.Filter", peers, mask, after=after)


def peers_without(g: Graph, peers: Output, peer: Output, *, after: After = None) -> Output:
    """The peers, without one: `peer_lists.without`."""
    return _one(g, "Peers.Without", peers, peer, after=after)


def peers_count(g: Graph, peers: Output, *, after: After = None) -> Output:
    """The number of peers in a list, as an int64 scalar: `peer_lists.length`."""
    return _one(g, "Peers.Count", peers, after=after)


def peers_contains(g: Graph, peers: Output, peer: Output, *, after: After = None) -> Output:
    """A bool scalar: true if the list has the peer. As `peer_lists.contains`."""
    return _one(g, "Peers.Contains", peers, peer, after=after)


# --- the address book ----------------------------------------------------------------------


def address_book_insert(g: Graph, peer: Output, address: Output, *, after: After = None) -> None:
    """Add one address of a peer to the node's address book."""
    _record(g, "Insert", peer, address, after=after, domain=keys.ADDRESS_BOOK_DOMAIN)


def address_book_insert_many(
    g: Graph, peer: Output, addresses: Output, *, after: After = None
) -> None:
    """Add addresses (an AddressVec) of a peer to the node's address book."""
    _record(g, "InsertMany", peer, addresses, after=after, domain=keys.ADDRESS_BOOK_DOMAIN)


def address_book_lookup(g: Graph, peer: Output, *, after: After = None) -> Output:
    """All addresses of a peer, as an AddressVec; the op fails if none is known."""
    return _one(g, "Lookup", peer, after=after, domain=keys.ADDRESS_BOOK_DOMAIN)


def type_cast(g: Graph, value: Output, *, to: TypeNode | str, after: After = None) -> Output:
    """The value as the type `to`, a type or its id (the op `Cast` of the types domain)."""
    target = to.id if isinstance(to, TypeNode) else to
    return _one(g, "Cast", value, after=after, domain=keys.TYPES_DOMAIN, to=target)


for _name, _function in list(globals().items()):
    if wants_graph(_function) and _function.__module__ == __name__:
        globals()[_name] = takes_graph(_function, "syscalls")
