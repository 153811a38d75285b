"""Changes of masks by DisPFL's released code (golden/dispfl)."""

import json
import math
from pathlib import Path

import pytest
import torch
from lightfed_kernels import Layout
from lightfed_kernels.masks import pack_mask, unpack_mask
from lightfed_kernels.segments import Segments, count_per_tensor
from lightfed_kernels.select import prune_counts, prune_regrow, select_by_magnitude
from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden/dispfl"


def row_of(data: dict[str, Tensor], prefix: str, layout: Layout) -> Tensor:
    row = layout.new_row()
    for name, view in layout.views(row).items():
        view.copy_(data[f"{prefix}/{name}"])
    return row


def layout_of(data: dict[str, Tensor], prefix: str) -> Layout:
    names = [key for key in data if key.startswith(f"{prefix}/")]
    return Layout.build((key.removeprefix(f"{prefix}/"), tuple(data[key].shape)) for key in names)


def test_golden_dispfl_fire_and_regrow_by_gradient(device: torch.device) -> None:
    data = load_file(GOLDEN / "fire_regrow.safetensors")
    meta = json.loads((GOLDEN / "meta.json").read_text())["fire_regrow"]
    layout = layout_of(data, "mask")
    segments = Segments.build(layout, device=device)
    mask, weights, gradient = (row_of(data, key, layout) for key in ("mask", "weight", "grad"))
    words, weights, gradient = (
        pack_mask(mask != 0).to(device),
        weights.to(device),
        gradient.to(device),
    )
    nonzeros = count_per_tensor(words, segments).tolist()
    assert len(meta["num_remove"]) == 6
    for time, numbers in meta["num_remove"].items():
        counts = prune_counts(nonzeros, meta["drop_ratio"][time])
        assert counts == [numbers[entry.name] for entry in layout]
        dropped = select_by_magnitude(weights, words, counts, segments, largest=False)
        fired = row_of(data, f"fired/{time}", layout)
        assert torch.equal(unpack_mask((words & ~dropped).cpu()), fired != 0)
        result = prune_regrow(weights, words, counts, segments, regrow=gradient)
        regrown = row_of(data, f"regrown_grad/{time}", layout)
        assert torch.equal(unpack_mask(result.cpu()), regrown != 0)


def test_golden_dispfl_training_loop_with_the_lowest_index_for_chance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")
    data = load_file(GOLDEN / "loop_dispfl_random.safetensors")
    about = json.loads((GOLDEN / "loops.json").read_text())["loop_dispfl_random"]
    layout = layout_of(data, "init_dense")
    segments = Segments.build(layout)
    # All scores tie.
    constant = torch.ones(layout.size)
    changed = 0
    for time in range(about["rounds"]):
        rate = about["alpha0"] / 2 * (1 + math.cos(math.pi * time / about["rounds"]))
        for client in range(about["N"]):
            before, weights, after = (
                row_of(data, f"r{time}/{client}/{key}", layout)
                for key in ("train_mask", "end", "next_mask")
            )
            words = pack_mask(before != 0)
            counts = prune_counts(count_per_tensor(words, segments).tolist(), rate)
            result = prune_regrow(weights, words, counts, segments, regrow=constant)
            assert torch.equal(unpack_mask(result), after != 0)
            changed += not torch.equal(before, after)
    assert changed > 0
