"""Networks with adapters in layers that reach for the weight of another layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from typing_extensions import override

from tests.promises.law.cases import CLASSES

WIDTH = 8


def _tokens(x: Tensor) -> Tensor:
    """(B, 8) -> (B, 3, 8)."""
    return torch.stack([x, 0.5 * x, -x], dim=1)


class Encoder(nn.Module):
    """An encoder layer of torch, which in evaluation reads the weights of its layers."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(
            WIDTH, 2, 16, dropout=0.0, batch_first=True, **settings
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(_tokens(x)).mean(1))


class Padded(nn.Module):
    """Two encoder layers on tokens of which some are padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, CLASSES)

    @override
    def forward(self, x: Tensor) -> Tensor:
        padding = torch.stack([x[:, 0] > 9, x[:, 1] > 0, x[:, 2] > 1], dim=1)
        encoded = self.encoder(_tokens(x), src_key_padding_mask=padding)
        return self.head(encoded[:, 0])


class Attention(nn.Module):
    """An attention, which reads the weight of its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    @override
    def forward(self, x: Tensor) -> Tensor:
        tokens = _tokens(x)
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.head(mixed.mean(1))


class Recurrent(nn.Module):
    """An LSTM with projections, which keeps its weights in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 6, proj_size=4, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(_tokens(x))[0].mean(1))


class Rare(nn.Module):
    """An adaptive softmax, whose clusters of classes have layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, CLASSES, cutoffs=[1, 2], div_value=2.0)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.softmax.log_prob(torch.tanh(self.body(x)))


class Twice(nn.Module):
    """One linear layer under two names, of which peft adapts the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = self.a
        self.head = nn.Linear(WIDTH, CLASSES)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(torch.tanh(self.a(x))))


class Product(nn.Module):
    """A layer's weight, read once more without the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(x)) + x @ self.a.weight)


class Reads(nn.Module):
    """A layer whose weight is read, and which is never called; and one that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(torch.tanh(nn.functional.linear(x, self.a.weight))))


class Embedded(nn.Module):
    """Tokens from the signs of the inputs. `tied` gives logits by the weight of the embedding."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * WIDTH, WIDTH)
        self.head = nn.Linear(2 * WIDTH if tied else WIDTH, CLASSES)
        self.tied = tied

    @override
    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(WIDTH, device=x.device) + WIDTH * (x > 0).long()
        hidden = self.embedding(ids).mean(1)
        return self.head(hidden @ self.embedding.weight.T if self.tied else hidden)


class Convolved(nn.Module):
    """A convolution of one or two dimensions, and a head."""

    def __init__(self, dimensions: int, **options: Any) -> None:
        super().__init__()
        kind = nn.Conv1d if dimensions == 1 else nn.Conv2d
        self.conv = kind(1, 4, 3, padding="same", **options)
        self.shape = (1, WIDTH) if dimensions == 1 else (1, 2, WIDTH // 2)
        self.head = nn.Linear(4 * WIDTH, CLASSES)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x.unflatten(1, self.shape))).flatten(1))


class LowRank(nn.Linear):
    """A linear layer with an adapter of its own, whose `weight` is that of the base."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(2, inputs) / 2)
        self.lora_B = nn.Parameter(torch.zeros(outputs, 2))

    @override
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input @ self.lora_A.T @ self.lora_B.T


def own_encoder(num_classes: int = CLASSES) -> nn.Module:
    """An encoder layer with adapters of a user's own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Encoder()
        net.requires_grad_(False)
        net.encoder.linear1 = LowRank(WIDTH, 16)
        net.encoder.linear2 = LowRank(16, WIDTH)
    return net


def normed_encoder(num_classes: int = CLASSES) -> nn.Module:
    """An encoder layer whose weights are computed from other parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Encoder()
    parametrizations.weight_norm(net.encoder.linear1)
    parametrizations.spectral_norm(net.encoder.self_attn.out_proj)
    return net


def normed_recurrent(num_classes: int = CLASSES) -> nn.Module:
    """An LSTM with projections whose weights are computed from other parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Recurrent()
    for name in ("weight_ih_l0", "weight_hr_l0"):
        parametrizations.weight_norm(net.lstm, name)
    return net


def adapted(
    make: Callable[..., nn.Module], *targets: str, rank: int = 2, **lora: Any
) -> Callable[..., nn.Module]:
    """What makes a network with peft's adapters in layers of these names."""
    return partial(_adapted, make, targets, rank, lora)


def _adapted(
    make: Callable[..., nn.Module],
    targets: tuple[str, ...],
    rank: int,
    lora: dict[str, Any],
    num_classes: int = CLASSES,
) -> nn.Module:
    import peft

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make()
        settings = {"r": rank, "lora_alpha": 8, "target_modules": [*targets]} | lora
        adapted: nn.Module = peft.get_peft_model(net, peft.LoraConfig(**settings))  # type: ignore[arg-type]
        return adapted
