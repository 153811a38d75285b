"""The whole state of a session's optimizers and schedulers, as one tensor that a client keeps."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightfed.state.optimizer_state import OptimizerState
from lightfed.utils.errors import UserError


class OptimizerStates:
    """Takes the state of several optimizers and their schedulers, and puts it back.

    Args:
        optimizers: Of one session, just configured.
        schedulers: As Lightning's `LRSchedulerConfig`.
    """

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        # Also what an optimizer counts in attributes of its own belongs to the client.
        self._states = [OptimizerState(optimizer) for optimizer in optimizers]
        self._schedulers = schedulers

    def saved(self, key: str) -> Tensor:
        """The state as bytes, (N,) of uint8.

        Raises:
            UserError: it holds something that a checkpoint cannot; names `key`.
        """
        states = {
            "optimizers": [state.saved() for state in self._states],
            "schedulers": [config.scheduler.state_dict() for config in self._schedulers],
        }
        return to_bytes(states, key, lambda: "the state of its optimizers")

    def load(self, saved: Tensor) -> None:
        """Continue from a saved state."""
        states = from_bytes(saved)
        for own, kept in zip(self._states, states["optimizers"], strict=True):
            own.load(kept)
        for config, state in zip(self._schedulers, states["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)


def to_bytes(value: Any, key: str, what: Callable[[], str]) -> Tensor:
    """Tensors and primitives as (N,) uint8; a UserError says `what` holds anything else."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        saved = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        from_bytes(saved)
    except Exception as error:
        found = f"{what()} holds more than tensors, numbers, texts, lists and dicts"
        fix = "keep only those, or leave out model.keep_optimizer"
        raise UserError(key, found, fix) from error
    return saved


def from_bytes(saved: Tensor) -> Any:
    """What `to_bytes` has saved; no object of another class is made."""
    return torch.load(io.BytesIO(saved.cpu().numpy().tobytes()), weights_only=True)
