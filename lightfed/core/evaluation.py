"""Evaluation, personalised and global, split over the ranks; one gather an evaluation.

A job is one client's own test split, or a rank's share of the global test set. The global test set
is cut into the same batches on any number of ranks, and means are taken over them in order, so the
figures do not depend on it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from lightfed.core.client import reported
from lightfed.core.fleet import Fleet
from lightfed.core.session import Report, seed_default_generators, weighted_means
from lightfed.core.work import ClientData
from lightfed.utils.rng import derive_seed, numpy_generator

Kind = Literal["global", "personal"]
WORST = 0.1  # share of the clients in the "worst" figure


class EvaluationData(ClientData, Protocol):
    """What an evaluation asks of a data module."""

    def test_batches(self, client: int) -> Iterator[Any]: ...
    def global_test_batches(self) -> int: ...
    def global_test_batch(self, index: int) -> Any: ...


# A job is a client, or one of these.
GLOBAL = -1
IDLE = -2


class Jobs:
    """The jobs of a rank, as Lightning wants a data loader.

    A plain list would be a collection of loaders.
    """

    def __init__(self, jobs: list[int]) -> None:
        self._jobs = jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[int]:
        return iter(self._jobs)


class Evaluation:
    """Jobs of this rank, their results, and the figures.

    Args:
        fleet: the clients.
        data: their test splits.
        kinds: which evaluations.
        clients: evaluate only so many clients, drawn once; None for all.
    """

    def __init__(
        self, fleet: Fleet, data: EvaluationData, *, kinds: Sequence[Kind], clients: int | None
    ) -> None:
        self._fleet = fleet
        self._data = data
        self._reports: list[Report] = []
        chosen = self._choose(clients) if "personal" in kinds else []
        self._has_global = "global" in kinds
        self.jobs = Jobs(self._spread(chosen))

    def _choose(self, count: int | None) -> list[int]:
        if count is None or count >= self._fleet.clients:
            return list(range(self._fleet.clients))
        rng = numpy_generator(self._fleet.seed, "evaluated-clients")
        return sorted(rng.choice(self._fleet.clients, count, replace=False, shuffle=False).tolist())

    def _spread(self, clients: list[int]) -> list[int]:
        """This rank's jobs, as many on every rank.

        Lightning's loop steps must match, so short ranks idle at the end.
        """
        world, rank = self._fleet.ranks.world, self._fleet.ranks.rank
        if self._fleet.algorithm.stateful:
            shares = [[k for k in clients if self._fleet.home(k) == r] for r in range(world)]
        else:
            shares = [clients[r::world] for r in range(world)]
        jobs: list[int] = list(shares[rank])
        if self._has_global:
            jobs.insert(0, GLOBAL)
        length = max(1, max(len(share) for share in shares) + self._has_global)
        return jobs + [IDLE] * (length - len(jobs))

    def start(self) -> None:
        """Before the first job, on every rank."""
        self._reports = []
        self._fleet.algorithm.evaluation_start(self._fleet)

    def run(self, job: int) -> None:
        """Evaluate; the reports stay on this rank until `finish`."""
        if job == IDLE:
            return
        module = self._fleet.algorithm.evaluated(self._fleet, None if job == GLOBAL else job)
        if module is None:
            return
        session = self._fleet.session_of(module)
        if module.training:
            module.eval()
        if job != GLOBAL:
            self._name_draws(job)
            batches = self._data.test_batches(job)
            self._reports.append(session.evaluate(batches, client=job))
            return
        ranks = self._fleet.ranks
        for index in range(ranks.rank, self._data.global_test_batches(), ranks.world):
            batch = self._data.global_test_batch(index)
            self._name_draws(index, kind="global")
            self._reports.append(session.evaluate([batch], client=GLOBAL, batch=index))

    def _name_draws(self, number: int, kind: str = "personal") -> None:
        """What a module draws in evaluation (tokens to mask) is the same on any rank."""
        seed = derive_seed(self._fleet.seed, f"{kind}-evaluation", client=number)
        seed_default_generators(seed, self._fleet.device)

    def finish(self) -> tuple[dict[str, float], list[Report]]:
        """The figures, the same on every rank, and the reports of the clients in order."""
        reports = self._fleet.ranks.gather(self._reports)
        reports.sort(key=lambda r: (r.client, r.batch))
        personal = [r for r in reports if r.client >= 0 and r.samples]
        for report in personal:
            report.metrics = reported(report.metrics)
        means = reported(weighted_means([r for r in reports if r.client < 0]))
        figures = {f"global/{name}": value for name, value in means.items()}
        return figures | self._personal_figures(personal), personal

    def _personal_figures(self, reports: list[Report]) -> dict[str, float]:
        """Over clients, each counting once.

        Mean, standard deviation, mean of the worst tenth, mean by cohort.
        """
        figures: dict[str, float] = {}
        names = sorted({name for report in reports for name in report.metrics})
        for name in names:
            having = [r for r in reports if name in r.metrics]
            values = np.array([r.metrics[name] for r in having])
            figures[f"personal/{name}"] = float(values.mean())
            if name.endswith("loss") or name.startswith("perplexity"):
                continue  # the worst are the largest, and a few would be all of the deviation
            worst = np.sort(values)[: max(1, int(np.ceil(WORST * len(values))))]
            figures[f"personal/{name}_std"] = float(values.std())
            figures[f"personal/{name}_worst10"] = float(worst.mean())
            figures |= self._by_cohort(name, having, values)
        return figures

    def _by_cohort(self, name: str, reports: list[Report], values: np.ndarray) -> dict[str, float]:
        cohorts = self._fleet.cohorts
        if len(cohorts) == 1:
            return {}
        of = np.array([self._fleet.home_cohort(r.client) for r in reports])
        return {
            f"personal/{name}/{state.name}": float(values[of == i].mean())
            for i, state in enumerate(cohorts)
            if (of == i).any()
        }
