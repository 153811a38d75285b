"""Steps of one client in three memory formats, of images and of the weights of convolutions.

    python benchmarks/formats.py [--workloads W2,W3] [--passes 7] [--batch 32]
        [--image 1,8,8] [--device cuda]

Bare PyTorch in one process, one client after the other: plain SGD in one foreach call. Seconds are
CPU time with one thread, on a card the time until it is done; the sides take turns, and a ratio is
taken within a pass. Operators are those that do work; on a card also its launches. The sides:

    first   images and weights in torch's own format, NCHW
    images  images in channels_last, weights as rows hold them
    both    weights in channels_last too

`data.channels_last` gives the first or the second; see `models/image_format.py`.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from figures import Figure, machine, spread
from operators import Counts
from torch import nn
from torch.profiler import ProfilerActivity, profile
from workers import seconds_on
from workloads import BATCH_SIZE, CLASSES, LARGE, LEARNING_RATE, WORKLOADS, Workload

SIDES = ("first", "images", "both")
KNOWN = {
    name: workload
    for name, workload in (WORKLOADS | LARGE).items()
    if len(workload.input_shape) == 3 and name not in ("W1", "W3a")
}
_SECONDS = 0.2  # of the steps of a side in a pass, about


class Steps:
    """A network that trains on one batch again and again.

    Args:
        model: in training mode.
        shape: (B, C, H, W) of the batch.
        side: of `SIDES`.
        device: cpu or cuda.
    """

    def __init__(self, model: nn.Module, shape: Sequence[int], side: str, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(*shape, generator=generator).to(device)
        if side != "first":
            last = x.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)
            x = last.permute(0, 3, 1, 2)  # of one channel too
        self._x = x
        self._y = torch.arange(shape[0], device=device) % CLASSES
        self._model = model.to(device)
        if side == "both":
            model.to(memory_format=torch.channels_last)
        self._leaves = list(model.parameters())
        self._values = [leaf.detach() for leaf in self._leaves]
        self._device = device

    def seconds(self, steps: int) -> float:
        """Seconds of one of so many steps."""
        start = seconds_on(self._device)
        for _ in range(steps):
            loss = F.cross_entropy(self._model(self._x), self._y)
            grads = torch.autograd.grad(loss, self._leaves)
            torch._foreach_add_(self._values, grads, alpha=-LEARNING_RATE)
        return (seconds_on(self._device) - start) / steps

    def counts(self) -> Counts:
        """What a step calls."""
        cards = [ProfilerActivity.CUDA] if self._device == "cuda" else []
        with profile(activities=[ProfilerActivity.CPU, *cards], acc_events=True) as profiled:
            self.seconds(1)
        return Counts.of(profiled)


def compare(workload: Workload, rate: float, *, batch: int, passes: int, device: str) -> None:
    """Let the sides take turns and print what a step of a width took."""
    shape = batch, *workload.input_shape
    sides = {side: Steps(workload.build(rate).train(), shape, side, device) for side in SIDES}
    for steps in sides.values():
        steps.seconds(2)
    count = max(1, int(_SECONDS / sides["first"].seconds(1)))
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(passes):
        turn = number % len(SIDES)
        for side in SIDES[turn:] + SIDES[:turn]:
            seconds[side].append(sides[side].seconds(count))
    print(f"\n{workload.name}  {workload.title}; width {rate:g}")
    for side, steps in sides.items():
        counts = steps.counts()
        launches = f", {counts.launches} launches" if device == "cuda" else ""
        milliseconds = spread([1e3 * value for value in seconds[side]], digits=2)
        print(f"    {side:6} {milliseconds:24} ms a step, {counts.working} operators{launches}")
    for below, above in (("first", "images"), ("first", "both"), ("images", "both")):
        print(f"    {above} / {below}: {Figure(seconds[below], seconds[above]).text()}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default=",".join(KNOWN), metavar="W2,W3,..")
    parser.add_argument("--passes", type=int, default=7, help="measurements of every side")
    parser.add_argument("--batch", type=int, default=BATCH_SIZE, help="images of a step")
    parser.add_argument("--image", metavar="1,8,8", help="channels, height and width of images")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")
    options = parser.parse_args(argv)
    names = options.workloads.split(",")
    if unknown := set(names) - set(KNOWN):
        parser.error(f"--workloads: {', '.join(sorted(unknown))}; choose of {', '.join(KNOWN)}")
    for name in ("passes", "batch"):
        if (given := getattr(options, name)) < 1:
            parser.error(f"--{name}: {given}; give at least 1")
    how = {"batch": options.batch, "passes": options.passes, "device": options.device}
    torch.set_num_threads(1)
    print(machine())
    for name in names:
        workload = KNOWN[name].tiny() if options.tiny else KNOWN[name]
        if options.image:
            image = tuple(int(size) for size in options.image.split(","))
            workload = replace(workload, input_shape=image)
        for rate in (1.0, 0.25, 0.0625) if workload.method == "HeteroFL" else (1.0,):
            compare(workload, rate, **how)
    return 0


if __name__ == "__main__":
    sys.exit(main())
