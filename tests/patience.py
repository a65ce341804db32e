"""How long a test waits for what must come.

Rule: a bound in real time is a net that ends a test which would hang, never the measure of what
is tested: machines stall for seconds. What is said about time is said in virtual time, or with
many seconds of room.
"""

from __future__ import annotations

# Seconds, far beyond what anything takes on the busiest machine.
PATIENCE_S = 120.0
# Commands of `bbnode` that give up on a daemon's answer after a few seconds.
_HASTY = frozenset({"invite", "logs", "peers", "ping", "status", "trace"})


def patiently(*words: object) -> list[str]:
    """The words of a `bbnode` command that waits long enough for its daemon."""
    said = [str(word) for word in words]
    hasty = said[0] in _HASTY or said[:2] == ["network", "import"]
    if hasty and "--timeout" not in said:
        said += ["--timeout", str(PATIENCE_S)]
    return said
