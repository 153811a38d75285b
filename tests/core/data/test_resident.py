"""The batches of a split: what the definition says, however the split is kept and gathered."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightfed.data.batches import Batch, LastBatch, ResidentSplit, fits_in_free_memory
from lightfed.data.dataset import Samples, Transform
from lightfed.utils.cache import cached

CPU = torch.device("cpu")
COLOR = Transform((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
AUGMENTED = replace(COLOR, crop_padding=4, flip=True)
ERASED = replace(AUGMENTED, padding="mean", erase=0.5)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def epoch_of(split: ResidentSplit, index: Any, **how: Any) -> Iterator[Batch]:
    return split.batches(split.plan(index, **how))


def images(
    count: int, *, dtype: torch.dtype = torch.uint8, height: int = 9, width: int = 7
) -> Samples:
    x = torch.randint(0, 256, (count, 3, height, width), generator=seeded(0))
    x = x.to(torch.uint8) if dtype == torch.uint8 else x / 256
    return Samples(x=x, y=torch.randint(0, 10, (count,), generator=seeded(1)))


def slow_normalize(x: Tensor, transform: Transform) -> Tensor:
    """Return one sample (C, H, W), normalized channel by channel."""
    unit = 255 if x.dtype == torch.uint8 else 1
    planes = zip(x, transform.mean, transform.std, strict=True)
    return torch.stack([(plane / unit - mean) / std for plane, mean, std in planes])


def slow_augment(x: Tensor, transform: Transform, *, top: int, left: int, mirrored: bool) -> Tensor:
    """Crop one sample (C, H, W) pixel by pixel: out[i, j] = x[i + top - pad, j + left - pad]."""
    _, height, width = x.shape
    out = torch.zeros_like(x)
    for i in range(height):
        for j in range(width):
            row = i + top - transform.crop_padding
            column = j + left - transform.crop_padding
            if 0 <= row < height and 0 <= column < width:
                target = width - 1 - j if mirrored else j
                out[:, i, target] = x[:, row, column]
    return out


def drawn(
    count: int, transform: Transform, generator: torch.Generator
) -> list[tuple[int, int, bool]]:
    """Draw the top and left edge of each crop, and whether it is mirrored."""
    edges = torch.randint(0, 2 * transform.crop_padding + 1, (2, count), generator=generator)
    mirrored = torch.randint(0, 2 if transform.flip else 1, (count,), generator=generator)
    triples = zip(*edges.tolist(), mirrored.tolist(), strict=True)
    return [(top, left, bool(mirror)) for top, left, mirror in triples]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("padding", "flip"), [(0, False), (4, True), (2, False), (0, True)])
def test_batches_are_what_the_definition_says(dtype: torch.dtype, padding: int, flip: bool) -> None:
    samples = images(20, dtype=dtype)
    transform = replace(COLOR, crop_padding=padding, flip=flip)
    split = ResidentSplit(samples, transform, device=CPU, train=True)
    index = torch.tensor([3, 19, 3, 0, 11, 7, 8, 1])

    x, y = split.batch(index, seeded(5))

    assert torch.equal(y, samples.y[index])
    assert x.dtype == torch.float32
    for i, (top, left, mirrored) in enumerate(drawn(len(index), transform, seeded(5))):
        raw = samples.x[index[i]]
        augmented = slow_augment(raw, transform, top=top, left=left, mirrored=mirrored)
        expected = slow_normalize(augmented, transform)
        torch.testing.assert_close(x[i], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transform", [COLOR, AUGMENTED, ERASED])
def test_without_a_generator_nothing_is_augmented(transform: Transform) -> None:
    samples = images(12)
    for_training = ResidentSplit(samples, transform, device=CPU, train=True)
    for_tests = ResidentSplit(samples, transform, device=CPU, train=False)
    index = torch.tensor([5, 0, 11])

    x, _ = for_training.batch(index)

    expected = torch.stack([slow_normalize(samples.x[i], COLOR) for i in index])
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(for_tests.batch(index, seeded(0))[0], x)


def test_a_model_may_write_into_its_batch() -> None:
    samples = images(12)
    split = ResidentSplit(samples, COLOR, device=CPU, train=True)
    index = torch.arange(4, 9)
    x, y = split.batch(index)
    assert torch.equal(y, samples.y[4:9])

    x_before = x.clone()
    y_before = y.clone()
    x.fill_(9)
    y.fill_(9)
    x_after, y_after = split.batch(index)
    assert torch.equal(x_after, x_before)
    assert torch.equal(y_after, y_before)


def one_image(x: Tensor) -> Samples:
    """Return a split of one image (1, H, W)."""
    return Samples(x=x.unsqueeze(0), y=torch.zeros(1, dtype=torch.int64))


def test_every_crop_occurs() -> None:
    """The position of a single bright pixel shows the crop."""
    x = torch.zeros(1, 9, 9, dtype=torch.uint8)
    x[0, 4, 4] = 255
    transform = Transform((0.0,), (1.0,), crop_padding=4)
    split = ResidentSplit(one_image(x), transform, device=CPU, train=True)

    crops, _ = split.batch(torch.zeros(4050, dtype=torch.int64), seeded(0))

    positions = crops.flatten(1).argmax(1)
    counts = torch.bincount(positions, minlength=81)
    assert counts.min() > 20  # 50 expected, standard deviation 7
    assert counts.max() < 90


def test_both_orientations_occur_equally_often() -> None:
    x = torch.zeros(1, 1, 2, dtype=torch.uint8)
    x[0, 0, 0] = 255
    transform = Transform((0.0,), (1.0,), flip=True)
    split = ResidentSplit(one_image(x), transform, device=CPU, train=True)

    samples, _ = split.batch(torch.zeros(4050, dtype=torch.int64), seeded(0))

    num_not_mirrored = samples[:, 0, 0, 0].sum()
    assert abs(num_not_mirrored - 2025) < 160  # five standard deviations


def test_last_batch_and_limit() -> None:
    split = ResidentSplit(images(50), COLOR, device=CPU, train=True)

    def sizes(count: int, *, last_batch: LastBatch = "keep", limit: int | None = None) -> list[int]:
        epoch = epoch_of(
            split,
            torch.arange(count),
            batch_size=8,
            generator=None,
            order=None,
            last_batch=last_batch,
            limit=limit,
        )
        return [len(y) for _, y in epoch]

    assert sizes(20, last_batch="drop") == [8, 8]
    assert sizes(7, last_batch="drop") == []
    assert sizes(17, last_batch="join") == [8, 9]
    assert sizes(18, last_batch="join") == [8, 8, 2]
    assert sizes(1, last_batch="join") == [1]
    assert sizes(17, last_batch="join", limit=1) == [8]
    assert sizes(0) == []
    assert sizes(20, limit=2) == [8, 8]
    assert sizes(20, limit=5) == [8, 8, 4]
    assert sizes(20, limit=0) == []


def test_augmentation_does_not_depend_on_the_batch_size() -> None:
    split = ResidentSplit(images(50), AUGMENTED, device=CPU, train=True)

    def samples_of_epoch(batch_size: int, seed: int) -> Tensor:
        index, draws = torch.arange(50), seeded(seed)
        epoch = epoch_of(split, index, batch_size=batch_size, generator=draws, order=seeded(2))
        return torch.cat([x for x, _ in epoch])

    expected = samples_of_epoch(50, 1)
    assert torch.equal(samples_of_epoch(5, 1), expected)
    assert torch.equal(samples_of_epoch(16, 1), expected)
    assert not torch.equal(samples_of_epoch(50, 9), expected)


def test_batches_do_not_share_memory_with_the_split() -> None:
    for transform in (COLOR, AUGMENTED):
        samples = images(20)
        split = ResidentSplit(samples, transform, device=CPU, train=True)
        before = samples.x.clone()
        index = torch.arange(20)
        batches = list(epoch_of(split, index, batch_size=8, generator=None, order=None))
        expected = torch.cat([x for x, _ in batches])
        second = batches[1][0].clone()
        batches[0][0].zero_()
        assert torch.equal(batches[1][0], second)
        assert torch.equal(split.batch(index)[0], expected)
        assert torch.equal(samples.x, before)


# How a split may be kept and its batches gathered: where, in which order of axes, normalized or
# not, and all together or few at a time.
ALL_TOGETHER = 1 << 20
TWO_BATCHES = 4 * 3 * 9 * 7 * 16
KEPT: list[dict[str, Any]] = []
for held, float_limit in ((True, 1 << 20), (True, 0), (False, 0)):
    for gathered in (ALL_TOGETHER, TWO_BATCHES):
        for channels_last in (False, True):
            KEPT.append(
                {
                    "channels_last": channels_last,
                    "held": held,
                    "float_limit": float_limit,
                    "gathered": gathered,
                }
            )


def epoch_and_tests(
    samples: Samples, transform: Transform, device: str, *, gathered: int, **kept: Any
) -> list[Batch]:
    """Return a shuffled and augmented epoch, and two batches that are tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightfed.data.batches.GATHER_BYTES", {"cpu": gathered, "cuda": gathered})
        split = ResidentSplit(samples, transform, device=torch.device(device), train=True, **kept)
    index = np.arange(len(samples.y))
    epoch = list(epoch_of(split, index, batch_size=7, generator=seeded(1), order=seeded(2)))

    # Batches that were gathered together are parts of one tensor.
    storages = {x.untyped_storage().data_ptr() for x, _ in epoch}
    assert len(storages) == (1 if gathered == ALL_TOGETHER else 4)
    return [*epoch, split.batch(torch.arange(3, 9)), split.batch(torch.arange(5))]


