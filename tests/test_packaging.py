"""What pyproject.toml promises is there: entry points, version, files."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bbnode
from bbnode import components
from bbnode.components import registry
from bbnode.daemon import units
from bbnode.ir import installation

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"


def test_every_component_entry_point_registers_the_type_that_it_names() -> None:
    entries = PROJECT["entry-points"][registry.ENTRY_POINT_GROUP]
    for type_name, module in entries.items():
        importlib.import_module(module)
        cls = registry.component_class(type_name)
        assert (cls.TYPE_NAME, cls.__module__) == (type_name, module)


def test_every_component_that_ships_has_its_entry_point() -> None:
    for found in pkgutil.walk_packages(components.__path__, "bbnode.components."):
        importlib.import_module(found.name)
    entries = PROJECT["entry-points"][registry.ENTRY_POINT_GROUP]
    shipped = {
        name
        for name, cls in registry._REGISTERED.items()
        if cls.__module__.startswith("bbnode.components.")
    }
    assert shipped == set(entries)


def test_the_version_stands_in_two_places_and_is_one() -> None:
    assert PROJECT["version"] == bbnode.__version__
    assert f"## [{bbnode.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_scripts_can_be_run() -> None:
    for name in (
        "scripts/demo",
        "scripts/test",
        "scripts/check",
        "scripts/bench",
        "scripts/constraints",
        ".ci/run",
    ):
        file = ROOT / name
        assert file.stat().st_mode & 0o111, name
        assert file.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n"), name


def test_every_direct_dependency_says_what_it_needs_at_least() -> None:
    for requirement in (Requirement(text) for text in asked("demo")):
        operators = {clause.operator for clause in requirement.specifier}
        assert operators & {">=", "=="}, requirement


def test_extras_have_the_names_that_pip_finds() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {canonicalize_name(name) for name in extras}
    told = 0
    for file in [*(ROOT / "bbnode").rglob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("d*/**/*.md")]:
        for name in re.findall(r"(?:bbnode|['\" ]\.)\[([^\]]+)\]['\"]", file.read_text("utf-8")):
            told += 1
            assert name in extras, f"{file}: {name}"
    assert told >= 1


def test_the_constraints_fit_and_pin_all_that_is_needed() -> None:
    lines = CONSTRAINTS.read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert list(pins) == sorted(canonicalize_name(name) for name in pins)
    for requirement in (Requirement(text) for text in asked("demo")):
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: {version}"
    instead = {each.name: each for each in overrides()}
    # What a package needs is known here of those that are installed in the very version.
    for name, version in pins.items():
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if found.version != version:
            continue
        for needed in (Requirement(text) for text in found.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                pinned = pins.get(canonicalize_name(needed.name))
                assert pinned is not None, f"{name} needs {needed}: run scripts/constraints"
                needed = instead.get(needed.name, needed)
                assert needed.specifier.contains(pinned), f"{name} needs {needed}: {pinned}"


def test_constraints_are_used_where_services_are_installed() -> None:
    text = (ROOT / "deploy" / "README.md").read_text("utf-8").replace("\\\n", "")
    lines = [line for line in text.splitlines() if line.startswith(("(umask", "uv tool install"))]
    told = [line for line in lines if re.search(r"uv (pip|tool) install", line)]
    assert len(told) == 5
    for line in told:
        assert "-c deploy/constraints.txt" in line, line
        assert re.search(r"--overrides? deploy/overrides\.txt", line), line


def test_what_is_taken_in_the_place_of_a_pin_is_one_and_the_same_everywhere() -> None:
    """uv's override, where a checkout, a project, an image or a hint says it."""
    (override,) = overrides()
    said = f"'{override}'"
    assert PYPROJECT["tool"]["uv"]["override-dependencies"] == [str(override)]
    for file in (ROOT / "bbnode" / "templates").glob("*/pyproject.toml.in"):
        assert f'override-dependencies = ["{override}"]' in file.read_text("utf-8"), file
    assert said in (ROOT / "deploy" / "docker" / "program.Dockerfile").read_text("utf-8")
    (libp2p,) = [text for text in PROJECT["dependencies"] if Requirement(text).name == "libp2p"]
    told = installation.libp2p_ways()
    assert said in told
    assert f"'{libp2p}'" in told
    assert "\n" not in told
    # It is needed: without it a package would be compiled.
    pins = [Requirement(text) for text in metadata.distribution("libp2p").requires or ()]
    (pinned,) = [each for each in pins if each.name == override.name]
    assert not pinned.specifier.contains("4.0.0")
    assert override.specifier.contains(metadata.version(override.name))


def overrides() -> list[Requirement]:
    lines = (ROOT / "deploy" / "overrides.txt").read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, built from this checkout."""
    pytest.importorskip("hatchling", reason="hatchling comes with the extra test")
    folder = tmp_path_factory.mktemp("built")
    # In a process: the backend counts from the working directory.
    code = (
        "import sys; from hatchling import build; "
        "build.build_wheel(sys.argv[1]); build.build_sdist(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True)
    return folder


def wheel_of(folder: Path) -> zipfile.ZipFile:
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def git_files() -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("an unpacked source archive has no history to compare with")
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).is_file()}


def test_the_source_archive_holds_the_whole_project(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    # Tests read all of it: scripts, pages, workflows.
    assert git_files() - held == set()


def test_the_wheel_holds_all_of_the_package(built: Path) -> None:
    with wheel_of(built) as wheel:
        held = set(wheel.namelist())
    assert {name for name in git_files() if name.startswith("bbnode/")} - held == set()
    assert {f"bbnode/daemon/units/{name}" for name in (units.SYSTEM_UNIT, units.USER_UNIT)} <= held


def test_the_build_is_that_of_the_files_wherever_they_are(built: Path, tmp_path: Path) -> None:
    with wheel_of(built) as wheel:
        wheel.extractall(tmp_path / "site")
    code = "from bbnode.daemon.build import build_id; print(build_id())"

    def build(place: Path) -> str:
        words = [sys.executable, "-Bc", code]
        environ = os.environ | {"PYTHONPATH": str(place)}
        done = subprocess.run(
            words, cwd=place, env=environ, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    first = build(tmp_path / "site")
    # Without the list of its files they are read, as in a checkout.
    (info,) = (tmp_path / "site").glob("*.dist-info")
    (info / "RECORD").unlink()
    assert build(tmp_path / "site") == first
    assert first == build(ROOT)
    with (tmp_path / "site" / "bbnode" / "py.typed").open("a") as file:
        file.write("\n")
    assert build(tmp_path / "site") != first


def test_links_of_the_packaged_readme_lead_to_the_repository(built: Path) -> None:
    with wheel_of(built) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        head, _, body = wheel.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    links = re.findall(r"\]\(([^)\s]+)\)", body)
    base = f"{PROJECT['urls']['Source']}/blob/main/"
    named = [link.removeprefix(base) for link in links if link.startswith(base)]
    assert len(named) > 5
    # Nothing else is changed, and what they name is there.
    readme = (ROOT / "README.md").read_text("utf-8")
    assert body.replace(base, "").strip() == readme.strip()
    assert [each for each in named if not (ROOT / each.partition("#")[0]).exists()] == []
    rest = [link for link in links if not link.startswith(("https://", "#"))]
    assert rest == []


def test_the_project_says_whose_it_is_and_where() -> None:
    assert PROJECT["authors"] == [{"name": "The bbnode developers"}]
    assert set(PROJECT["urls"]) == {"Homepage", "Source", "Issues", "Changelog"}


def asked(extra: str) -> list[str]:
    return [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
