"""Configuration: precedence, what bad input gets, and that every key is documented."""

from __future__ import annotations

import os
import tomllib
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bbnode.daemon import paths
from bbnode.daemon.config import (
    LimitsSection,
    NodeConfig,
    RelaySection,
    keys,
    overrides,
    reference,
    sources,
)
from bbnode.daemon.config.sources import ConfigError, resolve, shown
from bbnode.engine import Limits
from bbnode.ir.caps import MAX_CONFIG_BYTES, MAX_RESERVATION_S, MIN_CIRCUIT_BYTES
from bbnode.transport.limits import RelaySettings

PEER = "12D3KooWLkHMEPJ3cTgdLCx8X6wT38PaozEnDAmXZnTNyuSyCdJr"
MINIMAL = '[artifact]\npath = "a.onnx"\ntargets = ["client"]\n'


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str = "") -> Path:
        file = tmp_path / "node.toml"
        file.write_text(MINIMAL + text, encoding="utf-8")
        return file

    return write


def test_a_name_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    flags = {
        "artifact.path": "a.onnx",
        "artifact.targets": ["t"],
        "node.state_dir": os.fsdecode(b"/data/b\xffd"),
    }
    config = sources.resolve(None, environ={}, flags=flags).config
    with pytest.raises(sources.ConfigError, match=r"state_dir = .*not UTF-8; rename"):
        sources.write(tmp_path / "node.toml", config)
    assert not list(tmp_path.iterdir())


def test_defaults_then_file_then_environment_then_flags(toml) -> None:
    file = toml('[node]\nname = "file"\nlog_level = "debug"\nlog_format = "json"\n')
    environ = {"BBNODE_NODE__NAME": "environment", "BBNODE_NODE__LOG_LEVEL": "warning"}
    found = resolve(file, environ=environ, flags={"node.log_level": "error"})
    node = found.config.node
    assert (node.log_format, node.name, node.log_level) == ("json", "environment", "error")
    assert found.config.network.listen == ["/ip4/127.0.0.1/tcp/0"]
    assert found.origins == {
        "artifact.path": "file",
        "artifact.targets": "file",
        "node.log_format": "file",
        "node.name": "environment",
        "node.log_level": "flags",
    }


def test_the_environment_says_lists_numbers_and_free_tables(toml) -> None:
    environ = {
        "BBNODE_NETWORK__LISTEN": "/ip4/127.0.0.1/tcp/1, /ip4/127.0.0.1/tcp/2",
        "BBNODE_NODE__COMPONENTS": '["one", "two"]',
        "BBNODE_LIMITS__FRAMES": "7",
        "BBNODE_SLOTS__DATA__SHARD": "3",
        "BBNODE_SLOTS__DATA__SPLIT": "train",
        "BBNODE_ARTIFACT__SHA256": "1" * 64,
    }
    config = resolve(toml(), environ=environ).config
    assert config.network.listen == ["/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/2"]
    assert config.node.components == ["one", "two"]
    assert config.limits.frames == 7
    assert config.slots == {"data": {"shard": 3, "split": "train"}}
    assert config.artifact.sha256 == "1" * 64


