"""Errors between a control client and a daemon, and refusals as JSON.

Rule: a refusal is `application/problem+json` (RFC 9457) with a typed `code`; its `detail` says
what is wrong and what to do. Clients raise it as `ControlError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from bbnode.ir.errors import BbnodeError, DeploymentError, EnvironmentFault

PROBLEM_TYPE = "application/problem+json"
PROBLEM_SCHEMA = "bbnode/problem/1"


class ControlError(BbnodeError):
    """The daemon refused or failed a request: `kind` names its error, `status` is HTTP's."""

    def __init__(self, kind: str, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


class NotRunning(EnvironmentFault):
    """Nobody listens on the control socket, or the daemon went away."""


class ControlTimeout(EnvironmentFault):
    """The daemon did not answer in time."""


class ControlProtocolError(DeploymentError):
    """The bytes that came over the control socket are not this protocol."""


class AlreadyRunning(DeploymentError):
    """Another daemon answers on the control socket."""


class TcpRefused(DeploymentError):
    """The control plane is asked to listen on an address that others could reach."""


class Problem(BbnodeError):
    """A request is refused: raised by a handler, answered as problem+json."""

    def __init__(
        self, status: int, code: str, detail: str, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})

    def as_json(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return {
            "schema": PROBLEM_SCHEMA,
            "type": f"urn:bbnode:problem:{self.code}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "code": self.code,
            "detail": str(self),
        }


def error_of(status: int, body: Mapping[str, Any]) -> ControlError:
    """Return the error in a problem+json body, for a client to raise."""
    kind = body.get("code")
    detail = body.get("detail")
    return ControlError(
        kind if isinstance(kind, str) else "Unknown",
        detail if isinstance(detail, str) else f"the daemon answered with status {status}",
        status,
    )
