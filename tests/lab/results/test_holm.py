"""Claims that are corrected together, and pairs that differ in nothing."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.special import stdtr

from lightfed.lab.results import holm, verdicts
from lightfed.lab.results.claims import Question, answered
from lightfed.lab.results.groups import Group
from lightfed.lab.results.paired import Difference
from lightfed.lab.results.run import read
from tests.lab.report.make_run import ENVIRONMENT, write_run

METRIC = "global/accuracy"


def group(
    folder: Path, name: str, finals: Sequence[float], losses: Sequence[float] = (1.0,) * 20
) -> Group:
    """A method with a run of two rounds for each seed, whose accuracy ends as given."""
    runs = []
    for seed, final in enumerate(finals):
        place = write_run(
            folder / f"{name}{seed}",
            metrics={METRIC: (0.1, final), "train_loss": (2.0, losses[seed])},
            environment={**ENVIRONMENT, "seed": seed, "rounds": 2},
            evaluations=None,
            counts=None,
        )
        runs.append(read(place))
    return Group(name, tuple(runs))


def test_the_smallest_p_value_is_multiplied_by_the_number_of_claims() -> None:
    """The example of R's p.adjust: c(.01, .02, .03, .04, .05), holm."""
    assert holm.corrected([0.01, 0.02, 0.03, 0.04, 0.05]) == pytest.approx(
        [0.05, 0.08, 0.09, 0.09, 0.09]
    )
    # In any order, and never more than 1.
    assert holm.corrected([0.6, 0.001, 0.3]) == pytest.approx([0.6, 0.003, 0.6])
    assert holm.corrected([0.9, 0.9]) == [1.0, 1.0]
    assert holm.corrected([]) == []


def test_a_claim_without_a_result_counts_as_not_shown() -> None:
    assert holm.corrected([math.nan, 0.02]) == [1.0, 0.04]
    assert holm.corrected([0.02], claims=21) == [pytest.approx(0.42)]


def test_the_p_value_is_that_of_the_paired_t_test() -> None:
    found = Difference.of({0: 0.51, 1: 0.92, 2: 0.13}, {0: 0.5, 1: 0.9, 2: 0.1})
    t = found.mean / (found.std / math.sqrt(3))
    assert found.p == pytest.approx(2 * stdtr(2, -t))
    assert Difference.of({0: 1.0, 1: 1.0}, {0: 0.0, 1: 0.0}).p == 0.0
    assert Difference.of({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0}).p == 1.0
    assert math.isnan(Difference.of({0: 1.0}, {0: 0.0}).p)


def test_the_p_value_is_below_5_percent_where_the_interval_excludes_0() -> None:
    rng = np.random.default_rng(2)
    for n in (2, 3, 5, 9):
        for values in rng.normal(0.8, 1.0, (50, n)):
            found = Difference.of(dict(enumerate(values)), dict.fromkeys(range(n), 0.0))
            assert (found.p < holm.ERROR) == (found.verdict(1) != "not shown")


def test_21_claims_that_share_a_rival_are_wrongly_shown_in_one_study_of_twenty() -> None:
    """Without the correction, in nearly every second study."""
    rng = np.random.default_rng(55)
    studies, claims, seeds = 10_000, 21, 5
    values = rng.standard_normal((studies, claims + 1, seeds))
    differences = values[:, 1:] - values[:, :1]
    t = differences.mean(-1) / (differences.std(-1, ddof=1) / math.sqrt(seeds))
    p_values = 2 * stdtr(seeds - 1, -np.abs(t))

    wrong_studies = sum(min(holm.corrected(p_of_study)) <= holm.ERROR for p_of_study in p_values)
    assert wrong_studies / studies <= 0.055
    assert (p_values.min(axis=1) <= 0.05).mean() > 0.3


def test_a_claim_that_is_shown_by_itself_alone_says_so(tmp_path: Path) -> None:
    rival = group(tmp_path, "rival", (0.5, 0.5, 0.5, 0.5))
    close = group(tmp_path, "close", (0.51, 0.53, 0.54, 0.52))  # p 0.03
    clear = group(tmp_path, "clear", (0.81, 0.82, 0.81, 0.815))
    others = [group(tmp_path, f"x{i}", (0.51, 0.48, 0.52, 0.49)) for i in range(2)]

    (alone,) = answered([Question(close, rival, METRIC)])
    assert alone.verdict == "better"
    claims = answered([Question(method, rival, METRIC) for method in (close, clear, *others)])
    assert [claim.verdict for claim in claims] == ["not shown", "better", "not shown", "not shown"]
    assert claims[0].alone == "better"
    assert "not shown; by itself it would be: holds; a gain above" in claims[0].line
    assert claims[1].answer == "holds"
    # The line of a comparison of several says the same.
    line = verdicts.verdict(rival, close, METRIC, p=claims[0].p)
    assert line.startswith(f"no difference between {close.name} and {rival.name} is shown: ")
    assert f"corrected p {claims[0].p:.3f}" in line


def test_not_shown_says_what_is_excluded(tmp_path: Path) -> None:
    a = group(tmp_path, "a", (0.50, 0.50, 0.50))
    b = group(tmp_path, "b", (0.51, 0.50, 0.502))
    found = Difference.of(b.finals(METRIC), a.finals(METRIC))
    gain, loss = found.excluded(1)
    assert (gain, loss) == (found.high, -found.low)
    assert found.excluded(-1) == (loss, gain)
    assert gain is not None
    assert loss is not None
    said = (
        f"; a gain above {100 * gain:.2f} points and a deterioration above {100 * loss:.2f} points "
        "are excluded (95 %)"
    )
    assert said in verdicts.verdict(a, b, METRIC)
    # Only the end that is left of a difference that is shown.
    assert Difference.of({0: 1.0, 1: 1.1}, {0: 0.0, 1: 0.0}).excluded(1)[1] is None


def test_a_pair_without_a_difference_is_identical_only_if_all_metrics_are(tmp_path: Path) -> None:
    a = group(tmp_path, "a", (0.5, 0.6, 0.7))
    b = group(tmp_path, "b", (0.5, 0.6, 0.7))
    luck = group(tmp_path, "luck", (0.5, 0.6, 0.7), losses=(1.0, 1.0, 0.9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        line = verdicts.verdict(a, b, METRIC)
        (claim,) = answered([Question(b, a, METRIC)])
    assert line.startswith("identical runs: b and a have the same metrics in every round, 3 seeds")
    assert claim.verdict == "identical runs"
    assert claim.line.startswith("b is better than a in global accuracy: identical runs, ")
    assert "nan" not in line + claim.line

    line = verdicts.verdict(a, luck, METRIC)
    assert line.startswith("no difference between luck and a is shown: ")
    assert line.endswith("; the value is the same in every seed")
    assert verdicts.answer_of(a, luck, METRIC)[1] == "not shown"


def test_one_seed_of_identical_runs_is_said(tmp_path: Path) -> None:
    a = group(tmp_path, "a", (0.5,))
    b = group(tmp_path, "b", (0.5,))
    assert verdicts.answer_line(a, b, METRIC).startswith("identical runs: ")
