"""How signals reach a run, and how a checkpoint is restored."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightfed.utils.atomic_io import check_like, check_numbers, checked
from lightfed.utils.lightning_private import _CheckpointConnector, _SignalConnector


class FlagSignals(_SignalConnector):
    """Leaves signals to lightfed.utils.signals, which only records them.

    Lightning's handlers save and broadcast, which deadlocks if the signal interrupts a collective.
    Here the loop checks between sessions, all ranks stop at the same one and save, and `fit`
    requeues the job.
    """

    @override
    def register_signal_handlers(self) -> None:
        self.received_sigterm = False

    @override
    def teardown(self) -> None:
        pass


class Restores(_CheckpointConnector):
    """Reports what a checkpoint lacks, or holds in another form, in one line."""

    @override
    def resume_start(self, *args: Any, **kwargs: Any) -> None:
        super().resume_start(*args, **kwargs)
        with checked(self._ckpt_path):
            if found := self._loaded_checkpoint:
                lists: dict[str, Any] = {"optimizer_states": [], "lr_schedulers": []}
                loops = {"fit_loop": self.trainer.fit_loop.state_dict()}
                example = {"epoch": 0, "global_step": 0, "loops": loops, **lists}
                check_like(found, example, "checkpoint")

    @override
    def _restore_modules_and_callbacks(self, *args: Any, **kwargs: Any) -> None:
        with checked(self._ckpt_path):
            super()._restore_modules_and_callbacks(*args, **kwargs)
            if self._loaded_checkpoint and self.trainer.state.fn == TrainerFn.FITTING:
                self._try_optimizers(self._loaded_checkpoint)

    def _try_optimizers(self, found: Mapping[str, Any]) -> None:
        """Load states into copies of optimisers: Lightning does it when files are written."""
        made = self.trainer.lightning_module.configure_optimizers()
        optimizers, schedules = made if isinstance(made, tuple) else ([made] if made else [], [])
        states = found["optimizer_states"]
        for optimizer, state in zip(optimizers, states, strict=True):
            check_numbers(state, optimizer.state_dict(), "optimizer_states")
            optimizer.load_state_dict(state)
        for schedule, state in zip(schedules, found["lr_schedulers"], strict=False):
            check_like(
                state, dict.fromkeys({"last_epoch"} & vars(schedule).keys()), "lr_schedulers"
            )
            check_numbers(state, schedule.state_dict(), "lr_schedulers")
            schedule.load_state_dict(state)

    @override
    def restore_training_state(self) -> None:
        with checked(self._ckpt_path):
            super().restore_training_state()
