"""Mutual learning in closed form, and what it must not touch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightfed.algorithms.pfedmoe.fml import FML as FMLAlgorithm
from lightfed.algorithms.pfedmoe.mutual import FML, FedAPEN, FedKD, Form
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.core.models.client_cases import drawn, gradients, labels, network, random

X, Y = random(8, 7, seed=3), labels(8, 4)
CLIENTS = {
    "fml": lambda: FML(network(6), network(3, 1)),
    "fedkd": lambda: FedKD(network(6), network(3, 1)),
    "fedapen": lambda: FedAPEN(network(6), network(3, 1)),
}


def kl(target: Tensor, logits: Tensor) -> Tensor:
    """By its definition: sum p log(p / q), mean over samples."""
    p, q = target.softmax(1), logits.softmax(1)
    return (p * (p / q).log()).sum(1).mean()


@pytest.mark.parametrize("form", ["separate", "htfllib"])
def test_fmls_losses_are_their_formula(form: Form) -> None:
    client = FML(network(6), network(3, 1), alpha=0.3, beta=0.8, form=form)
    own, common = client.private(X), client.shared(X)
    each = 4 if form == "htfllib" else 1  # the mean over classes too
    losses = client.losses(X, Y)
    assert list(losses) == ["private", "shared"]
    expected = 0.3 * F.cross_entropy(own, Y) + 0.7 * kl(common, own) / each
    torch.testing.assert_close(losses["private"], expected)
    expected = 0.8 * F.cross_entropy(common, Y) + 0.2 * kl(own, common) / each
    torch.testing.assert_close(losses["shared"], expected)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_loss_moves_its_own_network_alone(name: str) -> None:
    client = CLIENTS[name]()
    losses = client.losses(X, Y)
    for part, loss in losses.items():
        other = {"private": "shared", "shared": "private"}[part]
        for parameter, grad in gradients(client, loss).items():
            if parameter.startswith(f"{other}."):
                assert not grad.any(), parameter
            if parameter.startswith(f"{part}."):
                assert grad.any(), parameter


@pytest.mark.parametrize("make", [FML, FedKD])
def test_in_htfllibs_form_a_loss_moves_both(make: type[FML] | type[FedKD]) -> None:
    client = make(network(6), network(3, 1), form="htfllib")
    for loss in client.losses(X, Y).values():
        assert all(grad.any() for grad in gradients(client, loss).values())


@pytest.mark.parametrize(("alpha", "beta", "key"), [(1.1, 0, "alpha"), (0.5, -0.1, "beta")])
def test_shares_outside_their_range_are_refused(alpha: float, beta: float, key: str) -> None:
    with pytest.raises(UserError) as refused:
        FMLAlgorithm(MLP, alpha=alpha, beta=beta)
    assert refused.value.key == f"model.algorithm.init_args.{key}"


@pytest.mark.parametrize("form", ["separate", "htfllib"])
def test_fedkds_losses_are_their_formula(form: Form) -> None:
    client = FedKD(network(6), network(3, 1), form=form)
    drawn(client.projection)
    own, common = client.private(X), client.shared(X)
    hard, other = F.cross_entropy(own, Y), F.cross_entropy(common, Y)
    projected = client.shared.extractor(X) @ client.projection.weight.T
    hidden = (client.private.extractor(X) - projected).square().mean()
    each = 4 if form == "htfllib" else 1
    losses = client.losses(X, Y)
    soft = (kl(common, own) / each + hidden) / (hard + other)
    torch.testing.assert_close(losses["private"], hard + soft)
    soft = (kl(own, common) / each + hidden) / (hard + other)
    torch.testing.assert_close(losses["shared"], other + soft)


def test_fedkds_quality_is_a_weight_and_its_projection_learns_from_the_student() -> None:
    client = FedKD(network(6), network(3, 1))
    drawn(client.projection)
    losses = client.losses(X, Y)
    assert not gradients(client, losses["private"])["projection.weight"].any()
    assert gradients(client, losses["shared"])["projection.weight"].any()
    own, common = client.private(X), client.shared(X).detach()
    hard = F.cross_entropy(own, Y)
    weight = 1 / (hard + F.cross_entropy(common, Y)).item()
    projected = client.projection(client.shared.extractor(X)).detach()
    hidden = (client.private.extractor(X) - projected).square().mean()
    expected = gradients(client, hard + weight * (kl(common, own) + hidden))
    for name, grad in gradients(client, losses["private"]).items():
        torch.testing.assert_close(grad, expected[name])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_fedapens_losses_are_their_formula(share: float) -> None:
    client = FedAPEN(network(6), network(3, 1))
    assert client.share == 0.5
    client.share.fill_(share)
    own, common = client.private(X), client.shared(X)
    mixed = share * own + (1 - share) * common
    torch.testing.assert_close(client(X), mixed)
    ensemble = F.cross_entropy(mixed, Y)
    losses = client.losses(X, Y)
    torch.testing.assert_close(
        losses["private"], F.cross_entropy(own, Y) + kl(common, own) + ensemble
    )
    torch.testing.assert_close(
        losses["shared"], F.cross_entropy(common, Y) + kl(own, common) + ensemble
    )


class Constant(nn.Module):
    """The same logits for all samples, and dropout that would change them in training."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.logits.expand(len(x), -1))


def test_a_step_of_the_share_is_the_gradient_of_the_ensembles_loss() -> None:
    client = FedAPEN(Constant(1.0, -2.0), Constant(0.5, 0.0))
    client.shared.eval()
    y = torch.tensor([0, 0, 1])
    client.learn_share([(torch.zeros(3, 1), y)], lr=0.1, passes=1)
    share = torch.tensor(0.5, requires_grad=True)
    mixed = share * torch.tensor([1.0, -2.0]) + (1 - share) * torch.tensor([0.5, 0.0])
    F.cross_entropy(mixed.expand(3, 2), y).backward()
    assert share.grad is not None
    torch.testing.assert_close(client.share, 0.5 - 0.1 * share.grad)
    assert client.training
    assert client.private.dropout.training
    assert not client.shared.dropout.training


@pytest.mark.parametrize(("label", "share"), [(0, 1.0), (1, 0.0)])
def test_the_share_stays_within_zero_and_one(label: int, share: float) -> None:
    client = FedAPEN(Constant(3.0, -3.0), Constant(-3.0, 3.0))
    y = torch.full((3,), label)
    client.learn_share([(torch.zeros(3, 1), y)], lr=100.0, passes=2)
    assert client.share == share


def test_a_hold_out_without_samples_is_refused() -> None:
    with pytest.raises(UserError, match=r"^hold_out: no sample"):
        FedAPEN(network(6), network(3)).learn_share([])
