"""Local training of the baselines against runs of HtFLlib's and FedAPEN's released code."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lightfed.algorithms.pfedmoe.low_rank import compress
from lightfed.algorithms.pfedmoe.mutual import FML, FedAPEN, FedKD
from tests.core.models.client_cases import descend, network
from tests.small import GOLDEN

FOLDER = GOLDEN / "baselines"
HTFLLIB = load_file(FOLDER / "htfllib.safetensors")
APEN = load_file(FOLDER / "fedapen.safetensors")
ABOUT: dict[str, Any] = json.loads((FOLDER / "htfllib.json").read_text())
ABOUT_APEN: dict[str, Any] = json.loads((FOLDER / "fedapen.json").read_text())


def recorded(vectors: dict[str, Tensor], folder: str) -> dict[str, Tensor]:
    """A recorded state dict; what is called base there is the extractor."""
    prefix = f"{folder}/"
    found = {
        name.removeprefix(prefix).replace("base.", "extractor."): tensor
        for name, tensor in vectors.items()
        if name.startswith(prefix)
    }
    assert found, folder
    return found


def check(module: nn.Module, vectors: dict[str, Tensor], folder: str) -> None:
    for name, tensor in recorded(vectors, folder).items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=0, atol=1e-6)


def load(module: nn.Module, vectors: dict[str, Tensor], folder: str) -> None:
    module.load_state_dict(recorded(vectors, folder))


def test_fedkd_in_htfllibs_form_and_what_it_uploads() -> None:
    case = "fedkd_e.95"
    about = ABOUT[case]
    client = FedKD(network(6), network(4), form="htfllib")
    parts = {"private": client.private, "shared": client.shared, "Wh": client.projection}
    for name, part in parts.items():
        load(part, HTFLLIB, f"{case}/{name}_before")
    rates = {"shared": about["lr_shared"], "projection": about["lr_Wh"]}
    # No gradient of this run is as long as the recorded clipping.
    descend(
        client, HTFLLIB["x"], HTFLLIB["y"], batch=about["batch"], lr=about["lr_private"],
        epochs=about["epochs"], rates=rates,
    )  # fmt: skip
    for name, part in parts.items():
        check(part, HTFLLIB, f"{case}/{name}_after")
    shared = client.shared.state_dict()
    packages = compress(shared, about["energy"])
    expected = recorded(HTFLLIB, f"{case}/uploaded_recovered")
    kept = about["kept_ranks"]
    for name, package in packages.items():
        tensor = package.tensor()
        if kept[name.replace("extractor.", "base.")] == 0:  # sent as nothing, by the known fault
            assert not expected[name].any()
            assert torch.equal(tensor, shared[name])
        else:
            # Singular values and vectors in float32: measured 7e-7.
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=5e-6)
    sizes = {n: p.bytes for n, p in packages.items()}
    biases = 4 * (4 + 5 + 4)
    # Factors of rank 3 would be larger than the matrices.
    assert sum(sizes.values()) == 4 * (28 + 20 + 20) + biases
    assert sizes["head.bias"] == 16


class Net(nn.Module):
    """FedAPEN's recorded networks."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, hidden), nn.Tanh(), nn.Linear(hidden, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def trained(client: FML | FedAPEN, case: str, lr: float) -> None:
    about = ABOUT_APEN[case]
    for part in ("private", "shared"):
        load(client.get_submodule(part), APEN, f"{case}/{part}_before")
    if isinstance(client, FedAPEN):
        client.share.fill_(about["weight_private"])
    descend(client, APEN["x"], APEN["y"], batch=about["batch"], lr=lr, epochs=about["epochs"])
    for part in ("private", "shared"):
        check(client.get_submodule(part), APEN, f"{case}/{part}_after")


def test_fedapen_trains_with_its_share_and_learns_the_next_one() -> None:
    about = ABOUT_APEN["equal"]
    client = FedAPEN(Net(6), Net(3))
    trained(client, "equal", about["lr"])
    client.share.fill_(about["lambda_before"])
    held_out = list(zip(APEN["xv"].chunk(2), APEN["yv"].chunk(2), strict=True))
    assert len(held_out) == about["val_batches"]
    client.learn_share(held_out, lr=about["lambda_lr_used"], passes=about["lambda_epochs"])
    assert float(client.share) == pytest.approx(about["lambda_after"], abs=1e-6)


def test_fml_in_its_chosen_form_is_fedapens_mutual_learning() -> None:
    """That has unit weights, twice those of alpha = beta = 0.5."""
    trained(FML(Net(6), Net(3)), "mutual", 2 * ABOUT_APEN["mutual"]["lr"])
