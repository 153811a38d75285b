"""Records the digests of many cases, to compare two commits bit for bit.

Before a change, and after it:

    python -m lightfed.testing.record before.json
    python -m lightfed.testing.record after.json --against before.json

A digest covers server state, clients' rows, kept state, metrics, costs and both tables. It does not
see what is printed, exported files, error lines or speed. Bits depend on the machine and on torch,
so a record is compared where it was made and is not committed.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from lightfed.testing.case import Case
from lightfed.testing.digest import digest, fit

Record = dict[str, dict[str, str]]
"""The digest of each part, by case and packs, such as "fedavg, packs 3"."""

CASES = "tests.promises.conformance.cases:CASES,COMBINATIONS"
PACKS: dict[str, str | int] = {"off": "off", "auto": "auto", "3": 3}


def cases_of(source: str) -> dict[str, Case]:
    """Return the cases of the tables that `module:NAME,NAME` names, by their names.

    Raises:
        AttributeError: The module has no such table.
    """
    module, _, tables = source.partition(":")
    cases: dict[str, Case] = {}
    for table in tables.split(","):
        cases |= getattr(import_module(module), table)

    return cases


def with_packs(cases: Mapping[str, Case], packs: str) -> dict[str, Case]:
    """Return cases with a setting of packs; a case that sets it itself stays as it is.

    Args:
        cases: The cases by name.
        packs: One of `PACKS`.
    """
    with_setting = {}
    for name, case in cases.items():
        federation = {"side_by_side": PACKS[packs], **case.federation}
        with_setting[f"{name}, packs {packs}"] = replace(case, federation=federation)
    return with_setting


def digest_of(cases: Mapping[str, Case], name: str) -> tuple[str, dict[str, str]]:
    """Return the name and the digest of one case.

    A case that fails has its error as its only part.
    """
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        try:
            return name, digest(*fit(cases[name], Path(folder)))
        except Exception as error:
            return name, {"error": f"{type(error).__name__}: {error}"}


def record(cases: Mapping[str, Case], processes: int) -> Record:
    """Fit every case in forked processes, print each name when it is done, and return the digests.

    Args:
        cases: The cases by name.
        processes: The number of processes at a time.
    """
    digests: Record = {}
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=20) as pool:
        for name, parts in pool.imap_unordered(partial(digest_of, cases), sorted(cases)):
            digests[name] = parts
            print(f"{len(digests)} of {len(cases)}: {name}", parts.get("error", ""), flush=True)

    return dict(sorted(digests.items()))


def differences(before: Record, after: Record) -> Iterator[str]:
    """Yield a line for each case that is missing in one record, or has parts that differ."""
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            yield f"{name}: only in the old record"
        elif name not in before:
            yield f"{name}: only in the new record"
        else:
            parts = before[name].keys() | after[name].keys()
            different = [
                part for part in sorted(parts) if before[name].get(part) != after[name].get(part)
            ]
            if different:
                yield f"{name}: {', '.join(different)}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The words of the command; those of this process by default.

    Returns:
        The exit status, which is 1 if a case has failed or differs from the old record.
    """
    parser = argparse.ArgumentParser(description="Record the digests of many cases.")
    parser.add_argument("out", type=Path, help="the JSON file to write")
    parser.add_argument("--against", type=Path, help="an earlier record to compare with")
    parser.add_argument("--cases", default=CASES, help=f"module:TABLE,TABLE (default: {CASES})")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases; all by default")
    parser.add_argument("--packs", nargs="*", choices=PACKS, default=[*PACKS])
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)

    chosen = cases_of(options.cases)
    if options.only:
        chosen = {name: chosen[name] for name in options.only}
    cases: dict[str, Case] = {}
    for packs in options.packs:
        cases |= with_packs(chosen, packs)

    digests = record(cases, options.processes)
    options.out.write_text(json.dumps(digests, indent=1) + "\n")
    failed = sum("error" in parts for parts in digests.values())
    print(f"{len(digests)} digests in {options.out}, {failed} of them failed")
    if options.against is None:
        return int(failed > 0)

    before = json.loads(options.against.read_text())
    if options.only:
        before = {name: parts for name, parts in before.items() if name in digests}

    lines = list(differences(before, digests))
    for line in lines:
        print(line)
    print(f"{len(lines)} of {len(before)} cases differ from {options.against}")
    return int(failed > 0 or bool(lines))


if __name__ == "__main__":
    sys.exit(main())
