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
from lightfed.lab.results.text import NOTHING, seconds_text
from lightfed.utils.errors import require

KINDS = ("exact", "asymptotic (8)", "in a run")
_MOST, _MOST_WAITS = 10_000, 1_000  # devices of all servers, and values of B: seconds of time
_BATCHES, _ROUNDS = 20, 100  # of consecutive rounds in a run, and in a batch


@dataclass(frozen=True)
class Cloud:
    """N servers with so many active devices each, whose delays are in virtual seconds."""

    delay: Delay
    servers: int
    devices: int

    @property
    def title(self) -> str:
        devices = f"{self.devices} active device{'s' * (self.devices > 1)}"
        return f"{self.delay}, {self.servers} servers of {devices}"

    def expected(self, wait: int) -> float:
        """E[tau_(B)] in virtual seconds."""
        return self.delay.expected(wait, self.servers, self.devices)

    def asymptotic(self, wait: int) -> float:
        """Eq. (8): r_{B,N} <~ F^-1(B/N) / F^-1(1 - 1/N), F that of tau_n; NaN for B = N."""
        if wait == self.servers:
            return math.nan
        # the largest of m delays is below t with probability P(T <= t) ** m
        shares = np.array([wait / self.servers, 1 - 1 / self.servers]) ** (1 / self.devices)
        first, last = map(self.delay.quantile, shares)
        return first / last if last > 0 else math.nan

    def in_a_run(self, wait: int, rng: np.random.Generator) -> np.ndarray:
        """Mean virtual seconds of a round where late servers continue, and its error, (2,).

        The error is that of means of consecutive rounds, without the first batch of them.
        """
        from lightfed.devices.event_clock import VirtualClock  # after the command is parsed: torch

        clock = VirtualClock(self.servers, wait)
        ends = []
        for _ in range((_BATCHES + 1) * _ROUNDS):
            clock.advance(self.delay.draw(rng, (len(clock.idle), self.devices)).max(axis=-1))
            ends.append(clock.now)
        means = np.diff(ends[_ROUNDS - 1 :: _ROUNDS]) / _ROUNDS
        return np.array([means.mean(), means.std(ddof=1) / math.sqrt(_BATCHES)])


def latencies(cloud: Cloud, waits: Sequence[int], *, seed: int) -> pd.DataFrame:
    """The analysis: for each B (`wait`) the `seconds` of a round, and its durations of all KINDS.

    These are relative to E[tau_(N)], NaN where (8) does not apply; `error` is that of the last one.
    """
    from lightfed.utils.rng import numpy_generator

    full = cloud.expected(cloud.servers)
    rows = []
    for wait in waits:
        run = cloud.in_a_run(wait, numpy_generator(seed, "latency/run", round=wait)) / full
        seconds = cloud.expected(wait)
        rows.append((wait, seconds, seconds / full, cloud.asymptotic(wait), *run))
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
    for name, value, least in (("servers", servers, 1), ("devices", devices, 1), ("seed", seed, 0)):
        require(value >= least, f"--{name}", value, f"give at least {least}")
    for name, value in (("servers", servers), ("devices", devices), ("servers", servers * devices)):
        found = f"{servers} servers of {devices} devices"
        require(value <= _MOST, f"--{name}", found, f"give at most {_MOST} in all")
    require(len(waits or ()) <= _MOST_WAITS, "--waits", f"{len(waits or ())} values", "give fewer")
    from lightfed.devices.event_clock import check_waits

    waits = waits or sorted({-(-servers * tenth // 10) for tenth in range(1, 11)})
    check_waits("--waits", waits, servers)
    cloud = Cloud(delay, servers, devices)
    table = latencies(cloud, waits, seed=seed)
    cells = {name: table[name].map("{:.4f}".format).replace("nan", NOTHING) for name in KINDS}
    cells["in a run"] += table["error"].map(" +- {:.4f}".format)
    named = {"B": table["wait"].astype("str"), "round lasts": table["seconds"].map(seconds_text)}
    console = new_console()
    print_line(console, cloud.title)
    print_table(console, pd.DataFrame(named | cells))
    print_line(console, "exact to asymptotic: E[tau_(B)] / E[tau_(N)], all servers restart")
    print_line(console, "in a run: late ones continue; mean round / E[tau_(N)]; +- standard error")


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
