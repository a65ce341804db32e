"""What `limits` measures us against: the cipher, TLS, js-libp2p and go-libp2p.

Rule: each as it comes, at its best: two processes on loopback, blocking calls, pieces of 256 KiB.
All but the cipher give the seconds of one bulk transfer, until its receiver has said that it has
it, and of some round trips of a small message.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any, Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.x509.oid import NameOID
from libp2p.utils import encode_uvarint
from multiaddr import Multiaddr

SMALL_BYTES = 64
PIECE = bytes(256 * 1024)
# A packet of Noise without its tag.
PLAIN_BYTES = 65_519
PATIENCE_S = 30.0
_SIZE_BYTES = 8
_HERE = Path(__file__).parent


class Contender(Protocol):
    """A connection between two processes that is not ours."""

    def bulk_s(self, size: int) -> float:
        """Seconds for `size` bytes one way, until the other side has said that it has them."""

    def round_trips_s(self, count: int) -> list[float]:
        """Seconds of each round trip."""


def cipher_s(size: int) -> float:
    """Seconds in which one core encrypts `size` bytes in packets of Noise."""
    seal = ChaCha20Poly1305(bytes(32)).encrypt_into
    plain, into, nonce = bytes(PLAIN_BYTES), bytearray(PLAIN_BYTES + 16), bytes(12)
    started = perf_counter()
    for _ in range(size // PLAIN_BYTES):
        seal(nonce, plain, None, into)
    return (perf_counter() - started) * size / (size // PLAIN_BYTES * PLAIN_BYTES)


class Blocking:
    """A Contender on two blocking sockets, one for bulk and one for round trips."""

    def __init__(self, bulk: socket.socket, echo: socket.socket) -> None:
        self._bulk = bulk
        self._echo = echo

    def bulk_s(self, size: int) -> float:
        started = perf_counter()
        self._bulk.sendall(size.to_bytes(_SIZE_BYTES, "big"))
        for at in range(0, size, len(PIECE)):
            self._bulk.sendall(memoryview(PIECE)[: size - at])
        _read(self._bulk, 1)
        return perf_counter() - started

    def round_trips_s(self, count: int) -> list[float]:
        times, message = [], b"x" * SMALL_BYTES
        for _ in range(count):
            started = perf_counter()
            self._echo.sendall(message)
            _read(self._echo, SMALL_BYTES)
            times.append(perf_counter() - started)
        return times


def _read(stream: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = stream.recv(size - len(data))
        if not more:
            raise SystemExit("the other process has gone")
        data += more
    return data


def _swallow(stream: socket.socket) -> None:
    """Answer each transfer, which begins with its size, with one byte."""
    into = memoryview(bytearray(len(PIECE)))
    with contextlib.suppress(SystemExit, OSError):
        while True:
            left = int.from_bytes(_read(stream, _SIZE_BYTES), "big")
            while left:
                got = stream.recv_into(into[: min(left, len(into))])
                if not got:
                    return
                left -= got
            stream.sendall(b".")


def _give_back(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := stream.recv(len(PIECE)):
            stream.sendall(data)


def _nodelay(stream: socket.socket) -> socket.socket:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


@contextmanager
def _process(*command: str) -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    """A child that lives as long as its standard input; gives the line of JSON that it prints."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            yield _line(child), child
        finally:
            if child.stdin is not None:
                child.stdin.close()


def _line(child: subprocess.Popen[str]) -> Any:
    line = child.stdout.readline() if child.stdout is not None else ""
    if not line:
        raise SystemExit(f"{child.args} has ended")
    return json.loads(line)


# -- TLS -------------------------------------------------------------------------------------


def serve_tls() -> None:
    """Be the other side of `tls`, until standard input ends."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        file.flush()
        context.load_cert_chain(file.name)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(json.dumps(listener.getsockname()[1]), flush=True)
        for serve in (_swallow, _give_back):
            stream = context.wrap_socket(_nodelay(listener.accept()[0]), server_side=True)
            Thread(target=serve, args=[stream], daemon=True).start()
        sys.stdin.read()


@contextmanager
def tls() -> Iterator[Contender]:
    """Python's `ssl`, as it comes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with _process(sys.executable, __file__) as (port, _), ExitStack() as stack:
        streams = []
        for _ in range(2):
            plain = _nodelay(socket.create_connection(("127.0.0.1", port)))
            streams.append(stack.enter_context(context.wrap_socket(plain)))
        yield Blocking(*streams)


# -- js-libp2p ---------------------------------------------------------------------------------


