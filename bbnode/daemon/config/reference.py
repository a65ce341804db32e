"""Every bound of a node, for `bbnode config reference --limits`.

Rule: nothing is said here that does not stand with the bound itself: in `ir.caps`, with the fields
of `TransportLimits`, or with the keys of the configuration.
"""

from __future__ import annotations

import textwrap
from itertools import groupby

from bbnode.daemon.config import LIMIT_PRESETS, LimitsSection
from bbnode.daemon.config.values import Section
from bbnode.daemon.config_relay import RelaySection
from bbnode.ir import caps
from bbnode.ir.caps import Cap
from bbnode.transport.limits import TransportLimits

_WIDTH = 100


def every_limit() -> list[Cap]:
    """Return all bounds: those that stand, those of the transport, those that can be configured."""
    return [
        *caps.TABLE,
        *caps.settable("Connections and queues", TransportLimits()),
        *_keys("limits", LimitsSection()),
        *_keys("relay", RelaySection()),
    ]


def as_text() -> str:
    """Return all bounds as text, by section: name, value, unit and reason of each."""
    lines: list[str] = []
    for section, limits in groupby(every_limit(), key=lambda cap: cap.section):
        lines += ["", section]
        for cap in limits:
            value = "none" if cap.value is None else f"{cap.value:_}".replace("_", ",")
            head = f"  {cap.name} = {value} {cap.unit}".rstrip()
            lines.append(head)
            lines += textwrap.wrap(
                cap.reason, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
    return "\n".join(lines).strip("\n") + "\n"


def _keys(name: str, section: Section) -> list[Cap]:
    """The keys of a section of the configuration that count something."""
    found = []
    for key, field in type(section).model_fields.items():
        unit = str((field.json_schema_extra or {}).get("unit", ""))  # type: ignore[union-attr]
        if not unit:
            continue
        value = LIMIT_PRESETS["default"][key] if name == "limits" else getattr(section, key)
        found.append(
            Cap(
                section=f"[{name}] of the configuration",
                name=key,
                value=value,
                unit=unit,
                reason=field.description or "",
            )
        )
    return found
