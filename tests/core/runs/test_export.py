"""Exported weights load with torch and safetensors alone."""

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightfed_kernels import unpack_mask
from lightning.pytorch import Callback
from safetensors.torch import load_file
from torch import Tensor, nn
from typing_extensions import override

from lightfed import Algorithm, Fleet, ModelKind, Rows
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.standalone import Standalone
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.networks.cnn import Conv
from lightfed.testing.digest import fit
from lightfed.utils.errors import DiskError, UserError
from tests.promises.conformance.cases import CASES, CLIENTS, Case
from tests.small import SGD_HALF, random_data, row_held
from tests.small import fit as small_fit


def exported(case: Case, folder: Path) -> Path:
    both = {"export": ("server", "clients")}
    case = Case(case.algorithm, case.model, case.levels, case.federation | both)
    fit(case, folder, rounds=1)
    return folder / "run" / "models"


def test_the_bare_network_takes_the_servers_weights_and_a_client_has_its_own_width(
    tmp_path: Path,
) -> None:
    folder = exported(CASES["heterofl"], tmp_path)
    server = load_file(folder / "server.safetensors")
    network = Conv(10, (1, 8, 8), hidden=(8, 12), norm="none")
    loaded = network.load_state_dict(server, strict=False)
    assert not loaded.missing_keys
    assert all(name.split(".")[1] in ("2", "7") for name in loaded.unexpected_keys)  # the norms
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


class OwnModule(L.LightningModule):
    """Has a layer beside `net`, of the same names, and weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight, self.other.weight = nn.Parameter(torch.ones(4)), self.net.weight

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.other(self.net(batch[0]) * self.weight)
        return nn.functional.cross_entropy(hidden, batch[1])


class OnlyNet(L.LightningModule):
    """Has all its weights in an attribute of the name that lightfed's own clients use."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("algorithm", "module", "files"),
    [(FedAvg, OwnModule, 3), (Standalone, OwnModule, 2), (FedAvg, OnlyNet, 3)],
)
def test_a_module_of_ones_own_loads_all_of_its_weights(
    algorithm: Any, module: Any, files: int, tmp_path: Path
) -> None:
    made = Federation(
        algorithm(), [ClientGroup(2, module)], optimizer=SGD_HALF, export=["server", "clients"],
        evaluate=[],
    )  # fmt: skip
    small_fit(made, random_data([4, 4]), tmp_path)
    found = list((tmp_path / "run" / "models").glob("*.safetensors"))
    assert len(found) == files
    for file in found:
        own = module()
        own.load_state_dict(load_file(file))
        row = row_held(made.fleet, "1" in file.stem)[1].floats
        assert torch.isclose(sum(p.sum() for p in own.parameters()), row.sum())
        if module is OwnModule:
            assert torch.equal(own.other.weight, own.net.weight)
            assert own.weight.sum() != 4


def test_a_full_disk_at_the_end_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Fills(Callback):
        @override
        def on_train_end(self, *_: Any) -> None:
            monkeypatch.setattr(os, "fsync", full)

    made = Federation(FedAvg(), [ClientGroup(2, OwnModule)], optimizer=SGD_HALF, evaluate=[])
    with pytest.raises(DiskError, match="cannot be written"):
        small_fit(made, random_data([4, 4]), tmp_path, callbacks=[Fills()])
    assert not list((tmp_path / "run" / "models").iterdir())


class Own(Algorithm):
    """As a user writes one: stateless, with nothing said of tests."""

    @override
    def setup(self, fed: Fleet) -> None:
        self.model = fed.new_model()

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)
        fed.send(self.model, clients)
        fed.train(clients, t)
        fed.merge(clients, into=self.model)


class Untested(Own):
    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        return None


class OwnHeads(Own):
    """A client is tested with the server's model in place of the row that it keeps."""

    stateful = True

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        return None if kind == "global" else fed.rows(clients, given=self.model)


@pytest.mark.parametrize("algorithm", [Own, OwnHeads])
def test_a_client_exports_what_is_tested_not_what_it_keeps(
    algorithm: type[Algorithm], tmp_path: Path
) -> None:
    folder = exported(replace(CASES["fedavg"], algorithm=algorithm), tmp_path)
    files = [load_file(folder / f"{n}.safetensors") for n in ("server", "client0", "client6")]
    assert all(one.keys() == files[0].keys() for one in files)
    assert all(torch.equal(files[0][name], one[name]) for one in files for name in files[0])


class UntestedHeads(Untested):
    stateful = True


@pytest.mark.parametrize("algorithm", [Untested, UntestedHeads])
def test_an_export_of_clients_without_a_model_is_refused_before_the_first_round(
    algorithm: type[Algorithm], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="gives client 0 no model; return one from its `models`"):
        exported(replace(CASES["fedavg"], algorithm=algorithm), tmp_path)
    assert not (tmp_path / "run" / "metrics.csv").exists()


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
