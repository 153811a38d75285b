"""Plans a run on many ranks (`lightfed plan`): placement, bytes, memory."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightfed.engine.session_setup import OptimizerFactory, make_optimizer
from lightfed.lab.previews.dry_run import DryFleet
from lightfed.lab.previews.layer_groups import aligned
from lightfed.lab.results.text import counted
from lightfed.state.server_model import ServerModel

# If there are more ranks, they are summarized.
_MOST_RANKS = 16

# Why bytes are only known as a bound, by its words.
_REASON_FOR_BOUND = {
    "at most ": "\n         masks save a part that is known only after training",
    "at least ": "\n         the rest depends on training",
}


def speedup(fleet: DryFleet) -> float:
    """Return how many times faster the ranks are than one: all loads over the largest of each call.

    The ranks wait for the busiest one after every call of `train`.
    """
    busiest = sum(call.loads.max() for call in fleet.calls)
    if not busiest:
        return 1.0
    return float(sum(call.loads.sum() for call in fleet.calls) / busiest)


def row_bytes(fleet: DryFleet) -> np.ndarray:
    """Return the bytes of a client's row in each group, with padding, of shape (groups,)."""
    sizes = []
    for state in fleet.groups:
        sizes.append(4 * state.layout.floats.size + 8 * state.layout.integers.size)
    return np.array(sizes)


def rank_rows(fleet: DryFleet) -> np.ndarray:
    """Return the bytes of clients' rows on each rank, of shape (ranks,).

    Each group allocates memory for its largest number of rows.
    """
    if fleet.stateful:
        counts = [fleet.sessions(range(fleet.clients)).counts]
    else:
        counts = [call.counts for call in fleet.calls]
    return row_bytes(fleet) @ np.max(counts, axis=0)


def memory(fleet: DryFleet, optimizer: OptimizerFactory | None) -> dict[str, int]:
    """Return the bytes on the device of the fullest rank, by what they are for.

    If the rows are in host memory, two of each group are on the device.

    Args:
        fleet: The fleet after its rounds.
        optimizer: Makes the clients' optimizers. Without it, modules make their own, and only
            gradients are counted.
    """
    row_of_each_group = int(row_bytes(fleet).sum())
    rows = int(rank_rows(fleet).max())

    trained_values = []
    for state in fleet.groups:
        parameters = [p for p in state.module.parameters() if p.requires_grad]
        trained_values.append(sum(parameter.numel() for parameter in parameters))
    largest = max(trained_values)

    server_state = sum(tensor.nbytes for tensor in fleet.algorithm.state_dict().values())
    merged = 0
    for module in fleet.algorithm.modules():
        if isinstance(module, ServerModel):
            merged += module.parameters_row.nbytes

    return {
        "rows of its clients": 0 if fleet.host_rows else rows,
        "two rows of every group, the others in host memory": (
            2 * row_of_each_group if fleet.host_rows else 0
        ),
        "live modules, one per group": row_of_each_group,
        "frozen parameters, held once": fleet.base.bytes,
        "server models": server_state,
        "state of the server's optimizer": round(merged * state_slots(fleet.server_step.make)),
        "gradients and optimizer state": round(4 * largest * (1 + state_slots(optimizer))),
        "rows of other ranks, at most": fleet.others,
    }


