import numpy as np
import pytest
import torch
from torch import Tensor

from lightfed.data.dataset import Samples
from lightfed.datasets.speech import NORMALISE, SHAPE, Tones
from tests.datasets.audio import needs_torchaudio
from tests.datasets.kit import refused

pytestmark = needs_torchaudio


def recordings(tones: Tones, *clips: int) -> list[np.ndarray]:
    return list(tones.recordings(np.array(clips)))


def test_both_splits_hold_every_word_of_every_speaker() -> None:
    tones = Tones(words=6, clips=6 * 10 * 2 + 5, speakers=10)
    train, test = tones.load("train"), tones.load("test")
    assert (len(train), len(test)) == (6 * 8 * 2 + 5, 6 * 2 * 2)
    assert train.x.shape[1:] == tones.input_shape == SHAPE
    assert train.x.dtype == torch.uint8
    assert tones.transform == NORMALISE
    assert tones.synthetic
    assert tones.classes == tuple(f"tone {i}" for i in range(6))
    assert train.groups is not None
    assert test.groups is not None
    assert set(test.groups.tolist()) == {4, 9}
    assert set(train.groups.tolist()) == {0, 1, 2, 3, 5, 6, 7, 8}
    pairs = (test.groups * 6 + test.y).bincount(minlength=60)
    assert pairs.tolist() == [2 if i // 6 in (4, 9) else 0 for i in range(60)]


def test_a_clip_is_the_same_wherever_it_is_made() -> None:
    few, many = Tones(words=3, clips=30, speakers=5), Tones(words=3, clips=90, speakers=5)
    for once, again in zip(recordings(few, 7, 29), recordings(many, 7, 29), strict=True):
        assert once.dtype == np.int16
        np.testing.assert_array_equal(once, again)
    assert torch.equal(few.load("test").x, Tones(words=3, clips=30, speakers=5).load("test").x)
    one, other = recordings(few, 0, 15)  # the same word by the same speaker
    assert not np.array_equal(one[:12_800], other[:12_800])


def spectra(samples: Samples, *, parts: int) -> Tensor:
    """(N, 32 * parts + 1): the pictures averaged over equal parts of the second, and a 1."""
    means = samples.x.float().div(255).unflatten(3, (parts, -1)).mean(dim=4).flatten(1)
    return torch.cat((means, torch.ones(len(means), 1)), dim=1)


def test_new_speakers_are_recognised_by_changes_of_the_spectrum() -> None:
    """Word w glides from vowel a to b, word w + 4 from b to a; a classifier can tell them apart."""
    tones = Tones(words=8, clips=8 * 40, speakers=20)
    train, test = tones.load("train"), tones.load("test")
    found = []
    for parts in (1, 2):
        wanted = torch.eye(8)[train.y]
        weights = torch.linalg.lstsq(spectra(train, parts=parts), wanted).solution
        found.append((spectra(test, parts=parts) @ weights).argmax(1))
    assert (found[0] % 4 == test.y % 4).float().mean() > 0.75
    assert (found[0] == test.y).float().mean() < 0.5
    assert (found[1] == test.y).float().mean() > 0.6


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        ("words", {"words": 1}),
        ("words", {"words": 57}),
        ("speakers", {"speakers": 4}),
        ("clips", {"words": 10, "speakers": 20, "clips": 199}),
    ],
)
def test_impossible_numbers_are_refused(key: str, arguments: dict[str, int]) -> None:
    refused(key, Tones, **arguments)
