"""Clients one after the other: what a fleet has where none train side by side."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lightfed.data.tested_samples import TestSplit
from lightfed.distributed.collectives import Ranks
from lightfed.local.client_sessions import ClientSessions
from lightfed.local.group_state import GroupState, Packing
from lightfed.local.hooks import SessionFleet
from lightfed.local.optimizer import Stepper
from lightfed.local.session import Report, Runtime, SessionReport
from lightfed.state.rows import Rows


class TestsAtOnce(Protocol):
    """Tests of several clients of one group, cut into pieces that ranks share."""

    def pieces(self, rank: int, world: int, home: Callable[[int], int] | None) -> Sequence[Any]:
        """What a rank runs; `home` gives the rank of a client, None if any rank can test any."""

    def start(self) -> None:
        """Forget the last evaluation."""

    def run(self, piece: Any, rows: Rows) -> None:
        """Run one of `pieces`."""

    def finish(self, ranks: Ranks) -> list[Report]:
        """The reports of all clients, on every rank."""


class Alone:
    """Trains and tests one client after the other.

    What trains several at once derives from it, as `lightfed.packs.runner.PackRunner` does.
    """

    def __init__(self, fleet: SessionFleet) -> None:
        self._fleet = fleet

    def packing(self, state: GroupState) -> Packing:
        """How many clients of a group train at once; asked before clients get their ranks."""
        return Packing()

    def attach(self, group: int, stepper: Stepper, runtime: Runtime) -> None:
        """Take the optimizer and the settings of a group whose clients train at once."""
        raise AssertionError("no group trains several clients at once")

    def watch(self, group: int, rates: Mapping[str, float]) -> None:
        """Take the learning rates, by name, that the sessions of a group log."""

    def schedule(self, settings: Mapping[str, Any]) -> None:
        """Take this round's settings of optimizers, such as a learning rate."""

    def form(self, sessions: ClientSessions, clients: Sequence[int], t: int) -> list[list[int]]:
        """The clients of this rank that train together in round t; the others train alone."""
        return []

    def run(
        self, sessions: ClientSessions, clients: Sequence[int], t: int
    ) -> Mapping[int, SessionReport] | None:
        """Train clients that `form` has put together; None if each has to train alone."""
        raise AssertionError("`form` puts no clients together")

    def tests(
        self, group: int, rows: Rows, clients: Sequence[int], tested_on: TestSplit = "test"
    ) -> TestsAtOnce | None:
        """Tests of several clients at once; None if each is tested alone.

        Args:
            group: Position of the clients' group.
            rows: The models to test.
            clients: Ascending; empty for the samples of all together.
            tested_on: The samples to test on.
        """
        return None
