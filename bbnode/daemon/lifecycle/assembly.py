"""The parts of a daemon, made from its configuration: artifact, node, transport.

Rule: whoever needs a part makes it here (the daemon, `bbnode join`, `bbnode doctor`), so that
all run and check the same. Nothing here listens or starts.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from multiaddr import Multiaddr

from bbnode import __version__
from bbnode.daemon import paths
from bbnode.daemon.access.control import AccessControl
from bbnode.daemon.artifacts.artifact import Artifact, load_artifact, parse_artifact, serialize
from bbnode.daemon.config.sources import ResolvedConfig
from bbnode.engine import Limits, Node, install
from bbnode.ir.errors import DeploymentError
from bbnode.transport import artifact_exchange
from bbnode.transport.artifact_exchange import Provider
from bbnode.transport.backend import Hello, TransportLimits
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.relay_settings import RelaySettings

if TYPE_CHECKING:
    from bbnode.transport.libp2p.backend import Libp2pBackend

# What waits for one peer on one lane of the transport: so many of the largest envelopes that the
# node takes, but no less than this, and no more than the transport's own bound.
QUEUED_LARGEST: Final = 4
MIN_QUEUE_BYTES: Final = 64 * 1024 * 1024


class ComponentsModuleMissing(DeploymentError):
    """A module listed under node.components can't be imported."""


def import_components(names: Sequence[str]) -> None:
    """Import the modules of node.components. Raises ComponentsModuleMissing."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ComponentsModuleMissing(
                f"node.components names {name!r}, which can't be imported: {error}"
            ) from error


def find_artifact(resolved: ResolvedConfig) -> Artifact:
    """Return the artifact that a configuration names, from its file or compiled now.

    Raises ArtifactUnreadable, InvalidArtifact, and what importing and compiling raise.
    """
    given = resolved.config.artifact
    if given.path is not None:
        return load_artifact(resolved.absolute(given.path), expected_sha256=given.sha256)
    from bbnode.daemon.artifacts.build import compile_module

    module = str(given.module)  # ArtifactSection has exactly one of the two
    return parse_artifact(serialize(compile_module(module, given.args)), module)


def install_node(
    resolved: ResolvedConfig,
    artifact: Artifact,
    identity: Identity,
    *,
    incarnation: int,
    record: Callable[[bytes], None] | None = None,
) -> Node:
    """Return a node with the targets of a configuration; `record` gets all input.

    Raises the errors of install.
    """
    config = resolved.config
    return install(
        artifact.model,
        config.artifact.targets,
        peer_id=identity.peer_id,
        addresses=(),
        config={slot: dict(settings) for slot, settings in config.slots.items()},
        limits=Limits.from_caps(config.limits.effective()),
        seed=int.from_bytes(identity.peer_id.to_bytes()[-8:], "big"),
        incarnation=incarnation,
        record=record,
        # A file may have come from anybody; what is compiled here now is the user's own.
        own_artifact=config.artifact.path is None,
    )


def make_access(resolved: ResolvedConfig, identity: Identity) -> AccessControl:
    """Return its access control; raises NotAMember, AccessRefused, PolicyError, StorageError."""
    return AccessControl(resolved.state_dir, identity.peer_id, resolved.config.access)


def artifact_source(resolved: ResolvedConfig, artifact: Artifact) -> Provider:
    """Return the provider of a node's artifact for peers that ask for it by its digest."""
    given = resolved.config.artifact.path
    path = None if given is None else resolved.absolute(given)

    def provide(sha256: str) -> BinaryIO | None:
        if sha256 != artifact.sha256:
            return None
        return io.BytesIO(serialize(artifact.model)) if path is None else path.open("rb")

    return provide


def make_backend(
    resolved: ResolvedConfig,
    artifact: Artifact,
    identity: Identity,
    node: Node,
    access: AccessControl,
) -> Libp2pBackend:
    """Return the transport of a node, which serves its artifact to whoever may connect.

    Raises the errors of its addresses.
    """
    # Not before the node is installed: an error of the configuration shows half a second
    # sooner without libp2p's import.
    from bbnode.transport.libp2p import imports as libp2p_imports

    libp2p_imports.import_core()
    from bbnode.transport.libp2p.backend import Libp2pBackend

    config = resolved.config
    hello = Hello(
        agent_version=f"bbnode/{__version__}",
        artifact_sha256=artifact.sha256,
        classes=node.classes,
        targets=node.targets,
        credentials=access.credentials,
    )
    caps = config.limits.effective()
    backend = Libp2pBackend(
        identity,
        listen=[Multiaddr(text) for text in config.network.listen],
        announce=[Multiaddr(text) for text in config.network.announce],
        hello=hello,
        limits=_transport_limits(caps["envelope_bytes"]),
        authorizer=access.authorizer,
        relay=RelaySettings(**config.relay.model_dump()),
    )
    # Reservations with relays come and go.
    backend.on_addresses = lambda: node.set_addresses(backend.listen_addresses())
    access.on_change = backend.reauthorize
    access.on_credentials = backend.set_credentials
    artifact_exchange.serve(backend, artifact_source(resolved, artifact))
    return backend


def _transport_limits(envelope_bytes: int | None) -> TransportLimits:
    """Return the transport's bounds for envelopes of this size at most; None: of any size."""
    usual = TransportLimits()
    if envelope_bytes is None:
        return usual
    queue_bytes = min(max(QUEUED_LARGEST * envelope_bytes, MIN_QUEUE_BYTES), usual.queue_bytes)
    return replace(usual, max_message_bytes=envelope_bytes, queue_bytes=queue_bytes)


def next_incarnation(state_dir: Any) -> int:
    """Return a number that grows with every start, so that ids made before and after differ."""
    path = state_dir / "incarnation"
    try:
        last = int(path.read_text("ascii"))
    except (OSError, ValueError):
        last = 0
    paths.write_atomically(path, f"{last + 1}\n".encode("ascii"), mode=0o600)
    return last + 1
