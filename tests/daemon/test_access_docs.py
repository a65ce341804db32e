"""The configuration in docs/access.md is one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from bbnode.access.policy import RULES
from bbnode.daemon.config import AccessSection
from bbnode.ir.peer import PeerId

TEXT = (Path(__file__).parents[2] / "docs" / "access.md").read_text("utf-8")


def test_the_table_of_the_configuration_has_every_key() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    section = tomllib.loads(example.replace("12D3KooW…", str(PeerId.from_seed("network"))))
    AccessSection.model_validate(section["access"])
    assert set(section["access"]) == set(AccessSection.model_fields)


def test_every_rule_stands_there() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \|[^|]+\| `", TEXT, re.MULTILINE)) == RULES
