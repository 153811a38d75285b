"""pFedMoE's configurations are one protocol; its lists are complete and mean what they say."""

import json
import shlex
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser

from tests.test_sweeps import ROOT, commands, parser

__all__ = ["parser"]

FOLDER = ROOT / "configs" / "pfedmoe"
METHODS = ["", "-fml", "-fedkd", "-fedapen", "-fd", "-fedproto", "-lgfedavg", "-standalone"]
DATA = ["cifar10", "cifar100"]


def read(config: str) -> Any:
    return yaml.safe_load((FOLDER / f"{config}.yaml").read_text())


def lines(study: str) -> list[tuple[str, dict[str, str]]]:
    """Of every line the method's suffix, and all arguments."""
    found = []
    for words in commands(FOLDER / f"{study}.sweep"):
        given = dict(zip(words[1::2], words[2::2], strict=True))
        stem = Path(given["--config"]).stem
        suffix = stem.removeprefix("digits").removeprefix("cifar10")
        assert Path(given["--config"]) == Path(f"configs/pfedmoe/{stem}.yaml")
        assert suffix in METHODS
        found.append((suffix, given))
    return found


def data_of(given: dict[str, str]) -> str:
    """The run's name begins with it."""
    data = "cifar100" if given.get("--data.dataset") == "CIFAR100" else "cifar10"
    assert given["--trainer.name"].split("-")[0] == data
    return data


@pytest.mark.parametrize("data", ["cifar10", "digits"])
def test_the_methods_differ_in_nothing_but_the_algorithm(data: str) -> None:
    ours = read(data)
    ours["model"].pop("algorithm")
    for suffix in METHODS[1:]:
        other = read(f"{data}{suffix}")
        other["model"].pop("algorithm")
        assert other == ours


def test_client_k_has_cnn_k_mod_five() -> None:
    variants = [c["model"]["init_args"]["variant"] for c in read("cifar10")["model"]["cohorts"]]
    assert variants == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("study", ["heterogeneous", "homogeneous", "scales", "classes", "gamma"])
def test_every_setting_of_a_study_has_all_methods(study: str) -> None:
    members: dict[str, list[str]] = {}
    for suffix, given in lines(study):
        rest = {k: v for k, v in given.items() if k not in ("--config", "--trainer.name")}
        assert data_of(given) in DATA
        members.setdefault(json.dumps(rest), []).append(suffix)
    assert all(found == METHODS for found in members.values())
    names = Counter(given["--trainer.name"] for _, given in lines(study))
    assert set(names.values()) == {1}


def test_scales_are_those_of_the_paper_with_ten_clients_a_round() -> None:
    found = set()
    for _, given in lines("scales") + lines("homogeneous") + lines("heterogeneous"):
        counts = [c["count"] for c in json.loads(given.get("--model.cohorts", "[]"))] or [2] * 5
        clients = sum(counts)
        assert len(set(counts)) == 1
        assert clients * float(given.get("--model.fraction", 1)) == pytest.approx(10)
        found.add((data_of(given), clients, len(counts)))
    assert found == set(product(DATA, (10, 50, 100), (1, 5)))


def test_robustness_is_over_the_lists_of_the_paper() -> None:
    classes = {(data_of(g), int(g["--data.partition.per_client"])) for _, g in lines("classes")}
    assert classes == {("cifar10", c) for c in (2, 4, 6, 8, 10)} | {
        ("cifar100", c) for c in (10, 30, 50, 70, 90, 100)
    }
    gammas = set()
    for _, given in lines("gamma"):
        partition = json.loads(given["--data.partition"])
        assert partition["class_path"] == "Dirichlet"
        assert partition["init_args"]["balance"]
        gammas.add((data_of(given), partition["init_args"]["alpha"]))
    assert gammas == set(product(DATA, (0.1, 0.2, 0.3, 0.4, 0.5)))


def test_embedded_runs_are_of_three_seeds() -> None:
    found = Counter((suffix, given["--model.seed"]) for suffix, given in lines("embedded"))
    # two classes with much and with little data, and eight classes
    assert found == dict.fromkeys(product(METHODS, "012"), 3)


def test_embedded_runs_of_a_protocol_are_on_equal_terms() -> None:
    own = {"--config", "--trainer.name", "--model.seed"}
    terms = [json.dumps({k: v for k, v in g.items() if k not in own}) for _, g in lines("embedded")]
    assert list(Counter(terms).values()) == [3 * len(METHODS)] * 3


def test_a_line_of_cifar100_is_of_cifar100(parser: ArgumentParser) -> None:
    words = next(w for w in commands(FOLDER / "scales.sweep") if "CIFAR100" in w)
    place = words.index("--config") + 1
    words[place] = str(ROOT / words[place])
    fit = parser.parse_args(words).fit
    assert fit.data.dataset.class_path.endswith("CIFAR100")
    assert fit.data.dataset.init_args.preset == "dispfl"
    assert fit.data.partition.init_args.per_client == 10
    assert [cohort.count for cohort in fit.model.cohorts] == [10] * 5
    assert fit.model.algorithm.class_path.endswith("PFedMoE")
    assert shlex.join(words).count("fraction") == 1
