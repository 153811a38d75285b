"""Networks with losses of their own: when `auto` packs them, and what they learn then."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.apfl import APFL
from lightfed.algorithms.contrastive import Contrastive
from lightfed.algorithms.fedbuff import FedBuff
from lightfed.algorithms.moon import MOON, Contrast
from lightfed.algorithms.pfedmoe.pfedmoe import PFedMoE
from lightfed.models.client_module import ClientModule
from lightfed.models.split import SplitNetwork
from lightfed.networks import MLP
from lightfed.packs import packing
from lightfed.packs.known_layers import may_mix_samples, unknown
from lightfed.packs.runner import _Buffers
from lightfed.utils.errors import UserError
from tests.packs.federations import CLIENTS, Residual, after, fleet, images, mlp
from tests.small import run_round
from tests.tiers import by_default


def close(rows: Tensor, expected: Tensor) -> bool:
    """Return whether rows agree within the rounding of a pack."""
    return torch.allclose(rows, expected, rtol=1e-5, atol=2e-5)


DECLARED = (
    "moon", "moon of images", "fd", "fd of raw logits", "fedgh", "fedproto", "fedtgp", "fedkd",
    "fedkd of htfllib", "fedmrl", "fml", "fml of htfllib", "fedapen", "depthfl",
)  # fmt: skip
# The others have the same networks.
QUICK = ("moon", "moon of images", "fd", "fedproto", "fedkd", "fedmrl", "fml", "fedapen", "depthfl")


@pytest.mark.parametrize("name", by_default(DECLARED, *QUICK))
def test_auto_packs_declared_losses_with_batches_of_other_sizes(name: str) -> None:
    made = fleet(name, "auto")
    assert unknown(made.groups[0].module) == ""
    made.open_round()
    (pack,) = made.packs.form(made.client_sessions, range(CLIENTS), 0)
    assert sorted(pack) == list(range(CLIENTS))

    rows, metrics = after(made, rounds=3)
    expected_rows, expected_metrics = after(fleet(name, "off"), rounds=3)
    assert close(rows, expected_rows)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5)


@pytest.mark.parametrize("gate", ["paper", "half"])
def test_layers_that_mix_samples_need_batches_of_one_size(gate: Any) -> None:
    """The gate of pFedMoE normalizes by the batch, in its own way; a fixed one does not."""
    sizes = [6, 9, 6, 6, 9, 6, 6, 9, 6]
    algorithm = partial(PFedMoE, mlp, gate_units=8, gate=gate)
    made = fleet("pfedmoe", "auto", sizes, algorithm=algorithm)
    assert unknown(made.groups[0].module) == ""
    assert may_mix_samples(made.groups[0].module) == (gate == "paper")
    made.open_round()
    packs = made.packs.form(made.client_sessions, range(len(sizes)), 0)
    lengths = sorted(len(pack) for pack in packs)
    assert lengths == ([6] if gate == "paper" else [9])  # three clients are too few

    rows, metrics = after(made)
    alone = fleet("pfedmoe", "off", sizes, algorithm=algorithm)
    expected_rows, expected_metrics = after(alone)
    assert close(rows, expected_rows)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5)


def test_networks_that_take_turns_train_alone() -> None:
    (reason,) = fleet("mlp", "auto", algorithm=APFL).training.side_by_side.values()
    assert "side_by_side" in str(reason)


@pytest.mark.parametrize("data", ["vectors", "images"])
def test_clients_that_come_and_go_have_their_own_previous_models(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some train for the first time in a late round, some miss rounds."""
    participants = [[0, 1, 2, 3, 4], [2, 3, 4, 5], [0, 1, 2, 5, 6], [0, 1, 2, 3, 4, 5, 6]]
    case: dict[str, Any] = {"algorithm": partial(MOON, pool=3), "model": Residual}
    if data == "images":
        case = {"algorithm": partial(MOON, pool=3), "data": images}

    def trained(side_by_side: Any) -> Tensor:
        made = fleet("moon" if data == "vectors" else "moon of images", side_by_side, **case)
        monkeypatch.setattr(made, "participants", lambda t: participants[t])
        rows, _ = after(made, rounds=4)
        return rows

    expected = trained("off")
    for most in (CLIENTS, 3):
        assert close(trained(most), expected)


@pytest.mark.parametrize("side_by_side", ["off", "auto"])
def test_a_network_that_is_its_head_has_nothing_to_freeze(side_by_side: Any) -> None:
    """All models have the same representations, so that the contrast has no gradient."""
    linear = partial(MLP, hidden=())
    of_moon, _ = after(fleet("moon", side_by_side, model=linear), rounds=3)
    of_fedavg, _ = after(fleet("mlp", side_by_side, model=linear), rounds=3)
    assert close(of_moon, of_fedavg)


