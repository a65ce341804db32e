"""Papers' experiments: each is listed with a page that shows its figure, and its claims hold."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from bbnode.ir.errors import EnvironmentFault
from reproduce import __main__ as command
from reproduce import experiment
from reproduce.experiment import Claim, Experiment, Result, Table

NAMES = experiment.names()


@pytest.mark.parametrize("name", NAMES)
def test_its_page_shows_its_figure_and_the_command(name: str) -> None:
    made = experiment.load(name)
    page = experiment.ROOT / made.page
    text = page.read_text("utf-8")
    assert f"](figures/{name}.svg)" in text
    assert f"./scripts/reproduce {name}" in text
    assert (experiment.FIGURES / f"{name}.svg").is_file()
    assert made.paper
    assert "\n" not in made.says


def test_there_is_no_figure_of_an_experiment_that_is_not() -> None:
    assert {path.stem for path in experiment.FIGURES.glob("*.svg")} == set(NAMES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_its_claims_hold(name: str) -> None:
    try:
        result = experiment.load(name).run(0)
    except EnvironmentFault as error:  # a text or a library that no extra brings
        pytest.skip(str(error))
    assert result.claims
    assert [f"{each.text} ({each.figures})" for each in result.claims if not each.holds] == []


# Those of some seconds; the others are run with `--seeds 5` by hand.
QUICK = ("boyd2006", "jelasity2005", "kmeans1982", "moshpit2021", "oort2021")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.parametrize("name", QUICK)
def test_its_claims_hold_for_other_seeds(name: str, seed: int) -> None:
    claims = experiment.load(name).run(seed).claims
    assert [f"{each.text} ({each.figures})" for each in claims if not each.holds] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in NAMES if experiment.load(name).on_daemons])
def test_its_claims_hold_on_daemons(name: str) -> None:
    run = experiment.load(name).on_daemons
    assert run is not None
    claims = run(0).claims
    assert claims
    assert [f"{each.text} ({each.figures})" for each in claims if not each.holds] == []


@pytest.fixture
def coin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for an experiment, whose claim holds for even seeds."""

    def run(seed: int) -> Result:
        table = Table("coin", ["seed", "share", "paper"], [[seed, seed / 3, None]])
        claims = [Claim("it is even", seed % 2 == 0, f"seed {seed}")]
        return Result([table], claims, lambda figure: figure.subplots().plot([0, seed]))

    made = Experiment(paper="Nobody, 2000", says="a coin", page="README.md", run=run)
    monkeypatch.setattr(command, "load", lambda _: made)


@pytest.mark.parametrize(("seed", "code", "said"), [(2, 0, "holds: "), (1, 1, "FAILS: ")])
def test_the_exit_code_says_if_every_claim_holds(
    coin: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int, code: int, said: str
) -> None:
    files = [tmp_path / "a.json", tmp_path / "a.svg", tmp_path / "b.svg"]
    for figure in files[1:]:
        arguments = ["coin", "--seed", str(seed), "--json", str(files[0]), "--figure", str(figure)]
        assert command.main(arguments) == code
    assert f"{said}it is even (seed {seed})" in capsys.readouterr().out
    assert json.loads(files[0].read_text())["tables"][0]["rows"] == [[seed, seed / 3, None]]
    assert files[1].read_bytes() == files[2].read_bytes()


def test_many_seeds_give_mean_and_error_and_each_has_to_hold(
    coin: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["coin", "--seeds", "3", "--figure", str(tmp_path / "a.svg")]
    assert command.main(arguments) == 1
    shown = capsys.readouterr().out
    assert "2 of 3" in shown
    assert "FAILS with seed 1: it is even (seed 1)" in shown


def test_numbers_are_summed_up_over_seeds() -> None:
    results = [
        Result([], [experiment.within("a share", value, 0.0, 2.0)], lambda _: None)
        for value in (1.0, 2.0, 3.0)
    ]
    ((text, held, mean, error),) = experiment.over_seeds(results).rows
    assert (text, held, mean) == ("a share", "2 of 3", 2.0)
    assert error == pytest.approx(1 / 3**0.5)


@pytest.mark.parametrize(("value", "holds"), [(1.3, True), (1.5, False), (0.5, False)])
def test_a_number_is_near_what_is_expected_by_its_deviation(value: float, holds: bool) -> None:
    assert experiment.near("a mean", value, 1.0, 0.1).holds is holds


@pytest.mark.parametrize(
    ("off", "holds"), [(0.0, True), (0.5, True), (30.0, False), (math.inf, False)]
)
def test_a_number_of_nodes_is_a_draw_of_numpys_distribution(off: float, holds: bool) -> None:
    pairs = [(10.0 + off, [9.0, 10.0, 11.0]), (20.0 + off, [19.5, 20.0, 20.5])]
    assert experiment.beside("a mean", pairs).holds is holds


@pytest.mark.parametrize(("times", "holds"), [(1.0, True), (1.1, True), (9.0, False)])
def test_and_so_is_a_ratio_of_them(times: float, holds: bool) -> None:
    pairs = [(10.0 * times, [9.0, 10.0, 11.0]), (1.0 * times, [0.9, 1.0, 1.1])]
    assert experiment.beside("rounds", pairs, ratio=True).holds is holds


def test_the_rounds_of_methods_by_hand_are_claims() -> None:
    def run(_: int) -> Result:
        return Result([], [], lambda _: None)

    made = Experiment(paper="p", says="s", page="README.md", run=run, methods=["FedAvg", "Median"])
    first, second = made.run(0).claims
    assert (first.holds, second.holds) == (True, True)
    assert first.text == "FedAvg, by hand: the mean of clients' weights, by numbers of examples"


def test_an_unknown_name_is_refused_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["mcmahan2071"]) == 2
    assert "error: no experiment 'mcmahan2071'" in capsys.readouterr().err


def test_an_experiment_that_has_no_run_on_daemons_says_which_have(
    coin: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["coin", "--daemons"]) == 2
    assert "coin runs in the simulator alone; --daemons is of" in capsys.readouterr().err


def test_the_page_of_methods_lists_each() -> None:
    text = (experiment.ROOT / "docs" / "methods" / "README.md").read_text("utf-8")
    listed = re.findall(r"^\| `(\w+)` .*\]\((\S+)\) \|$", text, re.MULTILINE)
    pages = [(name, Path(experiment.load(name).page).name) for name in NAMES]
    assert sorted(listed) == pages


def test_a_row_that_lacks_a_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="has not one cell a column"):
        Table("t", ["a", "b"], [[1]])
