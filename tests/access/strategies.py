"""Keys, peers and memberships that several tests of access draw from."""

from __future__ import annotations

from hypothesis import strategies as st

from bbnode.access.keys import SigningKey
from bbnode.access.statement import Membership, grant

OWNER = SigningKey.from_seed(b"o" * 32)
GRANTER = SigningKey.from_seed(b"g" * 32)
MEMBER = SigningKey.from_seed(b"m" * 32)
OTHER = SigningKey.from_seed(b"x" * 32)
NETWORK = OWNER.peer_id

NOW_S = 1_800_000_000
DAY_S = 86_400

CLASSES = st.none() | st.sets(
    st.from_regex(r"[a-z@][a-z0-9_]{0,9}", fullmatch=True), min_size=1, max_size=4
)


def member_of(network: SigningKey = OWNER, **changes: object) -> Membership:
    """A membership of MEMBER for one day, with those arguments of `grant` changed."""
    arguments: dict = {
        "member": MEMBER.peer_id,
        "not_before_s": NOW_S,
        "expires_s": NOW_S + DAY_S,
        "serial": 7,
        **changes,
    }
    return grant(network, **arguments)


def granter(**changes: object) -> Membership:
    """The membership of GRANTER, who may grant on."""
    return member_of(member=GRANTER.peer_id, serial=3, **{"may_grant": True, **changes})
