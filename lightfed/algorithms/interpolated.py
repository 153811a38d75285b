"""The client of APFL: a personal model and a copy of the global one, whose outputs are mixed.

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning. 2020.
https://arxiv.org/abs/2003.13461
"""

from collections.abc import Mapping
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override


class Interpolated(nn.Module):
    """alpha v(x) + (1 - alpha) w(x); w and v take turns in learning.

    Args:
        net: Maps (B, ...) to (B, C) logits. It becomes w, and a copy of it v.
        alpha: The share of v at first.

    Attributes:
        alpha: (), the share of v.
        turn: Whether w or v learns next.
        adapts: Whether the next step of v finds out how alpha should change.
    """

    alpha: Tensor
    turn: str = "w"
    adapts: bool = False
    _only_v: bool = False

    def __init__(self, net: nn.Module, alpha: float) -> None:
        super().__init__()
        self.w = net
        self.v = deepcopy(net)
        self.register_buffer("alpha", torch.tensor(alpha))
        # alpha g_v + (1 - alpha) g_w of every parameter, by its name in v and w.
        self._slopes: dict[str, Tensor] = {}

    def take_turns(self) -> None:
        """Begin a session in which w and v take turns, w first."""
        self.turn = "w"
        self._only_v = False

    def train_only_v(self) -> None:
        """Begin a session in which every step is one of v."""
        self.turn = "v"
        self._only_v = True
        self.adapts = False

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map samples (B, ...) to logits (B, C)."""
        return self._mixed(self.v(x), self.w(x))

    def _mixed(self, v: Tensor, w: Tensor) -> Tensor:
        return self.alpha * v + (1 - self.alpha) * w

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss of the network whose turn it is: "w" or "v".

        The loss of w is its own cross-entropy. That of v, in the next call on the same batch, is
        the cross-entropy of the mixture as a function of v alone.

        Args:
            x: Samples (B, ...).
            y: Labels (B,).
        """
        w_logits = self.w(x)
        if self.turn == "w":
            self.turn = "v"
            return {"w": F.cross_entropy(w_logits, y)}

        v_logits = self.v(x)
        if not self._only_v:
            self.turn = "w"
        if self.adapts:
            self.adapts = False
            self._find_slopes(F.cross_entropy(self._mixed(v_logits, w_logits), y))
        return {"v": F.cross_entropy(self._mixed(v_logits, w_logits.detach()), y)}

    def _find_slopes(self, loss: Tensor) -> None:
        """Keep the mixed gradients of the mixture's loss, for `adapt`."""
        v = {name: p for name, p in self.v.named_parameters() if p.requires_grad}
        w = {name: p for name, p in self.w.named_parameters() if p.requires_grad}
        # The graph is needed once more, for the step of v.
        gradients = torch.autograd.grad(loss, [*v.values(), *w.values()], retain_graph=True)
        v_gradients = gradients[: len(v)]
        w_gradients = gradients[len(v) :]

        self._slopes = {}
        for name, v_gradient, w_gradient in zip(v, v_gradients, w_gradients, strict=True):
            self._slopes[name] = self._mixed(v_gradient, w_gradient)

    @torch.no_grad()
    def adapt(self, tensors: Mapping[str, Tensor], lr: float, decay: float = 0.02) -> None:
        """Take one step of alpha within [0, 1], if `losses` has found out how it should change.

        alpha <- alpha - lr (<v - w, alpha g_v + (1 - alpha) g_w> + decay alpha)

        g_v and g_w are the gradients of the mixture's loss before the last step of v, as in the
        released code; v and w are the weights now.

        Args:
            tensors: The tensors of the client's row, by name; "net.alpha" is written.
            lr: Learning rate of alpha.
            decay: Weight decay of alpha.
        """
        if not self._slopes:
            return
        alpha = tensors["net.alpha"]
        change = decay * alpha
        for name, slope in self._slopes.items():
            change += ((tensors[f"net.v.{name}"] - tensors[f"net.w.{name}"]) * slope).sum()
        alpha.sub_(lr * change).clamp_(0, 1)
        self._slopes = {}
