"""`bbnode inspect --svg --html`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.daemon.artifacts.artifact import serialize
from bbnode.daemon.artifacts.picture import to_html, to_svg
from tests.daemon.views import federated


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    file = tmp_path / "a.onnx"
    file.write_bytes(serialize(federated()[0]))
    return file


def test_pictures_are_written_where_asked(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, html = tmp_path / "p.svg", tmp_path / "p.html"
    assert main(["inspect", str(artifact), "--svg", str(svg), "--html", str(html)]) == exits.OK
    assert capsys.readouterr().out == f"{svg}\n{html}\n"
    assert svg.read_text() == to_svg(federated()[0])
    assert html.read_text() == to_html(federated()[0])


def test_json_names_the_pictures(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "p.svg"
    assert main(["inspect", str(artifact), "--svg", str(svg), "--json"]) == exits.OK
    found = json.loads(capsys.readouterr().out)
    assert found["pictures"] == {"svg": str(svg)}
    assert [target["class"] for target in found["targets"]] == ["client", "server"]


def test_a_folder_that_is_not_there_is_one_line(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(artifact), "--svg", str(tmp_path / "no" / "p.svg")]) != exits.OK
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
