"""Adaptive optimizers of the server's model, for `model.server_optimizer`.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization.
ICLR 2021. https://arxiv.org/abs/2003.00295, algorithm 2.

They are torch optimizers whose gradient is -Delta: the server's model minus the mean of the
clients' models. `ServerStep` computes that gradient and lets an optimizer step. FedAvgM (Hsu, Qi,
Brown 2019) and the outer Nesterov momentum of DiLoCo need no class here: they are torch's own SGD
with momentum.
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

_KEY = "model.server_optimizer"


class _Adaptive(Optimizer):
    """Algorithm 2 of the paper, lines 12 to 18, except for the rule of v, which is a subclass's.

    m = beta_1 m + (1 - beta_1) Delta; x = x + eta m / (sqrt(v) + tau).
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments by their annotated bounds, before the constructor runs."""
        check_arguments(cls, args, kwargs, f"{_KEY}.init_args")
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
            params: The parameters of the server's model.
            lr: The rate eta.
            betas: The decay rates beta_1 of m and beta_2 of v.
            tau: The degree of adaptivity, which is added to the root of v.
            v_init: The value of v before the first round. The paper allows any number of at least
                tau^2; implementations have 0.
            bias_correction: None for no correction, as in the paper; 0 for Adam's own, from the
                first round on; 1 for that of Flower's FedAdam, which is one step ahead.
        """
        settings = {
            "lr": lr,
            "betas": betas,
            "tau": tau,
            "v_init": v_init,
            "ahead": bias_correction,
        }
        super().__init__(params, settings)

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
        """Update one tensor of the server's model, and its m and v, in place."""
        assert x.grad is not None
        delta = -x.grad

        state = self.state[x]
        if not state:
            state["step"] = 0
            state["m"] = torch.zeros_like(x)
            state["v"] = torch.full_like(x, v_init)

        beta_1, beta_2 = betas
        state["m"].mul_(beta_1).add_(delta, alpha=1 - beta_1)
        self.second(state["v"], delta * delta, beta_2)

        # Adam's correction of the bias towards the initial values of m and v. It is not in the
        # paper.
        state["step"] += 1
        if ahead is not None:
            steps = state["step"] + ahead
            lr *= (1 - beta_2**steps) ** 0.5 / (1 - beta_1**steps)

        x += lr * state["m"] / (state["v"].sqrt() + tau)

    @abstractmethod
    def second(self, v: Tensor, square: Tensor, beta: float) -> None:
        """Update v in place, the second moment.

        Args:
            v: The second moment, of the shape of the parameter.
            square: Delta^2, of the same shape.
            beta: beta_2.
        """


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
    """v = v + Delta^2. The paper has `betas: [0, 0.99]`; the second of them is not used."""

    @override
    def second(self, v: Tensor, square: Tensor, beta: float) -> None:
        v.add_(square)


class ServerStep:
    """Lets the server's optimizer step; without one, a merge gives the server's new values.

    Args:
        make: Makes the optimizer of a model's parameters; None for no optimizer.
        server: The module that holds the server's models.
        personal: The names of tensors that clients keep. In the server's models they never change.

    Attributes:
        optimizers: The optimizer of each model that has been merged, by the model's name.
    """

    def __init__(
        self,
        make: Callable[[Iterable[nn.Parameter]], Optimizer] | None,
        server: nn.Module,
        personal: Collection[str] = (),
    ) -> None:
        self.make = make
        self.optimizers: dict[str, Optimizer] = {}
        self._server = server
        self._personal = personal
        self._stepping: ServerModel | None = None

    @contextmanager
    def __call__(self, model: ServerModel, *, fixed: Collection[str] = ()) -> Iterator[None]:
        """Let the optimizer take one step towards what the context merges into a model.

        The gradient is the parameters before the context minus those after it. Elements that no
        client has sent have a gradient of 0; momentum moves them. Buffers stay as they were merged.

        `Fleet.merge` enters this context by itself. A method that merges a model in several parts
        enters it around all of them, so that there is one step and not one for each part.

        Args:
            model: The server model that is merged.
            fixed: Names of tensors that the merge leaves as they are. The optimizer does not move
                them either, and their momentum waits. Counters of steps, as Adam's, go on.
        """
        # The outermost context of a model takes the step.
        is_within_a_step = self._stepping is model
        has_work = self.make is not None or bool(self._personal)
        if is_within_a_step or not has_work:
            yield
            return

        before = model.floats.clone()
        self._stepping = model
        try:
            yield
        finally:
            self._stepping = None

        if self.make is not None:
            self._step(model, before, fixed)
        self._put_back_personal(model, before)

    def _step(self, model: ServerModel, before: Tensor, fixed: Collection[str]) -> None:
        """Step from the parameters before a merge, by the gradient that the merge stands for.

        Args:
            model: The server model, after the merge.
            before: Its values before the merge.
            fixed: Names of the tensors that do not step.
        """
        optimizer = self.of(model)
        row = model.parameters_row
        parameters_before = before[: len(row)]

        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.data = row
        parameter.grad = parameters_before - row
        row.copy_(parameters_before)

        positions = model.layout.positions(fixed).to(row.device) if fixed else None
        if positions is None:
            optimizer.step()
            return

        # What does not step has a gradient of 0, and is 0 during the step, against weight decay. So
        # the momentum that an optimizer's first step makes for it is 0.
        row[positions] = 0
        state = optimizer.state[parameter]
        waiting = {
            name: value[positions].clone()
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape == row.shape
        }
        optimizer.step()
        row[positions] = parameters_before[positions]
        for name, values in waiting.items():
            state[name][positions] = values

    def _put_back_personal(self, model: ServerModel, before: Tensor) -> None:
        """Give the tensors that clients keep their values from before a merge."""
        tensors_before = model.layout.floats.views(before)
        for name, tensor in model.layout.floats.views(model.floats).items():
            if name in self._personal:
                tensor.copy_(tensors_before[name])

    @property
    def rule(self) -> str:
        """The optimizer and its settings, for comparison; empty if there is none."""
        if self.make is None:
            return ""
        example = self.make([nn.Parameter(torch.zeros(1))])
        settings = {
            name: value for name, value in example.param_groups[0].items() if name != "params"
        }
        return f"{type(example).__name__} {settings}"

    def of(self, model: ServerModel) -> Optimizer:
        """Return the optimizer of a model, which is made when it is first needed.

        Raises:
            UserError: If the server does not keep that model: nor could it keep an optimizer.
        """
        names = {id(module): name for name, module in self._server.named_modules()}
        if id(model) not in names:
            raise UserError(
                key=_KEY,
                found="the method merges into a model that it does not keep",
                fix="leave it out",
            )

        name = names[id(model)]
        if name not in self.optimizers:
            assert self.make is not None
            self.optimizers[name] = self.make([nn.Parameter(model.parameters_row)])
        return self.optimizers[name]