class Js:
    """A Contender that measures itself, as it is told."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def _ask(self, words: str) -> list[float]:
        if self._child.stdin is None:
            raise SystemExit("the other process has no pipes")
        print(words, file=self._child.stdin, flush=True)
        times: list[float] = _line(self._child)
        return times

    def bulk_s(self, size: int) -> float:
        return self._ask(f"bulk {size}")[0]

    def round_trips_s(self, count: int) -> list[float]:
        return self._ask(f"rtt {count}")


def why_no_js() -> str:
    """Return why js-libp2p is not measured; "" if it can be."""
    if shutil.which("node") is None:
        return "there is no node"
    if not os.environ.get("BBNODE_JS"):
        return (
            "BBNODE_JS names no folder with libp2p's npm packages (tests/interop/test_js_libp2p.py)"
        )
    return ""


@contextmanager
def js() -> Iterator[Contender]:
    """js-libp2p with TCP, Noise and Yamux."""
    # Node looks for modules beside the script.
    script = Path(os.environ["BBNODE_JS"]) / "_limit_echo.mjs"
    shutil.copy(_HERE / script.name, script)
    with (
        _process("node", str(script)) as (addresses, _),
        _process("node", str(script), addresses[0]) as (_, child),
    ):
        yield Js(child)


# -- go-libp2p ---------------------------------------------------------------------------------

_IDENTIFY, _CONNECT, _STREAM_OPEN, _STREAM_HANDLER = range(4)
_TAKE, _ECHO = "/limit/take/1", "/limit/echo/1"


def why_no_go() -> str:
    """Return why go-libp2p is not measured; "" if it can be."""
    if not os.environ.get("BBNODE_P2PD"):
        return "BBNODE_P2PD names no daemon of go-libp2p (tests/interop/test_go_libp2p.py)"
    return ""


def _field(number: int, value: bytes | int) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, int):
        return encode_uvarint(number << 3) + encode_uvarint(value)
    return encode_uvarint(number << 3 | 2) + encode_uvarint(len(value)) + value


def _uvarint(read: Callable[[], int]) -> int:
    value = shift = 0
    while True:
        byte = read()
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value


def _fields(data: bytes) -> list[tuple[int, bytes | int]]:
    rest, found = iter(data), list[tuple[int, bytes | int]]()
    for first in rest:
        key = _uvarint(iter([first, *([] if first < 0x80 else [next(rest)])]).__next__)
        value: bytes | int = _uvarint(rest.__next__)
        if key & 7 and isinstance(value, int):
            value = bytes(next(rest) for _ in range(value))
        found.append((key >> 3, value))
    return found


def _message(stream: socket.socket) -> list[tuple[int, bytes | int]]:
    return _fields(_read(stream, _uvarint(lambda: _read(stream, 1)[0])))


class _GoHost:
    """One p2pd; whoever opens a stream to it talks with a thread of ours."""

    def __init__(self, folder: Path) -> None:
        self._control = folder / "control"

    def ask(self, kind: int, *parts: bytes) -> tuple[socket.socket, dict[int, bytes | int]]:
        """Send a request; return its socket, which is the stream if one was asked for."""
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(str(self._control))
        body = _field(1, kind) + b"".join(parts)
        stream.sendall(encode_uvarint(len(body)) + body)
        answer = dict(_message(stream))
        if answer[1] != 0:
            raise SystemExit(f"p2pd refused: {answer}")
        return stream, answer

    def handle(self, protocol: str, serve: Callable[[socket.socket], None]) -> None:
        """Serve the first stream of a protocol, in a thread."""
        listener = socket.create_server(("127.0.0.1", 0))

        def accept() -> None:
            stream = _nodelay(listener.accept()[0])
            _message(stream)
            serve(stream)

        Thread(target=accept, daemon=True).start()
        address = Multiaddr(f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}").to_bytes()
        asked = _field(1, address) + _field(2, protocol.encode()) + _field(3, 0)
        self.ask(_STREAM_HANDLER, _field(4, asked))


@contextmanager
def _p2pd(folder: Path) -> Iterator[_GoHost]:
    folder.mkdir()
    listen = ["-listen", f"/unix{folder}/control", "-hostAddrs", "/ip4/127.0.0.1/tcp/0"]
    with subprocess.Popen(
        [os.environ["BBNODE_P2PD"], *listen], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as child:
        try:
            until = time.monotonic() + PATIENCE_S
            while not (folder / "control").exists():
                if time.monotonic() > until or child.poll() is not None:
                    raise SystemExit("p2pd does not start")
                time.sleep(0.02)
            yield _GoHost(folder)
        finally:
            child.kill()


def serve_go(folder: Path) -> None:
    """Be the application behind a p2pd, until standard input ends."""
    host = _GoHost(folder)
    host.handle(_TAKE, _swallow)
    host.handle(_ECHO, _give_back)
    print("[]", flush=True)
    sys.stdin.read()


@contextmanager
def go() -> Iterator[Contender]:
    """go-libp2p behind its daemon, which adds a socket on each side."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        here, there = Path(name) / "here", Path(name) / "there"
        near, far = (stack.enter_context(_p2pd(folder)) for folder in (here, there))
        stack.enter_context(_process(sys.executable, __file__, str(there)))
        identity = far.ask(_IDENTIFY)[1][4]
        found = _fields(identity if isinstance(identity, bytes) else b"")
        peer = next(value for number, value in found if number == 1)
        addresses = [value for number, value in found if number == 2 and isinstance(value, bytes)]
        address = next(each for each in addresses if "127.0.0.1" in str(Multiaddr(each)))
        near.ask(_CONNECT, _field(2, _field(1, peer) + _field(2, address)))
        streams = [
            near.ask(_STREAM_OPEN, _field(3, _field(1, peer) + _field(2, protocol.encode())))[0]
            for protocol in (_TAKE, _ECHO)
        ]
        yield Blocking(*streams)


if __name__ == "__main__":
    serve_go(Path(sys.argv[1])) if sys.argv[1:] else serve_tls()
