"""`lightfed plan` on embedded data: a thousand clients of five levels, and one of each kind."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightfed.cli.command_line import main

CONFIGS = Path(__file__).parents[3] / "configs"
Plan = Callable[..., str]
THOUSAND = "control:Digits:1_1000_{}_iid_fix_a2-b2-c2-d2-e2_bn_1_1"


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Plan:
    """Runs the command; its text, after a look that it has left nothing behind."""
    monkeypatch.chdir(tmp_path)

    def run(config: object, *words: str) -> str:
        main(["plan", "--config", str(config), *words])
        assert not (tmp_path / "runs").exists()
        return capsys.readouterr().out

    return run


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found[1])


def test_a_thousand_clients_of_five_levels_are_balanced_on_64_ranks(plan: Plan) -> None:
    text = plan(THOUSAND.format("1"), "--world-size", "64", "--rounds=1")
    assert text.startswith("HeteroFL, 1,000 clients on 64 ranks: the first round, 1,000 sessions")
    assert number(r"speed    (\S+) times", text) >= 64 / 1.05


def test_a_tenth_of_them_is_balanced_in_every_round(plan: Plan) -> None:
    text = plan(THOUSAND.format("0.1"), "--world_size=64")
    assert "a mean of the first 5 rounds, 100 sessions in each" in text
    assert number(r"speed    (\S+) times", text) >= 20


@pytest.mark.parametrize(
    "config", ["fedbcd/digits-i-async", "heterofl/prose", "pfedmoe/digits-fedkd"]
)
def test_every_rank_of_a_kind_of_configuration_has_a_line(config: str, plan: Plan) -> None:
    text = plan(CONFIGS / f"{config}.yaml", "--world-size=5", "--rounds=2")
    assert 1 <= number(r"speed    (\S+) times", text) <= 5
    assert len(re.findall(r"(?m)^\d  .*B$", text)) >= 5


def test_one_rank_is_planned_as_well(plan: Plan) -> None:
    text = plan(CONFIGS / "quickstart.yaml", "--world-size=1", "--rounds=1")
    assert number(r"speed    (\S+) times", text) == 1.0


def test_the_cluster_of_a_configuration_need_not_be_here(plan: Plan) -> None:
    words = "--world-size=4 --rounds=1 --trainer.accelerator=gpu --trainer.devices=8"
    words += " --trainer.num_nodes=2 --trainer.precision=bf16-mixed"
    assert "20 clients on 4 ranks" in plan(CONFIGS / "quickstart.yaml", *words.split())


def test_a_session_has_the_batches_that_the_trainer_allows(plan: Plan) -> None:
    words = ("--world-size=4", "--rounds=1", "--trainer.limit_train_batches")
    costs = [
        re.findall(r"(?m)^\d +\S+ +(\S+) ", plan(CONFIGS / "quickstart.yaml", *words, limit))
        for limit in ("1000", "1")
    ]
    assert len(costs[0]) == len(costs[1]) == 4
    assert costs[0] != costs[1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--world-size=0", "world_size: 0 ranks"),
        ("--world-size=21", "world_size: 21 ranks"),
        ("--world-size=4 --rounds=0", "rounds: 0"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(
    words: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    config = str(CONFIGS / "quickstart.yaml")
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--config", config, *words.split()])
    assert capsys.readouterr().err.startswith(f"lightfed: error: {line}")


def test_the_partition_says_which_density_a_client_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["partition", "--config", str(CONFIGS / "devices" / "digits-dispfl.yaml")])
    held = re.findall(r"^ *\d+ +MLP, density (\S+) ", capsys.readouterr().out, re.MULTILINE)
    assert len(held) == 50  # the first of a hundred
    assert set(held) == {"1", "0.5", "0.2"}  # all of them can train more than 0.03
