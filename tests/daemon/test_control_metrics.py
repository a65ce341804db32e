"""The metrics' own address: what it answers, to whom, and that it is bounded by itself."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio

from bbnode.daemon.control import token as tokens
from bbnode.daemon.control.async_client import AsyncControlClient
from bbnode.daemon.control.errors import TcpRefused
from bbnode.daemon.control.listen import parse_metrics, tcp_listener
from bbnode.daemon.control.server import ControlLimits
from bbnode.ir.errors import EnvironmentFault
from tests.daemon.live import running
from tests.patience import PATIENCE_S


async def scraped(
    port: int, request: str, header: str = "", *, host: str = "127.0.0.1:9470"
) -> tuple[bytes, bytes]:
    """Status and body of one request to a port of this machine."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(
            f"{request} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{header}\r\n".encode()
        )
        told = b""
        while part := await stream.receive_some(65536):
            told += part
    head, _, body = told.partition(b"\r\n\r\n")
    return head.split()[1], body


async def test_metrics_listen_elsewhere_with_the_token_and_answer_nothing_else(
    tmp_path: Path,
) -> None:
    file = tmp_path / "shared.token"
    token = tokens.load_or_create_token(file)
    flags = {"control.metrics": "0.0.0.0:0", "control.token_file": str(file)}
    async with running(tmp_path, client=False, **flags) as live:
        assert live.plane.server.tcp_port is None
        port = live.plane.server.metrics_port
        assert port is not None
        assert not tokens.token_file(live.state_dir).exists()
        bearer = f"Authorization: Bearer {token}\r\n"
        assert (await scraped(port, "GET /metrics"))[0] == b"401"
        assert (await scraped(port, "GET /metrics", f"{bearer[:-3]}x\r\n"))[0] == b"401"
        status, body = await scraped(port, "GET /metrics", bearer)
        assert status == b"200"
        assert b"bbnode_ready 1.0" in body
        for path in ("/healthz", "/readyz"):
            assert (await scraped(port, f"GET {path}", bearer))[0] == b"200"
        assert await scraped(port, "HEAD /metrics", bearer) == (b"200", b"")
        for request in ("GET /v1/status", "GET /v1/config", "POST /v1/stop", "POST /metrics"):
            status, body = await scraped(port, request, bearer)
            assert (status, b"UnknownPath" in body) == (b"404", True)
        assert (
            await scraped(port, "POST /v1/stop", f"{bearer}Content-Length: 11\r\n\r\n123456789")
        )[0] == b"413"
        assert not live.stopped


async def test_metrics_on_loopback_need_no_token(tmp_path: Path) -> None:
    async with running(tmp_path, client=False, **{"control.metrics": "127.0.0.1:0"}) as live:
        port = live.plane.server.metrics_port
        assert port is not None
        assert (await scraped(port, "GET /metrics"))[0] == b"200"
        assert (await scraped(port, "GET /v1/status"))[0] == b"404"
        assert not tokens.token_file(live.state_dir).exists()


OWN = ["127.0.0.1", "localhost:1", "LOCALHOST.", "[::1]:9470", "node.localhost", "10.0.0.7:80"]
OTHERS = ["evil.example", "evil.example:9470", "localhost.evil.example", "127.0.0.1.evil.example"]
OTHERS += [
    "x",
    "",
    "[::1",
    "[::1]x",
    "local host",
    "127.0.0.1@evil.example",
    "0x7f.1",
    "2130706433",
]


@pytest.mark.parametrize("key", ["control.metrics", "control.tcp"])
async def test_no_web_page_gets_in_by_its_name(tmp_path: Path, key: str) -> None:
    flags = {key: "127.0.0.1:0", "control.hosts": "node7,node7.lab.example"}
    async with running(tmp_path, client=False, **flags) as live:
        server = live.plane.server
        port, bearer = server.metrics_port, ""
        if key == "control.tcp":
            port = server.tcp_port
            token = tokens.token_file(live.state_dir).read_text().strip()
            bearer = f"Authorization: Bearer {token}\r\n"
        assert port is not None
        for host in (*OWN, "node7", "NODE7.lab.example:80"):
            assert (await scraped(port, "GET /healthz", bearer, host=host))[0] == b"200", host
            origin = f"{bearer}Origin: http://{host}\r\n"
            assert (await scraped(port, "GET /healthz", origin))[0] == b"200", host
        for host in OTHERS:
            status, body = await scraped(port, "GET /metrics", bearer, host=host)
            assert (status, b"WrongHost" in body) == (b"421", True), host
            origin = f"{bearer}Origin: http://{host}\r\n"
            status, body = await scraped(port, "GET /metrics", origin)
            assert (status, b"WrongOrigin" in body) == (b"403", True), host
        assert (await scraped(port, "GET /metrics", f"{bearer}Origin: null\r\n"))[0] == b"403"
        assert server.counters()["control.wrong_host"] == 2 * len(OTHERS) + 1


async def test_beyond_loopback_the_token_counts_and_names_if_there_are_any(tmp_path: Path) -> None:
    for hosts, status in (("", b"200"), ("node7", b"421")):
        folder = tmp_path / (hosts or "any")
        folder.mkdir()
        flags = {"control.metrics": "0.0.0.0:0"} | ({"control.hosts": hosts} if hosts else {})
        async with running(folder, client=False, **flags) as live:
            port = live.plane.server.metrics_port
            assert port is not None
            token = tokens.token_file(live.state_dir).read_text().strip()
            bearer = f"Authorization: Bearer {token}\r\n"
            assert (await scraped(port, "GET /metrics", host="server"))[0] == b"401"
            assert (await scraped(port, "GET /metrics", bearer, host="server"))[0] == status
            assert (await scraped(port, "GET /metrics", bearer, host="node7"))[0] == b"200"


async def test_those_who_scrape_keep_no_operator_out(tmp_path: Path) -> None:
    limits = ControlLimits(connections=1, scrapers=1)
    flags = {"control.metrics": "127.0.0.1:0"}
    async with running(tmp_path, client=False, limits=limits, **flags) as live:
        port = live.plane.server.metrics_port
        assert port is not None
        async with await trio.open_tcp_stream("127.0.0.1", port):
            while not live.plane.server.counters()["control.connections"]:
                await trio.lowlevel.checkpoint()
            assert (await scraped(port, "GET /metrics"))[0] == b"503"
            async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
                await client.get("/v1/status")


@pytest.mark.parametrize(
    "address", ["", "9470", ":9470", "host:1", "0.0.0.0:", "0.0.0.0:70000", "0.0.0.0:" + "1" * 5000]
)
def test_metrics_listen_on_an_address_of_this_machine(address: str) -> None:
    with pytest.raises(TcpRefused, match=r"0\.0\.0\.0:9470"):
        parse_metrics(address)


def test_metrics_may_listen_on_any_interface() -> None:
    assert parse_metrics("0.0.0.0:9470") == ("0.0.0.0", 9470)
    assert parse_metrics("[::]:0") == ("::", 0)


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        refused = pytest.raises(EnvironmentFault, match=r"control\.metrics 127\.0\.0\.1, port")
        with refused, tcp_listener("127.0.0.1", port, key="control.metrics"):
            pass
