"""Adaptive optimisers of the server's model, for `model.server_optimizer`.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization.
ICLR 2021. https://arxiv.org/abs/2003.00295, algorithm 2.

They are torch optimisers whose gradient is -Delta: the server's model minus the mean of the
clients'. FedAvgM (Hsu, Qi, Brown 2019) is torch's own SGD with momentum, and so is the outer
Nesterov momentum of DiLoCo. `ServerStep` lets them step.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Momentum, Number, Positive, Weight, check_arguments
from lightfed.utils.errors import UserError

_KEY = "model.server_optimizer.init_args"


class _Adaptive(Optimizer):
    """m = beta_1 m + (1 - beta_1) Delta; x = x + eta m / (sqrt(v) + tau)."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments by their annotated bounds, before the constructor runs."""
        check_arguments(cls, args, kwargs, _KEY)
        return super().__new__(cls)

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: Positive = 0.1,
        betas: tuple[Momentum, Momentum] = (0.9, 0.99),
        tau: Positive = 1e-3,
        v_init: Weight = 0.0,
        bias_correction: Number | None = None,
    ) -> None:
        """Set the rates.

        Args:
            params: Of the server.
            lr: eta.
            betas: beta_1 and beta_2.
            tau: Degree of adaptivity, which is added to the root of v.
            v_init: v before the first round; the paper has any number of at least tau^2, and
                implementations have 0.
            bias_correction: None as in the paper; 0 for Adam's own, from the first round on; 1 for
                that of Flower's FedAdam, which is one step ahead.
        """
        rule = {"lr": lr, "betas": betas, "tau": tau, "v_init": v_init, "ahead": bias_correction}
        super().__init__(params, rule)

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for x in group["params"]:
                self._update(x, **group)

    def _update(
        self,
        x: Tensor,
        *,
        lr: float,
        betas: tuple[float, float],
        tau: float,
        v_init: float,
        ahead: int | None,
        **_: Any,
    ) -> None:
        assert x.grad is not None
        state, delta = self.state[x], -x.grad
        if not state:
            v = torch.full_like(x, v_init)
            state.update(step=0, m=torch.zeros_like(x), v=v)
        beta_1, beta_2 = betas
        state["m"].mul_(beta_1).add_(delta, alpha=1 - beta_1)
        self.second(state["v"], delta * delta, beta_2)
        state["step"] += 1
        if ahead is not None:
            steps = state["step"] + ahead
            lr *= (1 - beta_2**steps) ** 0.5 / (1 - beta_1**steps)
        x += lr * state["m"] / (state["v"].sqrt() + tau)

    @abstractmethod
    def second(self, v: Tensor, square: Tensor, beta: float) -> None:
        """Update v in place by the square of Delta."""


class FedAdam(_Adaptive):
    """v = beta_2 v + (1 - beta_2) Delta^2."""

    @override
    def second(self, v: Tensor, square: Tensor, beta: float) -> None:
        v.mul_(beta).add_(square, alpha=1 - beta)


class FedYogi(_Adaptive):
    """v = v - (1 - beta_2) Delta^2 sign(v - Delta^2)."""

    @override
    def second(self, v: Tensor, square: Tensor, beta: float) -> None:
        v.sub_((1 - beta) * square * (v - square).sign())


class FedAdagrad(_Adaptive):
    """v = v + Delta^2; the paper has `betas: [0, 0.99]`, of which the second does not matter."""

    @override
    def second(self, v: Tensor, square: Tensor, beta: float) -> None:
        v.add_(square)


class ServerStep:
    """The step of the server's optimiser; without one, merges are the server's new values.

    Args:
        make: makes the optimiser of a model's parameters; None for none.
        server: the module with the server's models.
        personal: names of tensors that clients keep: in the server's models they do not change.

    Attributes:
        optimizers: of the models that have been merged, by name.
    """

    def __init__(
        self,
        make: Callable[[Iterable[nn.Parameter]], Optimizer] | None,
        server: nn.Module,
        personal: Collection[str] = (),
    ) -> None:
        self.make, self._server, self._personal = make, server, personal
        self.optimizers: dict[str, Optimizer] = {}
        self._stepping: ServerModel | None = None

    @contextmanager
    def __call__(self, model: ServerModel) -> Iterator[None]:
        """Let the optimiser step to what is merged into a model within the context.

        Its gradient is the parameters before minus those merged. Elements that no client has sent
        have a gradient of 0; momentum moves them. Buffers are as merged. `merge` does it by itself.
        """
        if self._stepping is model or not (self.make or self._personal):
            yield
            return
        before, self._stepping = model.floats.clone(), model
        try:
            yield
        finally:
            self._stepping = None
        if self.make is not None:
            row, optimizer = model.parameters_row, self.of(model)
            (parameter,) = optimizer.param_groups[0]["params"]
            parameter.data, parameter.grad = row, before[: len(row)] - row
            row.copy_(before[: len(row)])
            optimizer.step()
        held = model.layout.floats.views(before)
        for name, tensor in model.layout.floats.views(model.floats).items():
            if name in self._personal:
                tensor.copy_(held[name])

    @property
    def rule(self) -> str:
        """The optimiser and its settings, for comparison; empty if there is none."""
        if self.make is None:
            return ""
        made = self.make([nn.Parameter(torch.zeros(1))])
        settings = {k: v for k, v in made.param_groups[0].items() if k != "params"}
        return f"{type(made).__name__} {settings}"

    def of(self, model: ServerModel) -> Optimizer:
        """The optimiser of a model; a UserError if the server does not keep that model."""
        names = {id(part): name for name, part in self._server.named_modules()}
        name = names.get(id(model))
        found, fix = "the method merges into a model that it does not keep", "leave it out"
        if name is None:
            raise UserError("model.server_optimizer", found, fix)
        if name not in self.optimizers:
            assert self.make is not None
            self.optimizers[name] = self.make([nn.Parameter(model.parameters_row)])
        return self.optimizers[name]
