"""An ASGI application, and its OpenAPI document, made from a table of typed functions.

The parameters of a function are the parts of a request: `host`, the parameters of the path by name,
`body` and `query` as pydantic models; its result is the JSON of the answer.

Rule: every wrong argument is a `Problem` (400) that names it and the expected value. An unknown
field of a body is one too, so that a misspelt field is not silently ignored.
"""

from __future__ import annotations

import inspect
import logging
import re
import typing
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote

import trio
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from bbnode import __version__
from bbnode.components.contracts import ComponentError
from bbnode.daemon.control.answers import ProblemBody
from bbnode.daemon.control.asgi import ASGIApp, Receive, Response, Scope, Send, StreamedResponse
from bbnode.daemon.control.client import FILE
from bbnode.daemon.control.errors import PROBLEM_TYPE, ControlProtocolError, Problem
from bbnode.daemon.control.feed import Subscription
from bbnode.daemon.control.host import Host
from bbnode.daemon.control.json_lines import encode, parse_object, short
from bbnode.engine.errors import EntryError, IngressClosed, UnknownTarget
from bbnode.ir.caps import MAX_QUERY_FIELDS
from bbnode.ir.errors import (
    AuthorError,
    BbnodeError,
    DeploymentError,
    EnvironmentFault,
    PeerError,
)
from bbnode.ir.peer import PeerId

logger = logging.getLogger(__name__)

# The shortest end of a PeerId that names a peer; fewer characters would be a guess.
MIN_SUFFIX_CHARS = 4
# Neither the server's name nor the date, as this is not a public server.
HEADERS = {"Cache-Control": "no-store"}
LINES = "application/x-ndjson"
TEXT = "text/plain; charset=utf-8"
# Bytes of a long answer that a client has to take within one deadline.
PIECE_BYTES = 1 << 20
# The status of an error is that of the first class here that fits.
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

Act = Callable[..., Awaitable[Mapping[str, Any] | Response | StreamedResponse]]


