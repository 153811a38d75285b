"""Errors, power, costs and bias of verdicts on real runs of the federation of `lightfed judge`.

A bank of runs is trained once, and every comparison is made of runs of the bank:

- `null`: one method at seeds 0, 1, ..., 399. A pair is the method at one seed against itself at
  another one, so that there is no difference to find. In matching 0 the pairs are seeds 2i and
  2i + 1, in each further matching all runs are paired anew at random. Every matching gives 10
  comparisons of 20 pairs, and no two pairs of a matching share a run. So the pairs of a comparison
  are independent, whereas comparisons of different matchings share runs: their number of wrong
  verdicts has the stated mean, and a spread somewhat above that of independent comparisons.
- `worse`: the same method at a worse learning rate and seeds 0, 1, ..., 99: with `null`, a real
  difference of about one point.
- `near`: at another rate that is as good, and seeds 0, 1, ..., 49.

The bank is 550 runs of a second of CPU time; what is there is not trained again.

    python benchmarks/real_verdicts.py FOLDER
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

# By the name of a part of the bank, its learning rate and its number of seeds.
BANK = {"near": (0.36, 50), "worse": (0.1, 60), "null": (0.3, 240)}
METRIC = "global/accuracy"


def bank_of(folder: Path, sizes: dict[str, tuple[float, int]], jobs: int) -> dict[str, Numbers]:
    """Train what is missing of the bank, and return the accuracies of its parts in points.

    Args:
        folder: Where the runs are.
        sizes: The learning rate and the number of seeds of each part.
        jobs: How many runs at once.

    Returns:
        For each part, test and validation accuracy by seed, (2, seeds).
    """
    from lightfed.lab import sweep
    from lightfed.lab.results.run import read

    folder.mkdir(parents=True, exist_ok=True)
    values = {}
    for name, (rate, seeds) in sizes.items():
        words = ["fit", "--config", "lightfed:judge/digits", f"--trainer.name={name}"]
        words += [f"--trainer.default_root_dir={folder / name}", f"--model.optimizer.lr={rate}"]
        words.append("--trainer.enable_checkpointing=false")
        (wanted,) = sweep.checked([words], [name])
        every = [wanted.at(seed) for seed in range(seeds)]
        missing = [run for run in every if run.finished() is None]
        if sweep.run(missing, jobs=jobs, to=sys.stderr):
            raise SystemExit(f"runs of {name} failed")

        columns = [[], []]  # type: list[list[float]]
        for run in every:
            path = run.finished()
            assert path is not None
            result = read(path)
            columns[0].append(100 * result.final(METRIC))
            columns[1].append(100 * result.final(f"validation/{METRIC}"))
        values[name] = np.array(columns)
    return values


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the bank and print what it says."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the runs are, or will be")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    bank = bank_of(options.folder, BANK, options.jobs)
    for name, values in bank.items():
        print(name, values.shape, values.mean(axis=1), values.std(axis=1, ddof=1))


if __name__ == "__main__":
    main()