def test_frozen_models_of_another_client_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above is sharp enough: a pack that mixes up frozen models is not close."""
    expected, _ = after(fleet("moon", "off"))
    note = _Buffers.note
    monkeypatch.setattr(_Buffers, "note", lambda self, i: note(self, (i + 1) % CLIENTS))
    rows, _ = after(fleet("moon", CLIENTS))
    assert not close(rows, expected)


def test_clients_with_other_numbers_of_previous_models_are_in_other_packs() -> None:
    """A client of FedBuff can train several times in a round."""

    def made(side_by_side: Any) -> Any:
        algorithm = partial(FedBuff, 4, at_once=True)
        return fleet("mlp", side_by_side, algorithm=algorithm, local_penalty=Contrast(pool=3))

    packed = made(CLIENTS)
    numbers = []
    freeze = Contrastive.freeze

    def noted(self: Contrastive, rows: list[Tensor]) -> None:
        numbers.append(len(rows))
        freeze(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Contrastive, "freeze", noted)
        rows, _ = after(packed, rounds=3)
    expected, _ = after(made("off"), rounds=3)
    assert close(rows, expected)
    assert len(set(numbers)) > 2

    packed.open_round()
    penalty = packed.penalties[0]
    for pack in packed.packs.form(packed.client_sessions, range(CLIENTS), 2):
        keys = {penalty.pack_key(packed, client, 2) for client in pack}
        assert len(keys) == 1
    everyone = {penalty.pack_key(packed, client, 2) for client in range(CLIENTS)}
    assert len(everyone) > 1


class ReadsInEvaluation(Residual):
    """Looks at the value of a tensor in evaluation mode, which `vmap` cannot."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        if not self.training and float(x.detach().sum()) > 1e9:
            return super().forward(0 * x)
        return super().forward(x)


def test_the_trial_of_an_unknown_network_runs_frozen_models() -> None:
    made = fleet("moon", CLIENTS, model=Residual)
    assert list(made.training.side_by_side.values()) == [CLIENTS]
    refused = fleet("moon", CLIENTS, model=ReadsInEvaluation)
    (reason,) = refused.training.side_by_side.values()
    assert ".item()" in str(reason)


class Inherited(Contrastive):
    """Inherits what its base declares, but has other losses."""

    packs = True

    @override
    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self(x)
        return {"spread": F.cross_entropy(logits - logits.mean(0), y)}


def contrastive(kind: type[Contrastive]) -> Contrastive:
    """Return a network of three classes for 4 features."""
    network = SplitNetwork(nn.Linear(4, 5), nn.Linear(5, 3), feature_dim=5)
    return kind(network, mu=1.0, temperature=0.5, most=2)


def test_losses_are_known_by_the_class_that_has_them() -> None:
    declared = ClientModule(contrastive(Contrastive), num_classes=3)
    assert unknown(declared) == ""
    assert not may_mix_samples(declared)

    inherited = ClientModule(contrastive(Inherited), num_classes=3)
    assert unknown(inherited) == "Inherited has its own losses"
    assert may_mix_samples(inherited)

    patched = contrastive(Contrastive)
    patched.losses = lambda x, y: {"spread": patched(x).std()}  # type: ignore[method-assign]
    assert "its own losses" in unknown(ClientModule(patched, num_classes=3))

    # A step of its own may do anything with known losses.
    class Stepped(ClientModule):
        pass

    assert "training step" in unknown(Stepped(contrastive(Contrastive), num_classes=3))


def test_known_losses_of_unknown_layers_are_unknown() -> None:
    network = contrastive(Contrastive)
    network.extractor = Residual(5)
    assert "Residual" in unknown(ClientModule(network, num_classes=3))


def test_samples_without_a_label_have_no_weight() -> None:
    """What fills up a batch changes neither a loss nor a gradient."""
    torch.manual_seed(0)
    network = contrastive(Contrastive)
    x = torch.randn(5, 4)
    y = torch.tensor([0, 2, 1, -100, -100])

    def losses_and_gradients(size: int) -> list[Tensor]:
        losses = network.losses(x[:size], y[:size])
        assert list(losses) == ["hard", "contrast"]
        parameters = list(network.parameters())
        gradients = torch.autograd.grad(sum(losses.values()), parameters)  # type: ignore[arg-type]
        return [*losses.values(), *gradients]

    for filled, real in zip(losses_and_gradients(5), losses_and_gradients(3), strict=True):
        torch.testing.assert_close(filled, real)


def test_frozen_models_count_towards_the_memory_of_a_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packing.MEMORY, "cpu", 1)

    def fitting(pool: int) -> int:
        """Return how many clients fit into the memory, as the refusal of more says."""
        with pytest.raises(UserError, match="clients fit") as error:
            fleet("moon", 40, [4] * 40, algorithm=partial(MOON, pool=pool))
        return int(str(error.value).split("and ")[1].split()[0])

    assert fitting(pool=1) > 1.5 * fitting(pool=10) > 1


def test_a_second_run_of_a_round_repeats_it() -> None:
    """A pack whose sessions begin again, as after a stop, has the same frozen models."""
    rows = []
    for _ in range(2):
        made = fleet("moon", 3)
        for t in range(3):
            run_round(made, t)
        rows.append(torch.stack([made.row(client).floats for client in range(CLIENTS)]))
    assert torch.equal(*rows)
