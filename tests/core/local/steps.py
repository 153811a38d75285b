"""A network and its losses, stepped by a Stepper or by torch's own loop."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightfed.local.optimizer import Stepper, make_stepper


class Net(nn.Module):
    """`side` takes part in every second batch only, as a branch that some inputs do not reach."""

    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        self.body = nn.Linear(4, hidden)
        self.side = nn.Linear(4, hidden)
        self.head = nn.Linear(hidden, 2)

    @override
    def forward(self, x: Tensor, *, side: bool) -> Tensor:
        hidden = self.body(x) + (self.side(x) if side else 0.0)
        return self.head(torch.tanh(hidden))


def net_of(seed: int = 0, hidden: int = 5) -> Net:
    net = Net(hidden)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
    return net


def loss_of(net: Net, step: int, *, unused: bool = False) -> Tensor:
    rng = torch.Generator().manual_seed(100 + step)
    x = torch.randn(6, 4, generator=rng)
    return net(x, side=not unused or step % 2 == 1).square().sum()


def reset(stepper: Stepper, net: nn.Module, lr: float | None = None) -> Tensor:
    """Begin a session, with a module whose parameters alias a row; returns the row."""
    trained = [p for p in net.parameters() if p.requires_grad]
    row = torch.cat([p.detach().flatten() for p in trained])
    for p, part in zip(trained, row.split([p.numel() for p in trained]), strict=True):
        p.data = part.view(p.shape)
    stepper.reset(lr, row, None)
    return row


def run_stepper(net: Net, stepper: Stepper, steps: int, **options: Any) -> None:
    for step in range(steps):
        stepper.step(loss_of(net, step, **options), None)


def run_torch(
    net: Net,
    optimizer: Optimizer,
    steps: int,
    *,
    clip: Callable[[], object] | None = None,
    schedule: LRScheduler | None = None,
    due: int = 1,
    **options: Any,
) -> None:
    """Train with a scheduler that steps after every `due` batches."""
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss_of(net, step, **options).backward()
        if clip is not None:
            clip()
        optimizer.step()
        if schedule is not None and step % due == due - 1:
            schedule.step()


def make(optimizer: Optimizer, **settings: Any) -> Stepper:
    options: dict[str, Any] = {"schedulers": [], "clipping": None} | settings
    return make_stepper(optimizer, **options)


def assert_equal(net: nn.Module, twin: nn.Module) -> None:
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q), name