def test_variables_that_a_container_manager_invents_are_not_ours(toml) -> None:
    environ = {"BBNODE_SERVICE_HOST": "10.0.0.1", "BBNODE_PORT": "tcp://10.0.0.1:80"}
    assert resolve(toml(), environ=environ).config == resolve(toml(), environ={}).config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[node]\nlog_levle = "info"', "[node]: unknown key 'log_levle'; did you mean 'log_level'"),
        ("[netwrok]", "top level: unknown key 'netwrok'; did you mean 'network'"),
        ("[node]\nzzz = 1", "unknown key 'zzz'; valid keys: name, state_dir"),
        ("[[invoke]]\ntimes = 3", "[invoke number 1]: missing key 'target': target to invoke"),
        (
            '[[invoke]]\ntarget="s"\n[[invoke]]\ntarget="s"\nwait_for = {clas="c", peers=1}',
            "[invoke number 2.wait_for]: unknown key 'clas'; did you mean 'class'",
        ),
        ('[[invoke]]\ntarget="s"\ninputs={t="x"}', "invoke.0.inputs.t: 'x' is not an input"),
        ('[[invoke]]\ntarget="s"\ntimes="3"', "invoke.0.times: Input should be a valid integer"),
        ('[[invoke]]\ntarget="s"\nevery_s=-1', "invoke.0.every_s: Input should be greater"),
        ('[[invoke]]\ntarget="s"\nevery_s=nan', "invoke.0.every_s: Input should be a finite"),
        (
            '[[invoke]]\ntarget="s"\nwait_for = {class="c", peers=1, min_peers=2}',
            "min_peers (2) is more than peers (1)",
        ),
        ('[network]\nlisten = ["tcp:1"]', "network.listen.0: 'tcp:1' is not a multiaddr"),
        ('[access]\nblock = ["x"]', "not a PeerId"),
        ("[access]\nbyte_burst = 5.0", "give 'bytes_per_s' as well"),
        ("[access]\nbytes_per_s = 0.0", "access.bytes_per_s"),
        (
            '[network]\nbootstrap = ["/ip4/127.0.0.1/tcp/1"]',
            "names no peer: it has to end with /p2p/ID",
        ),
        ("[limits]\nframes = 0", "limits.frames: Input should be greater than or equal to 1"),
        ("[node]\nname = true", "node.name: Input should be a valid string (it is True)"),
        ('[node]\nname = "a/b"', "node.name: String should match pattern"),
        ("[node", "not valid TOML"),
    ],
)
def test_bad_input_is_one_line_with_file_key_and_cure(toml, text: str, expected: str) -> None:
    file = toml(text + "\n")
    with pytest.raises(ConfigError) as caught:
        resolve(file, environ={})
    line = str(caught.value)
    assert expected in line
    assert line.startswith(f"{file}: ")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "top level: missing key 'artifact': the program that it runs"),
        ("[artifact]\ntargets=['c']\n", "exactly one of 'path'"),
        ("[artifact]\npath='a'\n", "[artifact]: missing key 'targets'"),
        ("[artifact]\npath='a'\nmodule='a:B'\ntargets=['c']\n", "exactly one of 'path'"),
        ("[artifact]\nmodule='a.b'\ntargets=['c']\n", "does not name a class"),
        ("[artifact]\npath='a'\nargs={x=1}\ntargets=['c']\n", "arguments of 'module'"),
        ("[artifact]\nmodule='a:B'\nsha256='" + "0" * 64 + "'\ntargets=['c']\n", "leave it out"),
    ],
)
def test_what_to_run_is_said_once(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="^" + str(file)) as caught:
        resolve(file, environ={})
    assert expected in str(caught.value)


def test_a_fault_names_the_variable_or_flag_that_it_came_from(toml) -> None:
    with pytest.raises(ConfigError, match=r"^environment BBNODE_NODE__NAM: .*did you mean 'name'"):
        resolve(toml(), environ={"BBNODE_NODE__NAM": "x"})
    with pytest.raises(ConfigError, match=r"^flag node.log_level: .*\(it is 'lots'\)"):
        resolve(toml(), environ={}, flags={"node.log_level": "lots"})
    with pytest.raises(ConfigError, match=r"^flag invoke.target.*not a table"):
        resolve(toml('[[invoke]]\ntarget="s"\n'), environ={}, flags={"invoke.target": "x"})


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; make one with `bbnode init`"):
        resolve(tmp_path / "none.toml", environ={})
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve(tmp_path, environ={})
    file = tmp_path / "bytes.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        resolve(file, environ={})
    file.write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        resolve(file, environ={})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
DOTTED = st.sampled_from([".".join(p).replace("[]", "") for p, _ in keys()]) | st.text(max_size=12)


@given(flags=st.dictionaries(DOTTED, JSON, max_size=3))
def test_any_value_of_any_key_is_a_configuration_or_a_config_error(flags: dict) -> None:
    base = {"artifact.path": "a", "artifact.targets": ["c"]}
    message = ""
    try:
        assert isinstance(resolve(None, environ={}, flags={**base, **flags}).config, NodeConfig)
    except ConfigError as error:
        message = str(error)
    assert message.isprintable()


def test_a_file_stores_only_what_differs_and_reads_back_the_same(toml, tmp_path: Path) -> None:
    config = resolve(
        toml('[limits]\nframes = 3\n[slots.data]\nshard = 1\n[[invoke]]\ntarget = "s"\n'),
        environ={},
    ).config
    assert overrides(config) == {
        "artifact": {"path": "a.onnx", "targets": ["client"]},
        "limits": {"frames": 3},
        "slots": {"data": {"shard": 1}},
        "invoke": [{"target": "s"}],
    }
    copy = tmp_path / "copy.toml"
    sources.write(copy, config, comment="made by a test")
    assert copy.read_text().startswith("# made by a test\n")
    assert resolve(copy, environ={}).config == config


def test_wait_for_is_written_under_the_name_that_it_is_read_with(toml, tmp_path: Path) -> None:
    text = '[[invoke]]\ntarget="s"\nwait_for={class="client", peers=4, min_peers=3}\n'
    config = resolve(toml(text), environ={}).config
    wait = config.invoke[0].wait_for
    assert wait is not None
    assert (wait.peer_class, wait.enough_peers) == ("client", 3)
    sources.write(tmp_path / "copy.toml", config)
    assert resolve(tmp_path / "copy.toml", environ={}).config == config


def test_every_key_is_documented() -> None:
    text = reference.as_toml()
    for path, field in keys():
        assert field.description, path
        assert f"#   {path[-1]} = " in text
    assert "#   timeout_s = 20.0  (s)" in text
    # Comments only: the reference is valid TOML that says nothing.
    assert tomllib.loads(text) == {}


