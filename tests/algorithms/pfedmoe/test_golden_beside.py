"""Whole rounds of pFedMoE and what it is compared with, against runs of the released code.

Batches come in the recorded order, and sessions begin with the recorded values.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.class_means import ClassMeans
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.algorithms.pfedmoe.fedapen import FedAPEN
from lightfed.algorithms.pfedmoe.fedkd import FedKD
from lightfed.algorithms.pfedmoe.fml import FML
from lightfed.algorithms.pfedmoe.pfedmoe import PFedMoE
from lightfed.algorithms.prototypes.fd import FD
from lightfed.algorithms.prototypes.fedproto import FedProto
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import SessionContext
from lightfed.models.split import SplitNetwork
from lightfed.state.rows import ModelLayout, Row
from lightfed.state.server_model import ServerModel
from tests.algorithms.peers.dispfl_cases import in_order
from tests.core.models.client_cases import network
from tests.small import GOLDEN, data_of, fleet_of, random_data, run_round

HTFLLIB = load_file(GOLDEN / "baselines/htfllib.safetensors")
APEN = load_file(GOLDEN / "baselines/fedapen.safetensors")
MOE = load_file(GOLDEN / "pfedmoe/moe.safetensors")
ABOUT = json.loads((GOLDEN / "baselines/htfllib.json").read_text())
ABOUT_APEN = json.loads((GOLDEN / "baselines/fedapen.json").read_text())
SIZES = [4, 6, 10]  # shares .2, .3, .5 of the recorded weighted mean
Values = Mapping[str, Tensor]
frozen = partial(SGD, lr=0.0)


class Alone(nn.Module):
    """FedAPEN's recorded networks."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, hidden), nn.Tanh(), nn.Linear(hidden, 4))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def recorded(vectors: Values, folder: str, prefix: str) -> dict[str, Tensor]:
    """A recorded state dict under the names that it has in a client; base is the extractor."""
    found = {
        prefix + name.removeprefix(f"{folder}/").replace("base.", "extractor."): tensor
        for name, tensor in vectors.items()
        if name.startswith(f"{folder}/")
    }
    assert found, folder
    return found


def plant(layout: ModelLayout, row: Row, values: Values) -> None:
    views = layout.floats.views(row.floats)
    for name, value in values.items():
        views[name].copy_(value)


def planted(algorithm: Algorithm, values: Callable[[int], Values]) -> None:
    """Sessions begin with these values in the client's row, whatever was sent."""
    before = algorithm.session_start

    def start(s: SessionContext) -> None:
        plant(s.group.layout, s.row, values(s.client))
        before(s)

    algorithm.session_start = start  # type: ignore[method-assign]


def agree(layout: ModelLayout, row: Row, expected: Values, bound: float = 1e-6) -> bool:
    views = layout.floats.views(row.floats)
    return all(torch.allclose(views[n], v, rtol=0, atol=bound) for n, v in expected.items())


def holds(fleet: Fleet, expected: Values) -> bool:
    """Whether client 0 has these values."""
    return agree(fleet.groups[0].layout, fleet.row(0), expected)


def server_holds(model: ServerModel, expected: Values, bound: float = 1e-6) -> bool:
    return agree(model.layout, model.row, expected, bound)


def one_client(
    algorithm: Algorithm,
    model: Callable[[], nn.Module],
    start: Values,
    *,
    lr: float,
    vectors: Values,
) -> Fleet:
    """A client with the recorded samples, two epochs of batches of 6."""
    x, y = vectors["x"], vectors["y"]
    data = in_order(data_of(x, y, [range(len(y))], classes=4, batch_size=6))
    planted(algorithm, lambda _: start)
    return fleet_of(
        [ClientGroup(1, model)], algorithm, data, optimizer=partial(SGD, lr=lr), epochs=2
    )


FORMS: list[tuple[Any, bool]] = [("htfllib", True), ("separate", False)]


@pytest.mark.parametrize("case", ["fml_a.5b.5", "fml_a.3b.8"])
@pytest.mark.parametrize(("form", "same"), FORMS)
def test_fml(case: str, form: Any, same: bool) -> None:
    about = ABOUT[case]
    algorithm = FML(partial(network, 3), about["alpha"], about["beta"], form=form)
    states = [
        recorded(HTFLLIB, f"{case}/private_{when}", "net.private.")
        | recorded(HTFLLIB, f"{case}/shared_{when}", "net.shared.")
        for when in ("before", "after")
    ]
    start = states[0]
    fleet = one_client(algorithm, partial(network, 6), start, lr=about["lr"], vectors=HTFLLIB)
    run_round(fleet, 0)
    assert holds(fleet, states[1]) == same
    shared = recorded(HTFLLIB, f"{case}/shared_after", "net.shared.")
    assert server_holds(algorithm.model, shared) == same


