"""The masked language model: its arithmetic, what it masks, how its heads nest."""

import json
from math import ceil, sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from lightfed.networks.transformer import Transformer
from lightfed.utils.errors import UserError
from tests.core.models.client_cases import shapes
from tests.small import GOLDEN

RATES = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}
VOCABULARY, WINDOW = 11, 6


def small(**given: Any) -> Transformer:
    given = {"embedding": 8, "heads": 2, "hidden": 12, "layers": 2, "dropout": 0.0} | given
    return Transformer(VOCABULARY, (WINDOW,), **given)


def windows(count: int = 3, length: int = WINDOW) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (count, length), generator=rng)


def expected_logits(model: Transformer, tokens: Tensor, divisor: float) -> Tensor:
    """The network as a formula of its parameters and its tokens after masking, head by head."""
    p = dict(model.named_parameters())

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return x * p[f"{name}.weight"] + p[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        return x * (1 + torch.erf(x / sqrt(2))) / 2

    positions = torch.arange(tokens.shape[1])
    x = p["token.weight"][tokens] / divisor + p["position.weight"][positions] / divisor
    x = norm(x, "norm")
    for i in range(len(model.layers)):
        layer = f"layers.{i}"
        q, k, v = (linear(x, f"{layer}.attention.{name}") / divisor for name in "qkv")
        channels = x.shape[-1] // 2
        outputs = []
        for head in (slice(0, channels), slice(channels, None)):
            scores = q[..., head] @ k[..., head].transpose(1, 2) / sqrt(channels)
            outputs.append(scores.softmax(-1) @ v[..., head])
        x = x + linear(torch.cat(outputs, -1), f"{layer}.attention.o") / divisor
        x = norm(x, f"{layer}.norm1")
        hidden = gelu(linear(x, f"{layer}.linear1") / divisor)
        x = norm(x + linear(hidden, f"{layer}.linear2") / divisor, f"{layer}.norm2")
    return linear(norm(gelu(linear(x, "decoder.0") / divisor), "decoder.3"), "decoder.4")


def seen(model: Transformer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logits, and the tokens after masking."""
    kept: list[Tensor] = []
    hook = model.token.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    logits = model(tokens)
    hook.remove()
    return logits, kept[0]


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.25])
@torch.no_grad()
def test_the_forward_pass_is_its_formula(rate: float) -> None:
    torch.manual_seed(0)
    model, tokens = small(rate=rate), windows()
    for parameter in model.parameters():  # biases and norms, too, that start as nothing
        parameter.uniform_(-0.7, 0.7, generator=torch.Generator().manual_seed(parameter.numel()))
    for training, divisor in ((True, rate), (False, 1.0)):
        logits, kept = seen(model.train(training), tokens)
        assert logits.shape == (3, WINDOW, VOCABULARY)
        assert (kept == VOCABULARY).any()
        expected = expected_logits(model, kept, divisor)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_how_it_starts() -> None:
    model = small(embedding=64, hidden=96)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 14
    assert not any(linear.bias.any() for linear in linears)
    for layer in model.layers:
        for linear in (layer.linear1, layer.linear2):
            assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)  # type: ignore[operator, union-attr]


def masks(model: Transformer, seed: int, count: int = 3) -> Tensor:
    torch.manual_seed(seed)
    return seen(model, windows(count))[1] == VOCABULARY


@torch.no_grad()
@pytest.mark.parametrize("training", [True, False])
def test_masks_are_drawn_afresh_in_training_and_evaluation(training: bool) -> None:
    model = small(mask_rate=0.3).train(training)
    found = masks(model, 0, 500)
    assert found.dtype == torch.bool
    assert found.shape == (500, WINDOW)
    assert abs(float(found.float().mean()) - 0.3) < 0.04  # five standard deviations
    assert torch.equal(found, masks(model, 0, 500))
    assert training or torch.equal(found, model.masked)
    assert not torch.equal(seen(model, windows(500))[1] == VOCABULARY, found)


@torch.no_grad()
def test_masked_positions_do_not_see_their_token_and_others_are_not_touched() -> None:
    model, tokens = small(layers=0).eval(), windows(50)  # without attention positions are alone
    logits = model(tokens)
    masked = model.masked
    assert masked.any()
    model.mask_rate = 0.0
    assert torch.equal(model(tokens)[~masked], logits[~masked])
    assert not model.masked.any()
    model.mask_rate = 1.0
    assert torch.equal(model(tokens)[masked], logits[masked])
    assert torch.equal(model(tokens), model(tokens.flip(0)))
    assert model.masked.all()


@torch.no_grad()
def test_short_windows_use_the_first_positions() -> None:
    model = small(mask_rate=0.0).eval()
    short = model(windows(length=4))
    assert short.shape == (3, 4, VOCABULARY)
    model.position.weight[4:] = 7.0
    assert torch.equal(model(windows(length=4)), short)


def kept(shape: tuple[int, ...], wide: tuple[int, ...], groups: tuple[int, ...]) -> list[list[int]]:
    """Per dimension, the indices of a wide tensor that a narrow one has."""
    return [
        [g * (w // count) + i for g in range(count) for i in range(n // count)]
        for n, w, count in zip(shape, wide, groups, strict=True)
    ]


def declared(model: Transformer) -> dict[str, tuple[int, ...]]:
    """Groups of all parameters, by their names in the model."""
    found = {name: (1,) * len(shape) for name, shape in shapes(model).items()}
    for path, part in model.named_modules():
        own = {f"{path}.{n}": counts for n, counts in getattr(part, "slice_groups", {}).items()}
        assert own.keys() <= found.keys()
        found.update(own)
    return found


def test_slices_are_those_of_the_released_code() -> None:
    recorded = json.loads((GOLDEN / "heterofl/transformer_abcde.json").read_text())
    tensors = load_file(GOLDEN / "heterofl/transformer_abcde.safetensors")
    cfg = recorded["cfg"]

    def build(level: str) -> Transformer:
        return Transformer(
            cfg["num_tokens"], (cfg["bptt"],), embedding=cfg["embedding"], heads=cfg["heads"],
            hidden=cfg["hidden"], layers=cfg["layers"], rate=RATES[level],
        )  # fmt: skip

    wide = shapes(build("a"))
    # One to one, in the order of the parameters.
    assert [list(shape) for shape in wide.values()] == list(recorded["param_shapes"].values())
    groups = declared(build("a"))
    for client, level in enumerate(recorded["levels_by_client"]):
        narrow = shapes(build(level))
        for name, released in zip(wide, recorded["param_shapes"], strict=True):
            indices = kept(narrow[name], wide[name], groups[name])
            full = tensors[f"global_before/{released}"]
            grid = torch.meshgrid(*map(torch.tensor, indices), indexing="ij")
            expected = tensors[f"distributed/{client}/{released}"]
            assert torch.equal(full[grid], expected), (level, name)


def is_legal(embedding: int, heads: int, rate: float) -> bool:
    return heads * ceil(embedding / heads * rate) == ceil(embedding * rate)


rates = st.floats(0.03, 1.0)


@settings(deadline=None, max_examples=25)
@given(embedding=st.integers(1, 40), heads=st.integers(1, 8), rate=rates)
def test_a_width_without_whole_heads_is_refused(embedding: int, heads: int, rate: float) -> None:
    if is_legal(embedding, heads, rate):
        model = small(embedding=embedding, heads=heads, rate=rate, layers=1)
        assert model.norm.weight.numel() % heads == 0
        return
    with pytest.raises(UserError) as error:
        small(embedding=embedding, heads=heads, rate=rate, layers=1)
    assert error.value.key == "heads"


def test_images_are_no_windows() -> None:
    with pytest.raises(UserError, match=r"input_shape: .*windows"):
        Transformer(10, (3, 32, 32))
