"""Ranks for a federation.

Lightning's launchers and process groups, no DDP wrap, sharded atomic checkpoints.
"""

import atexit
from functools import cache
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightfed.comm.collectives import Ranks, leave
from lightfed.core import checkpoint
from lightfed.core._lightning import _PATH
from lightfed.core.runlog import RunLogger


@cache
def _leave_at_exit() -> None:
    atexit.register(leave)


class FederatedStrategy(DDPStrategy):
    """Starts ranks (popen, torchrun, SLURM) over gloo or NCCL; each trains clients of its own.

    Server state is equal on all ranks because all compute it alike, so nothing is wrapped and
    nothing broadcast.
    """

    strategy_name = "federated"

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # An injected sampler must not split what the federation has split.
        return {"num_replicas": 1, "rank": 0}

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.ranks = Ranks(self.root_device)
        _leave_at_exit()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            for logger in trainer.loggers:
                if isinstance(logger, RunLogger):
                    logger.claim(self.ranks)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        """DDPStrategy.setup without the wrap and without the broadcast of module states."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @override
    def save_checkpoint(
        self, checkpoint_: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        checkpoint.save(checkpoint_, filepath, self.ranks)

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return checkpoint.load(checkpoint_path)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self.is_global_zero:
            checkpoint.remove(filepath)


StrategyRegistry.register(
    "federated", FederatedStrategy, description="Ranks of a federation; no model is wrapped"
)
