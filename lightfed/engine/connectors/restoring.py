"""How signals reach a run, and how a checkpoint is restored."""

from typing import Any

from typing_extensions import override

from lightfed.utils.atomic_io import check_like, checked
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
                loops = {"fit_loop": self.trainer.fit_loop.state_dict()}
                check_like(found, {"epoch": 0, "global_step": 0, "loops": loops}, "checkpoint")

    @override
    def _restore_modules_and_callbacks(self, *args: Any, **kwargs: Any) -> None:
        with checked(self._ckpt_path):
            super()._restore_modules_and_callbacks(*args, **kwargs)

    @override
    def restore_training_state(self) -> None:
        with checked(self._ckpt_path):
            super().restore_training_state()

    @override
    def restore_optimizers_and_schedulers(self) -> None:
        """Do nothing: the rate is a function of the round, by the configuration of this run."""
