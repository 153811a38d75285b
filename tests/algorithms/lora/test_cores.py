"""Rules with cores, and with a second adapter: what they export, refuse, and leave alone."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

import lightfed as lf
from lightfed.algorithms.lora.cores import orthonormal
from lightfed.algorithms.lora.feddpa import FedDPA
from lightfed.algorithms.lora.fedsb import FedSB
from lightfed.algorithms.lora.ravan import RAVAN
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.utils.errors import UserError
from tests.algorithms.lora.low_rank import NAMES
from tests.algorithms.lora.test_low_rank import Net, fleet
from tests.small import fit, fleet_of, random_data, run_round

RULES: dict[str, Any] = {
    "feddpa": FedDPA,
    "fedsb": FedSB,
    "ravan": partial(RAVAN, head_rank=1),
}


def test_rows_are_orthonormal_and_those_of_a_greater_rank() -> None:
    few, many = (orthonormal(rank, 9, torch.Generator().manual_seed(3)) for rank in (4, 9))
    assert torch.equal(few, many[:4])
    torch.testing.assert_close(many @ many.T, torch.eye(9), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_the_first_model_is_the_base(rule: str) -> None:
    """A core is 0 at first, or B' is; the factors beside it are not."""
    fed = fleet(Net, partial(Net, 3), rule=RULES[rule])
    x = torch.ones(2, 4)
    for client in range(2):
        with fed.deployed(client).bound(client) as module:
            body = module.net.body
            torch.testing.assert_close(body(x), x @ body.weight.T, rtol=0, atol=0)
            assert (body.up != 0).any() == (rule != "feddpa")


@pytest.mark.parametrize("rule", RULES)
def test_frozen_factors_keep_their_bits_and_cores_learn(rule: str) -> None:
    fed = fleet(Net, partial(Net, 3), rule=RULES[rule])
    frozen = {name: p.clone() for name, p in fed.groups[0].live.frozen.items()}
    before = fed.algorithm.model.floats.clone()
    for t in range(2):
        run_round(fed, t)
    for name, value in fed.groups[0].live.frozen.items():
        assert torch.equal(value, frozen[name])
    assert not torch.equal(fed.algorithm.model.floats, before)


@pytest.mark.parametrize("rule", ["fedsb", "ravan"])
def test_a_merge_of_cores_is_the_mean_of_the_dense_updates(rule: str) -> None:
    """Of unlike ranks and scales, by the clients' own modules before and after the merge."""
    nets = (partial(Net, 3), partial(Net, 2, scaling=0.5), partial(Net, 1, scaling=3.0))
    fed = fleet(*nets, rule=RULES[rule])
    for t in range(2):
        metrics = run_round(fed, t)
        assert metrics["aggregation_error"] <= 1e-6

        mean = torch.zeros(5, 4)
        for client in range(3):
            body = fed.bind(client).net.body
            mean += body.scaling * body.up @ body.down / 3
        with fed.deployed(0).bound(0) as module:  # of the greatest rank
            body = module.net.body
            torch.testing.assert_close(body.scaling * body.up @ body.down, mean)
    assert mean.abs().max() > 1e-2


def test_an_own_adapter_is_never_sent_and_waits_for_its_client() -> None:
    fed = fleet(Net, Net, rule=FedDPA)
    run_round(fed, 0)

    def own(client: int) -> Tensor:
        tensors = fed.state(client).layout.floats.views(fed.row(client).floats)
        return tensors["net.body.parametrizations.up.0.own"].clone()

    assert (own(0) == 0).all()  # the first round trains the common adapters alone
    run_round(fed, 1)
    first = own(0)
    assert (first != 0).any()
    assert not torch.equal(first, own(1))

    fed.participants = lambda t: [1]
    run_round(fed, 2)
    assert torch.equal(own(0), first)


def test_the_first_round_leaves_an_own_adapter_as_it_is_whatever_the_optimizer() -> None:
    """Its gradient is 0 there, but weight decay would move it."""
    algorithm = FedDPA(adapters=NAMES)
    group = ClientGroup(1, Net, name="g")
    decaying = partial(SGD, lr=0.1, weight_decay=0.5)
    fed = fleet_of([group], algorithm, random_data([9]), optimizer=decaying)
    start = algorithm.starts[0].clone()
    run_round(fed, 0)

    tensors = fed.state(0).layout.floats.views(fed.row(0).floats)
    assert torch.equal(tensors["net.body.parametrizations.down.0.own"], start)
    assert not torch.equal(tensors["net.body.parametrizations.down.original"], start)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_mixture_of_one_adapter_is_that_adapter(weight: float) -> None:
    fed = fleet(Net, partial(Net, 3), rule=FedDPA, local_weight=weight)
    for t in range(2):
        run_round(fed, t)
    A, D = fed.algorithm.server_factors()[0]
    for client, rank in enumerate((2, 3)):
        with fed.deployed(client).bound(client) as module:
            body = module.net.body
            update = body.scaling * body.up @ body.down
            parts = body.parametrizations
            own = body.scaling * parts.up[0].own @ parts.down[0].own
        torch.testing.assert_close(update, own if weight else D[:, :rank] @ A[:rank])


