"""The comparison of the meaning of connected peers' data, before the peers are used.

Rule: the node that keeps the reference of a class holds each newly connected peer of it, so that
nothing is sent there, until the peer has described its data and has taken the reference; one that
differs stays held, and both sides give the reason in one line. A peer of an earlier release is not
compared, which is reported. Peers of a class that no other class keeps compare in pairs, where the
lower PeerId asks: the reference of the one that has been used before stands, else the older one,
else the one of the lower PeerId; a node that has been used keeps its own. A peer's statements hold
only that peer.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from bbnode.components.contracts import DataSource
from bbnode.components.data.base import MemoryDataSource
from bbnode.components.data.shared_schema import SchemaRefused, SharedSchema, compare
from bbnode.components.errors import DataDiffers
from bbnode.daemon import paths
from bbnode.engine import Node, steps
from bbnode.engine.bootstrap.bootstraps import SLOT_PREFIX
from bbnode.engine.peers.references import (
    References,
    Verdict,
    schemas_from_json,
    schemas_to_json,
)
from bbnode.engine.planning.data_slots import DataSlots
from bbnode.engine.readiness import PENDING
from bbnode.engine.wire.refusals import public_text
from bbnode.ir.caps import MAX_SCHEMAS_BYTES, SCHEMA_ANSWER_S
from bbnode.ir.decoding import clip, shown
from bbnode.ir.errors import BbnodeError, DecodeError
from bbnode.ir.peer import PeerId
from bbnode.transport import schema_exchange
from bbnode.transport.base import (
    Capability,
    ConnectionClosed,
    ConnectionOpened,
    Transport,
    TransportEvent,
)
from bbnode.transport.errors import NotConnectedError

logger = logging.getLogger(__name__)

FILE_NAME: Final = "data-references.json"
_FILE_VERSION: Final = 1
# The pause between two requests to a peer that is not ready to answer.
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 60.0
# Attempts before a peer counts as one of an earlier release: its stream may have broken.
_TRIES_OF_OLD: Final = 2
_MAX_REASON_CHARS: Final = 400
# Requests in a row to one peer: its data, the reference, and once more if the reference grew.
_MOST_QUESTIONS: Final = 4


@dataclass(slots=True, kw_only=True)
class _Peer:
    """A connected peer whose data this node compares, or that compares this node's.

    Attributes:
        asks: True if this node asks the peer; else the peer asks.
        standing: "" while nothing is known, "agrees", "refused", "unnamed".
    """

    classes: tuple[str, ...]
    asks: bool
    standing: str = ""
    reason: str = PENDING
    mapped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unnamed: tuple[str, ...] = ()
    again: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope | None = None
    held: bool = True
    let_go: bool = False  # this node released it, and ignores the "peer.ready" that follows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A peer's answer, checked."""

    schemas: Mapping[str, SharedSchema | None]
    adopted: Mapping[str, str]  # digests, by slot
    waits: str
    refused: str
    references: Mapping[str, SharedSchema]
    since_s: float
    used: bool