class RequestBody(BaseModel):
    """The JSON body of a request, exactly as declared; null means absent."""

    # Its validator is built with the first request; a start would otherwise build all of them.
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Query(BaseModel):
    """The fields of a query; others are ignored."""

    model_config = ConfigDict(defer_build=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One request that a daemon answers; `schema` names the JSON of the answer."""

    method: str
    path: str
    schema: str
    act: Act
    # The parameters of `act` by name, and its return type.
    parameters: Mapping[str, Any]
    answer: Any
    media: str


class Endpoints(list[Endpoint]):
    """A table of endpoints, filled by decorating the functions that answer."""

    def add(
        self,
        method: str,
        path: str,
        schema: str = "",
        *,
        answer: Any = None,
        media: str = "application/json",
    ) -> Callable[[Act], Act]:
        """Add the decorated function; one that returns its own response names its `answer` here."""

        def decorate(act: Act) -> Act:
            hints = typing.get_type_hints(act)
            returned = hints.pop("return")
            self.append(
                Endpoint(
                    method=method,
                    path=path,
                    schema=schema,
                    act=act,
                    parameters=hints,
                    answer=returned if answer is None else answer,
                    media=media,
                )
            )
            return act

        return decorate


class Lines(StreamedResponse):
    """The lines of a subscription, until it ends or its client disconnects."""

    def __init__(self, subscription: Subscription, *, follow: bool = True) -> None:
        """Send the kept items and, with `follow`, the new ones."""
        if not follow:
            subscription.end()
        super().__init__(subscription, LINES, HEADERS)
        self.subscription = subscription

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.subscription.close()


class Blob(StreamedResponse):
    """The bytes of a file, of known length, in pieces that a client has to take in time."""

    def __init__(self, data: bytes) -> None:
        """Send `data`, which may be large."""
        view = memoryview(data)
        pieces = (bytes(view[at : at + PIECE_BYTES]) for at in range(0, len(view), PIECE_BYTES))
        super().__init__(pieces, FILE, {**HEADERS, "Content-Length": str(len(data))})


@dataclass(frozen=True, slots=True)
class _Route:
    """One path, in which `{name}` stands for one part, and its endpoints by method."""

    path: str
    pattern: re.Pattern[str]
    methods: dict[str, Endpoint]


def _routes(endpoints: Sequence[Endpoint]) -> list[_Route]:
    by_path: dict[str, _Route] = {}
    for endpoint in endpoints:
        path = endpoint.path
        pattern = re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(path)))
        by_path.setdefault(path, _Route(path, pattern, {})).methods[endpoint.method] = endpoint
    return list(by_path.values())


def application(
    endpoints: Sequence[Endpoint], host: Host, *, request_s: float, counts: Counter[str]
) -> ASGIApp:
    """Create the application for one daemon, with `request_s` seconds for each request."""
    routes = _routes(endpoints)
    # Most requests are for paths without parameters.
    plain = {route.path: route for route in routes if "{" not in route.path}

    def find(scope: Scope) -> tuple[Endpoint, Mapping[str, str]]:
        path, method = scope["path"], scope["method"]
        route = plain.get(path)
        parameters: Mapping[str, str] = {}
        if route is None:
            for each in routes:
                match = each.pattern.fullmatch(path)
                if match is not None:
                    route, parameters = each, match.groupdict()
                    break
        if route is None:
            known = ", ".join(route.path for route in routes)
            text = f"there is no {path[:200]}; there is: {known}"
            raise Problem(404, "UnknownPath", text)
        endpoint = route.methods.get("GET" if method == "HEAD" else method)
        if endpoint is None:
            allowed = ", ".join(route.methods)
            text = f"{path} takes {allowed}, not {method}"
            raise Problem(405, "MethodNotAllowed", text, headers={"Allow": allowed})
        return endpoint, parameters

    async def answer(scope: Scope, receive: Receive) -> Response | StreamedResponse:
        try:
            endpoint, parameters = find(scope)
            with trio.fail_after(request_s) as bound:
                return await _answered(endpoint, host, scope, receive, parameters, bound)
        except Problem as error:
            problem = error
        except ControlProtocolError as error:
            problem = Problem(500, "Unprintable", str(error))
        except BbnodeError as error:
            problem = problem_of(error)
        except trio.TooSlowError:
            text = f"{scope['path']} was not answered within {request_s:g} s"
            problem = Problem(504, "Timeout", text)
        except Exception:
            # The declared boundary of the control plane: a fault in one handler must not end the
            # daemon's work. The log has the traceback; the client learns only that the request
            # failed.
            logger.exception("control request failed", extra={"path": scope["path"]})
            counts["control.internal_errors"] += 1
            text = f"{scope['path']} failed inside the daemon; its log says where"
            problem = Problem(500, "InternalError", text)
        counts["control.refused"] += 1
        return problem_response(problem)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (await answer(scope, receive))(scope, receive, send)

    return app


async def _answered(
    endpoint: Endpoint,
    host: Host,
    scope: Scope,
    receive: Receive,
    parameters: Mapping[str, str],
    bound: trio.CancelScope,
) -> Response | StreamedResponse:
    arguments: dict[str, Any] = {}
    query = read_query(scope)
    for name, kind in endpoint.parameters.items():
        if kind is Host:
            arguments[name] = host
        elif name == "body":
            arguments[name] = body = checked(kind, _body((await receive())["body"]))
            bound.deadline += getattr(
                body, "wait_s", 0.0
            )  # the wait that the client itself asked for
        elif name == "query":
            fields = {
                field: texts if info.annotation == list[str] else texts[-1]
                for field, info in kind.model_fields.items()
                if (texts := query.get(field))
            }
            arguments[name] = checked(kind, fields)
        elif kind is PeerId:
            arguments[name] = known_peer(host, parameters[name])
        elif kind is str:
            arguments[name] = parameters[name]
        else:
            arguments[name] = _number(name, parameters[name])
    answer = await endpoint.act(**arguments)
    if isinstance(answer, Response | StreamedResponse):
        return answer
    return json_response({"schema": f"bbnode/{endpoint.schema}/1", **answer})


def json_response(message: Mapping[str, Any], status: int = 200) -> Response:
    """Create an answer from a JSON object."""
    return Response(encode(message), status, HEADERS, "application/json")


def text_response(text: str | bytes, status: int = 200, media: str = TEXT) -> Response:
    """Create an answer from a text."""
    return Response(text, status, HEADERS, media)


def problem_response(problem: Problem) -> Response:
    """Create an answer from a refusal."""
    headers = {**HEADERS, **problem.headers}
    return Response(encode(problem.as_json()), problem.status, headers, PROBLEM_TYPE)


def problem_of(error: BbnodeError) -> Problem:
    """Return an error of the daemon's layers as a refusal."""
    status = next((code for cls, code in STATUS_OF if isinstance(error, cls)), 500)
    return Problem(status, type(error).__name__, str(error))


def known_peer(host: Host, text: str) -> PeerId:
    """Return a PeerId from its text, or from the end of a connected or wanted peer's."""
    try:
        return PeerId.parse(text)
    except BbnodeError as error:
        known = {p.peer for p in host.backend.peers()} | {w.peer for w in host.backend.wanted()}
        known.update(host.node.address_book())
        fitting = [peer for peer in known if str(peer).endswith(text)]
        if len(text) >= MIN_SUFFIX_CHARS and len(fitting) == 1:
            return fitting[0]
        if len(text) >= MIN_SUFFIX_CHARS and fitting:
            raise Problem(
                400, "AmbiguousPeer", f"{short(text)} is the end of {len(fitting)} peers"
            ) from error
        raise Problem(
            400,
            "InvalidPeerId",
            f"{short(text)} is neither a PeerId nor the end of a known peer's; "
            "`bbnode peers` lists them",
        ) from error


def read_query(scope: Scope) -> dict[str, list[str]]:
    """Return the fields of a request's query; raises `Problem` (400) for a malformed target."""
    try:
        unquote(scope["raw_path"].decode("ascii"), errors="strict")
        return parse_qs(
            scope["query_string"].decode("ascii"),
            errors="strict",
            max_num_fields=MAX_QUERY_FIELDS,
        )
    except ValueError as error:
        raise Problem(400, "BadRequest", f"the request's target can't be read: {error}") from error


def _body(data: bytes) -> dict[str, Any]:
    if not data:
        return {}
    try:
        fields = parse_object(data)
    except ControlProtocolError as error:
        raise Problem(400, "BadRequest", f"the body is {error}") from error
    return {name: value for name, value in fields.items() if value is not None}


def checked(model: type[BaseModel], fields: Mapping[str, Any]) -> BaseModel:
    """Validate fields with a model; raises `Problem` (400), which names the wrong field."""
    try:
        return model.model_validate(fields)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_context=False)[0]
        name, value = ".".join(map(str, first["loc"])), first["input"]
        match first["type"]:
            case "missing":
                problem = Problem(400, "MissingField", f"the body has to have the field {name!r}")
            case "extra_forbidden":
                known = ", ".join(model.model_fields) or "none"
                text = f"unknown field {short(name)}; there is: {known}"
                problem = Problem(400, "UnknownField", text)
            case _:
                text = f"{short(name)} can't be {short(value)}: {first['msg']}"
                problem = Problem(400, "InvalidField", text)
        raise problem from invalid


