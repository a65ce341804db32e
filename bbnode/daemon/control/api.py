"""Everything that a daemon can be asked: one table, and how an answer is found in it.

Rule: the table is the API. A path has a version; within it fields are added and never change
their meaning. Each JSON object says what it is in `schema`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bbnode.components.contracts import ComponentError
from bbnode.daemon.control import api_actions, api_state, api_streams
from bbnode.daemon.control.errors import ControlProtocolError, Problem
from bbnode.daemon.control.host import Host
from bbnode.daemon.control.http import Answer, Request, Response, Streamed
from bbnode.daemon.control.invocations import Invocations
from bbnode.daemon.control.json_lines import encode
from bbnode.engine.errors import EntryError, IngressClosed, UnknownTarget
from bbnode.ir.errors import (
    AuthorError,
    BbnodeError,
    DeploymentError,
    EnvironmentFault,
    PeerError,
)

Act = Callable[[Host, Request, Mapping[str, str]], Awaitable[Mapping[str, Any] | Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One request: `{name}` in the path is a parameter; `schema` names the JSON it answers."""

    method: str
    path: str
    schema: str
    act: Act


# The nearest class of an error decides its status; the first that fits, in this order.
STATUS_OF: tuple[tuple[type[BbnodeError], int], ...] = (
    (UnknownTarget, 404),
    (IngressClosed, 503),
    (EnvironmentFault, 503),
    (EntryError, 400),
    (ComponentError, 409),
    (PeerError, 502),
    (AuthorError, 422),
    (DeploymentError, 400),
)


def routes(calls: api_actions.Calls) -> tuple[Route, ...]:
    """The table."""
    state, act, streams = api_state, api_actions, api_streams
    rows: tuple[tuple[str, str, str, Act], ...] = (
        ("GET", "/healthz", "", state.healthz),
        ("GET", "/readyz", "", state.readyz),
        ("GET", "/metrics", "", state.metrics),
        ("GET", "/v1/status", "status", state.status),
        ("GET", "/v1/peers", "peers", state.peers),
        ("GET", "/v1/peers/{peer}", "peer", state.peer),
        ("POST", "/v1/peers/{peer}/connect", "peers-connect", act.connect),
        ("POST", "/v1/peers/{peer}/disconnect", "peers-disconnect", act.disconnect),
        ("POST", "/v1/peers/{peer}/block", "peers-block", act.block),
        ("POST", "/v1/peers/{peer}/allow", "peers-allow", act.allow),
        ("POST", "/v1/access/reload", "access-reload", act.reload_access),
        ("POST", "/v1/ping", "ping", act.ping),
        ("POST", "/v1/dial-back", "dial-back", act.dial_back),
        ("POST", "/v1/invoke", "invoke", calls.invoke),
        ("POST", "/v1/emit", "emit", calls.emit),
        ("POST", "/v1/snapshot", "snapshot", act.snapshot),
        ("POST", "/v1/reload", "reload", act.reload),
        ("POST", "/v1/stop", "stop", act.stop),
        ("GET", "/v1/executions", "executions", state.executions),
        ("GET", "/v1/rounds", "rounds", state.rounds),
        ("GET", "/v1/trace", "tracing", state.traced),
        ("PUT", "/v1/trace", "tracing", act.set_tracing),
        ("GET", "/v1/trace/{id}", "trace", state.trace),
        ("GET", "/v1/events", "event", streams.events),
        ("GET", "/v1/logs", "log", streams.log_lines),
        ("GET", "/v1/log-level", "log-level", state.log_level),
        ("PUT", "/v1/log-level", "log-level", act.set_log_level),
        ("GET", "/v1/config", "config", state.config),
    )
    return tuple(Route(method=m, path=p, schema=s, act=a) for m, p, s, a in rows)


class Api:
    """Answers requests about one daemon."""

    def __init__(self, host: Host, invocations: Invocations) -> None:
        """`invocations` has to be told of every step of the node."""
        self._host = host
        self.routes = routes(api_actions.Calls(invocations))

    async def handle(self, request: Request) -> Answer:
        """Find the route and act. Raises `Problem`, and nothing else that is expected."""
        route, params = self._find(request)
        try:
            made = await route.act(self._host, request, params)
            if isinstance(made, Response | Streamed):
                return made
            return Response(body=encode({"schema": f"bbnode/{route.schema}/1", **made}))
        except Problem:
            raise
        except ControlProtocolError as error:
            raise Problem(500, "Unprintable", str(error)) from error
        except BbnodeError as error:
            raise problem_of(error) from error

    def _find(self, request: Request) -> tuple[Route, Mapping[str, str]]:
        methods = []
        for route in self.routes:
            params = match(route.path, request.path)
            if params is None:
                continue
            if route.method == request.method or (route.method, request.method) == ("GET", "HEAD"):
                return route, params
            methods.append(route.method)
        if methods:
            allowed = ", ".join(methods)
            raise Problem(
                405,
                "MethodNotAllowed",
                f"{request.path} takes {allowed}, not {request.method}",
                headers={"Allow": allowed},
            )
        known = ", ".join(dict.fromkeys(route.path for route in self.routes))
        raise Problem(404, "UnknownPath", f"there is no {request.path[:200]}; there is: {known}")


def match(pattern: str, path: str) -> dict[str, str] | None:
    """The parameters of a path that fits the pattern, or None."""
    wanted, given = pattern.split("/"), path.split("/")
    if len(wanted) != len(given):
        return None
    params = {}
    for name, text in zip(wanted, given, strict=True):
        if name.startswith("{") and text:
            params[name[1:-1]] = text
        elif name != text:
            return None
    return params


def problem_of(error: BbnodeError) -> Problem:
    """An error of the daemon's layers as an answer."""
    status = next((code for cls, code in STATUS_OF if isinstance(error, cls)), 500)
    return Problem(status, type(error).__name__, str(error))
