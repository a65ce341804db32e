"""Every request of the control plane against a live node, with what it refuses."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import trio

from bbnode.components import ConnectedView
from bbnode.components.contracts import ComponentError
from bbnode.daemon.access.control import AccessControl
from bbnode.daemon.config import AccessSection
from bbnode.daemon.control.async_client import AsyncControlClient
from bbnode.daemon.control.errors import ControlError
from bbnode.daemon.control.http import openapi, problem_of
from bbnode.daemon.control.routes import ENDPOINTS
from bbnode.daemon.paths import StorageError
from bbnode.engine import steps
from bbnode.engine.errors import IngressClosed, IngressFull, UnknownInput, UnknownTarget
from bbnode.ir.caps import MAX_ADDRESSES_PER_PEER, MAX_FACT_CHARS
from bbnode.ir.errors import BbnodeError, PeerError
from tests.daemon.live import CLIENT, RTT_S, SERVER, STRANGER, Live, running
from tests.patience import PATIENCE_S


def npy(array: np.ndarray) -> dict[str, str]:
    stream = io.BytesIO()
    np.save(stream, array)
    return {"npy": base64.b64encode(stream.getvalue()).decode()}


async def ask(live: Live, method: str, path: str, body: Any = None) -> dict[str, Any]:
    async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
        told = await client.request(method, path, body)
    as_described(method, path, told)
    return told


def as_described(method: str, path: str, told: dict[str, Any]) -> None:
    """An answer has the form that the OpenAPI document gives it."""
    given = path.partition("?")[0].split("/")
    (endpoint,) = (
        e
        for e in ENDPOINTS
        if e.method == method
        and len(e.path.split("/")) == len(given)
        and all(a == b or a.startswith("{") for a, b in zip(e.path.split("/"), given, strict=True))
    )
    document = openapi(ENDPOINTS)
    (content,) = document["paths"][endpoint.path][method.lower()]["responses"]["200"][
        "content"
    ].values()
    root = {**content["schema"], "components": document["components"]}
    jsonschema.Draft202012Validator(root).validate(told)


async def refused(live: Live, method: str, path: str, body: Any = None) -> ControlError:
    with pytest.raises(ControlError) as caught:
        await ask(live, method, path, body)
    return caught.value


async def test_status_says_who_is_there_and_how_it_is(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        told = await ask(live, "GET", "/v1/status")
        assert told["schema"] == "bbnode/status/1"
        assert (told["name"], told["peer_id"], told["phase"]) == ("server", str(SERVER), "ready")
        (peer,) = told["peers"]
        assert (peer["peer"], peer["classes"], peer["via"]) == (str(CLIENT), ["client"], "direct")
        checks = {check["check"]: check["ok"] for check in told["health"]}
        assert checks["phase"]
        assert checks["listening"]
        assert checks["bootstrap"]
        assert told["artifact_targets"] == told["targets"]
        assert told["targets"][0].startswith("server#")
        assert told["counters"]["control.connections"] == 1
        assert told["counters"]["transport.links.opened"] == 1


async def test_an_execution_that_waits_says_for_whom_and_until_when(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        # The client is there and never polls again, so the request stays open.
        live.backend.send = lambda *_, **__: None  # type: ignore[method-assign]
        told = await ask(live, "POST", "/v1/invoke", {"target": "server", "inputs": QUESTION})
        assert told["ok"] is None
        await live.until(steps.AppEvent)
        state = await ask(live, "GET", "/v1/executions")
        assert [e["execution"] for e in state["executions"]] == [told["execution"]]
        (waiting,) = state["waiting"]
        assert waiting["whom"] == str(CLIENT)
        assert waiting["why"] == "responses"
        assert 0 < waiting["remaining_s"] <= 60
        status = await ask(live, "GET", "/v1/status")
        assert status["waiting"][0]["whom"] == str(CLIENT)


QUESTION = {"question": [1.5, 2.5]}


@pytest.mark.parametrize(
    ("question", "shown"),
    [([1.5, 2.5], [1.5, 2.5]), (npy(np.float32([[1, 2]])), [[1.0, 2.0]]), (2.5, 2.5)],
)
async def test_invoke_gives_the_outputs_of_an_execution(
    tmp_path: Path, question: Any, shown: Any
) -> None:
    async with running(tmp_path) as live:
        body = {"target": "server", "inputs": {"question": question}, "wait_s": PATIENCE_S}
        told = await ask(live, "POST", "/v1/invoke", body)
        assert told["ok"] is True, told
        assert told["outputs"]["asked"] == shown
        assert told["outputs"]["answers"] == {
            "responded": [str(CLIENT)],
            "missing": [],
            "reasons": {},
        }
        assert told["failures"] == []


async def test_invoke_without_anybody_to_ask_says_which_op_failed(tmp_path: Path) -> None:
    async with running(tmp_path, client=False) as live:
        body = {"target": "server", "inputs": QUESTION, "wait_s": PATIENCE_S}
        told = await ask(live, "POST", "/v1/invoke", body)
        assert told["ok"] is False
        assert told["failures"][0]["kind"]


async def test_emit_starts_an_execution_by_one_input(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        body = {"target": "server", "input": "question", "value": [1.5], "wait_s": PATIENCE_S}
        told = await ask(live, "POST", "/v1/emit", body)
        assert (told["schema"], told["ok"]) == ("bbnode/emit/1", True)
        assert told["outputs"]["asked"] == [1.5]
        assert (await ask(live, "POST", "/v1/emit", {"kind": 4096}))["kind"] == 4096


async def test_peers_can_be_disconnected_connected_blocked_and_allowed(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        path = f"/v1/peers/{CLIENT}"
        address = str(live.backend.peers()[0].address)
        told = await ask(live, "GET", path)
        assert told["usable"]
        assert {rule["outcome"] for rule in told["why"]} == {"pass"}

        told = await ask(live, "POST", f"{path}/block")
        assert told["was_connected"]
        why = {rule["rule"]: rule for rule in (await ask(live, "GET", path))["why"]}
        assert why["access: block_list"]["outcome"] == "fail"
        assert why["access: block_list"]["detail"].startswith("blocklisted: ")
        await live.until(steps.PeerDown)  # whom this network lets come back: it asks nobody
        # Kept for the next start.
        again = AccessControl(live.state_dir, SERVER, AccessSection())
        assert not again.explain(CLIENT)[0].allowed
        told = await ask(live, "POST", f"{path}/allow")
        assert told["why"][0]["outcome"] == "pass"
        assert AccessControl(live.state_dir, SERVER, AccessSection()).explain(CLIENT)[0].allowed

        told = await ask(live, "POST", f"{path}/disconnect")
        assert told["peer"] == str(CLIENT)
        told = await ask(live, "POST", f"{path}/connect", {"addresses": [address]})
        assert told["addresses"] == [address]
        assert [w["peer"] for w in (await ask(live, "GET", "/v1/peers"))["wanted"]] == [str(CLIENT)]
        # The end of a PeerId is enough where only one peer is known.
        assert (await ask(live, "GET", f"/v1/peers/{str(CLIENT)[-6:]}"))["peer"] == str(CLIENT)


async def test_the_address_book_is_added_to_dropped_from_and_forgotten(tmp_path: Path) -> None:
    path, here, there = f"/v1/peers/{STRANGER}", "/ip4/10.0.0.7/tcp/1", "/ip4/10.0.0.8/tcp/1"
    async with running(tmp_path) as live:
        told = await ask(live, "POST", f"{path}/addresses/add", {"addresses": [here, there]})
        assert told["addresses"] == [here, there]
        peers = (await ask(live, "GET", "/v1/addresses"))["peers"]
        assert {"peer": str(STRANGER), "addresses": [here, there]} in peers
        await ask(live, "POST", f"{path}/connect", {})
        told = await ask(live, "POST", f"{path}/addresses/drop", {"address": here})
        assert (told["addresses"], told["was_known"]) == ([there], True)
        (wanted,) = [w for w in live.backend.wanted() if w.peer == STRANGER]
        assert [str(address) for address in wanted.addresses] == [there]
        told = await ask(live, "POST", f"{path}/forget")
        assert told["was_known"]
        assert not [w for w in live.backend.wanted() if w.peer == STRANGER]
        assert not (await ask(live, "POST", f"{path}/forget"))["was_known"]
        many = [f"/ip4/10.0.0.7/tcp/{port}" for port in range(1, MAX_ADDRESSES_PER_PEER + 1)]
        await ask(live, "POST", f"{path}/addresses/add", {"addresses": many})
        body = {"addresses": [there]}
        problem = await refused(live, "POST", f"{path}/addresses/add", body)
        assert (problem.kind, problem.status) == ("AddressBookFull", 409)


async def test_what_the_configuration_blocks_is_not_allowed_by_hand(tmp_path: Path) -> None:
    async with running(tmp_path, **{"access.block": [str(STRANGER)]}) as live:
        problem = await refused(live, "POST", f"/v1/peers/{STRANGER}/allow")
        assert problem.kind == "BlockedByConfig"
        assert "access.block" in str(problem)
        why = (await ask(live, "GET", f"/v1/peers/{STRANGER}"))["why"]
        assert (why[0]["rule"], why[0]["outcome"]) == ("access: block_list", "fail")
        assert f"bbnode peers allow {STRANGER}" in why[0]["detail"]
        assert (await ask(live, "POST", "/v1/access/reload"))["taken"] is True


async def test_a_ping_goes_to_a_connected_peer_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        told = await ask(live, "POST", "/v1/ping", {"peer": str(CLIENT)})
        assert told["rtt_ms"] == RTT_S * 1000
        problem = await refused(live, "POST", "/v1/ping", {"peer": str(STRANGER)})
        assert (problem.status, problem.kind) == (409, "NotConnected")


async def never(_: object) -> float:
    await trio.sleep_forever()
    raise AssertionError


async def test_a_ping_has_a_deadline(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        live.ping = never  # type: ignore[method-assign, assignment]
        body = {"peer": str(CLIENT), "timeout_s": 0.01}
        problem = await refused(live, "POST", "/v1/ping", body)
        assert (problem.status, problem.kind) == (504, "Timeout")


async def test_a_snapshot_is_written_or_says_why_not(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        told = await ask(live, "POST", "/v1/snapshot")
        assert (told["bytes"], live.saves) == (1234, 1)
        live.save_fails = StorageError("disk: no space left on device")
        problem = await refused(live, "POST", "/v1/snapshot")
        assert (problem.status, problem.kind) == (503, "StorageError")
        assert "no space left" in str(problem)


async def test_the_log_level_changes_while_running(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        before = await ask(live, "GET", "/v1/log-level")
        told = await ask(live, "PUT", "/v1/log-level", {"level": "error"})
        assert (told["level"], told["before"]) == ("error", before["level"])
        assert logging.getLogger().level == logging.ERROR


async def test_a_trace_tells_each_op_and_who_caused_it(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        assert (await ask(live, "PUT", "/v1/trace", {"on": True}))["tracing"] is True
        body = {"target": "server", "inputs": QUESTION, "wait_s": PATIENCE_S}
        execution = (await ask(live, "POST", "/v1/invoke", body))["execution"]
        told = await ask(live, "GET", f"/v1/trace/{execution}")
        kinds = [step["type"] for step in told["steps"]]
        assert kinds[0] == "execution_started"
        assert "op_completed" in kinds
        (sent,) = [step for step in told["steps"] if step["type"] == "fill_sent"]
        assert sent["peer"] == str(CLIENT)
        assert sent["wire_req_id"]
        assert execution in (await ask(live, "GET", "/v1/trace"))["executions"]
        # As the other node would be asked: which executions did that request start there?
        path = f"/v1/trace/{sent['wire_req_id']}?peer={CLIENT}"
        assert (await ask(live, "GET", path))["executions"] == []
        assert (await ask(live, "PUT", "/v1/trace", {"on": False}))["tracing"] is False
        problem = await refused(live, "GET", "/v1/trace/999")
        assert (problem.status, problem.kind) == (404, "UnknownExecution")
        assert "--on" in str(problem)


async def test_ops_of_a_trace_are_no_events(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        await ask(live, "PUT", "/v1/trace", {"on": True})
        body = {"target": "server", "inputs": QUESTION, "wait_s": PATIENCE_S}
        await ask(live, "POST", "/v1/invoke", body)
        kinds = {item.data["type"] for item in live.plane.host.events.kept()}
        assert "execution_finished" in kinds
        assert not kinds & {"op_completed", "fill_sent", "execution_started", "execution_ended"}


async def test_the_configuration_is_told_with_its_origins(tmp_path: Path) -> None:
    async with running(tmp_path, client=False) as live:
        told = await ask(live, "GET", "/v1/config")
        assert told["config"]["node"]["name"] == "server"
        assert told["origins"]["node.name"] == "flags"
        assert "network.listen" not in told["origins"]


async def test_stop_is_passed_on(tmp_path: Path) -> None:
    async with running(tmp_path, client=False) as live:
        assert (await ask(live, "POST", "/v1/stop"))["stopping"] is True
        assert live.stopped


async def test_rounds_are_those_of_the_daemon(tmp_path: Path) -> None:
    class Made:
        def as_json(self) -> dict[str, Any]:
            return {"target": "server", "done": 2}

        def finished(self) -> list[dict[str, Any]]:
            made = {"target": "server", "execution": 1, "started_at": 1.0}
            return [{**made, "round": 1}, {**made, "round": 2}]

    async with running(tmp_path, client=False) as live:
        live.plane.host.rounds = [Made()]
        told = await ask(live, "GET", "/v1/rounds?last=1")
        assert [made["round"] for made in told["rounds"]] == [2]
        told = await ask(live, "GET", "/v1/rounds?since=1")
        assert [made["round"] for made in told["rounds"]] == [2]
        assert told["invoke"] == [{"target": "server", "done": 2}]


async def test_health_and_readiness_are_http_statuses(tmp_path: Path) -> None:
    async with running(tmp_path, client=False) as live:
        for path, phase, status in (
            ("/healthz", "starting", b" 200 "),
            ("/readyz", "starting", b"503 "),
            ("/readyz", "ready", b" 200 "),
            ("/readyz", "stopping", b"503 "),
        ):
            live.plane.host.phase = phase
            assert status in (await raw(live, path)).splitlines()[0]


async def raw(live: Live, path: str, method: str = "GET") -> bytes:
    stream = await trio.open_unix_socket(str(live.socket))
    async with stream:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        await stream.send_all(head.encode())
        received = b""
        with trio.fail_after(PATIENCE_S):
            while some := await stream.receive_some(65536):
                received += some
    return received


HUGE = (
    np.lib.format.magic(1, 0)
    + b"\x76\x00"
    + (b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(117) + b"\n")
)
NOTHING = "x" * 52


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/nothing", None, 404, "UnknownPath"),
        ("GET", "/", None, 404, "UnknownPath"),
        ("GET", "/v1/peers/%ff", None, 400, "BadRequest"),
        ("GET", "/v1/status?" + "&".join(["a=1"] * 40), None, 400, "BadRequest"),
        ("POST", "/v1/status", {}, 405, "MethodNotAllowed"),
        ("DELETE", "/v1/log-level", None, 405, "MethodNotAllowed"),
        ("GET", f"/v1/peers/{NOTHING}", None, 400, "InvalidPeerId"),
        ("POST", "/v1/peers/0OIl/block", {}, 400, "InvalidPeerId"),
        ("POST", f"/v1/peers/{SERVER}/block", {}, 409, "OwnPeer"),
        ("POST", f"/v1/peers/{STRANGER}/connect", {}, 409, "NoAddress"),
        ("POST", f"/v1/peers/{STRANGER}/connect", {"addresses": ["x"]}, 400, "InvalidAddress"),
        ("POST", f"/v1/peers/{STRANGER}/connect", {"addresses": [1]}, 400, "InvalidField"),
        ("POST", f"/v1/peers/{STRANGER}/addresses/add", {}, 400, "MissingField"),
        ("POST", f"/v1/peers/{STRANGER}/addresses/add", {"addresses": []}, 400, "InvalidField"),
        (
            "POST",
            f"/v1/peers/{STRANGER}/addresses/add",
            {"addresses": ["x"]},
            400,
            "InvalidAddress",
        ),
        (
            *("POST", f"/v1/peers/{STRANGER}/addresses/add"),
            *({"addresses": [f"/ip4/1.2.3.4/tcp/1/p2p/{CLIENT}"]}, 400, "InvalidPeerAddress"),
        ),
        ("POST", f"/v1/peers/{STRANGER}/addresses/drop", {"address": "x"}, 400, "InvalidAddress"),
        ("POST", f"/v1/peers/{SERVER}/forget", {}, 400, "InvalidPeerAddress"),
        ("POST", "/v1/peers/0OIl/forget", {}, 400, "InvalidPeerId"),
        ("POST", "/v1/ping", {}, 400, "MissingField"),
        ("POST", "/v1/ping", {"peer": 1}, 400, "InvalidField"),
        ("POST", "/v1/ping", {"peer": str(CLIENT), "timeout_s": -1}, 400, "InvalidField"),
        ("POST", "/v1/invoke", {}, 400, "MissingField"),
        ("POST", "/v1/invoke", {"target": "nobody"}, 404, "UnknownTarget"),
        ("POST", "/v1/invoke", {"target": "server"}, 400, "MissingInput"),
        ("POST", "/v1/invoke", {"target": "server", "input": {}}, 400, "UnknownField"),
        ("POST", "/v1/invoke", {"target": "server", "inputs": []}, 400, "InvalidField"),
        ("POST", "/v1/invoke", {"target": "server", "inputs": {"x": 1}}, 400, "UnknownInput"),
        ("POST", "/v1/invoke", {"target": "server", "wait_s": 1e9}, 400, "InvalidField"),
        ("POST", "/v1/invoke", {"target": "server", "wait_s": True}, 400, "InvalidField"),
        *(
            ("POST", "/v1/invoke", {"target": "server", "inputs": {"q": bad}}, 400, "InvalidInput")
            for bad in (
                None,
                "text",
                [1, "2"],
                [True, 1],
                {"text": 1},
                {"npy": "!"},
                {"npy": base64.b64encode(b"no array").decode()},
                {"npy": base64.b64encode(HUGE).decode()},
                {"bytes": "!"},
                {"text": "a", "npy": "b"},
                10**30,
            )
        ),
        ("POST", "/v1/emit", {}, 400, "MissingField"),
        ("POST", "/v1/emit", {"kind": 1}, 400, "InvalidEventKind"),
        ("POST", "/v1/emit", {"kind": 4096, "target": "server"}, 400, "InvalidField"),
        ("PUT", "/v1/log-level", {}, 400, "MissingField"),
        ("PUT", "/v1/log-level", {"level": "loud"}, 400, "InvalidField"),
        ("PUT", "/v1/trace", {"on": 1}, 400, "InvalidField"),
        ("GET", "/v1/trace/x", None, 400, "InvalidField"),
        ("GET", "/v1/trace/1?peer=x", None, 400, "InvalidPeerId"),
        ("GET", "/v1/rounds?last=0", None, 400, "InvalidField"),
        ("GET", "/v1/logs?level=loud", None, 400, "InvalidField"),
        ("GET", "/v1/logs?follow=maybe", None, 400, "InvalidField"),
        ("GET", "/v1/events?last=x", None, 400, "InvalidField"),
    ],
)
async def test_a_wrong_request_is_refused_with_its_reason(
    tmp_path: Path, method: str, path: str, body: Any, status: int, code: str
) -> None:
    async with running(tmp_path, client=False) as live:
        problem = await refused(live, method, path, body)
        assert (problem.status, problem.kind) == (status, code), str(problem)
        assert len(str(problem)) > 10


async def test_a_body_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, client=False) as live:
        problem = await refused(live, "POST", "/v1/invoke", [1])
        assert (problem.status, problem.kind) == (400, "BadRequest")


class Odd(BbnodeError):
    """Of no family."""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnknownTarget("a", ["b"]), 404),
        (UnknownInput("x"), 400),
        (IngressFull("x"), 503),
        (IngressClosed("x"), 503),
        (StorageError("x"), 503),
        (ComponentError("x"), 409),
        (PeerError("x"), 502),
        (Odd("x"), 500),
    ],
)
def test_an_error_of_the_layers_has_its_status(error: BbnodeError, status: int) -> None:
    problem = problem_of(error)
    assert (problem.status, problem.code) == (status, type(error).__name__)


@pytest.mark.parametrize("path", ["/v1/peers/", "/v1/peers/a/b", "/v2/peers/a", "/v1/PEERS"])
async def test_a_path_fits_whole_or_not_at_all(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, client=False) as live:
        assert (await refused(live, "GET", path)).kind == "UnknownPath"


async def test_a_refused_method_names_those_that_are_taken(tmp_path: Path) -> None:
    async with running(tmp_path, client=False) as live:
        head = (await raw(live, "/v1/trace", "DELETE")).lower()
        assert b"\r\nallow: get, put\r\n" in head


def test_every_request_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "control.md").read_text("utf-8")
    for endpoint in ENDPOINTS:
        assert f"`{endpoint.method} {endpoint.path}`" in text
        assert endpoint.act.__doc__


async def test_the_openapi_document_has_every_request_and_valid_schemas(tmp_path: Path) -> None:
    async with (
        running(tmp_path, client=False) as live,
        AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client,
    ):
        told = await client.get("/openapi.json")
    assert told == openapi(ENDPOINTS)
    assert told["openapi"] == "3.1.0"
    shown = {(m.upper(), path) for path, item in told["paths"].items() for m in item}
    assert shown == {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}
    for schema in schemas(told):
        jsonschema.Draft202012Validator.check_schema(schema)
    for path, item in told["paths"].items():
        for operation in item.values():
            named = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path))
            assert operation["summary"]
    for ref in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(told)):
        assert ref in told["components"]["schemas"]


def schemas(node: Any) -> Iterator[Any]:
    """Every schema in an OpenAPI document."""
    if isinstance(node, dict):
        if isinstance(node.get("schemas"), dict):
            yield from node["schemas"].values()
        if isinstance(node.get("schema"), dict):
            yield node["schema"]
        node = [value for name, value in node.items() if name not in ("schema", "schemas")]
    if isinstance(node, list):
        for each in node:
            yield from schemas(each)


async def test_what_components_tell_of_themselves_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"items": 7, "metric": "cosine", "bad name": 1, "no_fact": [1], "long": "x" * 10_000}
    monkeypatch.setattr(ConnectedView, "facts", lambda _: told)
    async with running(tmp_path) as live:
        shown = (await ask(live, "GET", "/v1/status"))["components"]
        slots = [each["slot"] for each in shown]
        assert slots
        for each in shown:
            assert (each["type"], each["items"]) == ("bbnode.ConnectedView", 7)
            assert set(each) == {"slot", "type", "items", "metric", "long"}
            assert len(each["long"]) == MAX_FACT_CHARS
        page = (await raw(live, "/metrics")).decode()
        assert f'bbnode_component{{fact="items",slot="{slots[0]}"}} 7.0' in page
        assert "cosine" not in page
        # What raises is somebody's code: the node shows the rest.
        monkeypatch.setattr(ConnectedView, "facts", lambda _: 1 / 0)
        assert (await ask(live, "GET", "/v1/status"))["components"] == []


async def test_targets_are_listed_with_their_inputs(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        (target,) = (await ask(live, "GET", "/v1/targets"))["targets"]
        assert target["target"].startswith("server#")
        assert target["inputs"] == {"question": "Tensor.FLOAT"}