def test_limits_follow_the_preset_and_what_is_given() -> None:
    assert LimitsSection().effective() == asdict(Limits())
    edge = LimitsSection(preset="edge", bus_events=10, frames=5).effective()
    assert edge["envelope_bytes"] == 256 * 1024
    assert edge["envelope_fills"] == 64
    assert (edge["bus_events"], edge["ingress_events"], edge["frames"]) == (10, 40, 5)
    assert LimitsSection(bus_events=10, ingress_events=11).effective()["ingress_events"] == 11
    assert LimitsSection(preset="edge").effective() == asdict(Limits.edge())
    assert set(LimitsSection.model_fields) - {"preset"} == {f.name for f in fields(Limits)}


def test_the_pages_in_docs_are_the_references() -> None:
    docs = Path(__file__).parents[2] / "docs"
    how = "write it anew: bbnode config reference --markdown (--components) > docs/…"
    for name, made in (
        ("config.md", reference.config_markdown()),
        ("components-reference.md", reference.components_markdown()),
    ):
        assert (docs / name).read_text("utf-8") == made, f"docs/{name} is not current; {how}"
    for path, field in keys():
        assert f"| `{path[-1]}` | " in reference.config_markdown() or path == ("slots",), path
        assert field.description


def test_settings_of_a_component_are_read_from_its_docstring() -> None:
    page = reference.components_markdown()
    assert "| `path` | `str` | required | *local*; of an .npz file on this peer, or " in page
    assert "| `shards` | `int` | `1` | number of shares into which the split is divided" in page
    assert '| `split` | `"all" or "train" or "test" or "validation"` | ' in page
    assert "| `ttl_s` | `float` | `90.0` | seconds that an announcement is valid" in page


@pytest.mark.parametrize(
    "given",
    [
        {"circuits": 0},
        {"circuits": 1025},
        {"circuit_s": 2**32},
        {"circuit_bytes": 2**63},
        {"reservation_s": 0},
        {"reservation_s": MAX_RESERVATION_S + 1},
        {"circuit_bytes": MIN_CIRCUIT_BYTES - 1},
        {"through": ["/ip4/192.0.2.1/tcp/1"]},
        {"serve": "yes"},
        {"circuit": 1},
    ],
)
def test_what_no_relay_can_do_is_refused(given: dict[str, object]) -> None:
    assert RelaySection().settings() == RelaySettings(use=True)
    with pytest.raises(ValidationError):
        RelaySection(**given)


def test_paths_count_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    file = tmp_path / "node.toml"
    file.write_text(MINIMAL + '[node]\nname = "n"\n')
    found = resolve(file, environ={})
    assert found.state_dir == Path("/xdg/bbnode/n") == paths.default_state_dir("n")
    assert found.absolute(Path("a.onnx")) == tmp_path / "a.onnx"
    state = resolve(file, environ={}, flags={"node.state_dir": "state"})
    assert state.state_dir == Path.cwd() / "state"  # typed here, not in the file
    assert resolve(file, environ={}, flags={"node.state_dir": "/s"}).state_dir == Path("/s")


def test_what_is_shown_says_where_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        '[artifact]\npath = "a.onnx"\ntargets = ["client"]\n[slots.model]\nhidden = 3\n'
        '[[invoke]]\ntarget = "client"\n[invoke.inputs]\ntick = "trigger"\n'
    )
    resolved = resolve(
        file, environ={"BBNODE_NODE__LOG_LEVEL": "debug"}, flags={"node.name": "flagged"}
    )
    found = {key: (value, origin) for key, value, origin in shown(resolved)}
    assert found["artifact.targets"] == (["client"], "file")
    assert found["slots.model.hidden"] == (3, "file")
    assert found["invoke[0].inputs.tick"] == ("trigger", "file")
    assert found["invoke[0].times"] == (1, "default")
    assert found["node.log_level"] == ("debug", "environment")
    assert found["node.name"] == ("flagged", "flags")
    assert found["network.bootstrap"] == ([], "default")


def test_the_systems_nodes_have_the_systems_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "SYSTEM_CONFIG_DIR", tmp_path)
    file = tmp_path / "peer.toml"
    file.write_text('[node]\nname = "peer"\n[artifact]\npath = "a.onnx"\ntargets = ["client"]\n')
    state_dir = resolve(file, environ={}).state_dir
    assert state_dir == Path("/var/lib/bbnode/peer")
    assert paths.control_socket(state_dir) == Path("/run/bbnode/peer/control.sock")
    assert paths.cache_dir(state_dir) == Path("/var/cache/bbnode")


def test_a_mere_name_is_looked_for_where_configurations_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "bbnode" / "node.toml"
    assert paths.find_config(Path("node.toml")) == Path("node.toml")
    file.parent.mkdir()
    file.touch()
    assert paths.find_config(Path("node.toml")) == file
    assert paths.find_config(Path("./here/node.toml")) == Path("here/node.toml")
