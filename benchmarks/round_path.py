"""What one HeteroFL round passes: own files, own functions, and the deepest chain of own frames.

    python benchmarks/round_path.py [--side-by-side off]

Eight clients of two widths take three steps each. `Federation.run_round` is observed in the second
round. Only code of lightfed and lightfed_kernels counts: a function once, a file if one of its
functions ran.
"""

import argparse
import io
import logging
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lightfed_kernels
import torch

import lightfed as lf
from lightfed.federation import Federation
from lightfed.networks import MLP

RUN_ROUND = Federation.run_round
OWN = tuple(f"{Path(package.__file__).parent}/" for package in (lf, lightfed_kernels))


class Trace:
    """The own functions that ran, and the longest chain of own frames."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.deepest: list[str] = []

    def __call__(self, frame: FrameType | None, event: str, _: Any) -> None:
        assert frame is not None
        if event != "call" or not frame.f_code.co_filename.startswith(OWN):
            return
        self.functions.add(frame.f_code)
        chain = []
        while frame is not None and frame.f_code is not RUN_ROUND.__code__:
            code, frame = frame.f_code, frame.f_back
            if code.co_filename.startswith(OWN):
                chain.append(f"{Path(code.co_filename).name}: {code.co_name}")
        if len(chain) > len(self.deepest):
            self.deepest = chain


def observed(side_by_side: str, folder: str) -> Trace:
    """The trace of a federation's second round, of two."""
    trace = Trace()
    data = lf.FederatedDataModule(lf.Digits(), lf.Iid(), batch_size=60)  # three batches a client
    groups = [lf.ClientGroup(4, partial(MLP, hidden=[64]), rate=rate) for rate in (1.0, 0.25)]
    federation = lf.Federation(
        lf.HeteroFL(),
        clients=groups,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        evaluate=[],
        side_by_side=int(side_by_side) if side_by_side.isdecimal() else side_by_side,
    )

    def followed(federation: Federation, t: int, *args: Any, **settings: Any) -> None:
        sys.setprofile(trace if t == 1 else None)
        RUN_ROUND(federation, t, *args, **settings)
        sys.setprofile(None)

    Federation.run_round = followed  # type: ignore[method-assign]
    try:
        lf.FederatedTrainer(
            max_epochs=2, accelerator="cpu", default_root_dir=folder, enable_progress_bar=False
        ).fit(federation, data)
    finally:
        Federation.run_round = RUN_ROUND  # type: ignore[method-assign]
    return trace


def main() -> None:
    """Print the counts, and the deepest chain with `--chain`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side-by-side", default="off")
    parser.add_argument("--chain", action="store_true", help="print the deepest chain of frames")
    parser.add_argument("--files", action="store_true", help="print the files")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        trace = observed(given.side_by_side, folder)
    files = sorted({code.co_filename for code in trace.functions})
    deep = len(trace.deepest)
    print(f"{len(files)} files, {len(trace.functions)} functions, {deep} own frames deep")
    for line in [*(trace.deepest[::-1] if given.chain else []), *(files if given.files else [])]:
        print("   ", line)


if __name__ == "__main__":
    main()