def _number(name: str, text: str) -> int:
    # Longer texts are no number of ours, and int() of a long text is slow.
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise Problem(400, "InvalidField", f"{name!r} has to be a whole number, not {short(text)}")
    return int(text)


def openapi(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI document of the endpoints."""
    models: dict[Any, TypeAdapter[Any]] = {ProblemBody: TypeAdapter(ProblemBody)}
    for endpoint in endpoints:
        for kind in (endpoint.answer, endpoint.parameters.get("body")):
            if kind is not None and not _answers_itself(kind):
                models.setdefault(kind, TypeAdapter(kind))
    keyed: list[tuple[Any, Any, TypeAdapter[Any]]] = [
        (kind, "validation", adapter) for kind, adapter in models.items()
    ]
    generated, shared = TypeAdapter.json_schemas(keyed, ref_template="#/components/schemas/{model}")
    schemas = {kind: schema for (kind, _mode), schema in generated.items()}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        summary, _, description = (inspect.getdoc(endpoint.act) or "").partition("\n\n")
        content: dict[str, Any] = {}
        if endpoint.answer in schemas:
            content["schema"] = schemas[endpoint.answer]
        if endpoint.schema:
            const = {"type": "string", "const": f"bbnode/{endpoint.schema}/1"}
            own = {"type": "object", "properties": {"schema": const}, "required": ["schema"]}
            content["schema"] = {"allOf": [own, *content.values()]}
        problem = {PROBLEM_TYPE: {"schema": schemas[ProblemBody]}}
        operation: dict[str, Any] = {
            "operationId": endpoint.act.__name__,
            "summary": summary,
            "description": description,
            "parameters": list(_parameters(endpoint)),
            "responses": {
                "200": {"description": summary, "content": {endpoint.media: content}},
                "default": {"description": "A refusal.", "content": problem},
            },
        }
        if "body" in endpoint.parameters:
            body = {"schema": schemas[endpoint.parameters["body"]]}
            operation["requestBody"] = {"content": {"application/json": body}}
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "bbnode control plane", "version": __version__},
        "paths": paths,
        "components": {"schemas": shared.get("$defs", {})},
    }


def _answers_itself(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Response | StreamedResponse)


def _parameters(endpoint: Endpoint) -> typing.Iterator[dict[str, Any]]:
    for name, kind in endpoint.parameters.items():
        if name == "query":
            for field, schema in kind.model_json_schema()["properties"].items():
                yield {"name": field, "in": "query", "schema": schema}
        elif f"{{{name}}}" in endpoint.path:
            schema = {"type": "integer"} if kind is int else {"type": "string"}
            yield {"name": name, "in": "path", "required": True, "schema": schema}
