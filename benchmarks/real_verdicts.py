"""Errors, power, costs and bias of verdicts on real runs of the federation of `lightfed judge`.

A bank of runs is trained once, and every comparison is made of runs of the bank:

- `null`: one method at seeds 0, 1, 2, ... A pair is the method at one seed against itself at
  another, so that there is no difference to find. In the first matching the pairs are seeds 2i and
  2i + 1. In each further one all runs are paired anew, at random. Of each matching, comparisons of
  20 pairs each are made, in which no run occurs twice. So the pairs of a comparison are
  independent, whereas comparisons of different matchings share runs: their number of wrong
  verdicts has the stated mean, and a spread that is somewhat above that of fresh runs.
- `worse`: the same method at a lower learning rate and the first of these seeds. With `null`, this
  is a real difference of about one point, seed by seed.
- `near`: the same at a rate close to it, so that a choice between both is nearly a coin toss.

Simulations draw accuracies from those of `null` with replacement, a run for each method and seed.
What is there of the bank is not trained again; a run takes a second of CPU time.

    python benchmarks/real_verdicts.py FOLDER [--null 240] [--repetitions 10000]
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from verdicts import CLAIMS, LOOKS, Numbers, p_values, shown_by_holm

from lightfed.lab.results.paired import POWER, Difference, mean_and_std
from lightfed.lab.results.sequential import Design

# By the name of a part of the bank, its learning rate and its number of seeds.
RATES = {"near": 0.36, "worse": 0.1, "null": 0.3}
SEEDS = {"near": 50, "worse": 60, "null": 240}
METRIC = "global/accuracy"

COMPARISONS = 200
FIXED = Design((20,))
SEQUENTIAL = Design(LOOKS)


# The bank.


def bank_of(folder: Path, seeds: dict[str, int], jobs: int = 1) -> dict[str, Numbers]:
    """Train what is missing of the bank, and return the accuracies of its parts in points.

    Args:
        folder: Where the runs are.
        seeds: The number of seeds of each part.
        jobs: How many runs at once.

    Returns:
        For each part, test and validation accuracy by seed, (2, seeds).
    """
    from lightfed.lab import sweep
    from lightfed.lab.results.run import read

    folder.mkdir(parents=True, exist_ok=True)
    values = {}
    for name, rate in RATES.items():
        words = ["fit", "--config", "lightfed:judge/digits", f"--trainer.name={name}"]
        words += [f"--trainer.default_root_dir={folder / name}", f"--model.optimizer.lr={rate}"]
        words.append("--trainer.enable_checkpointing=false")
        (wanted,) = sweep.checked([words], [name])
        every = [wanted.at(seed) for seed in range(seeds[name])]
        missing = [run for run in every if run.finished() is None]
        if sweep.run(missing, jobs=jobs, to=sys.stderr):
            raise SystemExit(f"runs of {name} failed")

        test = []
        validation = []
        for run in every:
            path = run.finished()
            assert path is not None
            result = read(path)
            test.append(100 * result.final(METRIC))
            validation.append(100 * result.final(f"validation/{METRIC}"))
        values[name] = np.array([test, validation])
    return values


# What it says.


def null_comparisons(accuracy: Numbers, number: int, most: int) -> Numbers:
    """Return the differences of comparisons of a method with itself, (number, most).

    Args:
        accuracy: The accuracies of its runs, by seed.
        number: How many comparisons.
        most: The pairs of each.
    """
    rng = np.random.default_rng(55)
    runs = np.arange(len(accuracy))
    comparisons: list[Numbers] = []
    while len(comparisons) < number:
        pairs = runs[: len(runs) // 2 * 2].reshape(-1, 2)
        differences = accuracy[pairs[:, 1]] - accuracy[pairs[:, 0]]
        for first in range(0, len(differences) - most + 1, most):
            comparisons.append(differences[first : first + most])
        runs = rng.permutation(len(accuracy))
    return np.array(comparisons[:number])


def declared(differences: Numbers, design: Design) -> NDArray[np.bool_]:
    """Return which comparisons show a difference at one of the looks."""
    p = p_values(differences, design.looks)
    return np.asarray((p <= np.array(design.boundaries())).any(axis=-1))


def drawn(accuracy: Numbers, shape: tuple[int, ...], rng: np.random.Generator) -> Numbers:
    """Return accuracies of methods that are alike, each from a real run."""
    return rng.choice(accuracy, shape)


def simulated_errors(accuracy: Numbers, design: Design, repetitions: int) -> tuple[float, float]:
    """Return how often one claim, and one or more of `CLAIMS` with a shared rival, is wrong."""
    rng = np.random.default_rng(56)
    pairs = drawn(accuracy, (repetitions, 2, design.most), rng)
    single = declared(pairs[:, 1] - pairs[:, 0], design).mean()

    wrong = 0
    part = 1000  # repetitions at a time, which is memory
    for first in range(0, repetitions, part):
        size = (min(part, repetitions - first), CLAIMS + 1, design.most)
        methods = drawn(accuracy, size, rng)
        p = p_values(methods[:, 1:] - methods[:, :1], design.looks)
        wrong += int(shown_by_holm(p, design).any(axis=1).sum())
    return float(single), wrong / repetitions


def found_and_seeds(differences: Numbers, design: Design) -> tuple[float, float]:
    """Return how many comparisons show a gain, and their mean number of seeds."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shown, seeds = design.ends(differences)
    gains = shown & (differences.mean(axis=1) > 0)
    return float(gains.mean()), float(seeds.mean())


