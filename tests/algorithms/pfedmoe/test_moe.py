"""pFedMoE's client: the gate and the mixture of the shared and the private extractor."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lightfed.algorithms.pfedmoe.mixture import FixedGate, Gate, MixtureClient, SwitchNorm1d
from lightfed.utils.errors import UserError
from tests.core.models.client_cases import descend, network, random, values
from tests.small import GOLDEN

VECTORS = load_file(GOLDEN / "pfedmoe/moe.safetensors")
CLOSE = {"rtol": 1e-6, "atol": 1e-6}  # running variances reach 15
X, Y = VECTORS["moe/x"], VECTORS["moe/y"]
GATE = {"sn": "1", "fc1": "2", "bn1": "3", "fc2": "5", "bn2": "6"}  # positions of its layers
EXTRACTOR = {"c": "0", "f": "4"}


def recorded(when: str, part: str, names: dict[str, str]) -> dict[str, Tensor]:
    """The state of a part of the recorded client, under the names that it has here."""
    found = {}
    for key, tensor in VECTORS.items():
        folder, _, name = key.rpartition("/")
        if folder == f"moe/{when}/{part}":
            layer, _, last = name.rpartition(".")
            # The recorded normalisation has its vectors as rows.
            found[f"{names.get(layer, '')}.{last}".lstrip(".")] = (
                tensor[0] if tensor.dim() == 2 and layer == "sn" else tensor
            )
    return found


def extractor(channels: int) -> nn.Sequential:
    layers = (nn.Conv2d(3, channels, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(9 * channels, 6), nn.ReLU())


def recorded_client() -> MixtureClient:
    gate = Gate((3, 8, 8), hidden=5)
    gate.layers[1].debias = False  # type: ignore[assignment]
    gate.layers.load_state_dict(recorded("init", "gate", GATE), strict=False)
    client = MixtureClient(extractor(4), nn.Linear(6, 4), extractor(2), gate, batch=X[:2])
    client.extractor.load_state_dict(recorded("init", "F", EXTRACTOR))
    client.shared.load_state_dict(recorded("init", "G", EXTRACTOR))
    client.head.load_state_dict(recorded("init", "head", {}))
    return client


def test_four_steps_are_the_recorded_ones() -> None:
    client = recorded_client()
    descend(client, X, Y, batch=8, lr=0.05, rates={"gate": 0.02})
    for part, module, names in (
        ("F", client.extractor, EXTRACTOR),
        ("G", client.shared, EXTRACTOR),
        ("head", client.head, {}),
        ("gate", client.gate.layers, GATE),
    ):
        assert isinstance(module, nn.Module)
        after = values(module)
        expected = recorded("after", part, names)
        assert len(expected) >= 2
        for name, tensor in expected.items():
            torch.testing.assert_close(after[name], tensor, **CLOSE)
    client.eval()
    torch.testing.assert_close(client.gate(X), VECTORS["moe/eval_alpha"], **CLOSE)
    torch.testing.assert_close(client(X), VECTORS["moe/eval_logits"], **CLOSE)


def test_the_gate_is_as_the_paper_has_it() -> None:
    gate = Gate((3, 4, 5), hidden=7)
    kinds = [type(layer) for layer in gate.layers]
    assert kinds == [
        nn.Flatten, SwitchNorm1d, nn.Linear, nn.BatchNorm1d, nn.Sigmoid,
        nn.Linear, nn.BatchNorm1d, nn.Softmax,
    ]  # fmt: skip
    shapes = [tuple(p.shape) for p in gate.parameters() if p.dim() > 1]
    assert shapes == [(7, 60), (2, 7)]
    weights = gate(random(6, 3, 4, 5))
    assert weights.shape == (6, 2)
    torch.testing.assert_close(weights.sum(1), torch.ones(6))
    assert (weights.var(0) > 0).all(), "a weight for each sample, not for each batch"
    assert Gate((3, 32, 32)).layers[2].out_features == 128


def test_without_its_last_normalisation_a_gate_may_prefer_one_expert() -> None:
    x = random(6, 3, 4, 5)
    means = []
    for last_norm in (True, False):
        gate = Gate((3, 4, 5), hidden=7, last_norm=last_norm)
        with torch.no_grad():
            gate.layers[5].weight.zero_()
            gate.layers[5].bias.copy_(torch.tensor([3.0, 0.0]))
            means.append(gate(x)[:, 0].mean().item())
    # Equal logits of all samples are normalised to 0.
    assert means == pytest.approx([0.5, 1 / (1 + math.exp(-3))], abs=1e-3)


@pytest.mark.parametrize("personal", [0.0, 0.3, 1.0])
def test_the_mixture_weighs_shared_before_private(personal: float) -> None:
    own, common = network(6), network(3, seed=1)
    gate = FixedGate(1 - personal)
    client = MixtureClient(own.extractor, own.head, common.extractor, gate, batch=random(2, 7))
    x = random(5, 7)
    mixed = (1 - personal) * common.extractor(x) + personal * own.extractor(x)
    torch.testing.assert_close(client.features(x), mixed)
    torch.testing.assert_close(client(x), own.head(mixed))


def test_samples_of_one_number_are_refused() -> None:
    with pytest.raises(UserError, match=r"^input_shape: samples of 1 number"):
        Gate((1,))


def test_a_batch_of_one_is_refused() -> None:
    client = recorded_client()
    before = values(client)
    with pytest.raises(ValueError, match="a batch of 1"):
        client.losses(X[:1], Y[:1])
    for name, tensor in before.items():
        assert torch.equal(client.state_dict()[name], tensor)
    assert client.eval()(X[:1]).isfinite().all()
