"""Operators of a step of a pack, with room for packs of large networks as well.

    python benchmarks/packed_operators.py [--workloads W5,W3,W6]

As `operators.py --workloads ...`, side by side only: packs of 32 clients, or of a whole group, with
16 GiB for them. W6 takes minutes on a CPU.
"""

import argparse
import logging
import sys

import operators
from figures import machine
from operators import count
from workloads import CLIENT_SAMPLES, LARGE, WORKLOADS

_ALL = WORKLOADS | LARGE


def main(argv: list[str] | None = None) -> int:
    """Print a line for each workload."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default="W5,W3,W6", help="names, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="the same in small")
    options = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    operators.WAYS["roomy"] = {"side_by_side": 32, "pack_memory": 1 << 14}
    print(machine())
    for name in options.workloads.split(","):
        workload = _ALL[name].tiny() if options.tiny else _ALL[name]
        steps = workload.per_round * -(-CLIENT_SAMPLES // workload.batch)
        found = count(workload, way="roomy", device="cpu")
        print(
            f"{name}: {found.operators} operators, {found.working} working in a round; "
            f"{found.working / steps:.1f} working a step of a client",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
