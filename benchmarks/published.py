"""HeteroFL with PreActResNet-18 in the published batches of 10, as five programs would train it.

    python benchmarks/published.py [--passes 3] [--device cuda] [--out DIR] [--case hundred]

PreActResNet-18 of five widths on 3x32x32, ten clients, two of each width, which is what a published
round of ten of a hundred has on average. A client takes 50 steps, an epoch of its 500 images; a
published round has five such epochs, so an hour has 3,600 / (5 x seconds) published rounds. Every
side has a process, and the card, to itself:

    sequential   lightfed, one client after the other
    packs        lightfed, two clients of a width side by side, which is all that a round has
    as it comes  lightfed, which chooses
    loop         bare PyTorch: a model a width, samples on the card, a new torch.optim.SGD a client
    tuned        the fastest such loop known, see rounds.py
    copies       as FLGo trains: a deep copy of the model and a DataLoader on the host a client
    bf16         the fastest of lightfed's in bf16-mixed

Then the second case: a hundred clients of the same federation in one round, in packs, one after the
other and as deep copies, which is where packs have something to pack; how busy the card is
meanwhile, and whether two runs of packs have the same bits. `--out` keeps published.csv, as far as
it is, and the aims. The exit status is 1 if a side fails or a loss is not a number.
"""

import argparse
import copy
import sys
from collections.abc import Sequence

import rounds  # noqa: F401 - first: it sets the number of threads
import torch
import torch.nn.functional as F
from activity import Activity
from aims import Aim, write_aims
from figures import machine, out_folder
from models import Measured, Table, by_hand, by_lightfed, memory
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset
from workers import seconds_on
from workloads import CLASSES, HUNDRED, LEARNING_RATE, LEVELS, PUBLISHED, Workload

EPOCHS_OF_A_ROUND = 5
_WARM_UP = 1


def by_copies(workload: Workload, way: str, device: str, passes: int) -> Measured:
    """As FLGo trains: copies of models, and batches that a DataLoader collates on the host.

    The clients' slices are merged as HeteroFL's own code does, one tensor after the other.
    """
    torch.set_num_threads(1)
    pool = TensorDataset(*workload.samples("train", workload.pool))
    models = [workload.build(0.5**level).to(device) for level in range(len(LEVELS))]
    state = {name: value.detach().clone() for name, value in models[0].named_parameters()}
    seconds: list[float] = []
    for t in range(_WARM_UP + passes):
        start = seconds_on(device)
        sums = {name: torch.zeros_like(value) for name, value in state.items()}
        counts = {name: torch.zeros_like(value) for name, value in state.items()}
        for client in workload.draws(t).clients:
            model = copy.deepcopy(models[workload.level(client)]).train()
            slices = {}
            for name, value in model.named_parameters():
                slices[name] = tuple(slice(size) for size in value.shape)

            with torch.no_grad():
                for name, value in model.named_parameters():
                    value.copy_(state[name][slices[name]])
            owned = workload.owned(client)
            samples = Subset(pool, range(owned.start, owned.stop))
            _train_by_loader(model, samples, workload, device)
            for name, value in model.named_parameters():
                sums[name][slices[name]] += value.detach()
                counts[name][slices[name]] += 1
        for name, count in counts.items():
            state[name] = torch.where(count > 0, sums[name] / count, state[name])
        seconds.append(seconds_on(device) - start)
    return Measured(tuple(seconds[_WARM_UP:]), memory(device))


def _train_by_loader(
    model: torch.nn.Module, samples: Subset[tuple[Tensor, ...]], workload: Workload, device: str
) -> None:
    labels = [int(label) for _, label in samples]
    held = torch.zeros(CLASSES, dtype=torch.bool)
    held[labels] = True
    held = held.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(workload.epochs):
        for x, y in DataLoader(samples, workload.batch, shuffle=True):
            optimizer.zero_grad()
            logits = model(x.to(device)).masked_fill(~held, 0.0)
            loss = F.cross_entropy(logits, y.to(device))
            loss.backward()
            optimizer.step()