class Rates(FedKD):
    """The recorded learning rates: of the student half that of the others."""

    @override
    def lr_factors(self, module: L.LightningModule) -> Mapping[str, float]:
        return {"net.shared.": 0.5}


@pytest.mark.parametrize(("form", "same"), FORMS)
def test_fedkd_and_its_upload(form: Any, same: bool) -> None:
    case = "fedkd_e.6"
    about = ABOUT[case]
    energy = (about["energy"], about["energy"])
    algorithm = Rates(partial(network, 4), energy, form=form, rounds=1, compress="parameters")
    parts = [("private", "private"), ("shared", "shared"), ("Wh", "projection")]
    start, after = (
        {
            name: value
            for theirs, ours in parts
            for name, value in recorded(HTFLLIB, f"{case}/{theirs}_{when}", f"net.{ours}.").items()
        }
        for when in ("before", "after")
    )
    fleet = one_client(
        algorithm, partial(network, 6), start, lr=about["lr_private"], vectors=HTFLLIB
    )
    run_round(fleet, 0)
    private = {n: v for n, v in after.items() if not n.startswith("net.shared.")}
    assert holds(fleet, private) == same
    uploaded = recorded(HTFLLIB, f"{case}/uploaded_recovered", "net.shared.")
    # Singular values and vectors in float32: measured 7e-7.
    assert server_holds(algorithm.model, uploaded, 5e-6) == same


def common(case: str, kind: str, size: int, when: str) -> ClassMeans:
    means = ClassMeans(torch.zeros(4, size), torch.zeros(4, dtype=torch.bool))
    for c in range(4):
        if (name := f"{case}/{when}_{kind}/{c}") in HTFLLIB:
            means.values[c], means.seen[c] = HTFLLIB[name], True
    return means


def exchange(algorithm: FD | FedProto, case: str, kind: str, part: str) -> tuple[bool, bool]:
    """Whether a client's network and its upload are the recorded ones after a round."""
    size = 4 if kind == "logits" else 5
    start = recorded(HTFLLIB, f"{case}/before", part)
    fleet = one_client(algorithm, partial(network, 6), start, lr=ABOUT[case]["lr"], vectors=HTFLLIB)
    given, upload = (common(case, kind, size, when) for when in ("global", "uploaded"))
    algorithm.values.copy_(given.values)
    algorithm.seen.copy_(given.seen)
    run_round(fleet, 0)
    assert torch.equal(algorithm.seen, upload.seen)
    same = torch.allclose(algorithm.values, upload.values, rtol=0, atol=1e-6)
    return holds(fleet, recorded(HTFLLIB, f"{case}/after", part)), same


@pytest.mark.parametrize("case", ["fd_r0", "fd_r1"])
@pytest.mark.parametrize("target", ["raw", "softmax"])
def test_fd(case: str, target: Any) -> None:
    algorithm = FD(ABOUT[case]["lamda"], target, absent="forget")
    same = target == "raw" or case == "fd_r0"
    assert exchange(algorithm, case, "logits", "net.net.") == (same, same)


@pytest.mark.parametrize("case", ["fedproto_r0", "fedproto_r1"])
def test_fedproto(case: str) -> None:
    algorithm = FedProto(ABOUT[case]["lamda"], absent="forget")
    assert exchange(algorithm, case, "protos", "net.private.") == (True, True)


@pytest.mark.parametrize("case", ["apen_first", "apen_w.8"])
def test_fedapen_trains_aggregates_and_then_learns_its_share(case: str) -> None:
    about = ABOUT_APEN[case]
    assert about["lambda_before"] == pytest.approx(about["weight_private"])
    algorithm = FedAPEN(
        partial(Alone, 3), share_lr=about["lambda_lr_used"], passes=about["lambda_epochs"],
        learn="aggregated",
    )  # fmt: skip
    start, after = (
        recorded(APEN, f"{case}/private_{when}", "net.private.")
        | recorded(APEN, f"{case}/shared_{when}", "net.shared.")
        for when in ("before", "after")
    )
    start["net.share"] = torch.tensor(about["weight_private"])
    fleet = one_client(algorithm, partial(Alone, 6), start, lr=about["lr"], vectors=APEN)
    held = list(zip(APEN["xv"].chunk(2), APEN["yv"].chunk(2), strict=True))
    fleet.data.held_out_batches = lambda client: iter(held)  # type: ignore[method-assign]
    run_round(fleet, 0)
    after["net.share"] = torch.tensor(about["lambda_after"])
    assert holds(fleet, after)


