"""A frozen base of quantized tensors: counted, compared and held by the tensors within them."""

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.standalone import Standalone
from lightfed.api.fleet import Fleet
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.models.agreement import are_alike
from lightfed.models.tensors import check_device
from lightfed.state.costs import activation_bytes
from lightfed.state.frozen_base import FrozenBase, digest, digests
from lightfed.state.rows import LiveModule, ModelLayout
from lightfed.utils.errors import UserError
from lightfed.utils.tensor_parts import held_bytes, parts
from tests.small import fit, fleet_of, random_data, run_round
from tests.wrapped import Int8, quantized

FEATURES, WIDE, CLASSES = 4, 16, 3
BYTES = WIDE * FEATURES + 4 * WIDE + 4 * WIDE  # values, scales and the bias
SIZES = [10, 7, 12]


class Net(nn.Module):
    """A quantized body, drawn by `seed`, and a trained head behind `middle` units."""

    def __init__(self, num_classes: int = CLASSES, seed: int = 0, middle: int = 5) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = quantized(nn.Linear(FEATURES, WIDE))
        self.middle = nn.Linear(WIDE, middle)
        self.head = nn.Linear(middle, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.body(x).relu()))


def live_of(module: nn.Module) -> LiveModule:
    return LiveModule(module, ModelLayout.of(module))


def federation(seed: int = 0, **settings: Any) -> Federation:
    groups = [ClientGroup(2, partial(Net, seed=seed)), ClientGroup(1, partial(Net, seed=seed))]
    return Federation(FedAvg(), groups, optimizer=partial(SGD, lr=0.1), **settings)


def test_a_digest_stands_for_all_tensors_within() -> None:
    weight = Int8.of(torch.randn(3, 4))
    same = Int8(weight.values.clone(), weight.scale.clone())
    assert digest(same) == digest(weight)

    for name in parts(weight):
        other = weight.clone()
        parts(other)[name][0, 0] += 1
        assert digest(other) != digest(weight)
    assert digest(weight.dense) != digest(weight)  # the same numbers, held in another way


def test_bytes_are_those_of_the_tensors_within() -> None:
    weight = Int8.of(torch.randn(3, 4))
    assert weight.nbytes == 4 * 3 * 4  # what it shows
    assert held_bytes(weight) == 3 * 4 + 4 * 3


def test_groups_of_unlike_models_hold_equal_tensors_once() -> None:
    base = FrozenBase()
    lives = [live_of(Net(middle=5)), live_of(Net(middle=7)), live_of(Net(seed=1))]
    for live in lives:
        base.add_group(live)

    first, second, other = (live.module.get_submodule("body").weight for live in lives)
    assert second.values.data_ptr() == first.values.data_ptr()
    assert second.scale.data_ptr() == first.scale.data_ptr()
    assert other.values.data_ptr() != first.values.data_ptr()
    assert base.bytes == 2 * BYTES  # of two bodies, not of three
    assert "body.weight" in base.unlike(["a", "b", "c"])


@pytest.mark.parametrize("side_by_side", ["off", 2])
def test_clients_train_and_leave_the_base_as_it_is(side_by_side: Any) -> None:
    groups = [ClientGroup(2, Net), ClientGroup(1, partial(Net))]
    optimizer = partial(SGD, lr=0.1)
    data = random_data(SIZES, batch_size=4)
    fed = fleet_of(groups, FedAvg(), data, optimizer=optimizer, side_by_side=side_by_side)
    assert fed.base.bytes == BYTES
    before = digests(fed.groups[0].live.frozen)
    row = fed.algorithm.model.floats.clone()

    assert run_round(fed, 0)["excluded"] == 0.0

    assert digests(fed.groups[0].live.frozen) == before
    assert not torch.equal(fed.algorithm.model.floats, row)
    assert fed.groups[0].layout.parameter_numel == WIDE * 5 + 5 + 5 * CLASSES + CLASSES


def test_a_session_is_that_of_the_dense_base() -> None:
    """The head's values after a round equal those over the base that the tensor stands for."""

    class Dense(Net):
        def __init__(self, num_classes: int = CLASSES) -> None:
            super().__init__(num_classes)
            self.body.weight = nn.Parameter(self.body.weight.dense, requires_grad=False)

    rows = []
    for model in (Net, Dense):
        fed = fleet_of(
            [ClientGroup(3, model)], FedAvg(), random_data(SIZES), optimizer=partial(SGD, lr=0.1)
        )
        run_round(fed, 0)
        rows.append(fed.algorithm.model.floats.clone())
    assert torch.equal(*rows)


def test_a_step_that_writes_within_the_base_is_refused() -> None:
    class Writing(Net):
        @override
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.body.weight.scale.mul_(2.0)
            return super().forward(x)

    fed = fleet_of([ClientGroup(3, Writing)], Standalone(), random_data(SIZES))
    with pytest.raises(UserError, match=r"a step writes net\.body\.weight, which is frozen"):
        run_round(fed, 0)


