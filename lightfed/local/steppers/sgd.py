"""Plain SGD, the optimiser of every paper here, without the optimiser object.

Gradients come directly from autograd, and a few foreach calls give the same bits as
torch.optim.SGD at half the cost.
"""

from collections.abc import Sequence
from functools import cache
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable
from typing_extensions import override

from lightfed.local.optimizer import Clipping, GradientHook, Params, Proximal, Stepper, aligned

# What torch.autograd.grad calls. The name is private: a test and the pinned torch guard it.
run_backward = Variable._execution_engine.run_backward
# Elements of the widest vector of a CPU. torch's fused kernel rounds the elements after the last
# whole vector differently.
_LANES = 16


class SGDStepper(Stepper):
    """torch.optim.SGD on a list of tensors, bit for bit.

    Gradients are taken with respect to the module's parameters and applied to the views of the
    bound row that they alias. These are plain tensors, which need no `no_grad`.

    Attributes:
        lr: learning rate, of the latest session.
        momentum, dampening, weight_decay, nesterov: as of torch.optim.SGD.
        factors: of every parameter's learning rate, if they differ.
    """

    def __init__(
        self,
        params: Params,
        group: dict[str, Any],
        clipping: Clipping | None,
        factors: Sequence[float] | None = None,
    ) -> None:
        super().__init__(clipping)
        self._params = self._inputs = tuple(params)
        self._trained: Sequence[int] = range(len(params))  # positions of the inputs
        self.factors = factors  # of every parameter's learning rate
        self.lr: float = group["lr"]
        self._group, self._own_lr = group, self.lr  # a user's step may change the rate
        self.momentum: float = group["momentum"]
        self.dampening: float = group["dampening"]
        self.weight_decay: float = group["weight_decay"]
        self.nesterov: bool = group["nesterov"]
        names = ("momentum", "dampening", "weight_decay", "nesterov")
        self._settings = {name: group[name] for name in names}
        self._fuses = False
        self._buffers: list[Tensor | None] = []
        self._proximal: Proximal | None = None
        self._one = torch.ones((), device=params[0].device)

    @override
    def reset(
        self, lr: float | None, values: Params, row: Tensor, proximal: Proximal | None
    ) -> None:
        self._begin(values, row, proximal)
        self._proximal = proximal
        self._inputs, self._trained = self._params, range(len(self._params))
        self._buffers = [None] * len(values)
        if proximal is not None and proximal.momentum is not None:
            self._buffers = [*aligned(values, row, proximal.momentum.clone())]
        self._group["lr"] = self.lr = self._own_lr if lr is None else lr
        # Without momentum and decay, a step of torch is one pass already.
        self._fuses = bool(self.momentum or self.weight_decay) and self._can_fuse(values)

    @override
    def train_only(self, parameters: Sequence[Tensor]) -> None:
        chosen = {id(p) for p in parameters}
        self._trained = [i for i, p in enumerate(self._params) if id(p) in chosen]
        self._inputs = tuple(self._params[i] for i in self._trained)

    @override
    def step(self, loss: Tensor, hook: GradientHook | None) -> None:
        grads, used, values = [*self._gradients(loss)], self._trained, self._values
        if any(grad is None for grad in grads):
            # Parameters outside the graph are skipped, as by optimisers.
            used = [i for i, grad in zip(used, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if len(used) < len(values):
            values = [values[i] for i in used]
        self.update(values, grads, used, hook)

    def _gradients(self, loss: Tensor) -> tuple[Any, ...]:
        """torch.autograd.grad without its Python overhead, a fifth of a small model's step."""
        if self._one.dtype != loss.dtype:
            self._one = self._one.to(loss.dtype)
        scalar = loss if loss.dim() == 0 else loss.reshape(())
        return run_backward(
            (scalar,), (self._one,), False, False, self._inputs, True, accumulate_grad=False
        )

    def update(
        self, values: Params, grads: Params, used: Sequence[int], hook: GradientHook | None
    ) -> None:
        """One step from gradients, which may be overwritten, of the parameters `used`."""
        grads, self.lr = self._adjusted(grads, used, hook), self._group["lr"]
        if self._fuses:
            values, grads, used = self._fused(values, grads, used)
            if not used:
                return
        if self.weight_decay:
            grads = list(torch._foreach_add(grads, values, alpha=self.weight_decay))
        if self.momentum:
            buffers = self._accumulate(grads, used)
            grads = (
                list(torch._foreach_add(grads, buffers, alpha=self.momentum))
                if self.nesterov
                else buffers
            )
        if self.factors is not None:
            grads = list(torch._foreach_mul(grads, [self.factors[i] for i in used]))
        torch._foreach_add_(values, grads, alpha=-self.lr)

    def _can_fuse(self, values: Params) -> bool:
        plain = all(value.is_cpu and value.dtype == torch.float32 for value in values)
        return plain and self.factors is None and _fused_agrees(**self._settings)

    def _fused(
        self, values: Params, grads: Params, used: Sequence[int]
    ) -> tuple[Params, Params, Sequence[int]]:
        """Update most tensors in one pass over memory; returns the others."""
        buffers = [self._buffers[i] for i in used]
        fits = [
            value.numel() % _LANES == 0
            and (
                (
                    value.is_contiguous()
                    and grad.is_contiguous()
                    and (not self.momentum or (buffer is not None and buffer.is_contiguous()))
                )
                or _in_channels_last(value, grad, buffer if self.momentum else grad)
            )
            for value, grad, buffer in zip(values, grads, buffers, strict=True)
        ]
        if not any(fits):
            return values, grads, used
        _fused_sgd(
            [*compress(values, fits)],
            [*compress(grads, fits)],
            [b for b in compress(buffers, fits) if b is not None],
            lr=self.lr,
            **self._settings,
        )
        others = [not fit for fit in fits]
        return [*compress(values, others)], [*compress(grads, others)], [*compress(used, others)]

    def _accumulate(self, grads: Params, used: Sequence[int]) -> Params:
        """B <- momentum b + (1 - dampening) g; a buffer starts as the first gradient."""
        old = [
            (b, g) for i, g in zip(used, grads, strict=True) if (b := self._buffers[i]) is not None
        ]
        if old:
            buffers = [b for b, _ in old]
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_add_(buffers, [g for _, g in old], alpha=1 - self.dampening)
        if len(old) < len(used):
            for i, grad in zip(used, grads, strict=True):
                if self._buffers[i] is None:
                    self._buffers[i] = grad.clone()
        return [b for i in used if (b := self._buffers[i]) is not None]

    @override
    def finish(self) -> None:
        if self._proximal is None or not self._proximal.carries or not self.momentum:
            return
        momentum = self._proximal.momentum = torch.zeros_like(self._row)
        for part, buffer in zip(
            aligned(self._values, self._row, momentum), self._buffers, strict=True
        ):
            if buffer is not None:
                part.copy_(buffer)


def _in_channels_last(*tensors: Tensor | None) -> bool:
    return all(
        t is not None and t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)
        for t in tensors
    )


def _fused_sgd(values: Params, grads: Params, buffers: Params, **settings: Any) -> None:
    """torch.optim.SGD(fused=True), after its first step."""
    torch._fused_sgd_(values, grads, buffers, maximize=False, is_first_step=False, **settings)


@cache
def _fused_agrees(
    *, momentum: float, dampening: float, weight_decay: float, nesterov: bool
) -> bool:
    """Whether torch's fused kernel rounds as its other kernels on this CPU."""
    generator = torch.Generator().manual_seed(0)
    first, grad, buffer = torch.randn(3, 64 * _LANES, generator=generator).unbind()
    values = first.clone(), first.clone()
    settings: dict[str, Any] = {
        "lr": 0.03,
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
    }
    stepper = SGDStepper([first], settings, None)
    stepper._buffers = [buffer.clone()]
    stepper.update([values[0]], [grad.clone()], [0], None)
    _fused_sgd([values[1]], [grad], [buffer] if momentum else [], **settings)
    return torch.equal(*values)
