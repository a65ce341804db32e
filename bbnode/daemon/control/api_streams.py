"""Requests that go on: events of the node and lines of its log, one JSON object a line.

Rule: a stream ends with the daemon or with its client. What a slow reader loses is counted in
the `dropped` of its next line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from bbnode.daemon.control import arguments
from bbnode.daemon.control.errors import Problem
from bbnode.daemon.control.feed import Subscription
from bbnode.daemon.control.host import Host
from bbnode.daemon.control.http import Request, Streamed
from bbnode.ir.caps import KEPT_ITEMS

Params = Mapping[str, str]
Wanted = Callable[[Mapping[str, Any]], bool]


async def events(host: Host, request: Request, _params: Params) -> Streamed:
    """Events from now on, after the `?last=N` kept ones; `?type=NAME` (repeatable) chooses."""
    types = frozenset(request.query.get("type", ()))
    last = arguments.number(request, "last", default=0, highest=KEPT_ITEMS)
    wanted: Wanted | None = (lambda event: event.get("type") in types) if types else None
    return _stream(host.events.subscribe(last=last, wanted=wanted), request)


async def log_lines(host: Host, request: Request, _params: Params) -> Streamed:
    """The last `?last=N` lines of the log; with `?follow` those to come as well.

    `?level=warning` leaves out what is less severe.
    """
    last = arguments.number(request, "last", default=100, highest=KEPT_ITEMS)
    level = request.query.get("level", ["debug"])[-1].upper()
    least = logging.getLevelNamesMapping().get(level)
    if least is None:
        raise Problem(400, "InvalidField", "'level' has to be debug, info, warning or error")
    levels = logging.getLevelNamesMapping()

    def wanted(line: Mapping[str, Any]) -> bool:
        return levels.get(str(line.get("level", "")).upper(), 0) >= least

    subscription = host.logs.subscribe(last=last, wanted=wanted)
    return _stream(subscription, request)


def _stream(subscription: Subscription, request: Request) -> Streamed:
    """Go on, unless the client says `?follow=0`."""
    if "follow" in request.query and not arguments.flag(request, "follow"):
        subscription.end()
    return Streamed(source=subscription)
