"""The checkpoints of a run: those that it writes, and the one that it came from."""

from functools import partial
from pathlib import Path
from typing import Any

from lightfed.distributed.collectives import Ranks
from lightfed.runs import checkpoint
from lightfed.runs.last_checkpoint import BACKGROUND, NAME
from lightfed.runs.saving.background import Background
from lightfed.runs.saving.writing import Writing
from lightfed.state.chain import Chains


class Checkpoints:
    """Saves and loads; every method is called by every rank.

    If `strict`, loading may not fall back to the previous checkpoint. `progressed` says whether
    this process has saved rounds that were not on disk when it started.
    """

    def __init__(self) -> None:
        self.strict = False
        self.progressed = False
        self._chains = Chains()
        self._background = Background()
        self._came_from: Path | None = None  # the main file that was loaded
        self._loaded = 0  # rounds on disk when this process started

    def save(self, content: dict[str, Any], path: Path, ranks: Ranks, option: object) -> None:
        """Write a checkpoint, after the one before it.

        `content` is as dumped by Lightning. With the option BACKGROUND it returns when all of it is
        copied; `finish` waits for the rest, and has the same errors.
        """
        self.finish()
        # Keep the checkpoint that was loaded until the run has a complete one of its own.
        keep = self._came_from != checkpoint.previous_of(path).resolve()
        chains = self._chains if path.name == NAME else None
        rounds = content["global_step"]
        writing = Writing(content, path, ranks, keep_previous=keep, chains=chains)

        def write(ranks: Ranks) -> None:
            writing.write(ranks)
            self.progressed = rounds > self._loaded
            if not keep:
                self._came_from = None

        if option == BACKGROUND and writing.detach(ranks):
            self._background.start(partial(write, ranks.apart()))
        else:
            write(ranks)

    @property
    def failed(self) -> bool:
        """Whether a checkpoint could not be written, as `finish` will say."""
        return self._background.failed

    def finish(self) -> None:
        """Wait for the checkpoint that is written while training goes on.

        Raises a DiskError on every rank if it cannot be written, and TakenOver if the run continues
        in another process.
        """
        self._background.finish()

    def load(self, path: Path, ranks: Ranks) -> dict[str, Any]:
        """Read a checkpoint; unless `strict`, or the previous one."""
        if self.strict:
            content = checkpoint.load(path, ranks)
        else:
            content, path = checkpoint.load_newest(path, ranks)
        self._came_from = path.resolve()
        self._loaded = content.get("global_step", 0)
        return content
