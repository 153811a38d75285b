"""`lightfed latency`: the time saved by waiting only for the first B of N servers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightfed.results.units import NOTHING, seconds_text
from lightfed.simulation.delays import Delay
from lightfed.utils.errors import UserError, require

if TYPE_CHECKING:  # torch takes seconds to import, and `--help` has no use for it
    from lightfed.studies.fedbcd.latency import Cloud, Estimate, Latency

_MOST = 100_000_000  # delays to draw: a minute, and 3 GiB


def latency(
    delay: Delay,
    servers: int = 10,
    devices: int = 1,
    waits: list[int] | None = None,
    samples: int = 20_000,
    seed: int = 0,
    plot: Path | None = None,
) -> None:
    """Durations of rounds that wait for the first B of N servers, relative to waiting for all.

    A server is done when the slowest of its active devices is (Wu et al., AAAI 2021, eq. (7), (8)).

    Args:
        delay: distribution of the delay of a device, in virtual seconds.
        servers: N.
        devices: active devices of a server in a round.
        waits: values of B to analyse, such as [3,5,7,10]; by default every tenth of N.
        samples: rounds of the simulation.
        seed: of the simulation.
        plot: a .png, .svg or .pdf file for the curves.
    """
    from lightfed.simulation.clock import check_waits
    from lightfed.studies.fedbcd.latency import Cloud, latencies

    asked = {"servers": (servers, 1), "devices": (devices, 1), "samples": (samples, 2)}
    for name, (value, least) in {**asked, "seed": (seed, 0)}.items():
        require(value >= least, f"--{name}", value, f"give at least {least}")
    if waits is None:
        waits = sorted({-(-servers * tenth // 10) for tenth in range(1, 11)})
    if not waits:
        raise UserError("--waits", "an empty list", f"give numbers from 1 to {servers}")
    check_waits("--waits", waits, servers)
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise UserError("--plot", f"{plot}", "name a file that ends in .png, .svg or .pdf")
    cloud = Cloud(delay, servers, devices)
    draws = cloud.draws(len(waits), samples)
    fix = f"lower --servers, --devices or --samples for at most {_MOST:,}"
    require(draws <= _MOST, "--servers", f"{draws:,} delays to draw", fix)
    found = latencies(cloud, waits, samples=samples, seed=seed)
    _print(cloud, found)
    if plot is not None:
        _draw(cloud, found, plot)


def _print(cloud: "Cloud", found: Sequence["Latency"]) -> None:
    from lightfed.drawing.summary import new_console, print_line, print_table
    from lightfed.results.tables import text_table

    rows = [
        {
            "B": str(line.wait),
            "round lasts": seconds_text(line.expected),
            "exact": f"{line.ratio:.4f}",
            "simulated": _text(line.simulated),
            "asymptotic (8)": (NOTHING if np.isnan(line.asymptotic) else f"{line.asymptotic:.4f}"),
            "in a run": _text(line.in_a_run),
        }
        for line in found
    ]
    console = new_console()
    print_line(console, _title(cloud))
    print_table(console, text_table(rows), spare=("round lasts", "asymptotic (8)"))
    print_line(console, "exact to asymptotic: E[tau_(B)] / E[tau_(N)], all servers restart")
    print_line(console, "in a run: late ones continue; mean round / E[tau_(N)]; +- standard error")


def _draw(cloud: "Cloud", found: Sequence["Latency"], path: Path) -> None:
    from lightfed.drawing.files import picture
    from lightfed.studies.fedbcd.latency_figure import latency_figure

    content = picture(latency_figure(_title(cloud), cloud.servers, found), path.suffix[1:])
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError("--plot", str(error), "name a file that can be written") from error


def _title(cloud: "Cloud") -> str:
    devices = "device" if cloud.devices == 1 else "devices"
    return f"{cloud.delay}, {cloud.servers} servers of {cloud.devices} active {devices}"


def _text(estimate: "Estimate") -> str:
    return f"{estimate.value:.4f} +- {estimate.error:.4f}"


def main(argv: Sequence[str]) -> int:
    """Run `lightfed latency`; `argv` holds the words after it."""
    from jsonargparse import ArgumentError, auto_cli

    words = list(argv)
    try:
        auto_cli(
            latency, args=words, as_positional=False, prog="lightfed latency", exit_on_error=False
        )
    except ArgumentError as error:
        from lightfed.cli.errors import parser_error

        raise parser_error(str(error), words, {"": latency}) from error
    return 0
