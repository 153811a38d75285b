"""Optimizers that keep what they count elsewhere than in `.state`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from typing_extensions import override


class Warm(SGD):
    """Its first step adds a key to every group, as timm's Adan and Lamb do."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, momentum=0.9)

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["weight_decay"] = 0.01 * group["step"]
        super().step()


class Counting(SGD):
    """It counts in an attribute, in one that its first step makes, and in a state of numbers."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.count = 0
        self.history: list[int] = []

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.late = getattr(self, "late", 0) + 1
        self.history.append(self.count)
        for group in self.param_groups:
            group["momentum"] = 0.1 * len(self.history) / (1 + self.late)
            for p in group["params"]:
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                if p.grad is not None:
                    p.grad.mul_(1.0 / self.state[p]["steps"])
        super().step()


class Lookahead(Optimizer):
    """Zhang et al. 2019, around SGD: slow weights that are copies of the first values."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        self.base = SGD(params, lr=lr, momentum=0.9)
        super().__init__(self.base.param_groups, dict(self.base.defaults))
        self.base.param_groups = self.param_groups
        self.slow: list[Tensor] = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.steps = 0

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.steps += 1
        if self.steps % 2 == 0:
            with torch.no_grad():
                for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                    slow.add_(p - slow, alpha=0.5)
                    p.copy_(slow)


class InState(SGD):
    """Its constructor fills `.state`: slow weights by parameter, and sums that are not 0."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"slow": p.detach().clone(), "sum": torch.full_like(p, 2.0)}

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if p.grad is not None:
                state["sum"].add_(p.grad.abs())
                p.grad.div_(state["sum"])
        super().step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.lerp_(self.state[p]["slow"], 0.25)


class Growing(SGD):
    """Its second step takes a parameter out of its group, into a group of its own."""

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == 2:
            last = self.param_groups[0]["params"].pop()
            self.add_param_group({"params": [last], "lr": 0.0})
        super().step()