EXTRACTOR = {"c": "0", "f": "4"}
GATE = {"sn": "1", "fc1": "2", "bn1": "3", "fc2": "5", "bn2": "6"}


def expert(channels: int) -> SplitNetwork:
    layers = (nn.Conv2d(3, channels, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    extractor = nn.Sequential(*layers, nn.Linear(9 * channels, 6), nn.ReLU())
    return SplitNetwork(extractor, nn.Linear(6, 4), feature_dim=6)


def mixture(when: str) -> dict[str, Tensor]:
    """The recorded client of pFedMoE under the names that it has here."""
    parts: Iterable[tuple[str, str, Mapping[str, str]]] = (
        ("F", "net.extractor.", EXTRACTOR),
        ("G", "net.shared.", EXTRACTOR),
        ("head", "net.head.", {}),
        ("gate", "net.gate.layers.", GATE),
    )
    found = {}
    for part, prefix, names in parts:
        for key, value in MOE.items():
            folder, _, name = key.rpartition("/")
            if folder == f"moe/{when}/{part}" and value.is_floating_point():
                layer, _, last = name.rpartition(".")
                here = prefix + f"{names.get(layer, '')}.{last}".lstrip(".")
                found[here] = value[0] if layer == "sn" and value.dim() == 2 else value
    return found


def test_pfedmoe() -> None:
    x, y = MOE["moe/x"], MOE["moe/y"]
    data = in_order(data_of(x, y, [range(len(y))], classes=4, batch_size=8))
    algorithm = PFedMoE(partial(expert, 2), gate_units=5, gate_lr=0.02 / 0.05)
    planted(algorithm, lambda _: mixture("init"))
    fleet = fleet_of(
        [ClientGroup(1, partial(expert, 4))],
        algorithm,
        data,
        optimizer=partial(SGD, lr=0.05),
        epochs=2,
    )
    run_round(fleet, 0)
    views = fleet.groups[0].layout.floats.views(fleet.row(0).floats)
    after = mixture("after")
    assert len(after) > 15
    for name, value in after.items():
        torch.testing.assert_close(views[name], value, rtol=1e-6, atol=1e-6)
    shared = {n: v for n, v in after.items() if n.startswith("net.shared.")}
    assert server_holds(algorithm.model, shared)


@pytest.mark.parametrize(("weights", "same"), [("uniform", True), ("samples", False)])
def test_htfllibs_mean_of_fmls_shared_network_is_without_weights(weights: Any, same: bool) -> None:
    algorithm = FML(partial(network, 3), weights=weights)
    uploads = [recorded(HTFLLIB, f"fml_agg/in/{k}", "net.shared.") for k in range(3)]
    planted(algorithm, lambda client: uploads[client])
    data = random_data(SIZES, classes=4, features=7)
    fleet = fleet_of([ClientGroup(3, partial(network, 6))], algorithm, data, optimizer=frozen)
    run_round(fleet, 0)
    assert server_holds(algorithm.model, recorded(HTFLLIB, "fml_agg/out", "net.shared.")) == same
    shares = SIZES if weights == "samples" else [1, 1, 1]
    means = {
        n: sum(s / sum(shares) * u[n] for s, u in zip(shares, uploads, strict=True))
        for n in uploads[0]
    }
    assert server_holds(algorithm.model, means)  # type: ignore[arg-type]


@pytest.mark.parametrize(("weights", "same"), [("samples", True), ("uniform", False)])
def test_htfllibs_mean_of_the_heads_of_different_networks(weights: Any, same: bool) -> None:
    algorithm = LGFedAvg(1, weights=weights)
    names = ["net.head.", "net.2.", "net.2."]
    planted(algorithm, lambda k: recorded(HTFLLIB, f"lg_agg/in/{k}", names[k]))

    def flat() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 4))

    groups = [ClientGroup(1, partial(network, 6)), ClientGroup(2, flat)]
    fleet = fleet_of(groups, algorithm, random_data(SIZES, classes=4, features=7), optimizer=frozen)
    run_round(fleet, 0)
    expected = recorded(HTFLLIB, "lg_agg/out", "net.head.")
    assert server_holds(algorithm.model, expected) == same
