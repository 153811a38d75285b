"""Shows rounds, sessions, time left and metrics: two lines on a terminal, or lines of a log."""

import time
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ProgressBar
from rich import progress
from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.text import Text
from typing_extensions import override


class _Lines(Progress):
    """Shows metrics below the bar: on the same line they would push the times out."""

    @override
    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(task.fields["metrics"]) for task in self.tasks if task.fields["metrics"])


class RoundProgressBar(ProgressBar):
    """A bar over rounds with the sessions of the round and the latest metrics.

    If the output is not a terminal, it prints a line at most every `seconds`.

    Args:
        seconds: minimum time between lines of a log file.
    """

    def __init__(self, seconds: float = 30.0) -> None:
        super().__init__()
        self._seconds = seconds
        self._console = Console(stderr=True)
        self._progress: Progress | None = None
        self._task: Any = None
        self._enabled = True
        self._printed = 0.0

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._printed = time.monotonic()
        if not self._enabled or not trainer.is_global_zero or not self._console.is_terminal:
            return
        total = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else None
        self._progress = _Lines(
            progress.TextColumn("round"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.fields[sessions]}"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            console=self._console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(
            "", total=total, completed=trainer.current_epoch, sessions="", metrics=""
        )
        self._progress.start()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._progress is not None:
            waves = f"wave {batch_idx + 1}/{trainer.num_training_batches}"
            self._progress.update(self._task, sessions=waves)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._progress is not None:
            self._progress.update(self._task, advance=1, metrics=self._metrics(trainer))
        elif self._enabled and trainer.is_global_zero:
            finished, now = trainer.current_epoch + 1, time.monotonic()
            if finished == trainer.max_epochs or now - self._printed >= self._seconds:
                self._printed = now
                line = f"round {finished}/{trainer.max_epochs}  {self._metrics(trainer)}"
                self._console.print(line, highlight=False)

    def _metrics(self, trainer: L.Trainer) -> str:
        """Metrics of the round, and of the last evaluation."""
        shown = {k: v for k, v in trainer.progress_bar_metrics.items() if isinstance(v, float)}
        return "  ".join(f"{k} {shown[k]:.4g}" for k in sorted(shown, key=lambda k: "/" in k))

    @override
    def on_train_end(self, *_: Any) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    @override
    def on_exception(self, *_: Any) -> None:
        self.on_train_end()
