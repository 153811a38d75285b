"""A run that ends with its first session: a script, and the callback for the command line."""

import os
import sys
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from typing_extensions import override


class Leave(Callback):
    """Ends the process, without its tidying up, when the first session is over."""

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        os._exit(0)


def main(folder: str) -> None:
    """Start W1 by the Python interface.

    Args:
        folder: for the run folder.
    """
    from federated import build
    from workloads import WORKLOADS

    trainer, federation, data = build(WORKLOADS["W1"], folder, Leave())
    trainer.fit(federation, datamodule=data)
    raise AssertionError("the first session has not ended the process")


if __name__ == "__main__":
    main(sys.argv[1])
