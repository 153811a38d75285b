"""What happens to a client between "send" and "merge", on the rank it lies on."""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
from lightfed_kernels import FIXED_LIMIT, Segments, count_per_tensor
from torch import Tensor

from lightfed.core.algorithm import Algorithm
from lightfed.core.client import reported
from lightfed.core.cohort import CohortState, blank
from lightfed.core.ledger import masked_flops, weight_uses
from lightfed.core.optimizer import Proximal, Stepper
from lightfed.core.session import (
    LocalSession,
    PendingReport,
    Report,
    Runtime,
    Work,
    seed_default_generators,
)
from lightfed.core.store import Row
from lightfed.utils.rng import derive_seed, torch_generator

if TYPE_CHECKING:
    from lightfed.core.fleet import Fleet

log = logging.getLogger(__name__)

RunClient = Callable[[int], PendingReport]
Waves = Callable[[list[int], int, RunClient], list[PendingReport]]


class Training:
    """Runs the sessions of this rank's clients.

    Attributes:
        waves: calls `run` for the clients of this rank; the loop puts batch hooks around.
        lr: learning rate of the round, for optimisers that take it.
        tested: clients that are tested at the start of their sessions in this round.
        starts: reports of those tests.
        steps: batches of a client's session, where they are not those of the configuration.
    """

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self._runtime = Runtime()
        self._sessions: dict[int, LocalSession] = {}
        self._uses: dict[int, dict[str, float]] = {}  # by cohort, of weights
        self._segments: dict[int, Segments] = {}
        algorithm = fleet.algorithm
        has_hook = type(algorithm).local_gradient is not Algorithm.local_gradient
        self._hook = algorithm.local_gradient if has_hook else None
        self.waves: Waves = lambda mine, _, run: [run(client) for client in mine]
        self.lr: float | None = None
        self.tested: Collection[int] = ()
        self.starts: list[Report] = []
        self.steps: Mapping[int, int] = {}

    def attach(self, runtime: Runtime, steppers: Sequence[tuple[Stepper, bool]]) -> None:
        """Give the cohorts their sessions.

        Args:
            runtime: of the Trainer.
            steppers: one a cohort, and whether it takes the round's learning rate.
        """
        self._runtime = runtime
        self._sessions = {}
        for state, (stepper, takes_lr) in zip(self._fleet.cohorts, steppers, strict=True):
            state.takes_lr = takes_lr
            state.session = LocalSession(state.module, runtime, live=state.live, stepper=stepper)
            self._sessions[id(state.module)] = state.session

    def session_of(self, module: L.LightningModule) -> LocalSession:
        """The session that evaluates a module: a cohort's, or one for an algorithm's own module."""
        session = self._sessions.get(id(module))
        if session is None:
            session = self._sessions[id(module)] = LocalSession(module, self._runtime)
        return session

    def run(self, client: int, mine: list[int], t: int) -> PendingReport:
        """One session; `mine` says whose row is to be fetched next."""
        fleet, state = self._fleet, self._fleet.state(client)
        assert state.session is not None, "sessions are attached before the first round"
        row = self._fetch(client, mine)
        module = state.live.bind(row)
        assert isinstance(module, L.LightningModule)
        fleet.algorithm.session_start(fleet, client, module, row)
        if client in self.tested:
            self.starts.append(self._test(client, module))
        mask = fleet.algorithm.trained_mask(fleet, client)
        proximal = fleet.algorithm.proximal(fleet, client)
        report = state.session.train(row, self._work(client, state, t, "", mask, proximal))
        report.flops = state.flops if mask is None else self._masked_flops(client, mask)
        if proximal is not None and proximal.gap is not None:
            report.logged["stationarity"] = proximal.gap
        if type(fleet.algorithm).session_end is not Algorithm.session_end:
            fleet.algorithm.session_end(fleet, client, row)
        if state.staging is not None:
            state.staging.put_back(client)
        return report

    def finetune(self, client: int, row: Row) -> L.LightningModule:
        """The client's module, bound to a copy of a row after a session that nobody hears of."""
        fleet, state = self._fleet, self._fleet.cohorts[self._fleet.home_cohort(client)]
        assert state.session is not None, "sessions are attached before the first round"
        own = state.borrow(row)
        module = state.live.bind(own)
        assert isinstance(module, L.LightningModule)
        fleet.algorithm.session_start(fleet, client, module, own)
        # The same draws in every evaluation: figures of two rounds differ by their models alone.
        state.session.train(own, self._work(client, state, -1, "finetune-"))
        bound = state.live.bind(own)
        assert isinstance(bound, L.LightningModule)
        return bound

    def gradient(self, client: int, row: Row, t: int) -> Tensor:
        """(P,) the gradient of one training batch at a row, in eval mode; 0 where there is none.

        Drawn by (seed, "gradient", t, client).
        """
        state = self._fleet.state(client)
        assert state.session is not None, "sessions are attached before the first round"
        self._seed("gradient", t, client)
        batch = next(self._batches(client, t, 1, "gradient-"))
        return state.session.gradient(row, batch)

    def box(self, client: int) -> tuple[float, float] | None:
        """Bounds of a client's parameters, if its optimiser projects on them."""
        session = self._fleet.state(client).session
        assert session is not None, "sessions are attached before the first round"
        return session.box

    def judge(self, reports: Sequence[Report], t: int) -> dict[int, bool]:
        """Whose update is finite; the others are named in the log and start anew."""
        fleet = self._fleet
        limit = FIXED_LIMIT if fleet.accumulate == "fixed" else math.inf
        usable = {report.client: report.norm < limit for report in reports}
        for report in reports:
            if usable[report.client]:
                continue
            if fleet.algorithm.stateful and fleet.home(report.client) == fleet.ranks.rank:
                # From what is not finite there is no way back.
                fleet.algorithm.start_anew(fleet, report.client)
            if fleet.ranks.rank == 0:
                log.warning(
                    "round %d: the update of client %d is not finite (norm %g); "
                    "it is left out of the merge, and a client that keeps its row starts anew",
                    t, report.client, report.norm,
                )  # fmt: skip
        return usable

    def _masked_flops(self, client: int, mask: Tensor) -> float:
        """Forward FLOPs of a sample under a client's mask."""
        fleet, state = self._fleet, self._fleet.state(client)
        cohort = fleet.cohort_of(client)
        if not state.flops:
            return 0.0  # of a module without a forward they are not known
        if cohort not in self._uses:
            sample = blank(fleet.data, samples=2).to(fleet.device)
            self._uses[cohort] = weight_uses(state.module, sample)
            self._segments[cohort] = Segments.build(state.layout.floats, device=fleet.device)
        counts = count_per_tensor(mask, self._segments[cohort]).tolist()
        missing = {
            entry.name: entry.numel - count
            for entry, count in zip(state.layout.floats, counts, strict=True)
        }
        return masked_flops(state.flops, self._uses[cohort], missing)

    def _work(
        self,
        client: int,
        state: CohortState,
        t: int,
        purpose: str,
        mask: Tensor | None = None,
        proximal: Proximal | None = None,
    ) -> Work:
        """A session's work; what it draws has names that begin with `purpose`."""
        fleet = self._fleet
        per_epoch = fleet.data.num_batches(client, t)
        given = self.steps.get(client)
        left = fleet.work.batches(per_epoch) if given is None else fleet.work.limited(given)
        return Work(
            client,
            self._batches(client, t, left, purpose),
            epoch_batches=per_epoch,
            lr=self.lr if state.takes_lr else None,
            seed=derive_seed(fleet.seed, f"{purpose}session", t, client),
            hook=self._hook,
            mask=mask,
            proximal=proximal,
        )

    def _fetch(self, client: int, mine: list[int]) -> Row:
        """The client's row on the device, and the next client's on its way."""
        fleet, state = self._fleet, self._fleet.state(client)
        if state.staging is None:
            return fleet.row(client)
        row = state.staging.get(client)
        position = mine.index(client) + 1
        if position < len(mine) and (ahead := fleet.state(mine[position]).staging) is not None:
            ahead.prefetch(mine[position])
        return row

    def _batches(self, client: int, t: int, left: int, purpose: str) -> Iterator[Any]:
        """So many training batches; their order is named (seed, purpose + "order", t, client)."""
        fleet, data = self._fleet, self._fleet.data
        order = torch_generator(fleet.seed, f"{purpose}order", t, client)
        augment = None
        if data.augments:
            augment = torch_generator(fleet.seed, f"{purpose}augment", t, client)
        while left > 0:
            before = left
            epoch = data.train_epoch(client, order=order, augment=augment, limit=left, t=t)
            for batch in epoch:
                left -= 1
                yield batch
            assert left < before, f"client {client} has no batch"

    def _test(self, client: int, module: L.LightningModule) -> Report:
        """A client on its own test split, before it trains."""
        module.eval()
        self._seed("start-evaluation", -1, client)
        session = self.session_of(module)
        report = session.evaluate(self._fleet.data.test_batches(client), client=client)
        report.metrics = reported(report.metrics)
        return report

    def _seed(self, purpose: str, t: int, client: int) -> None:
        seed = derive_seed(self._fleet.seed, purpose, t, client)
        seed_default_generators(seed, self._fleet.device)
