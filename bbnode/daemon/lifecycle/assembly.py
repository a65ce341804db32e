"""The parts of a daemon, created from its configuration: artifact, node, transport.

Rule: the daemon, `bbnode join` and `bbnode doctor` all create their parts here, so that they run
and check the same things. Nothing here listens or starts.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, BinaryIO, Final

from multiaddr import Multiaddr

from bbnode.access.secrets import NodeSecrets
from bbnode.components.contracts import Component
from bbnode.components.registry import UnknownComponentType, component_class
from bbnode.components.settings import path_settings
from bbnode.daemon import paths
from bbnode.daemon.access.control import AccessControl
from bbnode.daemon.artifacts.artifact import Artifact, load_artifact, parse_artifact, serialize
from bbnode.daemon.build import full_version
from bbnode.daemon.config import NodeConfig
from bbnode.daemon.config.sources import ResolvedConfig
from bbnode.daemon.state import weights
from bbnode.daemon.upgrade import releases
from bbnode.engine import Limits, Node, install, plan_program
from bbnode.ir import keys
from bbnode.ir.class_names import ClassNotLoaded, load_module_named, search
from bbnode.ir.crossing import encode_crossings
from bbnode.ir.errors import DeploymentError
from bbnode.ir.peer import PeerId
from bbnode.transport import (
    Capability,
    Hello,
    Identity,
    NotSupportedError,
    Transport,
    TransportLimits,
    TransportSetup,
    artifact_exchange,
    registry,
)
from bbnode.transport.artifact_exchange import Provider

# The queue of one peer on one lane of the transport: this many of the largest envelopes that the
# node accepts, at least this many bytes, and at most the transport's own bound.
QUEUED_LARGEST: Final = 4
MIN_QUEUE_BYTES: Final = 64 * 1024 * 1024


class ComponentsModuleMissing(DeploymentError):
    """A module listed under node.components can't be imported."""


def import_components(resolved: ResolvedConfig) -> None:
    """Import the modules of node.components, as those of programs. Raises ComponentsModuleMissing.

    They may be beside the configuration or in the current directory.
    """
    names = resolved.config.node.components
    if names:
        _search(resolved)
    for name in names:
        try:
            load_module_named(name)
        except ClassNotLoaded as error:
            raise ComponentsModuleMissing(f"node.components: {error}") from error


def _search(resolved: ResolvedConfig) -> None:
    """Put the current directory, and before it the folder of the configuration, on the path."""
    search(Path.cwd())
    search(resolved.folder)


