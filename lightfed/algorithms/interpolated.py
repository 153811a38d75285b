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
        net: maps (B, ...) to (B, C) logits; w, and a copy of it v.
        alpha: share of v at first.

    Attributes:
        turn: whether w or v learns next.
        adapts: the next step of v finds out how alpha should change.
    """

    alpha: Tensor
    turn: str = "w"
    adapts: bool = False

    def __init__(self, net: nn.Module, alpha: float) -> None:
        super().__init__()
        self.w, self.v = net, deepcopy(net)
        self.register_buffer("alpha", torch.tensor(alpha))
        self._slopes: dict[str, Tensor] = {}

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C) logits."""
        return self._mixed(self.v(x), self.w(x))

    def _mixed(self, v: Tensor, w: Tensor) -> Tensor:
        return self.alpha * v + (1 - self.alpha) * w

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """CE(w(x), y), and in the next call that of the mixture as a function of v alone."""
        w = self.w(x)
        if self.turn == "w":
            self.turn = "v"
            return {"w": F.cross_entropy(w, y)}
        v, self.turn = self.v(x), "w"
        if self.adapts:
            loss, self.adapts = F.cross_entropy(self._mixed(v, w), y), False
            of_v, of_w = (
                {name: p for name, p in net.named_parameters() if p.requires_grad}
                for net in (self.v, self.w)
            )
            found = torch.autograd.grad(loss, [*of_v.values(), *of_w.values()], retain_graph=True)
            halves = zip(of_v, found[: len(of_v)], found[len(of_v) :], strict=True)
            self._slopes = {name: self._mixed(a, b) for name, a, b in halves}
        return {"v": F.cross_entropy(self._mixed(v, w.detach()), y)}

    @torch.no_grad()
    def adapt(self, tensors: Mapping[str, Tensor], lr: float, decay: float = 0.02) -> None:
        """One step of alpha, in [0, 1], if its slope is new; `tensors` are those of a client's row.

        alpha <- alpha - lr (<v - w, alpha g_v + (1 - alpha) g_w> + decay alpha), with the gradients
        of the mixture's loss before the last step of v, as in the released code.
        """
        if not self._slopes:
            return
        alpha = tensors["net.alpha"]
        change = decay * alpha
        for name, slope in self._slopes.items():
            change += ((tensors[f"net.v.{name}"] - tensors[f"net.w.{name}"]) * slope).sum()
        alpha.sub_(lr * change).clamp_(0, 1)
        self._slopes = {}
