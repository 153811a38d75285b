"""pFedMoE's configurations are one protocol; its lists are complete and mean what they say."""

import json
import shlex
from collections import Counter
from itertools import product
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser

from tests.configs import test_sweeps as sweeps
from tests.configs.test_sweeps import ROOT, commands, parser

__all__ = ["parser"]

FOLDER = ROOT / "configs" / "pfedmoe"
METHODS = ["", "-fml", "-fedkd", "-fedapen", "-fd", "-fedproto", "-lgfedavg", "-standalone"]
RATE = "--model.optimizer.init_args.lr"
NOT_TERMS = {"--trainer.name", "--model.seed", RATE}
# Arguments of pFedMoE that are not the paper's: what the whole is compared with.
PARTS = [("federate", "false"), ("gate", "half"), ("gate", "unnormalised")]
PART_KEYS = {f"--model.algorithm.init_args.{key}" for key, _ in PARTS}
STUDIES = ["heterogeneous", "homogeneous", "scales", "classes", "gamma"]


def read(config: str) -> Any:
    return yaml.safe_load((FOLDER / f"{config}.yaml").read_text())


def lines(study: str) -> list[tuple[str, dict[str, str]]]:
    """Of every line the method's suffix, and all other arguments."""
    found = []
    for config, given in sweeps.lines("pfedmoe", study):
        suffix = config.removeprefix("digits").removeprefix("cifar10")
        assert suffix in METHODS
        found.append((suffix, given))
    return found


def part_of(given: dict[str, str]) -> tuple[str, str] | None:
    """The argument that makes a line one of a part of pFedMoE."""
    found = [(key.rpartition(".")[2], given[key]) for key in PART_KEYS & given.keys()]
    assert len(found) <= 1
    return found[0] if found else None


def terms_of(given: dict[str, str]) -> str:
    """What a line has in common with those of other methods and seeds."""
    kept = {k: v for k, v in given.items() if k not in NOT_TERMS | PART_KEYS}
    return json.dumps(kept, sort_keys=True)


@pytest.mark.parametrize("data", ["cifar10", "digits"])
def test_the_methods_differ_in_algorithm_and_learning_rate_alone(data: str) -> None:
    found = []
    for suffix in METHODS:
        config = read(f"{data}{suffix}")
        config["model"].pop("algorithm")
        config["model"]["optimizer"]["init_args"].pop("lr")
        found.append(config)
    assert all(other == found[0] for other in found)


def test_client_k_has_cnn_k_mod_five() -> None:
    variants = [c["model"]["init_args"]["variant"] for c in read("cifar10")["model"]["clients"]]
    assert variants == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("study", STUDIES)
def test_every_setting_of_a_study_has_all_methods(study: str) -> None:
    members: dict[str, list[str]] = {}
    for suffix, given in lines(study):
        if part_of(given) is None:
            members.setdefault(terms_of(given), []).append(suffix)
    assert all(found == METHODS for found in members.values())
    names = Counter(given["--trainer.name"] for _, given in lines(study))
    assert set(names.values()) == {1}


def test_learning_rates_are_searched_alike_for_all_methods_on_seeds_of_their_own() -> None:
    members: dict[str, Counter[tuple[str, str, str]]] = {}
    for suffix, given in lines("rates"):
        assert part_of(given) is None
        run = (suffix, given[RATE], given["--model.seed"])
        members.setdefault(terms_of(given), Counter())[run] += 1
    assert len(members) == 2
    for runs in members.values():
        rates, seeds = ({run[k] for run in runs} for k in (1, 2))
        assert len(rates) >= 3
        assert runs == Counter(product(METHODS, rates, seeds))
        reported = {g.get("--model.seed", "0") for name in STUDIES for _, g in lines(name)}
        assert not seeds & reported


@pytest.mark.parametrize("config", ["cifar10", "cifar10-practical", "cifar100"])
def test_samples_and_clipping_are_those_of_the_authors_code(config: str) -> None:
    written = read(config)
    assert written["data"]["dataset"]["init_args"]["preset"] == "pfedmoe"
    assert written["trainer"]["gradient_clip_algorithm"] == "network"


def test_a_line_of_cifar100_is_of_cifar100(parser: ArgumentParser) -> None:
    words = next(w for w in commands(FOLDER / "scales.sweep") if "CIFAR100" in w)
    place = words.index("--config") + 1
    words[place] = str(ROOT / words[place])
    fit = parser.parse_args(words).fit
    assert fit.data.dataset.class_path.endswith("CIFAR100")
    assert fit.data.dataset.init_args.preset == "pfedmoe"
    assert fit.data.partition.init_args.per_client == 10
    assert [group.count for group in fit.model.clients] == [10] * 5
    assert fit.model.algorithm.class_path.endswith("PFedMoE")
    assert shlex.join(words).count("fraction") == 1