@pytest.mark.parametrize("transform", [COLOR, AUGMENTED, ERASED], ids=["plain", "crop", "erased"])
def test_how_a_split_is_kept_and_gathered_does_not_change_the_bits(transform: Transform) -> None:
    samples = images(50)
    first = epoch_and_tests(samples, transform, "cpu", **KEPT[0])
    assert [len(y) for _, y in first] == [7] * 7 + [1, 6, 5]
    for kept in KEPT:
        memory_format = torch.channels_last if kept["channels_last"] else torch.contiguous_format
        batches = epoch_and_tests(samples, transform, "cpu", **kept)
        for (x, y), (expected_x, expected_y) in zip(batches, first, strict=True):
            assert torch.equal(x, expected_x)
            assert torch.equal(y, expected_y)
            assert x.is_contiguous(memory_format=memory_format)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("transform", [COLOR, AUGMENTED, ERASED], ids=["plain", "crop", "erased"])
def test_a_gpu_gives_the_batches_of_the_cpu(transform: Transform, kept: dict[str, Any]) -> None:
    of_cpu = epoch_and_tests(images(50), transform, "cpu", **kept)
    of_gpu = epoch_and_tests(images(50), transform, "cuda", **kept)
    for (x, y), (x_gpu, y_gpu) in zip(of_cpu, of_gpu, strict=True):
        assert x_gpu.is_cuda
        torch.testing.assert_close(x_gpu.cpu(), x, rtol=1e-6, atol=1e-6)
        assert torch.equal(y_gpu.cpu(), y)


