"""ASPG, accelerated stochastic projected gradient: the local optimizer of FedBCD.

Wu, Scaglione, Wai, Karakoc, Hreinsson, Ma: Federated Block Coordinate Descent Scheme for Learning
Global and Personalized Models. AAAI 2021. https://arxiv.org/abs/2012.13900

    x_ex = x^k + zeta (x^k - x^{k-1})                                            (4a)
    x^{k+1} = clamp(x_ex - eta (g(x_ex) + gamma (x_ex - z)), box)                (4b)

x^k are the iterates, x_ex is the extrapolated point at which the gradient is taken, and z the model
of the device's server.
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
from lightfed.utils.errors import UserError

_KEY = "model.optimizer.init_args"


class AspgStepper(Stepper):
    """ASPG on the row that a live module is bound to.

    Within a session the row holds the extrapolated point, because the module takes its gradient
    there. A second row holds the iterate. The final difference of the two, zeta (x^K - x^{K-1}), is
    carried to the device's next session. Clipping acts on the gradient of the local objective,
    including its pull.
    """

    def __init__(self, optimizer: Optimizer, clipping: Clipping | None) -> None:
        super().__init__(optimizer, clipping)
        (self._group,) = optimizer.param_groups
        self._zeta: float = self._group["momentum"]
        self.box = self._group["box"]

        # Rows of shape (P,): the extrapolated point, which is the client's own row; the iterate;
        # and the gradient, with views of it for each parameter.
        self._point = torch.empty(0)
        self._iterate = torch.empty(0)
        self._gradient = torch.empty(0)
        self._parts: Params = []

        # The parts of a row that are trained.
        self._runs: list[slice] = []

    @override
    def reset(self, lr: float | None, row: Tensor, proximal: Proximal | None) -> None:
        super().reset(lr, row, None)
        self._zeta = self._group["momentum"]  # a schedule may have changed it
        self._point = row
        if len(self._gradient) != len(row):
            self._gradient = torch.zeros_like(row)
            self._iterate = torch.empty_like(row)
            self._parts = views_at(self._params, row, self._gradient)
            spans = []
            for part in self._parts:
                start = int(part.storage_offset())
                spans.append((start, start + part.numel()))
            self._runs = _aligned_runs(spans)

        # x^0 is the model, and x_ex the model plus what the last session has left.
        self._iterate.copy_(row)
        self._proximal = proximal
        if proximal is not None and proximal.momentum is not None:
            row += proximal.momentum

    @override
    def train_only(self, parameters: Sequence[Tensor]) -> None:
        raise UserError(
            "model.optimizer",
            "ASPG, and the algorithm freezes a part of the model",
            "use torch.optim.SGD",
        )

    @override
    def step(self, loss: Tensor, hook: GradientHook | None) -> None:
        self._backward(loss)
        with torch.no_grad():
            self._move(hook)
        for p in self._params:
            p.grad = None

    def _move(self, hook: GradientHook | None) -> None:
        """Take the step (4b), and extrapolate (4a), from the gradients of the parameters."""
        used, gradients = self._gradients()
        if len(used) < len(self._parts):
            self._gradient.zero_()
        torch._foreach_copy_([self._parts[i] for i in used], gradients)
        if hook is not None:
            hook(self._gradient)

        # Without a pull: gamma = 0, and any anchor.
        gamma = 0.0
        anchor = self._point.clone()
        decay = None
        if self._proximal is not None:
            decay = self._proximal.decay
            if self._proximal.gamma:
                gamma = self._proximal.gamma
                anchor = self._proximal.anchor

        if self.clipping is not None:
            # The pull has to be in the gradient before it is clipped: the kernel adds none then.
            for run in self._runs:
                self._gradient[run].add_(self._point[run] - anchor[run], alpha=gamma)
            self.clipping(self._parts, range(len(self._parts)))
            gamma = 0.0

        if decay is not None:
            for run in self._runs:
                self._gradient[run].addcmul_(self._point[run], decay[run])

        for run in self._runs:
            aspg_step_(
                self._point[run],
                self._iterate[run],
                self._gradient[run],
                anchor[run],
                lr=self._group["lr"],
                gamma=gamma,
                extrapolation=self._zeta,
                box=self.box,
            )

    @override
    def finish(self) -> None:
        """Put the iterate into the row; keep the momentum if it is carried."""
        if self._proximal is not None and self._proximal.carries:
            self._proximal.momentum = self._point - self._iterate
        self._point.copy_(self._iterate)


class StackedASPG(StackedOptimizer):
    """Takes the steps of `AspgStepper` for K clients at once.

    Within sessions the values are the extrapolated points. Pulls, decays and clipping are in the
    gradients already, as for any optimizer of a pack.
    """

    @override
    def start(
        self, values: Sequence[Tensor], *, lr: float | None, momenta: Sequence[Tensor] | None
    ) -> None:
        super().start(values, lr=lr, momenta=None)
        (group,) = self.optimizer.param_groups
        self._lr = group["lr"]
        self._zeta = group["momentum"]
        self._box = group["box"]
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
            point = leaf.data  # x_ex
            iterate = self._iterates[i][: len(point)]  # x^k

            # (4b)
            new = point if grad is None else point.sub(grad, alpha=self._lr)
            new = new.clone() if self._box is None else new.clamp(*self._box)

            # (4a), for the next step
            torch.add(new, new - iterate, alpha=self._zeta, out=point)
            iterate.copy_(new)

    @override
    def carried(self) -> list[Tensor | None]:
        """Return zeta (x^K - x^{K-1}) of each parameter, (K, *shape)."""
        momenta: list[Tensor | None] = []
        for point, iterate in zip(self._ends, self._iterates, strict=True):
            momenta.append(point - iterate)
        return momenta

    @override
    def finish(self) -> None:
        # The values become the iterates; `carried` still needs the last points.
        self._ends = [point.clone() for point in self._points]
        torch._foreach_copy_(self._points, self._iterates)


class ASPG(Optimizer):
    """ASPG as an optimizer of torch, for configurations and for use without lightfed.

    Between steps the parameters hold the extrapolated point, where the next gradient is taken. A
    session of lightfed takes the same steps on a flat row (`AspgStepper`), with the pull towards a
    server's model and with carried momentum.
    """

    stepper = AspgStepper  # steps a client's session
    stacked = StackedASPG  # steps the sessions of several clients at once

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.005,
        momentum: float = 0.9,
        box: tuple[float, float] | None = (-2.0, 2.0),
    ) -> None:
        """Set the step.

        Args:
            params: The parameters of the model.
            lr: eta, the step size.
            momentum: zeta, the extrapolation; 0 gives projected stochastic gradient.
            box: Bounds of every weight, with 0 between them; null for none.
        """
        if not 0 < lr < inf:
            raise UserError(f"{_KEY}.lr", str(lr), "give a number above 0")
        if not 0 <= momentum < inf:
            raise UserError(f"{_KEY}.momentum", str(momentum), "give a number of 0 or more")

        bounds = None
        if box is not None:
            low, high = box
            if not low < high:
                raise UserError(f"{_KEY}.box", f"[{low}, {high}]", "give low < high")
            if not low <= 0 <= high:
                found = f"[{low}, {high}], which excludes 0"
                raise UserError(f"{_KEY}.box", found, "give bounds around 0")
            bounds = (float(low), float(high))

        super().__init__(params, {"lr": lr, "momentum": momentum, "box": bounds})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step from the gradients of the parameters; `x` in the state is the iterate."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue

                # (4b), and (4a) for the next step
                old = self.state[p].get("x", p.detach().clone())
                new = p - group["lr"] * p.grad
                if group["box"] is not None:
                    new.clamp_(*group["box"])
                self.state[p]["x"] = new
                p.copy_(new + group["momentum"] * (new - old))
        return loss


def _aligned_runs(spans: Sequence[tuple[int, int]]) -> list[slice]:
    """Return the parts of a row that are trained, in whole aligned lines.

    Adjacent parameters are joined, so that a step launches few kernels. Frozen parameters between
    them are neither pulled nor projected.

    Args:
        spans: Start and end of each trained parameter in the row, ascending.
    """
    runs: list[tuple[int, int]] = []
    for start, end in spans:
        aligned_end = -(-end // ALIGNMENT) * ALIGNMENT  # rounded up
        if runs and start == runs[-1][1]:
            runs[-1] = (runs[-1][0], aligned_end)
        else:
            runs.append((start, aligned_end))
    return [slice(start, end) for start, end in runs]
