"""Errors, power and costs of the verdicts of `compare` and `study`, by simulation.

The spread of differences over seeds is that of real runs: quantiles of what the pages of
docs/studies state. Accuracies are shares of 360 test samples, as those of Digits are.

    python benchmarks/verdicts.py [--repetitions 10000]
"""

import argparse
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

from lightfed.lab.results.holm import ERROR
from lightfed.lab.results.sequential import SPENDING, Design

# Standard deviations of paired differences over seeds, in points: the smallest, the quantiles at
# 10, 25, 50, 75 and 90 %, and the largest of 91, each from 5 seeds.
SPREADS = (0.29, 0.91, 2.05, 4.08, 6.03, 8.73, 21.1)
TEST_SAMPLES = 360
LOOKS = (5, 8, 12, 16, 20)

# The largest of the studies of the circle: claims that share one rival.
CLAIMS = 21

Numbers = NDArray[np.float64]


def accuracies(studies: int, methods: int, seeds: int, rng: np.random.Generator) -> Numbers:
    """Return accuracies of methods that are alike, in points, (studies, methods, seeds)."""
    # The difference of two methods has the drawn spread.
    spread = rng.choice(SPREADS, (studies, 1, 1)) / math.sqrt(2)
    values = 80 + spread * rng.standard_normal((studies, methods, seeds))
    step = 100 / TEST_SAMPLES
    return np.round(values / step) * step


def p_values(differences: Numbers, looks: Sequence[int]) -> Numbers:
    """Return the p value of each look, (..., looks), of differences, (..., seeds)."""
    found = []
    for n in looks:
        seen = differences[..., :n]
        mean = seen.mean(axis=-1)
        error = seen.std(axis=-1, ddof=1) / math.sqrt(n)
        # Without any difference there is no t, and nothing is shown.
        t = np.divide(mean, error, out=np.zeros_like(mean), where=error > 0)
        found.append(2 * stdtr(n - 1, -np.abs(t)))
    return np.stack(found, axis=-1)


def shown_by_holm(p: Numbers, design: Design) -> NDArray[np.bool_]:
    """Return which claims of each study are shown after the correction.

    Args:
        p: P values, (studies, claims, looks).
        design: The looks.
    """
    number = p.shape[1]
    shown = np.zeros(p.shape[:2], dtype=bool)
    for left in range(number, 0, -1):
        # A claim that is shown at this level is shown if as many are shown at stricter ones.
        passes = (p <= np.array(design.boundaries(ERROR / left))).any(axis=-1)
        may_go_on = shown.sum(axis=1) >= number - left
        shown |= passes & may_go_on[:, None]
    return shown


def main() -> None:
    """Print the errors, and then power and seeds by the size of the difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=10_000)
    repetitions = parser.parse_args().repetitions

    fixed = Design((5,))
    designs = {"5 seeds": fixed, "20 seeds": Design((20,))}
    for name in SPENDING:
        designs[f"until decided, {name}"] = Design(LOOKS, name)

    print(f"wrongly shown, {repetitions} repetitions: one claim; one or more of {CLAIMS} by Holm")
    for name, design in designs.items():
        # The same draws for all designs.
        rng = np.random.default_rng(55)
        pairs = accuracies(repetitions, 2, design.most, rng)
        p = p_values(pairs[:, 1] - pairs[:, 0], design.looks)
        single = (p <= np.array(design.boundaries())).any(axis=-1).mean()

        methods = accuracies(repetitions, CLAIMS + 1, design.most, rng)
        p = p_values(methods[:, 1:] - methods[:, :1], design.looks)
        family = shown_by_holm(p, design).any(axis=1).mean()
        print(f"{name:32} {100 * single:5.2f} %  {100 * family:5.2f} %")

    effects = (0.0, 0.5, 0.66, 1.0, 1.5, 2.0, 3.0)
    print("found, and mean seeds, by the difference in standard deviations of paired differences")
    print(f"{'':32} " + " ".join(f"{effect:>12g}" for effect in effects))
    for name, design in designs.items():
        cells = []
        for effect in effects:
            found, seeds = design.simulated(effect, repetitions=repetitions)
            cells.append(f"{100 * found:5.1f} % {seeds:4.1f}")
        print(f"{name:32} " + " ".join(f"{cell:>12}" for cell in cells))
    for name, design in designs.items():
        print(f"{name}: finds {design.detectable():.2f} standard deviations in 80 %")


if __name__ == "__main__":
    main()
