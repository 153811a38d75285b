"""How long a round lasts that waits for the first B of N servers.

    python -m lightfed.lab.studies.latency --delay Exponential --delay.mean 1

Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global and Personalized Models",
AAAI 2021, arXiv:2012.13900, "latency analysis": the ratio r_{B,N} = E[tau_(B)] / E[tau_(N)] of the
order statistics of the servers' i.i.d. delays tau_n (eq. (7)), and its limit for many servers
(eq. (8)). Here tau_n is the largest delay of a server's active devices.

In eq. (7) every server restarts in every round. In a run late servers continue: a round is shorter
with nearly constant delays, and longer with heavy tails, because stragglers accumulate.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from lightfed.devices.delays import Delay
from lightfed.lab.drawing.summary import new_console, print_line, print_table
from lightfed.lab.results.text import NOTHING, counted, seconds_text
from lightfed.utils.errors import UserError

KINDS = ("exact", "asymptotic (8)", "in a run")

# Limits that keep the command at a few seconds.
_MOST_DEVICES = 10_000  # of all servers
_MOST_WAITS = 1_000  # values of B

# A run has this many batches of consecutive rounds, after one that does not count.
_BATCHES = 20
_ROUNDS_OF_A_BATCH = 100


@dataclass(frozen=True)
class Cloud:
    """Servers with devices whose delays are drawn independently.

    Attributes:
        delay: The distribution of the delay of a device, in virtual seconds.
        servers: Their number, N.
        devices: The number of active devices of each server.
    """

    delay: Delay
    servers: int
    devices: int

    @property
    def title(self) -> str:
        return f"{self.delay}, {self.servers} servers of {counted(self.devices, 'active device')}"

    def expected(self, wait: int) -> float:
        """Return E[tau_(B)], in virtual seconds, for B = `wait`."""
        return self.delay.expected(wait, self.servers, self.devices)

    def asymptotic(self, wait: int) -> float:
        """Return the limit of eq. (8) for B = `wait`.

        It is r_{B,N} <~ F^-1(B/N) / F^-1(1 - 1/N), where F is the distribution of tau_n.

        Returns:
            The limit; NaN for B = N.
        """
        if wait == self.servers:
            return math.nan
        # The largest of m delays is below t with probability P(T <= t) ** m.
        share_waited_for = (wait / self.servers) ** (1 / self.devices)
        share_of_all_but_one = (1 - 1 / self.servers) ** (1 / self.devices)
        last = self.delay.quantile(share_of_all_but_one)
        return self.delay.quantile(share_waited_for) / last if last > 0 else math.nan

    def in_a_run(self, wait: int, rng: np.random.Generator) -> np.ndarray:
        """Draw a run in which late servers continue, for B = `wait`.

        Returns:
            The mean duration of a round in virtual seconds, and its standard error, of shape (2,).
            The error is that of the means of batches of consecutive rounds.
        """
        from lightfed.devices.event_clock import VirtualClock  # after the command is parsed: torch

        clock = VirtualClock(self.servers, wait)
        ends = []
        for _ in range((_BATCHES + 1) * _ROUNDS_OF_A_BATCH):
            delays = self.delay.draw(rng, (len(clock.idle), self.devices))
            clock.advance(delays.max(axis=-1))
            ends.append(clock.now)

        # The first batch is left out, because all servers begin it at the same time.
        ends_of_batches = ends[_ROUNDS_OF_A_BATCH - 1 :: _ROUNDS_OF_A_BATCH]
        means = np.diff(ends_of_batches) / _ROUNDS_OF_A_BATCH
        return np.array([means.mean(), means.std(ddof=1) / math.sqrt(_BATCHES)])


def latencies(cloud: Cloud, waits: Sequence[int], *, seed: int) -> pd.DataFrame:
    """Return the analysis, a row for each value of B.

    Args:
        cloud: The servers.
        waits: The values of B.
        seed: The seed of the rounds in which late servers continue.

    Returns:
        Columns are `wait`, which is B, the `seconds` of a round, and its duration of all KINDS
        relative to E[tau_(N)], NaN where (8) does not apply; `error` is that of the last kind.
    """
    from lightfed.utils.rng import numpy_generator

    full = cloud.expected(cloud.servers)
    rows = []
    for wait in waits:
        mean, error = cloud.in_a_run(wait, numpy_generator(seed, "latency/run", round=wait)) / full
        seconds = cloud.expected(wait)
        rows.append((wait, seconds, seconds / full, cloud.asymptotic(wait), mean, error))
    return pd.DataFrame(rows, columns=pd.Index(["wait", "seconds", *KINDS, "error"]))


def latency(
    delay: Delay,
    servers: int = 10,
    devices: int = 1,
    waits: list[int] | None = None,
    seed: int = 0,
) -> None:
    """Durations of rounds that wait for the first B of N servers, relative to waiting for all.

    A server is done when the slowest of its active devices is (Wu et al., AAAI 2021, eq. (7), (8)).

    Args:
        delay: distribution of the delay of a device, in virtual seconds.
        servers: N.
        devices: active devices of a server in a round.
        waits: values of B to analyse, such as [3,5,7,10]; by default every tenth of N.
        seed: of the rounds in which late servers continue.
    """
    from lightfed.devices.event_clock import check_waits

    _check_sizes(servers, devices, seed)
    if waits is not None and len(waits) > _MOST_WAITS:
        raise UserError("--waits", f"{len(waits)} values", "give fewer")
    if not waits:
        waits = sorted({math.ceil(servers * tenth / 10) for tenth in range(1, 11)})
    check_waits("--waits", waits, servers)

    cloud = Cloud(delay, servers, devices)
    table = latencies(cloud, waits, seed=seed)
    cells = {
        "B": table["wait"].astype("str"),
        "round lasts": table["seconds"].map(seconds_text),
    }
    for kind in KINDS:
        cells[kind] = table[kind].map("{:.4f}".format).replace("nan", NOTHING)
    cells["in a run"] += table["error"].map(" +- {:.4f}".format)

    console = new_console()
    print_line(console, cloud.title)
    print_table(console, pd.DataFrame(cells))
    print_line(console, "exact to asymptotic: E[tau_(B)] / E[tau_(N)], all servers restart")
    print_line(console, "in a run: late ones continue; mean round / E[tau_(N)]; +- standard error")


def _check_sizes(servers: int, devices: int, seed: int) -> None:
    """Refuse numbers that are too small, or so large that the command would take minutes."""
    least_of = {"servers": (servers, 1), "devices": (devices, 1), "seed": (seed, 0)}
    for name, (value, least) in least_of.items():
        if value < least:
            raise UserError(f"--{name}", str(value), f"give at least {least}")

    found = f"{servers} servers of {devices} devices"
    fix = f"give at most {_MOST_DEVICES} in all"
    if devices > _MOST_DEVICES:
        raise UserError("--devices", found, fix)
    if servers * devices > _MOST_DEVICES:
        raise UserError("--servers", found, fix)


def main(words: Sequence[str]) -> None:
    """Print the table of `latency`, with its parameters as options."""
    from jsonargparse import ArgumentError, auto_cli

    try:
        auto_cli(
            latency, args=[*words], as_positional=False, exit_on_error=False,
            prog="python -m lightfed.lab.studies.latency",
        )  # fmt: skip
    except ArgumentError as error:
        from lightfed.cli.errors import parser_error  # torch, which `--help` does not need

        raise parser_error(str(error), words, {"": latency}) from error


if __name__ == "__main__":
    from lightfed.cli.command_line import run_program

    run_program(partial(main, sys.argv[1:]))