def slot_settings(
    resolved: ResolvedConfig, artifact: Artifact, *, exposed: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the settings of slots, with absolute paths.

    `exposed`: strangers can reach the node, so that stricter settings replace missing ones.
    """
    absolute = {slot: dict(settings) for slot, settings in resolved.config.slots.items()}
    for slot, cls in _bound_classes(artifact):
        for name in path_settings(cls.Config):
            value = absolute.get(slot, {}).get(name)
            if isinstance(value, str) and value:
                absolute[slot][name] = str(resolved.absolute(Path(value), f"slots.{slot}.{name}"))
        if exposed and cls.exposed_settings:
            absolute[slot] = {**cls.exposed_settings, **absolute.get(slot, {})}
    return absolute


def _bound_classes(artifact: Artifact) -> Iterator[tuple[str, type[Component]]]:
    """Yield each slot with the class of its component, if that is installed."""
    for entry in artifact.model.metadata_props:
        if not entry.key.startswith(keys.BINDING_PREFIX):
            continue
        parts = entry.value.split("|")
        with contextlib.suppress(UnknownComponentType):  # `install` reports it
            cls = component_class(parts[1] if len(parts) > 1 else "")
            yield entry.key.rpartition(".")[2], cls


def is_exposed(config: NodeConfig, network: PeerId | None) -> bool:
    """Return True for a node of an open network that may be reached from other machines."""
    if network is not None:
        return False
    places = (*config.network.listen, *config.network.announce)
    return any(not _is_loopback(place) for place in places)


def _is_loopback(address: str) -> bool:
    parts = str(address).split("/")
    if len(parts) > 2 and parts[1] in ("ip4", "ip6"):
        with contextlib.suppress(ValueError):
            return ip_address(parts[2]).is_loopback
    return len(parts) > 2 and parts[1] in ("memory", "unix")


def _of_file(resolved: ResolvedConfig, module: str) -> str:
    """Return the module of a configuration; for a file.py:Class with its folder."""
    place, _, name = module.partition(":")
    if not place.endswith(".py"):
        return module
    path = resolved.absolute(Path(place), "artifact.module")
    return f"{path}:{name}" if name else str(path)


def find_artifact(resolved: ResolvedConfig) -> Artifact:
    """Return the artifact that a configuration names, from its file or compiled now.

    Raises MissingFile, ArtifactUnreadable, InvalidArtifact, and the errors of importing and
    compiling.
    """
    section = resolved.config.artifact
    if section.path is not None:
        path = resolved.absolute(section.path, "artifact.path")
        return load_artifact(path, expected_sha256=section.sha256)
    from bbnode.daemon.artifacts.build import compile_module

    _search(resolved)
    module = _of_file(resolved, str(section.module))  # ArtifactSection has exactly one of the two
    return parse_artifact(serialize(compile_module(module, section.args)), module, own=True)


def install_node(
    resolved: ResolvedConfig,
    artifact: Artifact,
    identity: Identity,
    *,
    incarnation: int,
    network: PeerId | None,
    record: Callable[[bytes], None] | None = None,
) -> Node:
    """Return a node with the targets of a configuration; `record` gets all input.

    `network` is the private network of which it is a member, None for an open one.

    Raises the errors of install.
    """
    config = resolved.config
    return install(
        artifact.model,
        config.artifact.targets,
        peer_id=identity.peer_id,
        addresses=(),
        config=slot_settings(resolved, artifact, exposed=is_exposed(config, network)),
        limits=Limits.from_caps(config.limits.effective()),
        seed=int.from_bytes(identity.peer_id.to_bytes()[-8:], "big"),
        incarnation=incarnation,
        record=record,
        own_artifact=artifact.own,
        secrets=NodeSecrets(identity),
    )


def initial_component(resolved: ResolvedConfig, artifact: Artifact, slot: str) -> Component:
    """Return the component of a slot as the program has it, before any training.

    Raises the errors of install.
    """
    plan = plan_program(artifact.model, resolved.config.artifact.targets)
    (planned,) = (each for each in plan.slots if each.name == slot)
    return weights.initial_component(
        planned, slot_settings(resolved, artifact), own_artifact=artifact.own
    )


def make_access(resolved: ResolvedConfig, identity: Identity) -> AccessControl:
    """Return a node's access control.

    Raises NotAMember, AccessRefused, PolicyError, StorageError.
    """
    return AccessControl(resolved.state_dir, identity.peer_id, resolved.config.access)


def artifact_source(resolved: ResolvedConfig, artifact: Artifact) -> Provider:
    """Return the provider that serves a node's artifact to peers that ask for its digest."""
    configured = resolved.config.artifact.path
    path = None if configured is None else resolved.absolute(configured, "artifact.path")

    def provide(sha256: str) -> BinaryIO | None:
        if sha256 != artifact.sha256:
            return None
        return io.BytesIO(serialize(artifact.model)) if path is None else path.open("rb")

    return provide


def make_transport(
    resolved: ResolvedConfig,
    artifact: Artifact,
    identity: Identity,
    node: Node,
    access: AccessControl,
) -> Transport:
    """Return the transport of a node, which serves its artifact to admitted peers.

    Raises UnknownTransport, BrokenPlugin, NotSupportedError and the errors of its addresses.
    """
    config = resolved.config
    network = config.network
    # The default address is for TCP; another transport gets only the addresses of the file.
    listens = network.transport in registry.OVER_TCP or "listen" in network.model_fields_set
    transport = registry.make_transport(
        network.transport,
        TransportSetup(
            identity=identity,
            hello=Hello(
                agent_version=f"bbnode/{full_version()}",
                artifact_sha256=artifact.sha256,
                classes=node.classes,
                targets=node.targets,
                credentials=access.credentials,
                crossings=encode_crossings(node.crossings),
            ),
            listen=tuple(map(Multiaddr, network.listen)) if listens else (),
            announce=tuple(map(Multiaddr, network.announce)),
            limits=_transport_limits(
                config.limits.effective()["envelope_bytes"],
                guests=access.network is None if network.guests is None else network.guests,
            ),
            authorizer=access.authorizer,
            settings=network.settings,
            relay=config.relay.settings(),
            # Reservations with relays come and go.
            on_addresses=lambda: node.set_addresses(transport.listen_addresses()),
        ),
    )
    _check_capabilities(transport, config, access)
    check_topics(node, config, transport.capabilities)
    access.on_change = transport.reauthorize
    access.on_credentials = transport.set_credentials
    artifact_exchange.serve(transport, artifact_source(resolved, artifact))
    if config.artifact.path is not None:
        file = resolved.absolute(config.artifact.path, "artifact.path")
        releases.serve(transport, artifact.sha256, partial(releases.read_release, file))
    return transport


def _check_capabilities(transport: Transport, config: NodeConfig, access: AccessControl) -> None:
    """Raise NotSupportedError if the configuration needs a capability that the transport lacks."""
    asked = (
        (Capability.STREAMS, "a private network (access.network)", access.network is not None),
        (Capability.RELAYS, "relay.serve", config.relay.serve),
        (
            Capability.RELAYS,
            "relay.use",
            config.relay.use and "use" in config.relay.model_fields_set,
        ),
        (Capability.IP, "discovery.mdns", config.discovery.mdns),
    )
    for capability, key, is_asked in asked:
        if is_asked and capability not in transport.capabilities:
            raise NotSupportedError(
                f"the transport {config.network.transport!r} has no {capability.value}, which "
                f"{key} needs: leave it out, or choose another network.transport"
            )


def check_topics(node: Node, config: NodeConfig, capabilities: Container[Capability]) -> None:
    """Raise NotSupportedError for a component that uses topics where none are carried."""
    user = next((s for s in node.slots if getattr(node.component(s), "uses_topics", False)), None)
    if user is None or (config.topics.enabled and Capability.TOPICS in capabilities):
        return
    what = f"slot {user!r} ({node.binding(user).type_name}) uses topics"
    if Capability.TOPICS in capabilities:
        raise NotSupportedError(f"{what}, and topics.enabled is false: set it to true")
    raise NotSupportedError(
        f"{what}, which the transport {config.network.transport!r} does not carry: set "
        'network.transport = "libp2p", or run a program without them'
    )


def carries_topics(transport: Transport, config: NodeConfig) -> bool:
    """Return True if a node with this transport carries topics."""
    return config.topics.enabled and Capability.TOPICS in transport.capabilities


def _transport_limits(envelope_bytes: int | None, *, guests: bool) -> TransportLimits:
    """Return the transport's bounds for envelopes of at most this size; None: of any size.

    `guests`: hosts without a protocol of bbnode may stay.
    """
    usual = TransportLimits(foreign_hosts=guests)
    if envelope_bytes is None:
        return usual
    queue_bytes = min(max(QUEUED_LARGEST * envelope_bytes, MIN_QUEUE_BYTES), usual.queue_bytes)
    return replace(usual, max_message_bytes=envelope_bytes, queue_bytes=queue_bytes)


def next_incarnation(state_dir: Any) -> int:
    """Return a number that grows with every start, so that ids of different starts differ."""
    path = state_dir / "incarnation"
    try:
        last = int(path.read_text("ascii"))
    except (OSError, ValueError):
        last = 0
    paths.write_atomically(path, f"{last + 1}\n".encode("ascii"), mode=0o600)
    return last + 1
