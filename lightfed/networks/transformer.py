"""HeteroFL's masked language model."""

from collections.abc import Mapping, Sequence
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightfed.data.batches import sent
from lightfed.networks.layers import Scaler
from lightfed.utils.counts import rounded_up
from lightfed.utils.errors import UserError


class Transformer(nn.Module):
    """Token and position embeddings, post-LN encoder layers, and a decoder of two linear layers.

    It masks its own input, in training and in evaluation: every forward pass replaces each position
    by the mask token with probability `mask_rate`. Diao et al. 2021, released code; 19,263,486
    parameters on WikiText-2 (33,278 tokens, windows of 64) at rate 1. In that code all encoder
    layers start with the same weights; here every layer draws its own.

    A narrow model has as many heads as the full one, each with fewer channels.

    Args:
        num_classes: V, the number of tokens of the vocabulary.
        input_shape: (T,), the length of the longest window.
        embedding: D, the channels of a token at rate 1.
        heads: Number of heads of the attention.
        hidden: Units of the feed-forward layers at rate 1.
        layers: Number of encoder layers.
        dropout: Probability of dropout, after the embedding, the attention, and both feed-forward
            layers.
        mask_rate: Probability that a position is masked.
        rate: Width ratio, and what the Scalers divide by in training.

    Attributes:
        masked: (B, T) bool, the positions that the last forward pass in evaluation masked.
        label_rows: Names of the parameters whose rows are tokens, besides the last layer's.

    Raises:
        UserError: The samples are not windows of tokens, or the rate does not give whole heads.
    """

    def __init__(
        self,
        num_classes: int = 33278,
        input_shape: Sequence[int] = (64,),
        *,
        embedding: int = 256,
        heads: int = 8,
        hidden: int = 512,
        layers: int = 4,
        dropout: float = 0.2,
        mask_rate: float = 0.15,
        rate: float = 1.0,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise UserError(
                key="input_shape",
                found=f"samples of shape {tuple(input_shape)}",
                fix="use data with windows of tokens",
            )
        width = rounded_up(embedding * rate)
        if width % heads != 0:
            raise UserError(
                key="heads",
                found=f"{heads}, which do not divide {width} channels (rate {rate:g})",
                fix="use a divisor, or another embedding",
            )

        self.mask_token = num_classes  # row V of the embedding
        self.mask_rate = mask_rate
        self.masked = torch.zeros(0, *input_shape, dtype=torch.bool)
        self.label_rows = ("token.weight",)

        self.position = nn.Embedding(input_shape[0], width)
        self.token = nn.Embedding(num_classes + 1, width)
        self.scaler = Scaler(rate)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

        units = rounded_up(hidden * rate)
        self.layers = nn.Sequential()
        for _ in range(layers):
            self.layers.append(EncoderLayer(width, heads, units, dropout, rate))
        self.decoder = nn.Sequential(
            nn.Linear(width, width),
            Scaler(rate),
            nn.GELU(),
            nn.LayerNorm(width),
            nn.Linear(width, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens (B, T) to logits (B, T, V)."""
        # Drawn on the CPU, so that every device masks the same positions. The CPU's default
        # generator is seeded for every session and every evaluated batch.
        drawn = torch.rand_like(tokens, dtype=torch.float32, device="cpu")
        masked = sent(drawn < self.mask_rate, tokens.device)
        if not self.training:
            self.masked = masked
        visible = tokens.masked_fill(masked, self.mask_token)

        # The Scaler of the sum is the sum of both embeddings' Scalers.
        length = visible.shape[1]
        embedded = self.scaler(self.token(visible) + self.position.weight[:length])
        return self.decoder(self.layers(self.dropout(self.norm(embedded))))


class EncoderLayer(nn.Module):
    """Attention, then two linear layers with GELU; each is added to its input and normalized.

    Args:
        width: D of the narrow model.
        heads: Number of heads of the attention.
        hidden: Units between the two linear layers.
        dropout: Probability of dropout, after the attention, the hidden units and the output.
        rate: What the Scalers divide by in training.
    """

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, rate: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, rate)
        self.norm1 = nn.LayerNorm(width)
        self.linear1 = nn.Linear(width, hidden)
        self.linear2 = nn.Linear(hidden, width)
        self.norm2 = nn.LayerNorm(width)
        self.scaler = Scaler(rate)
        self.dropout = nn.Dropout(dropout)
        for linear in (self.linear1, self.linear2):
            nn.init.normal_(linear.weight, std=0.02)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x = self.norm1(x + self.dropout(self.attention(x)))
        hidden = self.dropout(F.gelu(self.scaler(self.linear1(x))))
        return self.norm2(x + self.dropout(self.scaler(self.linear2(hidden))))


class Attention(nn.Module):
    """Self-attention over all positions, with a Scaler after each linear layer.

    The linear layers are separate, because a narrow client owns the leading channels of every head.

    Args:
        width: D of the narrow model, a multiple of the heads.
        heads: H, the number of heads.
        rate: What the Scaler divides by in training.

    Attributes:
        slice_groups: By the name of a parameter, the number of groups in each dimension. Narrow
            models take the leading part of every group.
    """

    def __init__(self, width: int, heads: int, rate: float) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)
        self.scaler = Scaler(rate)
        # Outputs of q, k and v are grouped by heads, and so are the inputs of o.
        self.slice_groups: Mapping[str, tuple[int, ...]] = {
            "q.weight": (heads, 1),
            "k.weight": (heads, 1),
            "v.weight": (heads, 1),
            "q.bias": (heads,),
            "k.bias": (heads,),
            "v.bias": (heads,),
            "o.weight": (1, heads),
        }

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        q = self._by_head(self.scaler(self.q(x)))
        k = self._by_head(self.scaler(self.k(x)))
        v = self._by_head(self.scaler(self.v(x)))
        # The temperature is that of the client's own heads, which are narrower than the full ones.
        scale = 1 / sqrt(q.shape[-1])
        mixed = F.scaled_dot_product_attention(q, k, v, scale=scale)
        return self.scaler(self.o(mixed.transpose(1, 2).flatten(-2)))

    def _by_head(self, x: Tensor) -> Tensor:
        """Cut channels into heads: (B, T, D) -> (B, H, T, D / H)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
