"""Exported weights load with torch and safetensors alone."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from lightfed.models.cnn import Conv
from tests.conformance.cases import CASES, CLIENTS, Case
from tests.conformance.run import fit


def exported(case: Case, folder: Path) -> Path:
    both = {"export": ("server", "clients")}
    case = Case(case.algorithm, case.model, case.levels, case.federation | both)
    fit(case, folder, rounds=1)
    return folder / "run" / "models"


def test_the_servers_weights_load_into_the_bare_network(tmp_path: Path) -> None:
    folder = exported(CASES["heterofl"], tmp_path)
    network = Conv(10, (1, 8, 8), hidden=(8, 12), norm="none")
    weights = load_file(folder / "server.safetensors")
    loaded = network.load_state_dict(weights, strict=False)
    assert not loaded.missing_keys
    assert all(name.split(".")[1] in ("2", "7") for name in loaded.unexpected_keys)  # the norms


def test_every_client_gets_weights_of_its_own_width(tmp_path: Path) -> None:
    folder = exported(CASES["heterofl"], tmp_path)
    server = load_file(folder / "server.safetensors")
    assert len(list(folder.glob("client*.safetensors"))) == CLIENTS
    widths = []
    for client in range(CLIENTS):
        weights = load_file(folder / f"client{client}.safetensors")
        first = weights["blocks.0.weight"]
        widths.append(len(first))
        assert torch.equal(first, server["blocks.0.weight"][: len(first)])
    assert widths == [8, 4, 2, 1, 1, 1, 1]


def test_stateful_clients_are_exported_as_they_are(tmp_path: Path) -> None:
    folder = exported(CASES["standalone"], tmp_path)
    assert not (folder / "server.safetensors").exists()
    files = [load_file(folder / f"client{client}.safetensors") for client in range(CLIENTS)]
    first = next(iter(files[0]))
    assert any(not torch.equal(files[0][first], other[first]) for other in files[1:])
