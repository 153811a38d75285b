"""Two convolutions and linear layers: DisPFL's CNN, LG-FedAvg's, the five of pFedMoE."""

import json
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lightfed.networks.lenet import LeNet, MoECNN, Variant
from lightfed.state.rows import ModelLayout
from tests.core.models.client_cases import random
from tests.small import GOLDEN

VARIANTS = get_args(Variant)
CNNS = json.loads((GOLDEN / "pfedmoe/moe.json").read_text())["cnns"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_pfedmoes_have_the_papers_sizes(variant: Variant) -> None:
    counts = CNNS[f"CNN-{variant}"]
    with torch.device("meta"):
        models = [MoECNN(classes, variant=variant) for classes in (10, 100)]
    assert [ModelLayout.of(m).parameter_numel for m in models] == [
        counts["params_c10"],
        counts["params_c100"],
    ]
    for model in models:
        own = sum(p.numel() for p in model.extractor.parameters())
        assert own == counts["extractor_params"]
        assert model.feature_dim == model.head.in_features == counts["fc2"]
    shapes = [list(p.shape) for name, p in models[0].named_parameters() if "weight" in name]
    first, second, units = counts["conv1"], counts["conv2"], counts["fc1"]
    flat = second * 5 * 5
    convs = [[first, 3, 5, 5], [second, first, 5, 5]]
    assert shapes == [*convs, [units, flat], [500, units], [10, 500]]


@torch.no_grad()
def test_the_forward_pass_is_its_formula() -> None:
    model = LeNet(4, (2, 20, 17), channels=(3, 5), hidden=(7, 6))
    p = list(model.parameters())
    x = y = random(2, 2, 20, 17)
    for weight, bias in zip(p[0:4:2], p[1:4:2], strict=True):
        y = F.max_pool2d(F.conv2d(y, weight, bias).relu(), 2)
    y = y.flatten(1)
    for weight, bias in zip(p[4:8:2], p[5:8:2], strict=True):
        y = (y @ weight.T + bias).relu()
    torch.testing.assert_close(model.extractor(x), y)
    torch.testing.assert_close(model(x), y @ p[8].T + p[9])


@settings(deadline=None, max_examples=20)
@given(width=st.floats(0.001, 0.3), variant=st.sampled_from(VARIANTS))
def test_all_variants_of_one_width_give_the_same_features(width: float, variant: Variant) -> None:
    model = MoECNN(4, (1, 16, 16), variant=variant, width=width)
    counts = CNNS[f"CNN-{variant}"]
    assert model.feature_dim - 1 < 500 * width <= model.feature_dim + 1e-9
    sizes = [p.shape[0] for name, p in model.extractor.named_parameters() if "weight" in name]
    full = [counts[key] for key in ("conv1", "conv2", "fc1", "fc2")]
    assert all(
        size - 1 < wide * width <= size + 1e-9 for size, wide in zip(sizes, full, strict=True)
    )
    assert model(random(2, 1, 16, 16)).shape == (2, 4)
