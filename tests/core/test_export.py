"""Exported weights load with torch and safetensors alone."""

from pathlib import Path

import torch
from lightfed_kernels import unpack_mask
from safetensors.torch import load_file

from lightfed.algorithms.dispfl import DisPFL
from lightfed.models.networks.cnn import Conv
from lightfed.testing.digest import fit
from tests.conformance.cases import CASES, CLIENTS, Case


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


def test_masks_are_exported_with_the_weights_that_they_cover(tmp_path: Path) -> None:
    case = CASES["dispfl"]
    case = Case(case.algorithm, case.model, "", case.federation | {"export": ("clients",)})
    _, federation = fit(case, tmp_path, rounds=2)
    algorithm, layout = federation.algorithm, federation.fleet.groups[0].layout.floats
    assert isinstance(algorithm, DisPFL)
    folder = tmp_path / "run"
    assert len(list((folder / "masks").iterdir())) == CLIENTS
    for client, mask in algorithm.masks.items():
        saved = load_file(folder / "masks" / f"client{client}.safetensors")
        assert list(saved) == ["mask"]
        assert torch.equal(saved["mask"], mask)
        weights = load_file(folder / "models" / f"client{client}.safetensors")
        for name, covered in layout.views(unpack_mask(mask)).items():
            # Trained weights are not 0 by chance; units that never fire keep what they had.
            assert not weights[name.removeprefix("net.")][~covered].any()
        assert 0 < int(unpack_mask(mask).sum()) < layout.numel


def test_clients_without_masks_export_none(tmp_path: Path) -> None:
    exported(CASES["standalone"], tmp_path / "kept")
    exported(CASES["heterofl"], tmp_path / "stateless")
    assert not list(tmp_path.rglob("masks"))