class Agreeing:
    """Compares the data of connected peers with the references that this node keeps."""

    def __init__(
        self,
        node: Node,
        transport: Transport,
        slots: DataSlots,
        declared: Mapping[str, SharedSchema],
        *,
        state_dir: Path,
        prepare: Callable[[Sequence[str]], None],
        publish: Callable[[Mapping[str, Any]], None],
        is_trusted: Callable[[PeerId], bool] = lambda _: False,
        artifact_sha256: str = "",
        goes_on: bool = True,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Load the earlier agreements, and have the node's data sources adopt them.

        Args:
            declared: the schemas of the program, by group.
            prepare: prepares these slots again.
            is_trusted: returns True for a peer that the node's owner has named.
            artifact_sha256: of the program; an agreement on another one does not bind this one
                unless it `goes_on` with the models of that.
            now_s: the wall clock, for the age of a reference.
        """
        self._node = node
        self._transport = transport
        self._slots = slots
        self._path = state_dir / FILE_NAME
        self._artifact_sha256 = artifact_sha256
        self._before: dict[str, SharedSchema] = {}  # references of another program
        self.moved: tuple[str, ...] = ()
        self._prepare = prepare
        self._is_trusted = is_trusted
        self._publish = publish
        self._own = {
            slot: group
            for slot, group in slots.of(node.classes).items()
            if isinstance(node.component(slot), DataSource)
        }
        self._keeps = slots.kept_by(node.classes)
        self._keepers = {slots.keepers[name] for name in node.classes if name in slots.keepers}
        self.references = References(declared, slots.measured)
        self._declared = dict(declared)
        self._since_s = now_s()
        self._used = False
        self._adopted: dict[str, SharedSchema] = {}
        self._refused: dict[
            str, str
        ] = {}  # own slots that can't be mapped, with the reason of their source
        self._peers: dict[PeerId, _Peer] = {}
        self._bound: dict[str, PeerId] = {}  # by own class, whose reference was taken
        self._prepared: dict[str, trio.Event] = {}
        self._threads = trio.CapacityLimiter(1)
        self._answering = trio.Lock()
        self._own_taken = False
        self._told_unnamed: set[str] = set()
        self._new, self._to_ask = trio.open_memory_channel[PeerId](math.inf)
        self._load(goes_on=goes_on)
        self._serves = Capability.STREAMS in transport.capabilities
        if self._serves and (self._keepers or self._keeps):
            schema_exchange.serve(transport, self._may_ask, self._answer)

    # -- what is shown ---------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """Return the references and own data for the status."""
        own = {}
        for slot, group in self._own.items():
            known = self._node.component(slot).known_schema()
            reference = self._adopted.get(slot)
            mapped = compare(reference, known).mapped if reference and known else ()
            own[slot] = {
                "group": group,
                "digest": "" if known is None else known.digest,
                "named": known is not None and known.is_named,
                "mapped": list(mapped),
                "adopted": "" if reference is None else reference.digest,
            }
        return {
            "own": own,
            "moved": list(self.moved),
            "references": {
                group: {"digest": each.digest, "meaning": list(each.lines())}
                for group, each in self.references.kept.items()
            },
            "peers": {
                str(peer): {
                    "standing": each.standing or "pending",
                    "reason": each.reason,
                    "mapped": {slot: list(lines) for slot, lines in each.mapped.items()},
                    "unnamed": list(each.unnamed),
                }
                for peer, each in self._peers.items()
            },
        }

    def reference_of(self, slot: str = "") -> SharedSchema | None:
        """Return the reference of an own slot's examples; "": that which all others share here."""
        if slot in self._own:
            return self._adopted.get(slot) or self.references.kept.get(self._own[slot])
        kept = [*self.references.kept.values()]
        return kept[0] if len(kept) == 1 else None

    def for_checkpoint(self) -> dict[str, str]:
        """Return the meaning of the examples of own slots, as JSON; under "" that of the others."""
        schemas = {slot: self.reference_of(slot) for slot in ("", *self._own)}
        return {slot: each.to_json() for slot, each in schemas.items() if each is not None}

    # -- events ----------------------------------------------------------------------------

    def heard(self, event: TransportEvent) -> None:
        """Handle an event of the transport, before the node does."""
        if isinstance(event, ConnectionClosed):
            gone = self._peers.pop(event.peer, None)
            if gone is not None and gone.scope is not None:
                gone.scope.cancel()
            for name in [name for name, peer in self._bound.items() if peer == event.peer]:
                del self._bound[name]
            return
        if not self._serves or not isinstance(event, ConnectionOpened):
            return
        peer = event.peer
        classes = tuple(
            name for name in event.hello.classes if name in self._keeps and self._has_data(name)
        )
        if not classes or peer in self._peers:
            return
        pairs = any(self._slots.keepers[name] == name for name in classes)
        asks = not pairs or self._node.peer_id < peer
        self._peers[peer] = _Peer(classes=classes, asks=asks)
        self._node.hold_peer(peer, classes, PENDING)
        self._new.send_nowait(peer)

    def _has_data(self, name: str) -> bool:
        return bool(self._slots.groups.get(name))

    def observe(self, step: steps.Step) -> None:
        """Note that the node is used, that a slot is prepared, that a peer is ready."""
        if isinstance(step, steps.ExecutionFinished):
            if not self._used and self._is_used():
                self._used = True
                self._save()
        elif isinstance(step, steps.BootstrapComplete):
            event = self._prepared.pop(step.target.removeprefix(SLOT_PREFIX), None)
            if event is not None:
                event.set()
        elif isinstance(step, steps.Telemetry) and step.name == "peer.ready":
            state = self._peers.get(step.attributes["peer"])
            if state is not None and not state.let_go:
                state.again.set()
            elif state is not None:
                state.let_go = False

    def _is_used(self) -> bool:
        return any(each.standing == "agrees" for each in self._peers.values())

    async def run(self) -> None:
        """Compare the data of peers as they connect."""
        async with trio.open_nursery() as nursery:
            async for peer in self._to_ask:
                state = self._peers.get(peer)
                if state is not None and state.scope is None:
                    nursery.start_soon(self._agree, peer, state)

    # -- asking ----------------------------------------------------------------------------

    async def _agree(self, peer: PeerId, state: _Peer) -> None:
        with trio.CancelScope() as state.scope:
            if not state.asks:
                # The peer asks; one of an earlier release never does.
                with trio.move_on_after(2 * SCHEMA_ANSWER_S) as waited:
                    while not state.standing:
                        await state.again.wait()
                        state.again = trio.Event()
                if waited.cancelled_caught and not state.standing:
                    self._unnamed(peer, state)
                return
            pause_s, tries = _FIRST_PAUSE_S, 0
            while self._peers.get(peer) is state:
                state.again = trio.Event()
                try:
                    settled = await self._compare(peer, state)
                    tries = 0
                except schema_exchange.NotSpoken:
                    tries += 1
                    settled = tries >= _TRIES_OF_OLD
                    if settled:
                        self._unnamed(peer, state)
                except NotConnectedError:
                    return
                except BbnodeError as error:
                    settled = False
                    self._hold(peer, state, "", f"{PENDING}: {_line(error)}")
                if settled:
                    if state.standing == "unnamed":
                        return
                    since_s = trio.current_time()
                    await state.again.wait()
                    if not state.standing:  # the reference grew
                        continue
                    # The peer reports that it is ready again, which it may do as often as it likes.
                    if trio.current_time() - since_s > _LONGEST_PAUSE_S:
                        pause_s = _FIRST_PAUSE_S
                    await trio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                else:
                    with trio.move_on_after(pause_s):
                        await state.again.wait()
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _compare(self, peer: PeerId, state: _Peer) -> bool:
        """Compare a peer's data once; return False if it can't answer yet."""
        groups = self._slots.of(state.classes)
        await self._take_own()
        adopts = {
            slot: self.references.kept[group]
            for slot, group in groups.items()
            if group in self.references.kept
        }
        pairs = any(self._slots.keepers[name] == name for name in state.classes)
        # A reference that still grows is not sent before the peer's data are known.
        asked: Mapping[str, SharedSchema] = {} if pairs or self._grows() else adopts
        for _ in range(_MOST_QUESTIONS):
            answer = await self._ask(peer, groups, asked)
            if answer.waits:
                self._hold(peer, state, "", f"{PENDING}: {answer.waits}")
                return False
            if pairs:
                theirs = await self._take_theirs(answer)
                if theirs is not None and theirs:
                    await self._ask(peer, groups, {}, verdict=theirs)
                    self._hold(peer, state, "refused", theirs)
                    return True
            verdict = self.references.take(groups, answer.schemas, grows=self._grows())
            if verdict.refused:
                self._hold(peer, state, "refused", verdict.refused)
                if pairs:
                    await self._ask(peer, groups, {}, verdict=verdict.refused)
                elif asked != adopts or not answer.refused:
                    await self._ask(peer, groups, adopts)
                return True
            if verdict.grew:
                self._grew(verdict.grew, but=peer)
                await self._adopt_own()
            if self._has_adopted(answer, verdict) or not verdict.adopts:
                if pairs:
                    await self._ask(peer, groups, {}, verdict="")
                self._let_go(peer, state, verdict)
                return True
            if answer.refused and asked == verdict.adopts:
                self._hold(peer, state, "refused", answer.refused)
                return True
            asked = verdict.adopts
        return False  # its answer differs each time

    async def _ask(
        self,
        peer: PeerId,
        groups: Mapping[str, str],
        adopt: Mapping[str, SharedSchema],
        *,
        verdict: str | None = None,
    ) -> _Answer:
        question = {"adopt": schemas_to_json(adopt), "verdict": verdict}
        raw = await schema_exchange.ask(self._transport, peer, json.dumps(question).encode("ascii"))
        # Milliseconds for the answer of an honest peer, a second for the largest one allowed.
        return await trio.to_thread.run_sync(_read_answer, raw, set(groups), limiter=self._threads)

    def _has_adopted(self, answer: _Answer, verdict: Verdict) -> bool:
        return not answer.refused and all(
            answer.adopted.get(slot) == each.digest for slot, each in verdict.adopts.items()
        )

    def _grows(self) -> bool:
        return not self._used and not self._node.executions()

    def _grew(self, groups: frozenset[str], but: PeerId | None = None) -> None:
        """Store the references, and compare the peers again that had agreed to earlier ones."""
        for group in groups & self._before.keys():
            self._tell_moved(group, self._before.pop(group), self.references.kept[group])
        self._save()
        for peer, each in self._peers.items():
            mine = self._slots.of(each.classes).values()
            if each.standing == "agrees" and peer != but and each.asks and groups & {*mine}:
                each.standing, each.held = "", True
                self._node.hold_peer(peer, each.classes, PENDING)
                each.again.set()

    def _hold(self, peer: PeerId, state: _Peer, standing: str, reason: str) -> None:
        if self._peers.get(peer) is not state:
            return
        changed = state.standing != standing and standing
        state.standing, state.reason, state.held = standing, reason, True
        self._node.hold_peer(peer, state.classes, reason)
        if changed:
            logger.warning("data of a peer differ", extra={"peer": str(peer), "reason": reason})
            self._publish({"type": "data_differ", "peer": str(peer), "reason": reason})

    def _let_go(self, peer: PeerId, state: _Peer, verdict: Verdict) -> None:
        if self._peers.get(peer) is not state:
            return
        state.standing, state.reason = "agrees", ""
        state.mapped, state.unnamed = verdict.mapped, verdict.unnamed
        self._release(peer, state)
        for slot, lines in verdict.mapped.items():
            logged = {"peer": str(peer), "slot": slot, "mapped": "; ".join(lines)}
            logger.info("data of a peer are mapped", extra=logged)
        for slot in verdict.unnamed:
            logged = {"peer": str(peer), "slot": slot}
            logger.info("data of a peer are unnamed: compared by shape and type", extra=logged)

    def _release(self, peer: PeerId, state: _Peer) -> None:
        if state.held:
            state.held, state.let_go = False, True
            self._node.hold_peer(peer, (), "")

    def _unnamed(self, peer: PeerId, state: _Peer) -> None:
        if self._peers.get(peer) is not state:
            return
        state.standing, state.reason = "unnamed", "it does not say what its data mean"
        self._release(peer, state)
        logger.info("a peer does not say what its data mean", extra={"peer": str(peer)})

    # -- this node's own data --------------------------------------------------------------

    async def _take_own(self) -> None:
        """Compare the own data of this node, once they are loaded, if it keeps their group."""
        if self._own_taken:
            return
        groups = {
            slot: group
            for name in self._node.classes
            for slot, group in self._slots.groups.get(name, {}).items()
            if slot in self._own and self._is_kept_here(group)
        }
        if not groups:
            self._own_taken = True
            return
        schemas = {slot: await self._own_schema(slot) for slot in groups}
        if any(isinstance(each, str) for each in schemas.values()):
            return  # it is not ready, and reports so
        known = {slot: each for slot, each in schemas.items() if not isinstance(each, str)}
        verdict = self.references.take(groups, known, grows=self._grows())
        self._own_taken = not verdict.refused
        if verdict.grew:
            self._grew(verdict.grew)
        await self._adopt_own()

    def _is_kept_here(self, group: str) -> bool:
        return any(group in self._slots.groups.get(name, {}).values() for name in self._keeps)

    async def _adopt_own(self) -> None:
        """Have the own data sources of kept groups adopt the references."""
        for slot, group in self._own.items():
            reference = self.references.kept.get(group)
            if reference is not None and self._is_kept_here(group):
                await self._adopt(slot, reference)
        self._save()

    async def _adopt(self, slot: str, reference: SharedSchema) -> None:
        """Have one data source adopt a reference, and wait until it is prepared again."""
        if self._adopted.get(slot) == reference and slot not in self._refused:
            return
        source: DataSource = self._node.component(slot)
        was_known = await trio.to_thread.run_sync(source.known_schema) is not None
        try:
            await trio.to_thread.run_sync(source.adopt, reference, limiter=self._threads)
            self._refused.pop(slot, None)
        except DataDiffers as error:
            self._refused[slot] = _line(error)
        self._adopted[slot] = reference
        if was_known and source.known_schema() is None:
            prepared = self._prepared.setdefault(slot, trio.Event())
            self._prepare([slot])
            with trio.move_on_after(SCHEMA_ANSWER_S):
                await prepared.wait()

    async def _own_schema(self, slot: str) -> SharedSchema | str | None:
        """Return the meaning of an own slot's examples; a text: the reason why it is unknown."""
        source: DataSource = self._node.component(slot)
        known = source.known_schema()
        if known is None:
            why = self._node.not_ready().get(slot)
            if why is not None:
                return public_text(why)
            try:
                with trio.fail_after(SCHEMA_ANSWER_S):
                    known = await trio.to_thread.run_sync(
                        source.own_schema, limiter=self._threads, abandon_on_cancel=True
                    )
            except trio.TooSlowError:
                return "they are being read"
            except BbnodeError as error:
                return _line(error)
        if (known is None or not known.is_named) and slot not in self._told_unnamed:
            self._told_unnamed.add(slot)
            logger.warning(
                "data are unnamed: peers compare them by shape and type alone",
                extra={"slot": slot},
            )
        return known

    async def _take_theirs(self, answer: _Answer) -> str | None:
        """Adopt a like peer's references if they stand; a text is the reason why they can't be.

        None if this node's own stand.
        """
        mine = (not self._used, self._since_s)
        theirs = (not answer.used, answer.since_s)
        if not answer.references or mine <= theirs or not self._own:
            if self._used and answer.used and answer.references:
                return self._differ(answer.references) or None
            return None
        known = {slot: each for slot, each in [
            (slot, await self._own_schema(slot)) for slot in self._own
        ] if not isinstance(each, str)}  # fmt: skip
        trial = References(self._declared, self._slots.measured)
        for group, reference in answer.references.items():
            if group in self._own.values():
                trial.put(group, reference)
        verdict = trial.take(self._own, known, grows=False)
        if verdict.refused:
            return f"this node's {verdict.refused}"
        for group, reference in trial.kept.items():
            self.references.put(group, reference)
        self._since_s = answer.since_s
        self._grew(frozenset(trial.kept))
        await self._adopt_own()
        return None

    def _differ(self, references: Mapping[str, SharedSchema]) -> str:
        """Return the difference between the references of two nodes that were both used, or ""."""
        lines: list[str] = []
        for group, theirs in references.items():
            mine = self.references.kept.get(group)
            if mine is not None:
                agreed = compare(mine, theirs)
                lines += [*agreed.refused, *agreed.mapped]
        return f"both were trained before they met: {'; '.join(lines)}" if lines else ""

    # -- answering -------------------------------------------------------------------------

    def _may_ask(self, peer: PeerId) -> bool:
        info = self._transport.peer_info(peer)
        return info is not None and not self._keepers.isdisjoint(info.hello.classes)

    async def _answer(self, peer: PeerId, question: bytes) -> bytes:
        async with self._answering:
            adopt, verdict = await trio.to_thread.run_sync(
                _read_question, question, limiter=self._threads
            )
            info = self._transport.peer_info(peer)
            plays = () if info is None else info.hello.classes
            state = self._peers.get(peer)
            asked = [
                name
                for name in self._node.classes
                if self._slots.keepers.get(name) in plays and self._has_data(name)
            ]
            groups = {s: g for s, g in self._slots.of(asked).items() if s in self._own}
            conflict = ""
            for slot, reference in adopt.items():
                if slot not in groups:
                    continue
                why = self._conflict(asked, peer, slot, reference)
                conflict = conflict or why
                if not why:
                    await self._adopt(slot, reference)
                    if (
                        state is not None and not self._used
                    ):  # a peer of the same class: it keeps them too
                        self.references.put(groups[slot], reference)
            if adopt:
                self._save()
            if state is not None and not state.asks and verdict is not None:
                if verdict:
                    self._hold(peer, state, "refused", clip(verdict, _MAX_REASON_CHARS))
                else:
                    self._let_go(peer, state, Verdict())
                state.again.set()
            schemas = {slot: await self._own_schema(slot) for slot in groups}
            waits = [each for each in schemas.values() if isinstance(each, str)]
            known = {s: e for s, e in schemas.items() if isinstance(e, SharedSchema)}
            if state is not None:
                await self._take_own()
            answer = {
                "schemas": schemas_to_json(known),
                "adopted": {
                    slot: each.digest for slot, each in self._adopted.items() if slot in groups
                },
                "waits": waits[0] if waits else "",
                "refused": conflict
                or "; ".join(
                    dict.fromkeys(why for slot, why in self._refused.items() if slot in groups)
                ),
                "references": schemas_to_json(
                    {g: r for g, r in self.references.kept.items() if state is not None}
                ),
                "since": self._since_s,
                "used": self._used,
            }
            return json.dumps(answer).encode("ascii")

    def _conflict(
        self, asked: Sequence[str], peer: PeerId, slot: str, reference: SharedSchema
    ) -> str:
        """Return the reason to refuse a peer's reference, or "".

        A node of this class, which anybody may claim to be, is not followed against the own data.
        Of several that keep the reference of this class, the first one is followed while it is
        connected; one that the node's owner has named before others, and one that the own data
        agree with before one that they do not.
        """
        known = self._node.component(slot).known_schema()
        line = "" if known is None else compare(reference, known).line
        before = self._adopted.get(slot)
        for name in asked:
            if slot not in self._slots.groups.get(name, {}):
                continue
            if self._slots.keepers.get(name) == name:
                if line:
                    return line
                if self._used and before is not None and before != reference:
                    return "it was trained by another reference before"
                continue
            bound = self._bound.setdefault(name, peer)
            if bound == peer or before == reference:
                continue
            fails = known is not None and before is not None and compare(before, known).line
            ranks = [
                (self._is_trusted(bound), not fails),
                (self._is_trusted(peer), not line),
            ]
            if ranks[0] >= ranks[1]:
                return f"its data follow the reference of …{bound.short}, which is another one"
            self._bound[name] = peer
        return ""

    # -- disk ------------------------------------------------------------------------------

    def _save(self) -> None:
        content = {
            "version": _FILE_VERSION,
            "since": self._since_s,
            "used": self._used,
            "artifact": self._artifact_sha256,
            "references": schemas_to_json(self.references.kept),
            "adopted": schemas_to_json(self._adopted),
        }
        try:
            paths.write_atomically(self._path, json.dumps(content).encode("ascii"), mode=0o600)
        except paths.StorageError as error:
            logger.warning("what was agreed about data is not kept", extra={"reason": str(error)})

    def _load(self, *, goes_on: bool) -> None:
        """Load the earlier agreements, and have the own sources adopt them before they load."""
        before: dict[str, SharedSchema] = {}
        adopted: dict[str, SharedSchema] = {}
        try:
            before, adopted = self._read_file(goes_on=goes_on)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, LookupError, TypeError, BbnodeError, RecursionError) as error:
            logger.warning(
                "what was agreed about data can't be read; it is agreed on again",
                extra={"path": str(self._path), "reason": clip(str(error))},
            )
        known = {group for groups in self._slots.groups.values() for group in groups.values()}
        for group, reference in before.items():
            declared = self._declared.get(group)
            if declared is not None:
                self._tell_moved(group, reference, declared)
            if group in known and (declared is None or not compare(declared, reference).refused):
                self.references.put(group, reference)
        for slot, group in self._own.items():
            wanted = self._declared.get(group)
            kept = adopted.get(slot)
            if kept is not None and (wanted is None or not compare(wanted, kept).refused):
                wanted = kept
            if wanted is None:
                continue
            self._adopted[slot] = wanted
            source: DataSource = self._node.component(slot)
            if isinstance(source, MemoryDataSource):
                source.adopt(wanted)  # nothing is loaded yet, and nothing is read for it

    def _read_file(
        self, *, goes_on: bool
    ) -> tuple[dict[str, SharedSchema], dict[str, SharedSchema]]:
        if self._path.stat().st_size > 4 * MAX_SCHEMAS_BYTES:
            raise DecodeError("it is too large")
        content = json.loads(self._path.read_bytes())
        if content["version"] != _FILE_VERSION:
            raise DecodeError(f"it is of version {shown(content['version'])}")
        references = schemas_from_json(_text(content["references"]))
        adopted = schemas_from_json(_text(content["adopted"]))
        since_s, used = float(content["since"]), bool(content["used"])
        if content["artifact"] != self._artifact_sha256 and not goes_on:
            self._before = references if used else {}
            return {}, {}
        self._since_s, self._used = since_s, used
        # Nothing was trained with it: the first peer that connects defines it anew.
        return references if used else {}, adopted

    def _tell_moved(self, group: str, before: SharedSchema, after: SharedSchema) -> None:
        """Report in one line for each difference how another program's data differ in meaning."""
        agreed = compare(after, before)
        lines = [
            f"{group}: before, {line}".replace("the federation has", "now")
            for line in (*agreed.refused, *agreed.mapped)
        ]
        for line in lines:
            logger.warning("the meaning of the data has moved", extra={"moved": line})
        self.moved += tuple(lines)


