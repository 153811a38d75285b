"""How far masks are apart, against counts element by element."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightfed_kernels import pack_mask, popcount
from safetensors.numpy import load_file, save_file

from lightfed.results.run import read
from lightfed.studies.dispfl import masks
from lightfed.studies.dispfl.masks import MaskPairs, mask_pairs
from lightfed.utils.errors import UserError
from tests.report.make_run import ENVIRONMENT, write_masks, write_run


def _run(root: Path, written: dict[int, np.ndarray], parameters: object = None) -> Path:
    folder = write_run(
        root / "run",
        metrics={"train_loss": (1.0,)},
        environment={**ENVIRONMENT, "parameters": parameters},
        evaluations=None,
    )
    write_masks(folder, written)
    return folder


def _pairs(root: Path, written: dict[int, np.ndarray], parameters: object = None) -> MaskPairs:
    found = mask_pairs(read(_run(root, written, parameters)))
    assert found is not None
    return found


@given(
    seed=st.integers(0, 2**32 - 1),
    clients=st.integers(1, 6),
    words=st.integers(1, 9),
    density=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    block=st.sampled_from([1, 7, 1024]),
)
@settings(max_examples=20, deadline=None)
def test_distances_are_those_counted_element_by_element(
    seed: int, clients: int, words: int, density: float, block: int
) -> None:
    kept = np.random.default_rng(seed).random((clients, 32 * words)) < density
    with TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "BLOCK", block)
        found = _pairs(Path(root), dict(enumerate(kept)))
    differing = (kept[:, None] != kept[None]).sum(axis=2)
    assert found.client.tolist() == list(range(clients))
    np.testing.assert_array_equal(found.differing, differing)
    assert found.sparse == (~kept.all(axis=0)).sum()
    np.testing.assert_array_equal(found.distance, differing / max(1, found.sparse))


def test_the_words_are_those_of_the_kernels(tmp_path: Path) -> None:
    kept = np.random.default_rng(0).random(96) < 0.4
    path = _run(tmp_path, {3: kept}) / "masks" / "client3.safetensors"
    words = pack_mask(torch.from_numpy(kept))
    np.testing.assert_array_equal(load_file(path)["mask"], words.numpy())
    assert int(popcount(words)) == kept.sum()


@pytest.mark.parametrize(
    ("parameters", "sparse"),
    [
        ({"a": 50}, 20),  # elements 0..29 are in every mask, 50..63 are padding
        ({"a": 50, "b": 50}, 20),
        ({"a": 50, "b": 60}, 34),
        (None, 34),
        ({"a": 5}, 10),  # all that is in no mask may be padding; 30..39 are in one
    ],
)
def test_padding_is_no_sparse_element(tmp_path: Path, parameters: object, sparse: int) -> None:
    at = np.arange(64)
    written = {0: at < 30, 1: at < 40, 2: at < 30}
    assert _pairs(tmp_path, written, parameters).sparse == sparse


def test_masks_of_the_most_frequent_length_are_compared(tmp_path: Path) -> None:
    short, long = np.arange(32) < 9, np.arange(64) < 9
    found = _pairs(tmp_path, {0: short, 2: long, 10: long, 9: ~long})
    assert found.client.tolist() == [2, 9, 10]
    assert found.differing.tolist() == [[0, 64, 0], [64, 0, 64], [0, 64, 0]]
    assert found.total == 4


def test_of_very_many_clients_a_hundred_are_read(tmp_path: Path) -> None:
    at = np.arange(32)
    found = _pairs(tmp_path, {k: at < k % 32 for k in range(199)})
    assert found.client.tolist() == list(range(0, 199, 2))
    assert found.total == 199
    assert found.differing[0, 3] == 6


def test_a_run_without_masks_has_no_pairs(tmp_path: Path) -> None:
    assert mask_pairs(read(write_run(tmp_path / "dense"))) is None
    folder = _run(tmp_path, {})
    (folder / "masks" / "client.safetensors").write_bytes(b"no mask")
    assert mask_pairs(read(folder)) is None


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def _other_name(path: Path) -> None:
    save_file({"masks": np.zeros(2, np.int32)}, path)


def _other_type(path: Path) -> None:
    save_file({"mask": np.zeros(2, np.int64)}, path)


def _other_shape(path: Path) -> None:
    save_file({"mask": np.zeros((1, 2), np.int32)}, path)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_cut, "header"),
        (_other_name, "it holds no tensor mask"),
        (_other_type, "a mask of type int64 and shape (2,)"),
        (_other_shape, "a mask of type int32 and shape (1, 2)"),
    ],
)
def test_a_damaged_mask_is_named(
    tmp_path: Path, damage: Callable[[Path], None], named: str
) -> None:
    folder = _run(tmp_path, {k: np.arange(64) < 9 for k in range(3)})
    damage(folder / "masks" / "client1.safetensors")
    with pytest.raises(UserError) as caught:
        mask_pairs(read(folder))
    text = str(caught.value)
    assert text.startswith(f"report: {folder}/masks/client1.safetensors cannot be read: ")
    assert named in text
    assert "\n" not in text
