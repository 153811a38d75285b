"""Random erasing against the order of the authors' code: normalise, mirror, erase, crop."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightfed.data.batches import ResidentSplit, draw_rectangles
from lightfed.data.dataset import Samples, Transform

CPU = torch.device("cpu")
PLAIN = Transform((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
SIZE = (9, 7)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def in_the_authors_order(x: Tensor, transform: Transform, seed: int) -> Tensor:
    """(B, C, H, W) uint8 -> a batch, one sample after the other."""
    count, pad, rng = len(x), transform.crop_padding, seeded(seed)
    corners = torch.randint(0, 2 * pad + 1, (2, count), generator=rng).tolist()
    mirrored = torch.randint(0, 2 if transform.flip else 1, (count,), generator=rng).tolist()
    boxes = draw_rectangles(count, SIZE, probability=transform.erase, generator=rng).T.tolist()
    mean, std = (torch.tensor(v)[:, None, None] for v in (transform.mean, transform.std))
    colour = torch.zeros(3, 1, 1) if transform.padding == "mean" else -mean / std
    found = []
    for k, (top, left, height, width) in enumerate(boxes):
        sample = (x[k] / 255 - mean) / std
        row, column = corners[0][k], corners[1][k]
        if mirrored[k]:
            sample = sample.flip(2)
            left, column = SIZE[1] - left - width, 2 * pad - column
        sample[:, top : top + height, left : left + width] = 0
        canvas = colour.repeat(1, SIZE[0] + 2 * pad, SIZE[1] + 2 * pad)
        canvas[:, pad : pad + SIZE[0], pad : pad + SIZE[1]] = sample
        found.append(canvas[:, row : row + SIZE[0], column : column + SIZE[1]])
    return torch.stack(found)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {"crop_padding": 3, "padding": "mean", "erase": 0.7},
        {"crop_padding": 0, "padding": "black", "erase": 0.7},
        {"crop_padding": 2, "padding": "black", "erase": 1.0},
    ],
)
def test_batches_match_the_authors_order(flip: bool, given: dict[str, Any]) -> None:
    transform = replace(PLAIN, flip=flip, **given)
    x = torch.randint(0, 256, (40, 3, *SIZE), generator=seeded(0)).to(torch.uint8)
    samples = Samples(x=x, y=torch.arange(40))
    split = ResidentSplit(samples, transform, device=CPU, train=True)
    index = torch.arange(40)
    found, y = split.batch(index, seeded(5))
    assert torch.equal(y, index)
    # Black is normalised by other arithmetic here than in the split.
    torch.testing.assert_close(found, in_the_authors_order(x, transform, 5), rtol=1e-5, atol=1e-5)
    without, _ = split.batch(index)
    plain = ResidentSplit(samples, transform.fixed(), device=CPU, train=True)
    assert torch.equal(without, plain.batch(index)[0])
    assert not torch.equal(found, without)


def test_rectangles_are_drawn_as_published() -> None:
    size, count = (32, 32), 40_000
    top, left, height, width = draw_rectangles(
        count, size, probability=0.5, generator=seeded(0)
    ).unbind()
    erased = height > 0
    assert torch.equal(erased, width > 0)
    assert abs(erased.float().mean().item() - 0.5) < 0.0125  # five deviations
    top, left, height, width = (v[erased].double() for v in (top, left, height, width))
    area = height * width / 1024
    assert area.mean().item() == pytest.approx(0.12, abs=0.003)  # uniform in .04 to .2
    assert area.std().item() == pytest.approx(0.16 / 12**0.5, rel=0.05)
    ratio = (height / width).log()
    assert abs(ratio.mean().item()) < 0.02
    assert ratio.std().item() == pytest.approx(
        2 * torch.log(torch.tensor(2.0)).item() / 12**0.5, rel=0.05
    )
    for start, side in ((top, height), (left, width)):
        assert (start >= 0).all()
        assert (start + side <= 32).all()
        place = start / (32 - side)
        assert place.mean().item() == pytest.approx(0.5, abs=0.01)
        assert place.std().item() == pytest.approx(12**-0.5, rel=0.05)


def test_rectangles_are_cut_to_small_images() -> None:
    boxes = draw_rectangles(2000, (2, 30), probability=1.0, generator=seeded(1))
    assert boxes[2].max() == 2
    assert (boxes[:2] + boxes[2:] <= torch.tensor([[2], [30]])).all()
