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

from lightfed.utils.errors import require
from lightfed.utils.lightning_private import is_overridden

log = logging.getLogger(__name__)

Stage = Literal["validation", "test", "predict"]
Hook = Callable[..., Any]

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def stage_of(module: L.LightningModule) -> Stage:
    """The stage that evaluates a module now: that of its Trainer, and validation in a session."""
    trainer = vars(module).get("_trainer")
    # The Trainer of sessions is in a stage of its own; that of the run knows what was asked for.
    run = trainer and (vars(trainer).get("_run_trainer") or trainer)
    testing = run is not None and run.testing
    if testing and is_overridden("test_step", module):
        return "test"
    return "validation"


def is_evaluated(module: L.LightningModule, *, tests: bool) -> bool:
    """Whether a module has the step of an evaluation; in `tests` its validation_step will do."""
    return is_overridden("validation_step", module) or (
        tests and is_overridden("test_step", module)
    )


class StageHooks:
    """The step and the hooks of one stage of a module, in Lightning's order.

    Args:
        module: of the client.
        stage: whose step runs.
        moved: gives a batch as transfer hooks leave it, those of a user's data module included;
            None to call the module's own.

    Attributes:
        module: as given.
        step: runs on a batch and its number.

    Raises:
        UserError: the module has no such step.
    """

    def __init__(
        self,
        module: L.LightningModule,
        stage: Stage,
        moved: Callable[[Any], Any] | None = None,
    ) -> None:
        name = type(module).__name__
        found, fix = f"{name} has no {stage}_step", "define one, or set model.evaluate: []"
        has_step = stage == "predict" or is_overridden(f"{stage}_step", module)
        require(has_step, "model.clients", found, fix)
        self.module, self._stage = module, stage
        self.step: Hook = getattr(module, f"{stage}_step")
        self._starts = self._own("model_eval", "start", "epoch_start")
        self._batch_starts = self._own("batch_start")
        self._batch_ends = self._own("batch_end")
        self._ends = self._own("epoch_end", "end", "model_train")
        self._moved = moved
        self._transfers: list[Hook] = [
            getattr(module, hook) for hook in _TRANSFERS if is_overridden(hook, module)
        ]

    def _own(self, *moments: str) -> list[Hook]:
        """The hooks of these moments that the module overrides."""
        names = (f"on_{self._stage}_{moment}" for moment in moments)
        return [
            getattr(self.module, name)
            for name in names
            if hasattr(L.LightningModule, name) and is_overridden(name, self.module)
        ]

    def start(self) -> None:
        """Call what comes before the first batch."""
        for hook in self._starts:
            hook()

    def end(self) -> None:
        """Call what comes after the last batch."""
        for hook in self._ends:
            hook()

    def transferred(self, batch: Any, device: torch.device) -> Any:
        """The batch as the hooks of transfers give it."""
        if self._moved is not None:
            return self._moved(batch)
        for hook in self._transfers:
            if hook.__name__ == "transfer_batch_to_device":
                batch = hook(batch, device, 0)
            else:
                batch = hook(batch, 0)
        return batch

    def run(self, batch: Any, index: int) -> Any:
        """The output of the step on a batch, with the hooks around it."""
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
        """Evaluate the module on batches; the number of samples.

        Args:
            batches: on the device.
            device: of the rank.
            context: of the Trainer's precision.
            note: takes a batch before its step, and returns its number of samples.
            first: number of the first batch.
        """
        samples = 0
        self.start()
        for index, given in enumerate(batches, first):
            transfers = self._transfers or self._moved is not None
            batch = self.transferred(given, device) if transfers else given
            samples += note(batch)
            with context():
                self.run(batch, index)
        self.end()
        return samples


def is_whole(module: L.LightningModule) -> bool:
    """Whether hooks begin or end an evaluation, whose batches ranks then cannot share."""
    hooks = StageHooks(module, stage_of(module))
    return bool(hooks._starts or hooks._ends)


def warn_of_missing_test_step(module: L.LightningModule) -> None:
    """Say that `test` runs a module's validation_step, if it has no test_step."""
    if type(module).__module__.startswith("lightfed.") or is_overridden("test_step", module):
        return
    log.warning(
        "%s has no test_step: its validation_step runs, with the hooks of validation",
        type(module).__name__,
    )
