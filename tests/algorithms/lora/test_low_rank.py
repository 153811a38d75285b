"""Rules of low-rank adapters: what they refuse, and what holds without recordings."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.lora.adapter_rule import AdapterRule
from lightfed.algorithms.lora.adapters import adapters_of
from lightfed.algorithms.lora.feddpa import FedDPA
from lightfed.algorithms.lora.fedexlora import FedExLoRA
from lightfed.algorithms.lora.flexlora import FlexLoRA
from lightfed.algorithms.lora.flora import FLoRA
from lightfed.algorithms.lora.products import Product
from lightfed.algorithms.lora.rankmean import RankMean
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.utils.errors import UserError
from tests.algorithms.lora.low_rank import NAMES, RULES, Adapted
from tests.small import fit, fleet_of, random_data, run_round
from tests.tiers import by_default

TUNED = [name for name in RULES if name != "fedsa"]
DRAW = torch.Generator().manual_seed(0)
BASE = torch.randn(5, 4, generator=DRAW)


class Net(nn.Module):
    """One adapter and a head."""

    def __init__(
        self, rank: int = 2, *, base: Tensor = BASE, scaling: float = 2.0, **change: Any
    ) -> None:
        super().__init__()
        self.body = Adapted(base, rank, scaling)
        self.head = nn.Linear(len(base), 3)
        for name, value in change.items():
            setattr(self.body, name, value)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Tied(Net):
    def __init__(self) -> None:
        super().__init__(base=torch.eye(4))
        self.other = nn.Linear(4, 4)
        self.other.weight = self.body.weight


class Shared(Net):
    """Two layers have one A."""

    def __init__(self) -> None:
        super().__init__(base=torch.eye(4))
        self.second = Adapted(torch.eye(4), 2, 1.0)
        self.second.down = self.body.down


class Frozen(Net):
    """A second pair of factors, of which some or none are trained."""

    def __init__(self, *, down: bool, up: bool) -> None:
        super().__init__()
        self.other = Adapted(BASE, 2, 1.0)
        self.other.down.requires_grad_(down)
        self.other.up.requires_grad_(up)


class Trained(Net):
    def __init__(self) -> None:
        super().__init__(up=nn.Parameter(torch.ones(5, 2)))


def fleet(*nets: Any, rule: Any = RankMean, **arguments: Any) -> Any:
    """Make a federation of one client for each network, under a rule with these arguments."""
    groups = [ClientGroup(1, net, name=f"g{i}") for i, net in enumerate(nets)]
    algorithm = rule(adapters=NAMES, **arguments)
    return fleet_of(groups, algorithm, random_data([9] * len(groups)))


# By case, the networks of the clients and the arguments of `fleet`.
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "no adapters": ([partial(nn.Linear, 4, 3)], {}),
    "one group without": ([Net, partial(nn.Linear, 4, 3)], {}),
    "rank 0": ([partial(Net, 0)], {}),
    "unlike ranks of A and B": ([partial(Net, up=nn.Parameter(torch.zeros(5, 3)))], {}),
    "unlike shapes": ([Net, partial(Net, base=torch.ones(6, 4))], {}),
    "no B": ([partial(Net, up=None)], {}),
    "a magnitude": ([partial(Net, lora_magnitude_vector=nn.Parameter(torch.ones(5)))], {}),
    "trained already": ([Trained], {}),
    "an A of two layers": ([Shared], {}),
    "a frozen A": ([partial(Frozen, down=False, up=True)], {}),
    "a frozen B": ([partial(Frozen, down=True, up=False)], {}),
    "a scale of 0": ([partial(Net, scaling=0.0)], {}),
    "an update of experts": ([partial(Net, num_experts=2)], {}),
    "a tied base, FLoRA": ([Tied], {"rule": FLoRA}),
    "a tied base, FedEx": ([Tied], {"rule": FedExLoRA}),
    "a trained base": ([partial(Net, weight=nn.Parameter(BASE))], {"rule": FLoRA}),
    "a quantised base": (
        [partial(Net, weight=nn.Parameter(BASE.to(torch.int8), requires_grad=False))],
        {"rule": FLoRA},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_adapter_is_refused_in_one_line(case: str) -> None:
    nets, arguments = REFUSED[case]
    with pytest.raises(UserError) as error:
        fleet(*nets, **arguments)
    assert error.value.key.startswith("model.clients")


def test_a_server_rank_below_a_clients_is_refused() -> None:
    with pytest.raises(UserError) as error:
        fleet(Net, partial(Net, 3), rule=FlexLoRA, server_rank=2)
    assert error.value.key == "model.algorithm.init_args.server_rank"


def test_a_decay_without_ranks_to_drop_is_refused() -> None:
    with pytest.raises(UserError) as error:
        fleet(Net, rule=RULES["hetlora"], decay=0.1)
    assert error.value.key == "model.algorithm.init_args.decay"


@pytest.mark.parametrize("rule", RULES)
def test_factors_that_are_both_frozen_are_left_alone(rule: str) -> None:
    fed = fleet(partial(Frozen, down=False, up=False), rule=RULES[rule])
    run_round(fed, 0)
    assert len(fed.algorithm.adapters[0]) == 1
    assert (fed.groups[0].module.net.other.down == 1).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_round_without_a_usable_client_changes_nothing(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = fleet(Net, Net, rule=RULES[rule])
    before = fed.algorithm.model.floats.clone()
    monkeypatch.setattr(fed, "usable", lambda client: False)
    metrics = run_round(fed, 0)
    assert metrics["aggregation_error"] == metrics["aggregation_error_worst"] == 0
    torch.testing.assert_close(fed.algorithm.model.floats, before)


@pytest.mark.parametrize("rule", by_default(TUNED, "ffa", "flora", "rankmean"))
def test_fine_tuning_starts_from_what_is_deployed(rule: str, tmp_path: Path) -> None:
    """A rate of 0 in the last round: tests before and after fine-tuning agree."""
    groups = [ClientGroup(2, partial(Net, rank, scaling=8 / rank)) for rank in (2, 3)]
    root = Federation(
        RULES[rule](adapters=NAMES), groups, optimizer=partial(SGD, lr=0.5),
        lr_schedule=partial(LambdaLR, lr_lambda=lambda t: float(t < 1)),
        evaluate=("global", "personal", "finetuned"),
    )  # fmt: skip
    trainer = fit(root, random_data([9, 12, 9, 12]), tmp_path, rounds=2)
    found = trainer.results.rounds
    assert found["finetuned/loss"].iloc[-1] == pytest.approx(found["personal/loss"].iloc[-1])
    assert "global/loss" in found


def test_frozen_factors_of_unlike_rank_are_exported_with_their_clients(tmp_path: Path) -> None:
    groups = [ClientGroup(1, partial(Net, rank)) for rank in (2, 3)]
    root = Federation(
        RULES["ffa"](adapters=NAMES), groups, optimizer=partial(SGD, lr=0.1), export=("clients",)
    )
    fit(root, random_data([9, 9]), tmp_path)
    models = tmp_path / "run" / "models"
    assert {*load_file(models / "base.safetensors")} == {"body.weight"}
    for client, rank in enumerate((2, 3)):
        assert load_file(models / f"client{client}.safetensors")["body.down"].shape == (rank, 4)


@pytest.mark.parametrize(
    "rule", [*(RULES[name] for name in ("rankmean", "zeropad", "hetlora", "lorafair")), FedDPA]
)
def test_the_server_beside_personal_heads_is_exported_as_modules_hold_it(
    rule: type[AdapterRule], tmp_path: Path
) -> None:
    """The server keeps s * B. Its file has B, as a network multiplies it by s."""
    groups = [ClientGroup(1, partial(Net, rank)) for rank in (2, 3)]
    algorithm = rule(adapters=NAMES)
    root = Federation(
        algorithm,
        groups,
        optimizer=partial(SGD, lr=0.1),
        personal=["net.head."],
        export=("server",),
    )
    fit(root, random_data([9, 9]), tmp_path)

    file = load_file(tmp_path / "run" / "models" / "server.safetensors")
    ((down, scaled_up),) = algorithm.server_factors()
    assert {*file} == {"body.down", "body.up"}
    assert torch.equal(file["body.down"], down.float())
    scale = 2.0
    torch.testing.assert_close(file["body.up"] * scale, scaled_up.float())
    assert scaled_up.abs().sum() > 0


def test_a_tied_base_may_have_adapters_that_are_averaged() -> None:
    run_round(fleet(Tied), 0)


@pytest.mark.parametrize("rule", ["fedex", "flexlora", "flora", "ffa", "rolora", "fedsvd"])
def test_exact_rules_apply_the_mean_update(rule: str) -> None:
    fed = fleet(Net, partial(Net, 3, scaling=0.5), rule=RULES[rule])
    for t in range(2 if rule == "rolora" else 1):  # B, and then A
        assert run_round(fed, t)["aggregation_error"] <= 1e-6


def test_all_clients_start_from_one_update() -> None:
    fed = fleet(Net, partial(Net, 3, scaling=0.5), partial(Net, 4))
    run_round(fed, 0)
    A, D = fed.algorithm.server_factors()[0]
    for client, rank in enumerate((2, 3, 4)):
        with fed.deployed(client).bound(client) as module:
            body = module.net.body
            torch.testing.assert_close(body.scaling * body.up @ body.down, D[:, :rank] @ A[:rank])


def test_the_mean_of_equal_ranks_and_scales_is_that_of_fedavg() -> None:
    """Unlike products are another matter: `aggregation_error` is what they differ by."""
    fed = fleet(*[partial(Net, scaling=1.0)] * 3)
    start = fed.algorithm.model.row.clone()
    groups = [ClientGroup(1, partial(Net, scaling=1.0), name=f"g{i}") for i in range(3)]
    plain = fleet_of(groups, FedAvg(), random_data([9] * 3))
    plain.algorithm.model.floats.copy_(start.floats)
    for t in range(2):  # in the first, B = 0, so that A does not move
        metrics = run_round(fed, t)
        run_round(plain, t)
    torch.testing.assert_close(fed.algorithm.model.floats, plain.algorithm.model.floats)
    assert metrics["aggregation_error"] > 1e-4


def test_adapters_of_peft_are_found() -> None:
    peft = pytest.importorskip("peft", reason="needs the extra hf")
    from transformers.pytorch_utils import Conv1D

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 5)
            self.words = nn.Embedding(7, 4)
            self.image = nn.Conv2d(2, 3, 2)
            self.turned = Conv1D(6, 4)

    names = ["line", "words", "image", "turned"]
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=names)
    model = peft.get_peft_model(Layers(), config)
    adapters = {a.layer.rsplit(".")[-1]: a for a in adapters_of(model, RankMean().names)}
    shapes = {name: (adapter.outputs, adapter.inputs) for name, adapter in adapters.items()}
    assert shapes == {"line": (5, 4), "words": (7, 4), "image": (3, 8), "turned": (6, 4)}

    tensors = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    for name, adapter in adapters.items():
        A, B = adapter.factors(tensors)
        with torch.no_grad():
            A.copy_(torch.randn(A.shape, generator=generator))
            B.copy_(torch.randn(B.shape, generator=generator))

        layer = model.get_submodule(adapter.layer)
        update = layer.get_delta_weight("default")
        update = update.T if name == "turned" else update.flatten(1)
        torch.testing.assert_close(adapter.scale * B @ A, update)
        assert adapter.weight(tensors).shape == update.shape
        assert adapter.base


@pytest.mark.parametrize("before", ["highest", "high"])
def test_the_trial_of_a_merge_leaves_no_trace(before: Any) -> None:
    """Neither in torch's switches, which it sets for exact products, nor in the module."""
    torch.set_float32_matmul_precision(before)
    try:
        made = fleet(Net, rule=FLoRA)
        assert torch.get_float32_matmul_precision() == before
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
    state = made.groups[0]
    assert torch.equal(state.live.frozen["net.body.weight"], BASE)
    assert state.module.training
    run_round(made, 0)


@pytest.mark.parametrize("factors", [1, 4, 5, 6, 40])
def test_the_norm_of_a_product_is_that_of_its_matrix(factors: int) -> None:
    generator = torch.Generator().manual_seed(factors)
    left = torch.randn(5, factors, dtype=torch.float64, generator=generator)
    right = torch.randn(factors, 7, dtype=torch.float64, generator=generator)
    entries = [(left[i] * right[:, j]).sum() for i in range(5) for j in range(7)]
    squares = sum(float(entry) ** 2 for entry in entries)
    assert Product(left, right).norm() == pytest.approx(squares**0.5, rel=1e-12)


def test_many_factors_are_not_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A QR decomposition of a hundred clients' factors takes longer than the matrix itself."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("decomposed")

    monkeypatch.setattr(torch.linalg, "qr", refused)
    ones = torch.ones(5, 100, dtype=torch.float64)
    assert Product(ones, ones.T).norm() == pytest.approx(500.0)
