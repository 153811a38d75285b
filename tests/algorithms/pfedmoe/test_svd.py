"""FedKD's compression against the released code's and against what a truncation must be."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from lightfed.algorithms.pfedmoe.low_rank import compress, energy_of_round, kept_rank
from tests.core.models.client_cases import random
from tests.small import GOLDEN

VECTORS = load_file(GOLDEN / "baselines/htfllib.safetensors")
RANKS = json.loads((GOLDEN / "baselines/htfllib.json").read_text())["svd_ranks"]
ENERGIES = ("0.5", "0.9", "0.95", "0.98")


def received(tensor: Tensor, energy: float) -> Tensor:
    return compress({"it": tensor}, energy)["it"].tensor()


def singular_values(tensor: Tensor) -> Tensor:
    return torch.linalg.svdvals(tensor)


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("energy", ENERGIES)
def test_matrices_and_kernels_are_cut_as_in_the_released_code(kind: str, energy: str) -> None:
    tensor = VECTORS[f"svd/{kind}/in"]
    assert kept_rank(singular_values(tensor), float(energy)) == RANKS[kind][energy]
    expected = VECTORS[f"svd/{kind}/e{energy}"]
    # Singular values of up to 13 in float32: measured 3e-6.
    torch.testing.assert_close(received(tensor, float(energy)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("energy", ENERGIES[1:])  # at 0.5 the two halves of the spectrum are equal
def test_a_flat_spectrum_keeps_its_full_rank_where_the_released_code_sends_nothing(
    energy: str,
) -> None:
    tensor = VECTORS["svd/flat_spectrum/in"]
    assert RANKS["flat_spectrum"][energy] == 0
    assert not VECTORS[f"svd/flat_spectrum/e{energy}"].any()
    assert kept_rank(singular_values(tensor), float(energy)) == 6
    assert torch.equal(received(tensor, float(energy)), tensor)


@settings(deadline=None, max_examples=25)
@given(
    shape=st.lists(st.integers(2, 7), min_size=2, max_size=4),
    energy=st.floats(0, 0.999),
    seed=st.integers(0, 99),
)
def test_the_rank_is_the_least_that_keeps_the_energy(
    shape: list[int], energy: float, seed: int
) -> None:
    tensor = random(*shape, seed=seed).double()
    package = compress({"it": tensor}, energy)["it"]
    spectra = singular_values(tensor).reshape(-1, min(shape[-2:])).square().sum(0)
    total = float(spectra.sum())
    lost = float((tensor - package.tensor()).square().sum())
    rank = kept_rank(singular_values(tensor), energy)
    assert lost == pytest.approx(float(spectra[rank:].sum()), abs=1e-9 * total)
    assert lost <= (1 - energy) * total * (1 + 1e-9) + 1e-9
    assert float(spectra[: rank - 1].sum()) <= energy * total * (1 + 1e-9)
    assert package.bytes <= tensor.nbytes


@settings(deadline=None, max_examples=30)
@given(shape=st.lists(st.integers(1, 6), min_size=0, max_size=4), seed=st.integers(0, 99))
def test_energy_one_is_no_compression(shape: list[int], seed: int) -> None:
    tensor = random(*shape, seed=seed)
    packages = compress({"it": tensor}, 1.0)
    assert torch.equal(packages["it"].tensor(), tensor)
    assert packages["it"].bytes == 4 * tensor.numel()


def test_tensors_of_one_row_and_of_zeros_travel_whole() -> None:
    tensors = {"row": random(1, 6), "filter": random(1, 3, 2, 2), "zeros": torch.zeros(4, 5)}
    sent = compress(tensors, 0.1)
    assert sent.keys() == tensors.keys()
    assert all(torch.equal(sent[name].tensor(), tensor) for name, tensor in tensors.items())


def test_bytes_are_those_of_the_factors_or_of_the_tensor_if_it_is_smaller() -> None:
    low = random(20, 2) @ random(2, 30, seed=1)
    packages = compress({"low": low, "kernels": random(5, 4, 3, 3), "bias": random(7)}, 0.999)
    assert packages["low"].bytes == 4 * 2 * (20 + 30 + 1)
    assert packages["kernels"].bytes == 4 * 5 * 4 * 3 * 3
    assert packages["bias"].bytes == 4 * 7
    assert all(part.is_contiguous() for part in packages["low"].parts)
    # The values are those of the factors in either case.
    cut = VECTORS["svd/conv/in"]
    (whole,) = compress({"it": cut}, 0.9)["it"].parts
    torch.testing.assert_close(whole, VECTORS["svd/conv/e0.9"], rtol=0, atol=1e-5)
    assert not torch.equal(whole, cut)


def test_the_energy_grows_to_its_end() -> None:
    assert energy_of_round(0, 10) == pytest.approx(0.953)
    assert energy_of_round(9, 10) == pytest.approx(0.98)
    assert energy_of_round(1, 4, start=0.5, end=0.9) == pytest.approx(0.7)