def _line(error: BaseException) -> str:
    return clip(public_text(str(error)), _MAX_REASON_CHARS)


def _read_question(raw: bytes) -> tuple[dict[str, SharedSchema], str | None]:
    try:
        content = json.loads(raw)
        verdict = content["verdict"]
        if not isinstance(verdict, str | None):
            raise TypeError("a verdict is a text")
        return schemas_from_json(_text(content["adopt"])), verdict
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise SchemaRefused("no question about data") from error


def _read_answer(raw: bytes, slots: set[str]) -> _Answer:
    """Return a peer's answer for these slots only. Raises SchemaRefused."""
    try:
        content = json.loads(raw)
        schemas = schemas_from_json(_text(content["schemas"]))
        adopted = {str(slot): _text(each) for slot, each in dict(content["adopted"]).items()}
        since_s = float(content["since"])
        if not math.isfinite(since_s):
            raise ValueError("no time")
        return _Answer(
            schemas={slot: each for slot, each in schemas.items() if slot in slots},
            adopted=adopted,
            waits=clip(_text(content["waits"]), _MAX_REASON_CHARS),
            refused=clip(_text(content["refused"]), _MAX_REASON_CHARS),
            references=schemas_from_json(_text(content["references"])),
            since_s=since_s,
            used=bool(content["used"]),
        )
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise SchemaRefused("no answer about data") from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is missing")
    return value
