"""What Lightning calls while it evaluates a module: a step for each batch, and hooks around it.

A client's evaluation is one `validate` or `test` of its module; `predict` is one of that client's
module. The hooks are looked up once: a module that overrides none pays for none.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import lightning.pytorch as L
import torch

from lightfed.utils.errors import UserError
from lightfed.utils.lightning_private import is_overridden

log = logging.getLogger(__name__)

Stage = Literal["validation", "test", "predict"]
Hook = Callable[..., Any]

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def stage_of(module: L.LightningModule) -> Stage:
    """Return the stage that evaluates a module now: "test" if its run tests and it can."""
    trainer = vars(module).get("_trainer")
    # The Trainer of sessions is in a stage of its own; that of the run knows what was asked for.
    run_trainer = trainer
    if trainer is not None:
        run_trainer = vars(trainer).get("_run_trainer") or trainer
    is_testing = run_trainer is not None and run_trainer.testing
    if is_testing and is_overridden("test_step", module):
        return "test"
    return "validation"


def is_evaluated(module: L.LightningModule, *, tests: bool) -> bool:
    """Return whether a module has the step of an evaluation.

    Args:
        module: The module.
        tests: Whether it is a test. A validation_step will do for that, too.
    """
    if is_overridden("validation_step", module):
        return True
    return tests and is_overridden("test_step", module)


class StageHooks:
    """The step and the hooks of one stage of a module, in Lightning's order.

    Args:
        module: The client's module.
        stage: The stage whose step runs.
        moved: Returns a batch as all transfer hooks leave it, those of a user's data module
            included; None to call the module's own.

    Attributes:
        module: The client's module.
        step: The step, which runs on a batch and its number.

    Raises:
        UserError: If the module has no such step.
    """

    def __init__(
        self,
        module: L.LightningModule,
        stage: Stage,
        moved: Callable[[Any], Any] | None = None,
    ) -> None:
        # Lightning itself has a step of predictions: the forward pass.
        has_step = stage == "predict" or is_overridden(f"{stage}_step", module)
        if not has_step:
            raise UserError(
                key="model.clients",
                found=f"{type(module).__name__} has no {stage}_step",
                fix="define one, or set model.evaluate: []",
            )

        self.module = module
        self.step: Hook = getattr(module, f"{stage}_step")
        self._stage = stage
        self._moved = moved
        self._starts = self._overridden("model_eval", "start", "epoch_start")
        self._batch_starts = self._overridden("batch_start")
        self._batch_ends = self._overridden("batch_end")
        self._ends = self._overridden("epoch_end", "end", "model_train")
        self._transfers: list[Hook] = [
            getattr(module, hook) for hook in _TRANSFERS if is_overridden(hook, module)
        ]

    def _overridden(self, *moments: str) -> list[Hook]:
        """Return the hooks of these moments that the module overrides."""
        hooks = []
        for moment in moments:
            name = f"on_{self._stage}_{moment}"
            # Not every stage has every moment.
            if hasattr(L.LightningModule, name) and is_overridden(name, self.module):
                hooks.append(getattr(self.module, name))
        return hooks

    @property
    def begins_or_ends(self) -> bool:
        """Whether hooks come before the first batch, or after the last one."""
        return bool(self._starts or self._ends)

    def start(self) -> None:
        """Call what comes before the first batch."""
        for hook in self._starts:
            hook()

    def end(self) -> None:
        """Call what comes after the last batch."""
        for hook in self._ends:
            hook()

    def transferred(self, batch: Any, device: torch.device) -> Any:
        """Return the batch as the hooks of transfers leave it."""
        if self._moved is not None:
            return self._moved(batch)
        for hook in self._transfers:
            if hook.__name__ == "transfer_batch_to_device":
                batch = hook(batch, device, 0)
            else:
                batch = hook(batch, 0)
        return batch

    def run(self, batch: Any, index: int) -> Any:
        """Return the output of the step on a batch, with the hooks around it."""
        for hook in self._batch_starts:
            hook(batch, index)
        output = self.step(batch, index)
        for hook in self._batch_ends:
            hook(output, batch, index)
        return output

    def evaluate(
        self,
        batches: Iterable[Any],
        *,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
        note: Callable[[Any], int],
        first: int = 0,
    ) -> int:
        """Evaluate the module on batches, and return the number of samples.

        Args:
            batches: The batches, on the device.
            device: The device of the rank.
            context: Makes the context of the Trainer's precision.
            note: Takes a batch before its step, and returns its number of samples.
            first: The number of the first batch.
        """
        has_transfers = bool(self._transfers) or self._moved is not None
        samples = 0
        self.start()
        for index, batch in enumerate(batches, first):
            if has_transfers:
                batch = self.transferred(batch, device)
            samples += note(batch)
            with context():
                self.run(batch, index)
        self.end()
        return samples


def is_whole(module: L.LightningModule) -> bool:
    """Return whether hooks begin or end an evaluation, whose batches ranks then cannot share."""
    return StageHooks(module, stage_of(module)).begins_or_ends


def warn_of_missing_test_step(module: L.LightningModule) -> None:
    """Warn that `test` runs a user's validation_step, if the module has no test_step."""
    is_ours = type(module).__module__.startswith("lightfed.")
    if is_ours or is_overridden("test_step", module):
        return
    log.warning(
        "%s has no test_step: its validation_step is called instead, with the hooks of validation",
        type(module).__name__,
    )
