"""Clients trained side by side: the bits of any pack size, and what falls back."""

import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightfed_kernels import stream_keys
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.shared import slice_tests
from lightfed.algorithms.shared.aspg import ASPG
from lightfed.algorithms.standalone import Standalone
from lightfed.engine.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.local.packed import rules
from lightfed.local.packed.rules import FLOOR, client_bytes
from lightfed.local.packed.steps import tensors
from lightfed.models import MLP
from lightfed.state.costs import activation_bytes
from lightfed.utils.errors import UserError
from lightfed.utils.rng import DeviceStreams
from tests.core.packs import (
    CASES,
    CLIENTS,
    SIZES,
    Bent,
    Listened,
    Reads,
    Smooth,
    after,
    fleet,
    mlp,
    most,
    vectors,
)
from tests.core.test_suspend import SignalAt
from tests.small import fit, random_data, run_round, server_row
from tests.tiers import by_default

# One of each kind of layer, optimiser and hook.
QUICK = (
    "mlp", "clipped", "fedprox", "dropout", "residual", "vmap", "frozen bn", "tied", "shifts",
    "no gradients", "dropout of convolutions", "late", "adam", "dispfl", "pfedmoe", "aspg",
    "phases", "bn", "one channel", "one pixel", "static bn", "static bn of drops",
    "masked language model",
)  # fmt: skip


@pytest.mark.parametrize("name", by_default(CASES, *QUICK))
def test_a_clients_bits_are_those_of_any_pack(name: str) -> None:
    whole = fleet(name, CLIENTS)
    rows, metrics = after(whole)
    assert most(whole) == [CLIENTS]
    for size in (1, 4):
        some = fleet(name, max(size, 2))
        some.training._packs._most = {0: size}  # of 1: padded
        found = after(some)
        assert torch.equal(found[0], rows)
        assert found[1] == metrics
    alone, its = after(fleet(name, "off"))
    torch.testing.assert_close(rows, alone, rtol=1e-5, atol=2e-5)
    assert metrics == pytest.approx(its, rel=1e-5)


@pytest.mark.parametrize(
    "name", ["dropout", "dropout of convolutions", "static bn of drops", "masked language model"]
)
def test_draws_on_the_device_are_those_of_any_pack(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_the_device(seeds: Sequence[int], device: torch.device) -> DeviceStreams:
        keys = stream_keys(seeds)
        return DeviceStreams(keys, torch.zeros_like(keys))

    host, _ = after(fleet(name, CLIENTS))
    for module in (rules, tensors, slice_tests):
        monkeypatch.setattr(module, "streams", on_the_device)
    whole, metrics = after(fleet(name, CLIENTS))
    assert not torch.equal(whole, host)
    assert torch.isfinite(whole).all()
    for size in (1, 4):
        some = fleet(name, max(size, 2))
        some.training._packs._most = {0: size}
        found = after(some)
        assert torch.equal(found[0], whole)
        assert found[1] == metrics


@pytest.mark.parametrize("width", [40, 200])
def test_linear_layers_have_the_bits_of_a_client_alone(width: int) -> None:
    model, data = partial(MLP, hidden=(width,)), partial(random_data, features=64, batch_size=8)
    rows = [
        after(fleet("mlp", side, [24] * 5, model=model, data=data))[0] for side in ("off", 5, 2)
    ]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("mlp", 0.0), ("island", 1e-6), ("vmap", 2e-3), ("bn", 2e-3), ("gn", 2e-2)],
)
def test_bf16_takes_gradients_outside_autocast_as_for_a_client_alone(
    name: str, tolerance: float
) -> None:
    precision = partial(torch.autocast, "cpu", torch.bfloat16)
    alone, pack, packs = (
        after(fleet(name, side, precision=precision))[0] for side in ("off", CLIENTS, 3)
    )
    assert torch.equal(pack, packs)
    assert float((pack - alone).norm() / alone.norm()) <= tolerance


@pytest.mark.parametrize("name", ["bn", "vmap"])
def test_a_pack_below_the_floor_is_padded(name: str) -> None:
    drawn = [[0], [0, 1], [*range(FLOOR + 1)]]
    found = []
    for clients in drawn:
        made = fleet(name, CLIENTS)
        made.participants = lambda t, c=clients: c  # type: ignore[method-assign,misc]
        run_round(made, 0)
        found.append(made.row(0).floats.clone())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


class Curved(nn.Module):
    """Odd widths, and functions whose last elements have other instructions."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        sizes = [(input_shape[0], 31), (31, 33), (33, 25), (25, num_classes)]
        self.parts = nn.ModuleList(nn.Linear(a, b, bias=a != 31) for a, b in sizes)
        self.last = nn.SiLU()

    @override
    def forward(self, x: Tensor) -> Tensor:
        one, two, three, four = self.parts
        x = torch.sigmoid(one(x))
        return four(self.last(three(nn.functional.gelu(two(x), approximate="tanh"))))


class CurvedStep(Smooth):
    """The same, which only `vmap` runs."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(num_classes, input_shape)
        self.net = Curved(num_classes, input_shape)