def ten_clients(table: Table, workload: Workload) -> list[Aim]:
    """Measure all sides of a published round, lightfed first, as the time may end."""
    print(f"\n{workload.name}  {workload.title}", flush=True)
    ours = {
        "as it comes": table.side(workload, "as it comes", by_lightfed, "lightfed"),
        "sequential": table.side(workload, "sequential", by_lightfed, "sequential"),
        "packs": table.side(workload, "packs", by_lightfed, "packs32"),
    }
    measured = {way: side for way, side in ours.items() if side.seconds}
    others = {
        "copies": table.side(workload, "copies", by_copies, "copies"),
        "loop": table.side(workload, "loop", by_hand, "loop"),
        "tuned": table.side(workload, "tuned", by_hand, "tuned"),
    }
    if measured:
        best = min(measured, key=lambda way: measured[way].median)
        way = {"as it comes": "lightfed", "packs": "packs32"}.get(best, best)
        others["bf16"] = table.side(workload, f"{best}, bf16", by_lightfed, way, "bf16")
    for name, side in {**ours, **others}.items():
        if side.seconds:
            hourly = 3600 / (EPOCHS_OF_A_ROUND * side.median)
            print(f"    {name:18} {hourly:7.0f} published rounds an hour", flush=True)
    return [
        Aim(
            "published round, lightfed as it comes over deep copies",
            ratio(others["copies"], ours["as it comes"]),
            4.0,
            1.5,
        ),
        Aim(
            "published round, lightfed as it comes over the bare loop",
            ratio(others["loop"], ours["as it comes"]),
            1.0,
            0.8,
        ),
    ]


def hundred_clients(table: Table, workload: Workload) -> list[Aim]:
    """Measure a round of a hundred clients, in packs and one client after the other."""
    print(f"\n{workload.name}  {workload.title}", flush=True)
    with Activity() as activity:
        packs = table.side(workload, "packs", by_lightfed, "packs32")
    print(f"    packs: {activity.line()}", flush=True)
    again = table.side(workload, "packs, again", by_lightfed, "packs32")
    alike = "the same" if packs.bits == again.bits else "OTHER"
    print(f"    two runs of packs have {alike} bits", flush=True)
    alone = table.side(workload, "sequential", by_lightfed, "sequential")
    copies = table.side(workload, "copies", by_copies, "copies")
    table.side(workload, "packs, bf16", by_lightfed, "packs32", "bf16")
    return [
        Aim("HeteroFL a-e, 100 of 1,000: packs over one by one", ratio(alone, packs), 10, 4),
        Aim("HeteroFL a-e, 100 of 1,000: packs over deep copies", ratio(copies, packs), 20, 8),
        Aim("the card is busy during packed rounds", activity.sustained, 60, 30, "%"),
    ]


def ratio(slower: Measured, faster: Measured) -> float | None:
    """How many times faster the second is; None if one was not measured."""
    if not slower.seconds or not faster.seconds:
        return None
    return slower.median / faster.median


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all sides."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=3, help="measurements of every side")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=out_folder, help="folder for published.csv")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--case", choices=["hundred", "published"], help="one of the two cases")
    options = parser.parse_args(argv)
    print(machine())
    table = Table(options.device, options.passes, options.out, "published.csv")
    hundred = HUNDRED.tiny() if options.tiny else HUNDRED
    published = PUBLISHED.tiny() if options.tiny else PUBLISHED
    aims: list[Aim] = []
    if options.case != "published":
        aims += hundred_clients(table, hundred)
        write_aims(options.out, aims)
    if options.case != "hundred":
        aims += ten_clients(table, published)
        write_aims(options.out, aims)
    return 0 if table.good else 1


if __name__ == "__main__":
    sys.exit(main())
