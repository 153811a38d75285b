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
        optimizers: The optimizers of one session, just configured.
        schedulers: Their schedulers, as Lightning's `LRSchedulerConfig`.
    """

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        # An optimizer may count in attributes of its own, which belong to the client as well.
        self._states = [OptimizerState(optimizer) for optimizer in optimizers]
        self._schedulers = schedulers

    def saved(self, key: str) -> Tensor:
        """Return the state as bytes: (N,) of uint8.

        Args:
            key: The configuration key of the group's model, for errors.

        Raises:
            UserError: The state holds something that a checkpoint cannot hold.
        """
        states = {
            "optimizers": [state.saved() for state in self._states],
            "schedulers": [config.scheduler.state_dict() for config in self._schedulers],
        }
        return to_bytes(states, key, lambda: "the state of its optimizers")

    def load(self, saved: Tensor) -> None:
        """Continue from a saved state."""
        states = from_bytes(saved)
        for state, saved_optimizer in zip(self._states, states["optimizers"], strict=True):
            state.load(saved_optimizer)
        for config, saved_scheduler in zip(self._schedulers, states["schedulers"], strict=True):
            config.scheduler.load_state_dict(saved_scheduler)


def to_bytes(value: Any, key: str, what: Callable[[], str]) -> Tensor:
    """Return tensors and primitives as bytes: (N,) of uint8.

    Args:
        value: What to save.
        key: The configuration key to name in an error.
        what: Describes the value, for an error.

    Raises:
        UserError: The value holds anything else than tensors and primitives.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        saved = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        # Saving takes any object. Only reading finds out whether there is one that must not be made
        # from a file.
        from_bytes(saved)
    except Exception as error:
        found = f"{what()} holds more than tensors, numbers, texts, lists and dicts"
        fix = "keep only those, or leave out model.keep_optimizer"
        raise UserError(key, found, fix) from error
    return saved


def from_bytes(saved: Tensor) -> Any:
    """Return what `to_bytes` has saved; no object of another class is made."""
    return torch.load(io.BytesIO(saved.cpu().numpy().tobytes()), weights_only=True)
