"""Plans a run on many ranks (`lightfed plan`): placement, bytes, memory."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from lightfed.engine.session_setup import OptimizerFactory, make_optimizer
from lightfed.lab.previews.dry_run import DryFleet
from lightfed.lab.previews.layer_groups import aligned
from lightfed.lab.results.text import counted
from lightfed.state.server_model import ServerModel

_TABLE = 16  # ranks; more are summarised
_WHY = {
    "at most ": "\n         masks save a part that is known only after training",
    "at least ": "\n         the rest depends on training",
}


def speedup(fleet: DryFleet) -> float:
    """Time of one rank that trains all sessions over that of the busiest ranks."""
    busiest = sum(call.loads.max() for call in fleet.calls)
    return float(sum(call.loads.sum() for call in fleet.calls) / busiest) if busiest else 1.0


def row_bytes(fleet: DryFleet) -> np.ndarray:
    """(groups,) bytes of a client's row, with padding."""
    layouts = [state.layout for state in fleet.groups]
    return np.array([4 * layout.floats.size + 8 * layout.integers.size for layout in layouts])


def rank_rows(fleet: DryFleet) -> np.ndarray:
    """(ranks,) bytes of clients' rows; each group allocates for its largest number of rows."""
    keeps = fleet.stateful
    calls = [fleet.sessions(range(fleet.clients))] if keeps else fleet.calls
    return row_bytes(fleet) @ np.max([call.counts for call in calls], axis=0)


def memory(fleet: DryFleet, optimizer: OptimizerFactory | None) -> dict[str, int]:
    """Bytes on the device of the fullest rank, by kind.

    If its rows are in host memory, two per group are on the device. Without an optimizer, which
    modules then configure, only gradients count.
    """
    modules = [state.module for state in fleet.groups]
    trained = max(sum(p.numel() for p in m.parameters() if p.requires_grad) for m in modules)
    one_of_each = int(row_bytes(fleet).sum())
    server = sum(t.nbytes for t in fleet.algorithm.state_dict().values())
    merged = [m.parameters_row for m in fleet.algorithm.modules() if isinstance(m, ServerModel)]
    return {
        "rows of its clients": 0 if fleet.host_rows else int(rank_rows(fleet).max()),
        "two rows of every group, the others in host memory": (
            2 * one_of_each if fleet.host_rows else 0
        ),
        "live modules, one per group": one_of_each,
        "frozen parameters, held once": fleet.base.bytes,
        "server models": server,
        "state of the server's optimiser": round(
            sum(row.nbytes for row in merged) * state_slots(fleet.server_step.make)
        ),
        "gradients and optimiser state": round(4 * trained * (1 + state_slots(optimizer))),
        "rows of other ranks, at most": fleet.others,
    }


def state_slots(factory: OptimizerFactory | None) -> float:
    """Number of values that an optimiser keeps per parameter, measured on a small one."""
    if factory is None:
        return 0.0
    parameter = nn.Parameter(torch.zeros(8, 8))
    optimizer = make_optimizer(factory, [parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step(lambda: 0.0)
    kept = [v for v in optimizer.state[parameter].values() if isinstance(v, Tensor)]
    return sum(v.numel() for v in kept if v.dim()) / parameter.numel()


def plan_text(fleet: DryFleet, parts: dict[str, int], *, rounds: int, chunks: int = 1) -> str:
    """Summary of a fleet's rounds as text; numbers per round are means.

    `parts` are those of the memory. A round trains on one of `chunks` of a client's samples.
    """
    over = "the first round" if rounds == 1 else f"a mean of the first {rounds} rounds"
    bound = f"{fleet.bound} ".lstrip()
    sent = {"down": "bytes_down", "up": "bytes_up", "between servers": "server_bytes"}
    sizes = {name: fleet.sums[key] / rounds for name, key in sent.items() if key in fleet.sums}
    traffic = ", ".join(f"{name} {bound}{_scaled(size, 'B')}" for name, size in sizes.items())
    sessions = sum(call.counts.sum(0) for call in fleet.calls) / rounds
    loads = sum(call.loads for call in fleet.calls) / (rounds * chunks)
    lines = [
        f"{type(fleet.algorithm).__name__}, {fleet.clients:,} clients on "
        f"{counted(fleet.ranks.world, 'rank')}: {over}, {sessions.sum():,g} sessions in each",
        _groups(fleet),
        *packs_text(fleet.training.side_by_side),
        _ranks(fleet, np.stack([sessions, loads, rank_rows(fleet)])),
        f"speed    {speedup(fleet):.2f} times that of one rank: all loads over the largest",
        f"bytes    a round: {traffic}{_WHY.get(bound, '')}",
        *_time(fleet, rounds),
        f"memory   of the fullest rank's device: {_scaled(sum(parts.values()), 'B')}",
    ]
    text = "\n\n".join(lines)
    for what, size in parts.items():
        text += f"\n         {_scaled(size, 'B'):>8}  {what}" if size else ""
    return text + "\n         without activations, the data set, and temporary memory of merges"


def _time(fleet: DryFleet, rounds: int) -> list[str]:
    """Virtual time of a round; nothing without devices."""
    if fleet.clock is None:
        return []
    return [f"time     a round: {fleet.clock.now / rounds:.4g} virtual seconds, if nobody leaves"]


def _groups(fleet: DryFleet) -> str:
    lines = [("group", "width", "clients", "parameters", "FLOPs a sample", "a row")]
    for state, row in zip(fleet.groups, row_bytes(fleet).tolist(), strict=True):
        count, parameters = f"{state.group.count:,}", f"{state.layout.parameter_numel:,}"
        flops = _scaled(state.flops) if state.flops else "not known"
        width = f"{state.group.width:.4g}"
        lines.append((state.name, width, count, parameters, flops, _scaled(row, "B")))
    return aligned(lines)


def packs_text(side_by_side: Mapping[str, int | str]) -> list[str]:
    """How many clients of each group train at once, or why they do not; nothing without groups."""
    lines = [
        f"{name}: {f'packs of {how}' if isinstance(how, int) else f'no packs, {how}'}"
        for name, how in side_by_side.items()
    ]
    return ["packs    " + "\n         ".join(lines)] if lines else []


def _ranks(fleet: DryFleet, numbers: np.ndarray) -> str:
    """A line per rank, or min, median and max if there are many; from (numbers, ranks)."""
    names = [str(rank) for rank in range(fleet.ranks.world)]
    if len(names) > _TABLE:  # per column: not of the same rank
        names, numbers = ["least", "median", "most"], np.quantile(numbers, [0, 0.5, 1], axis=1).T
    lines = [("rank", "sessions", "samples x FLOPs", "rows")]
    for name, (sessions, load, row) in zip(names, numbers.T.tolist(), strict=True):
        lines.append((name, f"{sessions:,g}", _scaled(load), _scaled(row, "B")))
    return aligned(lines)


def _scaled(value: float, unit: str = "") -> str:
    """Four digits and a unit prefix, such as 1.235 kB; 640 B below a thousand."""
    power = min(int(math.log10(value)) // 3, 4) if value >= 1 else 0
    return f"{value / 1000**power:.4g} {('', 'k', 'M', 'G', 'T')[power]}{unit}".rstrip()
