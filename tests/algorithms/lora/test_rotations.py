"""FedRotLoRA: rotations of a client's factors, against closed forms and bare loops."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightfed.algorithms.lora.fedrotlora import FedRotLoRA, nearest_rotation
from lightfed.algorithms.lora.rankmean import RankMean
from tests.algorithms.lora.low_rank import NAMES
from tests.algorithms.lora.test_frozen_factors import federation, parts
from tests.small import run_round


def turn(angle: float) -> Tensor:
    cosine, sine = math.cos(angle), math.sin(angle)
    return torch.tensor([[cosine, -sine], [sine, cosine]], dtype=torch.float64)


@pytest.mark.parametrize("angle", [0.0, 0.4, -2.0, 3.1])
def test_a_turned_factor_is_turned_back(angle: float) -> None:
    """Of N = A_k A^T with A_k = T A, the nearest rotation Q has Q^T A_k = A."""
    draw = torch.Generator().manual_seed(1)
    A = torch.randn(2, 7, dtype=torch.float64, generator=draw)
    turned = turn(angle) @ A
    Q = nearest_rotation(turned @ A.T)
    assert Q is not None
    torch.testing.assert_close(Q.T @ turned, A)


def test_the_nearest_rotation_is_the_best_of_all_angles() -> None:
    """Also of a matrix whose nearest orthogonal one is a reflection."""
    for N in (torch.tensor([[1.0, 2.0], [-1.5, 0.4]]), torch.tensor([[1.0, 0.3], [0.2, -2.0]])):
        N = N.double()
        Q = nearest_rotation(N)
        assert Q is not None
        assert float(torch.linalg.det(Q)) == pytest.approx(1)
        angles = [i * 2 * math.pi / 10_000 for i in range(10_000)]
        best = max(float((N * turn(angle)).sum()) for angle in angles)
        assert float((N * Q).sum()) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(
    "N",
    [
        torch.zeros(3, 3),
        torch.diag(torch.tensor([1.0, 0.0, 0.0])),  # two ranks without a direction
        torch.diag(torch.tensor([1.0, -1.0])),  # all reflections are as near
    ],
)
def test_several_nearest_rotations_are_none(N: Tensor) -> None:
    assert nearest_rotation(N.double()) is None


def test_one_missing_rank_is_no_choice() -> None:
    """The determinant decides about a single direction."""
    Q = nearest_rotation(torch.diag(torch.tensor([2.0, 1.0, 0.0])).double())
    assert Q is not None
    torch.testing.assert_close(Q, torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
def test_a_strength_turns_part_of_the_way(strength: float) -> None:
    """Of two ranks the nearest rotation to (1 - l) I + l T is a turn by a known angle."""
    angle = 1.2
    rule = FedRotLoRA(strength=strength, adapters=NAMES)
    Q = rule.rotation(turn(angle) * 3)
    expected = math.atan2(strength * math.sin(angle), 1 - strength + strength * math.cos(angle))
    assert Q is not None
    torch.testing.assert_close(Q, turn(expected))


def test_half_a_turn_by_half_is_left_alone() -> None:
    """(1 - l) I + l T is 0 there."""
    assert FedRotLoRA(adapters=NAMES).rotation(turn(math.pi)) is None


def test_a_client_sends_the_product_that_it_has_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its factors are nearer to what it received, in the factor of the round."""
    rule = FedRotLoRA(strength=1.0, adapters=NAMES)
    fed = federation(rule, 3, 2)
    before: dict[str, Tensor] = {}
    inner = rule.before_sending

    def watched(*arguments: Any) -> None:
        before.update(parts(fed, 0))
        inner(*arguments)

    monkeypatch.setattr(rule, "before_sending", watched)
    for t in range(4):
        A_sent, D_sent = (factor.clone() for factor in rule.server_factors()[0])
        run_round(fed, t)
        after = parts(fed, 0)
        A, B = after["net.body.down"], after["net.body.up"]
        old_A, old_B = before["net.body.down"], before["net.body.up"]
        torch.testing.assert_close(B @ A, old_B @ old_A, rtol=1e-4, atol=1e-5)
        if t == 0:
            assert torch.equal(A, old_A)
            assert torch.equal(B, old_B)
            continue
        sent, now, old = (A_sent, A, old_A) if t % 2 else (D_sent * 3 / 4, B, old_B)
        assert (now - sent).norm() < (old - sent).norm()


def test_without_strength_it_is_the_mean_by_rank() -> None:
    turned = federation(FedRotLoRA(strength=0.0, adapters=NAMES), 3, 2)
    plain = federation(RankMean(adapters=NAMES), 3, 2)
    for t in range(3):
        metrics = run_round(turned, t)
        assert metrics == pytest.approx(run_round(plain, t))
    torch.testing.assert_close(
        turned.algorithm.model.floats, plain.algorithm.model.floats, rtol=0, atol=1e-6
    )
