"""What ranks say with every gather: signals, checkpoints that failed, the times of a round."""

from dataclasses import dataclass
from typing import NamedTuple

from lightfed.engine.federation import federation_of
from lightfed.engine.run_trainer import RunTrainer
from lightfed.utils import signals
from lightfed.utils.stopwatch import PARTS, Part


class Notice(NamedTuple):
    """Of a rank: the signal that it has received, or 0; whether its checkpoint failed; a round."""

    signal: int
    failed: bool
    round: "Round | None"


@dataclass(frozen=True)
class Round:
    """A finished round on a rank: seconds by part, and the rows that have moved between ranks."""

    number: int
    seconds: dict[Part, float]
    moved: int


class RoundNotices:
    """What this rank says to the others, and what they have said.

    A round is reported with the next gather, which is one of the next round. So nobody waits at the
    end of a round. A signal that arrives after a round's last gather is seen in the next round,
    whose sessions it suspends.
    """

    def __init__(self, trainer: RunTrainer) -> None:
        self._trainer = trainer
        self._round: Round | None = None  # not reported yet
        self._told: list[Notice] = []  # at the last gather of this round

    def tell(self) -> Notice:
        """What goes with a gather."""
        failed = self._trainer.strategy.checkpoints.failed
        return Notice(signals.asked() or 0, failed, self._round)

    def hear(self, told: list[Notice]) -> None:
        """Note what all ranks have said, and log the round that they have finished.

        Its parts are means over the ranks; they add up to the round's duration.
        """
        self._told, logger = told, self._trainer.run_logger
        if logger is not None and self._round is not None:
            seconds = [notice.round.seconds for notice in told if notice.round is not None]
            means = {part: sum(own[part] for own in seconds) / len(seconds) for part in PARTS}
            logger.log_timings(self._round.number, means, moved=self._round.moved)
        self._round = None

    def round_ends(self) -> int:
        """Report a round with the next gather; the same as `asked`."""
        trainer, ranks = self._trainer, self._trainer.strategy.ranks
        moved = federation_of(trainer).fleet.moved
        self._round = Round(trainer.current_epoch, ranks.timings.take(), moved)
        if ranks.alone or not self._told:  # nobody has to wait, or nothing was gathered
            ranks.gather([])
        return self.asked()

    def asked(self) -> int:
        """The signal that a rank had received at the round's last gather, or 0; on all ranks alike.

        A DiskError if a checkpoint could not be written.
        """
        told, self._told = self._told, []
        if any(notice.failed for notice in told):
            self._trainer.strategy.checkpoints.finish()
        return max(notice.signal for notice in told)

    def run_ends(self) -> None:
        """Report the last round."""
        if self._round is not None:
            self._trainer.strategy.ranks.gather([])