def state_slots(factory: OptimizerFactory | None) -> float:
    """Return the number of values that an optimizer keeps per parameter, measured on a small one.

    Args:
        factory: Makes the optimizer; None for no optimizer.
    """
    if factory is None:
        return 0.0

    parameter = nn.Parameter(torch.zeros(8, 8))
    optimizer = make_optimizer(factory, [parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step(lambda: 0.0)

    # A counter of steps has no dimension.
    kept = 0
    for value in optimizer.state[parameter].values():
        if isinstance(value, Tensor) and value.dim() > 0:
            kept += value.numel()
    return kept / parameter.numel()


def plan_text(fleet: DryFleet, parts: dict[str, int], *, rounds: int, chunks: int = 1) -> str:
    """Return a summary of a fleet's rounds as text; numbers per round are means.

    Args:
        fleet: The fleet after its rounds.
        parts: The bytes of its memory by what they are for.
        rounds: The number of rounds.
        chunks: A round trains on one of so many parts of a client's samples.
    """
    sessions, loads = _sessions_and_loads(fleet, rounds=rounds, chunks=chunks)
    planned = "the first round" if rounds == 1 else f"a mean of the first {rounds} rounds"

    paragraphs = [
        f"{type(fleet.algorithm).__name__}, {fleet.clients:,} clients on "
        f"{counted(fleet.ranks.world, 'rank')}: {planned}, {sessions.sum():,g} sessions in each",
        _groups_text(fleet),
        *packs_text(fleet.training.side_by_side),
        _ranks_text(fleet, np.stack([sessions, loads, rank_rows(fleet)])),
        f"speed    {speedup(fleet):.2f} times that of one rank: all loads over the largest",
        _bytes_text(fleet, rounds),
        *_time_text(fleet, rounds),
        _memory_text(parts),
    ]
    return "\n\n".join(paragraphs)


def plan_numbers(
    fleet: DryFleet, parts: dict[str, int], *, rounds: int, chunks: int = 1
) -> dict[str, Any]:
    """Return what `plan_text` says for a program, as values for JSON; arguments as there."""
    sessions, loads = _sessions_and_loads(fleet, rounds=rounds, chunks=chunks)

    groups = []
    for state, size in zip(fleet.groups, row_bytes(fleet).tolist(), strict=True):
        pack = fleet.training.side_by_side.get(state.name)
        groups.append(
            {
                "name": state.name,
                "width": state.group.width,
                "clients": state.group.count,
                "parameters": state.layout.parameter_numel,
                "flops_per_sample": state.flops or None,
                "row_bytes": size,
                "pack": pack if isinstance(pack, int) else None,
                "no_pack": pack if isinstance(pack, str) else None,
            }
        )

    ranks = []
    for sessions_of_rank, load, size in zip(
        sessions.tolist(), loads.tolist(), rank_rows(fleet).tolist(), strict=True
    ):
        ranks.append({"sessions": sessions_of_rank, "load": load, "row_bytes": size})

    traffic = {}
    for column in ("bytes_down", "bytes_up", "server_bytes"):
        traffic[column] = fleet.sums[column] / rounds if column in fleet.sums else None

    return {
        "algorithm": type(fleet.algorithm).__name__,
        "clients": fleet.clients,
        "rounds": rounds,
        "groups": groups,
        "ranks": ranks,
        "speedup": speedup(fleet),
        "bytes_per_round": traffic,
        "bytes_bound": fleet.bound.strip() or None,
        "virtual_seconds_per_round": (
            None if fleet.clock.times() is None else fleet.clock.now / rounds
        ),
        "joules_per_round": (
            None if fleet.clock.joules() is None else fleet.sums["joules"] / rounds
        ),
        "memory_bytes": {purpose: size for purpose, size in parts.items() if size},
    }


def _sessions_and_loads(
    fleet: DryFleet, *, rounds: int, chunks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sessions and loads of each rank, (ranks,) each, as means over the rounds."""
    sessions = sum((call.counts.sum(0) for call in fleet.calls), np.zeros(fleet.ranks.world))
    loads = sum((call.loads for call in fleet.calls), np.zeros(fleet.ranks.world))
    return sessions / rounds, loads / (rounds * chunks)


def _bytes_text(fleet: DryFleet, rounds: int) -> str:
    """Return the paragraph about the bytes that are sent in a round."""
    bound = f"{fleet.bound} " if fleet.bound else ""
    columns = {"down": "bytes_down", "up": "bytes_up", "between servers": "server_bytes"}
    sizes = []
    for way, column in columns.items():
        if column in fleet.sums:
            sizes.append(f"{way} {bound}{_scaled(fleet.sums[column] / rounds, 'B')}")
    return f"bytes    a round: {', '.join(sizes)}{_REASON_FOR_BOUND.get(bound, '')}"


def _memory_text(parts: Mapping[str, int]) -> str:
    """Return the paragraph about the memory of the fullest rank."""
    lines = [f"memory   of the fullest rank's device: {_scaled(sum(parts.values()), 'B')}"]
    for purpose, size in parts.items():
        if size:
            lines.append(f"         {_scaled(size, 'B'):>8}  {purpose}")
    lines.append("         without activations, the data set, and temporary memory of merges")
    return "\n".join(lines)


def _time_text(fleet: DryFleet, rounds: int) -> list[str]:
    """Return the paragraphs about the virtual time and the energy of a round, without devices none.

    Args:
        fleet: The fleet after its rounds.
        rounds: The number of its rounds.
    """
    paragraphs = []
    if fleet.clock.times() is not None:
        seconds = fleet.clock.now / rounds
        paragraphs.append(f"time     a round: {seconds:.4g} virtual seconds, if nobody leaves")
    if fleet.clock.joules() is not None:
        joules = _scaled(fleet.sums["joules"] / rounds, "J")
        paragraphs.append(f"energy   a round: {joules}, of all clients' devices")
    return paragraphs


def _groups_text(fleet: DryFleet) -> str:
    """Return the table of client groups."""
    lines = [("group", "width", "clients", "parameters", "FLOPs a sample", "a row")]
    for state, size in zip(fleet.groups, row_bytes(fleet).tolist(), strict=True):
        lines.append(
            (
                state.name,
                f"{state.group.width:.4g}",
                f"{state.group.count:,}",
                f"{state.layout.parameter_numel:,}",
                _scaled(state.flops) if state.flops else "not known",
                _scaled(size, "B"),
            )
        )
    return aligned(lines)


def packs_text(side_by_side: Mapping[str, int | str]) -> list[str]:
    """Return the paragraph about packs; none without groups.

    Args:
        side_by_side: How many clients of each group train at once, or why they do not.
    """
    lines = []
    for name, size_or_reason in side_by_side.items():
        if isinstance(size_or_reason, int):
            lines.append(f"{name}: packs of {size_or_reason}")
        else:
            lines.append(f"{name}: no packs, {size_or_reason}")

    if not lines:
        return []
    return ["packs    " + "\n         ".join(lines)]


def _ranks_text(fleet: DryFleet, numbers: np.ndarray) -> str:
    """Return the table of ranks.

    Args:
        fleet: The fleet.
        numbers: The sessions, loads and bytes of rows of each rank, of shape (3, ranks).
    """
    names = [str(rank) for rank in range(fleet.ranks.world)]
    if len(names) > _MOST_RANKS:
        # Of each column by itself: the numbers of a line are not those of one rank.
        names = ["least", "median", "most"]
        numbers = np.quantile(numbers, [0, 0.5, 1], axis=1).T

    lines = [("rank", "sessions", "samples x FLOPs", "rows")]
    for name, (sessions, load, size) in zip(names, numbers.T.tolist(), strict=True):
        lines.append((name, f"{sessions:,g}", _scaled(load), _scaled(size, "B")))
    return aligned(lines)


def _scaled(value: float, unit: str = "") -> str:
    """Return a value with four digits and a prefix of its unit, such as 1.235 kB or 640 B."""
    prefixes = ("", "k", "M", "G", "T")
    power = 0
    if value >= 1:
        power = min(int(math.log10(value)) // 3, len(prefixes) - 1)
    return f"{value / 1000**power:.4g} {prefixes[power]}{unit}".rstrip()