def test_a_run_resumes_on_its_own_base_only(tmp_path: Path) -> None:
    data = random_data(SIZES, batch_size=4)
    fit(federation(), data, tmp_path / "whole", rounds=2)
    fit(federation(), data, tmp_path, rounds=1)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    fit(federation(), data, tmp_path / "same", rounds=2, ckpt_path=last)
    whole, resumed = (
        load_file(tmp_path / name / "run" / "models" / "server.safetensors")
        for name in ("whole", "same")
    )
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    with pytest.raises(UserError, match=r"ckpt_path: .*net\.body\.weight"):
        fit(federation(seed=1), data, tmp_path / "other", rounds=2, ckpt_path=last)


def test_an_export_has_no_base_and_says_how_to_get_it(tmp_path: Path) -> None:
    root = federation(export=("server", "clients"))
    fit(root, random_data(SIZES, batch_size=4), tmp_path, rounds=1)
    folder = tmp_path / "run" / "models"
    assert not (folder / "base.safetensors").exists()
    told = json.loads((folder / "base.json").read_text())
    assert "strict=False" in told["how"]
    names = [state.name for state in root.fleet.groups]
    assert told["digests"] == dict(zip(names, root.fleet.base.digests, strict=True))

    entries = json.loads((folder / "models.json").read_text())
    for name in ("server", "client0", "client2"):
        trained = load_file(folder / f"{name}.safetensors")
        assert not any(key.startswith("body") for key in trained)
        assert entries[name]["unwritten"] == "base.json"
        assert not {"base", "missing", "note"} & entries[name].keys()
        assert not Net().load_state_dict(trained, strict=False).unexpected_keys


def test_tensors_within_that_share_memory_are_refused() -> None:
    class Shared(Net):
        def __init__(self, num_classes: int = CLASSES) -> None:
            super().__init__(num_classes)
            scale = self.body.weight.scale
            other = torch.zeros(WIDE, FEATURES, dtype=torch.int8)
            self.other = nn.Parameter(Int8(other, scale[:]), requires_grad=False)

    with pytest.raises(UserError, match=r"body\.weight\.scale shares memory with other\.scale"):
        fleet_of([ClientGroup(3, Shared)], FedAvg(), random_data(SIZES))


def test_a_trained_quantized_tensor_is_refused() -> None:
    class Trained(Net):
        def __init__(self, num_classes: int = CLASSES) -> None:
            super().__init__(num_classes)
            self.body.weight.requires_grad_(True)

    with pytest.raises(UserError, match=r"body\.weight is trained, and is quantized \(Int8\)"):
        fleet_of([ClientGroup(3, Trained)], FedAvg(), random_data(SIZES))


def test_a_method_that_adds_to_the_base_refuses_it() -> None:
    class Adding(FedAvg):
        @override
        def setup(self, fed: Fleet) -> None:
            super().setup(fed)
            fed.base.server_model([state.name for state in fed.groups])

    with pytest.raises(UserError, match=r"weight is quantized \(Int8\).*dtype: float32"):
        fleet_of([ClientGroup(3, Net)], Adding(), random_data(SIZES))


def test_networks_are_compared_by_the_tensors_within() -> None:
    one, same, other = Net(), Net(), Net()
    with torch.no_grad():
        for net in (same, other):
            for name in ("middle", "head"):
                net.get_submodule(name).load_state_dict(one.get_submodule(name).state_dict())
        other.body.weight.scale[0] *= 2
    assert are_alike(one, same)
    assert not are_alike(one, other)


def test_activations_are_counted_without_the_base() -> None:
    class Dense(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body.weight = nn.Parameter(self.body.weight.dense, requires_grad=False)

    x = torch.zeros(2, FEATURES)
    assert activation_bytes(Net(), x) == activation_bytes(Dense(), x)


def linear4bit(kind: str) -> type[nn.Linear]:
    """Return a class of bitsandbytes by its name, or one derived from it."""
    made = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    if kind == "Linear4bit":
        return made
    return type(kind, (made,), {"__module__": "bitsandbytes.nn.modules"})


@pytest.mark.parametrize("kind", ["Linear4bit", "LinearNF4", "MyOwn"])
def test_four_bits_of_bitsandbytes_are_refused_by_name(kind: str) -> None:
    class Packed(Net):
        def __init__(self, num_classes: int = CLASSES) -> None:
            super().__init__(num_classes)
            self.middle = linear4bit(kind)(WIDE, 5)

    with pytest.raises(UserError, match=rf"middle is a {kind} of bitsandbytes.*no gradient; use"):
        ClientGroup(3, Packed).build(random_data(SIZES).dataset, position=0, seed=0)


@pytest.mark.parametrize("has_it", [True, False])
def test_half_a_base_needs_a_gpu_that_has_the_type(
    has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_it)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old card")
    net = Net()
    gpu = torch.device("cuda", 0)
    check_device(net, gpu, "model")  # no tensor has the type

    net.body.bias = nn.Parameter(net.body.bias.bfloat16(), requires_grad=False)
    check_device(net, torch.device("cpu"), "model")
    if has_it:
        check_device(net, gpu, "model")
        return
    with pytest.raises(UserError, match=r"^model: body\.bias is bfloat16, which Old card"):
        check_device(net, gpu, "model")
