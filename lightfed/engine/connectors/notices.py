"""What ranks say with every gather: signals, checkpoints that failed, the times of a round."""

from typing import NamedTuple

from lightfed.engine.federation import federation_of
from lightfed.engine.run_trainer import RunTrainer
from lightfed.utils import signals
from lightfed.utils.stopwatch import PARTS, Part


class Notice(NamedTuple):
    """Of a rank: its last signal, or 0; whether its checkpoint failed; parts of a round."""

    signal: int
    failed: bool
    seconds: dict[Part, float]


class RoundNotices:
    """What this rank says to the others, and what they have said.

    The times of a round go with the next gather, in the next round: nobody waits at the end of one.
    A signal after a round's last gather is seen by all in the next round, whose sessions it
    suspends.
    """

    def __init__(self, trainer: RunTrainer) -> None:
        self._trainer = trainer
        self._seconds: dict[Part, float] = {}  # of a round that is not reported yet
        self._round = self._moved = 0  # its number, and the rows that have moved
        self._said: list[Notice] = []  # at the last gather of this round

    def tell(self) -> Notice:
        """What goes with a gather."""
        failed = self._trainer.strategy.checkpoints.failed
        return Notice(signals.asked() or 0, failed, self._seconds)

    def hear(self, said: list[Notice]) -> None:
        """Note what all ranks have said, and log the round that they have finished.

        Its parts are means over the ranks; they add up to the round's duration.
        """
        self._said, logger = said, self._trainer.run_logger
        if logger is not None and self._seconds:
            means = {p: sum(rank.seconds[p] for rank in said) / len(said) for p in PARTS}
            logger.log_timings(self._round, means, moved=self._moved)
        self._seconds = {}

    def round_ends(self) -> int:
        """Report a round with the next gather; the same as `asked`."""
        ranks = self._trainer.strategy.ranks
        if not self._said:  # nothing was gathered in this round
            ranks.gather([])
        self._round = self._trainer.current_epoch
        self._moved = federation_of(self._trainer).fleet.moved
        self._seconds = ranks.timings.take()
        if ranks.alone:  # nobody has to wait
            ranks.gather([])
        return self.asked()

    def asked(self) -> int:
        """The signal that a rank had received at the round's last gather, or 0; on all ranks alike.

        A DiskError if a checkpoint could not be written.
        """
        said, self._said = self._said, []
        if any(rank.failed for rank in said):
            self._trainer.strategy.checkpoints.finish()
        return max(rank.signal for rank in said)

    def run_ends(self) -> None:
        """Report the last round."""
        if self._seconds:
            self._trainer.strategy.ranks.gather([])
