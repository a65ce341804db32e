"""The `[relay]` table."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from bbnode.daemon.config_relay import RelaySection
from bbnode.transport.limits import RelaySettings


def test_the_table_is_the_settings_with_relays_used() -> None:
    assert RelaySettings(**RelaySection().model_dump()) == RelaySettings(use=True)


@pytest.mark.parametrize(
    "given",
    [
        {"circuits": 0},
        {"circuits": 1025},
        {"circuit_s": 2**32},
        {"circuit_bytes": 2**63},
        {"reservation_s": 0},
        {"serve": "yes"},
        {"circuit": 1},
    ],
)
def test_what_no_relay_can_do_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RelaySection(**given)