@pytest.mark.parametrize("model", [Curved, pytest.param(CurvedStep, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "size",
    [pytest.param(50, marks=pytest.mark.matrix), 51, pytest.param(53, marks=pytest.mark.matrix)],
)
def test_neither_odd_widths_nor_the_ends_of_tensors_show_the_other_clients(
    model: type[nn.Module], size: int
) -> None:
    rows = []
    for most_clients in (CLIENTS, 4, 1):
        made = fleet("mlp", CLIENTS, [size] * CLIENTS, model=model, epochs=3)
        made.training._packs._most = {0: most_clients}
        rows.append(after(made)[0])
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("name", ["mlp", "bn", "standalone", "dispfl", "phases"])
def test_rows_on_the_host_train_in_packs_to_the_same_bits(name: str) -> None:
    here, there = fleet(name, 3), fleet(name, 3, host_rows=True)
    assert most(here) == most(there) == [3]
    found, expected = after(there), after(here)
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]


def test_an_optimiser_that_moves_all_parameters_refuses_phases_in_packs_too() -> None:
    for side in ("off", 3):
        made = fleet("phases", side, optimizer=partial(ASPG, lr=0.1), clip=None)
        with pytest.raises(UserError, match="freezes a part"):
            run_round(made, 0)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("algorithm", [FedAvg, Standalone])
def test_a_client_that_fails_is_left_out_and_the_others_keep_their_bits(
    algorithm: Callable[[], Any], host: bool
) -> None:
    rows = []
    for broken in (False, True):
        made = fleet("mlp", 4, algorithm=algorithm, host_rows=host)
        if broken:
            last = SIZES[0] + SIZES[1] - 1  # of client 1, whose second or third batch raises
            made.data.train.y[last] = 99
        else:
            others = [k for k in range(CLIENTS) if k != 1]
            made.participants = lambda t, o=others: o  # type: ignore[method-assign,misc]
        assert run_round(made, 0)["excluded"] == float(broken)
        rows.append(torch.stack([made.row(k).floats.clone() for k in range(CLIENTS) if k != 1]))
    assert torch.equal(*rows)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": Reads}, "item"),
        ({"optimizer": partial(torch.optim.ASGD, lr=0.1)}, "ASGD"),
        ({"model": Listened}, "hooks"),
        ({"algorithm": Bent}, "Bent"),
    ],
)
def test_what_cannot_be_packed_trains_one_client_at_a_time(
    settings: dict[str, Any], reason: str
) -> None:
    made = fleet("mlp", CLIENTS, **settings)
    assert most(made) == []
    rows, _ = after(made)
    assert torch.equal(rows, after(fleet("mlp", "off", **settings))[0])
    assert reason in str(list(made.training.side_by_side.values()))


def test_the_environment_says_how_each_group_is_trained(tmp_path: Path) -> None:
    import json

    groups = [ClientGroup(3, mlp, name="net"), ClientGroup(2, Reads, name="own")]
    federation = Federation(Standalone(), groups, optimizer=partial(SGD, lr=0.1), side_by_side=2)
    fit(federation, random_data([6] * 5), tmp_path)
    found = json.loads((tmp_path / "run/environment.json").read_text())["side_by_side"]
    assert found["net"] == 2
    assert "item" in found["own"]


def test_memory_bounds_a_pack_by_rows_and_activations() -> None:
    """Of an MLP: inputs of the linear layers, outputs of the ReLUs, and log-probabilities."""
    made = fleet("mlp", "auto")
    state = made.groups[0]
    floats = 4 + 40 + 30  # inputs of the three layers; a ReLU keeps what the next layer does
    assert activation_bytes(state.module, torch.zeros(2, 4)) == 4 * floats
    each = 4 * (5 * state.layout.size + 1.5 * 4 * floats)
    assert client_bytes(state, made.data) == each  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "value", "why"),
    [
        ("_FEW", CLIENTS + 1, "7 clients in a round"),
        ("_BUSY", 1.0, "one client keeps a CPU busy"),
        ("_LARGE", 4 * 1523 - 1, "the parameters of one client fill a CPU's cache"),
        ("_LARGE", 4 * 1523, CLIENTS),
    ],
)
def test_by_default_packs_are_of_many_small_clients(
    limit: str, value: float, why: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, limit, value)
    monkeypatch.setattr(rules, "_MOST", CLIENTS)
    made = fleet("mlp", "auto")
    assert made.groups[0].layout.parameter_numel == 1523
    assert [*made.training.side_by_side.values()] == [why]


def test_a_number_below_two_is_refused() -> None:
    with pytest.raises(UserError) as refused:
        Federation(FedAvg(), [ClientGroup(2, mlp)], side_by_side=1)
    assert refused.value.key == "model.side_by_side"


def test_a_bare_off_in_a_file_is_read_as_false() -> None:
    made = rules.Packed(False, capture=False)
    assert (made.side_by_side, made.capture) == ("off", "off")
    assert most(fleet("mlp", False)) == []


def test_a_run_stopped_between_two_packs_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def run(folder: Path, **flags: Any) -> Tensor:
        federation = Federation(
            FedAvg(), [ClientGroup(CLIENTS, mlp)], optimizer=partial(SGD, lr=0.2), side_by_side=3
        )
        fit(federation, vectors(SIZES), folder, rounds=2, **flags)
        return server_row(federation)

    whole = run(tmp_path / "whole")
    with pytest.raises(SystemExit) as left:
        run(tmp_path / "other", callbacks=[SignalAt(2)])
    assert left.value.code == 128 + signal.SIGUSR1
    assert torch.equal(run(tmp_path / "other", ckpt_path="last"), whole)


def test_a_users_module_logs_means_over_samples() -> None:
    values = [run_round(fleet("vmap", side), 0)["top"] for side in ("off", CLIENTS)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
