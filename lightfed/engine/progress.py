"""Shows the progress of a run: a bar with metrics below it on a terminal, or lines of a log."""

import time
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ProgressBar
from rich import progress as columns
from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.text import Text
from typing_extensions import override


class _BarAboveMetrics(Progress):
    """Shows metrics below the bar: on the same line they would push the times out."""

    @override
    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.fields["metrics"]:
                yield Text(task.fields["metrics"])


class RoundProgressBar(ProgressBar):
    """A bar over rounds, with the waves of the current round and the latest metrics.

    If the output is not a terminal, it prints a line at most every `seconds`, and one at the end.

    Args:
        seconds: The shortest time between two lines of a log.

    Attributes:
        console: Where it prints.
        progress: The bar on a terminal, while a run trains; None in a log.
    """

    def __init__(self, seconds: float = 30.0) -> None:
        super().__init__()
        self.console = Console(stderr=True)
        self.progress: Progress | None = None
        self._seconds = seconds
        self._task: Any = None
        self._enabled = True
        self._printed = 0.0  # when the last line was printed

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._printed = time.monotonic()
        if not self._enabled or not trainer.is_global_zero or not self.console.is_terminal:
            return

        self.progress = _BarAboveMetrics(
            columns.TextColumn("round"),
            columns.MofNCompleteColumn(),
            columns.BarColumn(bar_width=24),
            columns.TextColumn("{task.fields[sessions]}"),
            columns.TimeElapsedColumn(),
            columns.TextColumn("left"),
            columns.TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=4,
        )
        has_limit = trainer.max_epochs is not None and trainer.max_epochs > 0
        self._task = self.progress.add_task(
            "",
            total=trainer.max_epochs if has_limit else None,
            completed=trainer.current_epoch,
            sessions="",
            metrics="",
        )
        self.progress.start()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.progress is not None:
            waves = f"wave {batch_idx + 1}/{trainer.num_training_batches}"
            self.progress.update(self._task, sessions=waves)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.progress is not None:
            self.progress.update(self._task, advance=1, metrics=_metrics(trainer))
            return
        if not self._enabled or not trainer.is_global_zero:
            return

        finished_rounds = trainer.current_epoch + 1
        now = time.monotonic()
        is_due = now - self._printed >= self._seconds
        if is_due or finished_rounds == trainer.max_epochs:
            self._printed = now
            line = f"round {finished_rounds}/{trainer.max_epochs}  {_metrics(trainer)}"
            self.console.print(line, highlight=False)

    @override
    def on_train_end(self, *_: Any) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

    @override
    def on_exception(self, *_: Any) -> None:
        self.on_train_end()


def _metrics(trainer: L.Trainer) -> str:
    """Return the metrics of the round and of the last evaluation, as they are shown."""
    values = {k: v for k, v in trainer.progress_bar_metrics.items() if isinstance(v, float)}
    # Metrics of an evaluation, which have a slash, stand behind those of the round.
    names = sorted(values, key=lambda name: "/" in name)
    return "  ".join(f"{name} {values[name]:.4g}" for name in names)