def resampled(differences: Numbers, shape: tuple[int, int], gain: float | None) -> Numbers:
    """Return comparisons of real paired differences, drawn with replacement.

    Args:
        differences: The paired differences.
        shape: Comparisons, and seeds of each.
        gain: What is planted: their mean becomes this; None leaves it as it is.
    """
    chosen = np.random.default_rng(57).choice(differences, shape)
    return chosen if gain is None else chosen - differences.mean() + gain


def announced(gain: float, spread: float) -> int:
    """Return the number of seeds that `compare` announces for a difference of this size."""
    needed = Difference((0, 1), gain, spread).seeds_needed()
    assert needed is not None
    return needed


def bias_of_choice(first: Numbers, second: Numbers) -> dict[str, tuple[float, float]]:
    """Return by how much the shown test accuracy of a chosen rate exceeds that of a rate at random.

    Args:
        first: Test and validation accuracy of one rate by seed, (2, seeds).
        second: Those of the other.

    Returns:
        By what the choice is made on, the mean bias in points, and half of its 95 % interval.
    """
    from lightfed.lab.results.paired import t_half_width

    fair = (first[0] + second[0]) / 2
    biases = {}
    for place, samples in enumerate(("test samples", "validation samples")):
        # A tie is broken by the order of the grid, as in a search.
        takes_second = second[place] > first[place]
        shown = np.where(takes_second, second[0], first[0])
        mean, std = mean_and_std(list(shown - fair))
        biases[samples] = (mean, float(t_half_width(std, len(fair))))
    return biases


def report(bank: dict[str, Numbers], repetitions: int) -> None:
    """Print what the bank says."""
    accuracy = bank["null"][0]
    mean, std = mean_and_std(list(accuracy))
    print(f"null: {len(accuracy)} runs, {mean:.2f} % +- {std:.2f} (standard deviation)")

    comparisons = null_comparisons(accuracy, COMPARISONS, LOOKS[-1])
    for name, design in (("20 seeds", FIXED), ("until decided", SEQUENTIAL)):
        wrong = int(declared(comparisons, design).sum())
        single, family = simulated_errors(accuracy, design, repetitions)
        print(
            f"{name}: {wrong} of {COMPARISONS} real null comparisons declared; of {repetitions} "
            f"simulated {100 * single:.2f} %, one or more of {CLAIMS} {100 * family:.2f} %"
        )

    # Differences of the method and itself, planted with a gain; and of a setting known as better.
    nulls = comparisons.ravel()
    seeds = len(bank["worse"][0])
    better = accuracy[:seeds] - bank["worse"][0]
    gain, spread = mean_and_std(list(better))
    print(f"better rate: {gain:+.2f} points +- {spread:.2f} (paired, {seeds} seeds)")
    _, null_spread = mean_and_std(list(nulls))
    cases = {
        "a planted gain of one paired deviation": (nulls, null_spread, null_spread),
        "a planted gain of one point": (better, 1.0, spread),
        "the better rate as it is": (better, None, spread),
    }
    for name, (differences, planted, deviation) in cases.items():
        size = gain if planted is None else planted
        n = announced(size, deviation)
        fixed = Design((n,))
        found, _ = found_and_seeds(resampled(differences, (repetitions, n), planted), fixed)
        drawn_ones = resampled(differences, (repetitions, LOOKS[-1]), planted)
        by_looks, mean_seeds = found_and_seeds(drawn_ones, SEQUENTIAL)
        print(
            f"{name}: {n} seeds announced find it in {100 * found:.1f} % (wanted: "
            f"{100 * POWER:.0f} %); until decided finds it in {100 * by_looks:.1f} %, after "
            f"{mean_seeds:.1f} seeds"
        )

    shares = []
    for name, effect in (("null", 0.0), ("one deviation", 1.0), ("two deviations", 2.0)):
        values = resampled(nulls, (repetitions, LOOKS[-1]), effect * null_spread)
        _, mean_seeds = found_and_seeds(values, SEQUENTIAL)
        shares.append(mean_seeds / LOOKS[-1])
        print(f"{name}: {mean_seeds:.1f} of {LOOKS[-1]} seeds")
    null, one, two = shares
    print(
        f"runs of the fixed design: {(null + two) / 2:.2f} over null and two deviations, ", end=""
    )
    print(f"{(null + one) / 2:.2f} over null and one")

    number = len(bank["near"][0])
    biases = bias_of_choice(bank["null"][:, :number], bank["near"])
    for samples, (bias, half) in biases.items():
        print(f"rate chosen on {samples}: {bias:+.2f} +- {half:.2f} points, {number} repetitions")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the bank and print what it says."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the runs are, or will be")
    for flag in ("--near", "--worse", "--null"):
        seeds = SEEDS[flag.removeprefix("--")]
        what = f"runs of that part (default: {seeds})"
        parser.add_argument(flag, type=int, default=seeds, help=what)
    parser.add_argument("--repetitions", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in SEEDS}
    bank = bank_of(options.folder, sizes, options.jobs)
    report(bank, options.repetitions)


if __name__ == "__main__":
    main()
