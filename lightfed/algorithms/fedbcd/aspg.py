"""Accelerated stochastic projected gradient: the local optimiser of FedBCD.

Wu, Scaglione, Wai, Karakoc, Hreinsson, Ma: Federated Block Coordinate Descent Scheme for Learning
Global and Personalized Models. AAAI 2021. https://arxiv.org/abs/2012.13900

    x_ex = x^k + zeta (x^k - x^{k-1})                                            (4a)
    x^{k+1} = clamp(x_ex - eta (g(x_ex) + gamma (x_ex - z)), box)                (4b)
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import torch
from lightfed_kernels import ALIGNMENT, aspg_step_
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightfed.local.optimizer import Clipping, GradientHook, Params, Proximal, Stepper, views_at
from lightfed.packs.stacked_optimizer import StackedOptimizer
from lightfed.utils.errors import UserError, require

_KEY = "model.optimizer.init_args"


class AspgStepper(Stepper):
    """ASPG on the row that a live module is bound to.

    Within a session the row holds the extrapolated point, and a separate row the iterate. The final
    difference of the two, zeta (x^K - x^{K-1}), is carried to the device's next session. Clipping
    acts on the gradient of the local objective, including its pull.
    """

    def __init__(self, optimizer: Optimizer, clipping: Clipping | None) -> None:
        super().__init__(optimizer, clipping)
        (self._group,) = optimizer.param_groups
        self._zeta: float = self._group["momentum"]
        self.box = self._group["box"]
        self._point = self._iterate = self._gradient = torch.empty(0)
        self._parts: Params = []  # of the gradient, as the parameters lie in a row
        self._runs: list[slice] = []  # of a row, that are trained

    @override
    def reset(self, lr: float | None, row: Tensor, proximal: Proximal | None) -> None:
        super().reset(lr, row, None)
        self._zeta = self._group["momentum"]  # a schedule may have changed it
        self._point, values = row, self._params
        if len(self._gradient) != len(row):
            self._gradient, self._iterate = torch.zeros_like(row), torch.empty_like(row)
            self._parts = views_at(values, row, self._gradient)
            starts = [int(part.storage_offset()) for part in self._parts]
            ends = [start + v.numel() for start, v in zip(starts, values, strict=True)]
            self._runs = _runs([*zip(starts, ends, strict=True)])
        self._iterate.copy_(row)
        self._proximal = proximal
        if proximal is not None and proximal.momentum is not None:
            row += proximal.momentum

    @override
    def train_only(self, parameters: Sequence[Tensor]) -> None:
        found = "ASPG, and the algorithm freezes a part of the model"
        raise UserError("model.optimizer", found, "use torch.optim.SGD")

    @override
    def step(self, loss: Tensor, hook: GradientHook | None) -> None:
        self._backward(loss)
        with torch.no_grad():
            self._move(hook)
        for p in self._params:
            p.grad = None

    def _move(self, hook: GradientHook | None) -> None:
        used, grads = self._gradients()
        if len(used) < len(self._parts):
            self._gradient.zero_()
        torch._foreach_copy_([self._parts[i] for i in used], grads)
        if hook is not None:
            hook(self._gradient)
        gamma, anchor = 0.0, self._point.clone()  # a pull of no weight
        if self._proximal is not None and self._proximal.gamma:
            gamma, anchor = self._proximal.gamma, self._proximal.anchor
        if self.clipping is not None:
            for run in self._runs:
                self._gradient[run].add_(self._point[run] - anchor[run], alpha=gamma)
            self.clipping(self._parts, range(len(self._parts)))
            gamma = 0.0
        if self._proximal is not None and self._proximal.decay is not None:
            for run in self._runs:
                self._gradient[run].addcmul_(self._point[run], self._proximal.decay[run])
        for run in self._runs:
            aspg_step_(
                self._point[run], self._iterate[run], self._gradient[run], anchor[run],
                lr=self._group["lr"], gamma=gamma, extrapolation=self._zeta, box=self.box,
            )  # fmt: skip

    @override
    def finish(self) -> None:
        """The row becomes the iterate; the momentum is kept if it is carried."""
        if self._proximal is not None and self._proximal.carries:
            self._proximal.momentum = self._point - self._iterate
        self._point.copy_(self._iterate)


class StackedASPG(StackedOptimizer):
    """The steps of `AspgStepper` for K clients.

    Within sessions the values are the extrapolated points.
    """

    @override
    def start(
        self, values: Sequence[Tensor], *, lr: float | None, momenta: Sequence[Tensor] | None
    ) -> None:
        super().start(values, lr=lr, momenta=None)
        (group,) = self._optimizer.param_groups
        self._lr, self._zeta, self._box = group["lr"], group["momentum"], group["box"]
        self._points = list(values)
        self._iterates = [value.clone() for value in values]
        if momenta is not None:
            torch._foreach_add_(self._points, list(momenta))

    @override
    def narrow(self, clients: int) -> None:
        for leaf in self.leaves:
            leaf.data = leaf.data[:clients]

    @override
    def step(self, grads: Sequence[Tensor | None]) -> None:
        for i, (leaf, grad) in enumerate(zip(self.leaves, grads, strict=True)):
            point = leaf.data
            iterate = self._iterates[i][: len(point)]
            new = point if grad is None else point.sub(grad, alpha=self._lr)
            new = new.clone() if self._box is None else new.clamp(*self._box)
            torch.add(new, new - iterate, alpha=self._zeta, out=point)
            iterate.copy_(new)

    @override
    def carried(self) -> list[Tensor | None]:
        return [p - x for p, x in zip(self._ends, self._iterates, strict=True)]

    @override
    def finish(self) -> None:
        self._ends = [point.clone() for point in self._points]
        torch._foreach_copy_(self._points, self._iterates)


class ASPG(Optimizer):
    """The optimiser, for configurations and for use without lightfed.

    Between steps the parameters hold the extrapolated point, where the next gradient is taken. A
    session of lightfed takes the same steps on a flat row (`AspgStepper`), with the pull to a
    server's model and carried momentum.
    """

    stepper = AspgStepper  # of a session
    stacked = StackedASPG  # of the sessions of several clients at once

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.005,
        momentum: float = 0.9,
        box: tuple[float, float] | None = (-2.0, 2.0),
    ) -> None:
        """The step.

        Args:
            params: Of the model.
            lr: eta, the step size.
            momentum: zeta, the extrapolation; 0 is projected stochastic gradient.
            box: Bounds of every weight, 0 among them; null for none.
        """
        require(0 < lr < inf, f"{_KEY}.lr", lr, "give a number above 0")
        require(0 <= momentum < inf, f"{_KEY}.momentum", momentum, "give a number of 0 or more")
        if box is not None:
            low, high = box
            require(low < high, f"{_KEY}.box", f"[{low}, {high}]", "give low < high")
            found = f"[{low}, {high}], which excludes 0"
            require(low <= 0 <= high, f"{_KEY}.box", found, "give bounds around 0")
        bounds = None if box is None else (float(box[0]), float(box[1]))
        super().__init__(params, {"lr": lr, "momentum": momentum, "box": bounds})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step from the parameters and their gradients; `x` of the state is the model."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                old = self.state[p].get("x", p.detach().clone())
                new = p - group["lr"] * p.grad
                if group["box"] is not None:
                    new.clamp_(*group["box"])
                self.state[p]["x"] = new
                p.copy_(new + group["momentum"] * (new - old))
        return loss


def _runs(spans: Sequence[tuple[int, int]]) -> list[slice]:
    """The trained parts of a row, from the spans of its parameters, in whole aligned lines.

    Adjacent parts are joined. Frozen parameters between them are neither pulled nor projected.
    """
    lines = [(start, -(-end // ALIGNMENT) * ALIGNMENT) for start, end in spans]
    runs = [lines[0]]
    for start, end in lines[1:]:
        if start == runs[-1][1]:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((start, end))
    return [slice(*run) for run in runs]