@pytest.mark.parametrize("float_limit", [0, 1 << 20])
def test_float_samples_of_the_caller_do_not_change(float_limit: int) -> None:
    x = torch.randn(40, 5, generator=seeded(0))
    samples = Samples(x=x.clone(), y=torch.zeros(40, dtype=torch.int64))
    kept: dict[str, Any] = {"device": CPU, "channels_last": True, "float_limit": float_limit}
    split = ResidentSplit(samples, Transform((1.0,), (2.0,)), train=True, **kept)
    torch.testing.assert_close(split.batch(torch.arange(40))[0], (x - 1) / 2)
    torch.testing.assert_close(split.batch(torch.arange(3, 9))[0], (x[3:9] - 1) / 2)
    assert torch.equal(samples.x, x)
    assert len(split) == 40


def test_auto_takes_the_device_with_memory_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightfed.data.batches.free_memory", lambda: 1000.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (400, 800))
    assert [fits_in_free_memory(size, torch.device("cuda")) for size in (200, 201)] == [True, False]
    assert [fits_in_free_memory(size, CPU) for size in (500, 501)] == [True, False]


def test_what_the_device_does_not_hold_stays_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch copies its own rows only: the file is read where it is, and is never copied."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mapped = cached("x", lambda: np.arange(40, dtype=np.uint8).reshape(10, 1, 2, 2))
    samples = Samples(torch.from_numpy(mapped), torch.arange(10))
    split = ResidentSplit(samples, Transform((0.0,), (1.0,)), device=CPU, train=True, held=False)
    assert split.stored.data_ptr() == samples.x.data_ptr()

    x, _ = split.batch(torch.tensor([9]))
    torch.testing.assert_close(x.flatten() * 255, torch.arange(36.0, 40.0))
