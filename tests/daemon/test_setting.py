"""One setting of a command line: which key, which text, for which class."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.daemon.config.setting import Setting, parse_setting
from bbnode.daemon.config.sources import ConfigError

CLASSES = ("server", "client", "node")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("slots.data.path=data/{i}.npz", Setting(key="slots.data.path", text="data/{i}.npz")),
        (
            "client.slots.data.path=data/{i}.npz",
            Setting(key="slots.data.path", text="data/{i}.npz", peer_class="client"),
        ),
        ("node.log_level=debug", Setting(key="node.log_level", text="debug")),
        (
            "node.node.log_level=debug",
            Setting(key="node.log_level", text="debug", peer_class="node"),
        ),
        (
            "client.12.slots.data.path=x",
            Setting(key="slots.data.path", text="x", peer_class="client", index=12),
        ),
        ("slots.data.note=a=b", Setting(key="slots.data.note", text="a=b")),
        (" limits.frames = 3", Setting(key="limits.frames", text=" 3")),
        ("slots.data.path=", Setting(key="slots.data.path", text="")),
    ],
)
def test_a_setting_names_a_key_and_perhaps_a_class(text: str, found: Setting) -> None:
    assert parse_setting(text, CLASSES) == found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nonsense", "is not KEY=VALUE, as in server.slots.data.path=data/0.npz"),
        ("=x", "is not KEY=VALUE"),
        ("slots..path=x", "is not KEY=VALUE"),
        ("clients.slots.data.path=x", "'clients' is neither a class (server, client, node)"),
        ("client.slot.data.path=x", "'client' is neither"),
        ("client.0.slot.data.path=x", "'client' is neither"),
        ("client.-1.slots.data.path=x", "'client' is neither"),
    ],
)
def test_what_is_no_setting_is_refused_with_what_to_write(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_setting(text, CLASSES)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=200))
def test_any_text_is_a_setting_or_a_config_error_of_one_line(text: str) -> None:
    told = ""
    try:
        assert parse_setting(text, CLASSES).text == text.partition("=")[2]
    except ConfigError as error:
        told = str(error)
    assert "\n" not in told
