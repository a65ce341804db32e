"""Writes constraints.txt: one version of each package that bbnode[demo] needs, as installed here.

    scripts/constraints

Rule: what is written is what the tests ran with: the packages of the environment that this runs
in, found from pyproject.toml through what each says that it requires. Sorted, so that a change
reads as one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).with_name("constraints.txt")
HEAD = (
    "# One tested set of versions, for the image and for services: uv's -c, with overrides.txt.\n"
    "# Written by scripts/constraints; pyproject.toml has what is allowed.\n"
)


def direct() -> list[Requirement]:
    """What pyproject.toml asks for, with the extra that the image offers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    return [Requirement(text) for text in asked]


def required_by(requirement: Requirement) -> Iterator[Requirement]:
    """What an installed package requires on this machine, with the extras that are asked of it."""
    for text in distribution(requirement.name).requires or ():
        found = Requirement(text)
        extras = requirement.extras or {""}
        if found.marker is None or any(found.marker.evaluate({"extra": e}) for e in extras):
            yield found


def closure(asked: Iterable[Requirement]) -> dict[str, str]:
    """Every package that is needed, by its normalised name, with the version installed here."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(asked)
    while waiting:
        requirement = waiting.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = distribution(requirement.name).version
        waiting.extend(required_by(requirement))
    return found


def text(pins: dict[str, str]) -> str:
    """The file for these versions."""
    return HEAD + "".join(f"{name}=={pins[name]}\n" for name in sorted(pins))


def main() -> None:
    """Write the file."""
    try:
        FILE.write_text(text(closure(direct())), "utf-8")
    except PackageNotFoundError as error:
        raise SystemExit(f"error: {error.name} is not installed here; run scripts/test") from error


if __name__ == "__main__":
    main()