def test_a_trained_model_is_the_mixture_too() -> None:
    """The common adapters train alone, and a session ends with what its client would deploy."""
    fed = fleet(Net, partial(Net, 3), rule=FedDPA, local_weight=0.25)
    for t in range(2):
        run_round(fed, t)
    for client in range(2):
        with fed.algorithm.models(fed, "trained", [client]).bound(client) as module:
            body = module.net.body
            update = body.up @ body.down
            A, B = body.parametrizations.down, body.parametrizations.up
            expected = 0.75 * B.original @ A.original + 0.25 * B[0].own @ A[0].own
        torch.testing.assert_close(update, expected)
        assert (B[0].own != 0).any()


class Alike(Net):
    """The name of a trained tensor begins that of an adapter's."""

    def __init__(self) -> None:
        super().__init__()
        self.bod = nn.Parameter(torch.ones(3))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.bod


def test_names_that_a_part_of_a_session_cannot_tell_apart_are_refused() -> None:
    fed = fleet(Alike, Alike, rule=FedDPA)
    with pytest.raises(UserError, match=r"body\.parametrizations") as error:
        run_round(fed, 0)
    assert error.value.key == "model.clients"


def test_a_global_model_is_the_servers_adapters_alone() -> None:
    fed = fleet(Net, partial(Net, 3), rule=FedDPA)
    for t in range(2):
        run_round(fed, t)
    A, D = fed.algorithm.server_factors()[0]
    with fed.algorithm.models(fed, "global", []).bound(0) as module:
        body = module.net.body
        torch.testing.assert_close(body.scaling * body.up @ body.down, D @ A)


# By case, the networks of the clients, the rule, and what the line says.
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "a rank above the inputs": (partial(Net, 5), FedSB, "at most 4"),
    "a rank above the outputs": (
        partial(Net, 3, base=torch.ones(2, 4)), RULES["ravan"], "at most 2",
    ),
    "a partial head": (partial(Net, 3), partial(RAVAN, head_rank=2), "a multiple"),
    "a head above the rank": (partial(Net, 1), partial(RAVAN, head_rank=2), "a multiple"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_rank_without_factors_is_refused_in_one_line(case: str) -> None:
    net, rule, fix = REFUSED[case]
    with pytest.raises(UserError) as error:
        fleet(net, rule=rule)
    assert error.value.key == "model.clients"
    assert fix in error.value.fix
    assert "body" in error.value.found


@pytest.mark.parametrize("given", [-0.1, 1.5, float("nan")])
def test_a_weight_that_is_no_share_is_refused(given: float) -> None:
    with pytest.raises(UserError) as error:
        FedDPA(given)
    assert error.value.key == "model.algorithm.init_args.local_weight"


def test_heads_without_a_rank_are_refused() -> None:
    with pytest.raises(UserError) as error:
        RAVAN(0)
    assert error.value.key == "model.algorithm.init_args.head_rank"


@pytest.mark.parametrize("rule", RULES)
def test_a_file_holds_the_factors_as_the_layers_read_them(rule: str, tmp_path: Path) -> None:
    groups = [ClientGroup(1, partial(Net, rank, scaling=8 / rank)) for rank in (2, 3)]
    root = Federation(
        RULES[rule](adapters=NAMES), groups, optimizer=partial(SGD, lr=0.1),
        export=("server", "clients"),
    )  # fmt: skip
    fit(root, random_data([9, 9]), tmp_path, rounds=2)
    models = tmp_path / "run" / "models"
    x = torch.ones(2, 4)
    for client, rank in enumerate((2, 3)):
        with torch.no_grad(), root.fleet.deployed(client).bound(client) as module:
            expected = module.net(x)
        both = 2 * rank if rule == "feddpa" else rank
        net = Net(both, scaling=8 / rank)
        tensors = load_file(models / "base.safetensors")
        tensors |= load_file(models / f"client{client}.safetensors")
        net.load_state_dict(tensors)
        with torch.no_grad():
            torch.testing.assert_close(net(x), expected)


def test_they_are_public() -> None:
    assert {lf.FedDPA, lf.FedSB, lf.RAVAN} == {FedDPA, FedSB, RAVAN}
