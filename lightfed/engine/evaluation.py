"""Evaluation, split over the ranks; one gather per evaluation.

The kinds, each with its own name:

    global      the server's models on the global test set; means of several
    local       the server's model on a client's test split, if the client's model is another one
    personal    a client's model on its own test split, after aggregation or after its session:
                `evaluate_at`; at the other moment it is `trained` or `aggregated`
    finetuned   the server's model after a session, on the client's test split

A job is one client's own test split, a rank's share of the global test set, or a piece of a test of
several clients at once (`lightfed.local.alone.TestsAtOnce`). The global test set has the
same batches on any number of ranks, and means are taken over them in order, so the metrics do not
depend on the ranks. Models that no longer exist at the end of the round are tested in the
sessions (`ClientSessions.tests`); their reports are added here.
"""

from collections import UserList
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch

from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.alone import TestsAtOnce
from lightfed.local.logbook import needs_whole
from lightfed.local.session import GLOBAL, Report, weighted_means
from lightfed.models.client_module import reported
from lightfed.models.evaluating import is_whole
from lightfed.state.rows import ModelKind, Moment, Rows
from lightfed.utils.errors import UserError
from lightfed.utils.metrics import lower_is_better
from lightfed.utils.rng import derive_seed, numpy_generator, seed_default_generators

Kind = Literal["global", "personal", "local", "trained", "aggregated", "finetuned"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOMENTS: tuple[Moment, ...] = get_args(Moment)
WORST = 0.1  # share of the clients in the "worst" metric
MOST = 1_000  # clients to evaluate by default; their number costs more than a round beyond that


# A job is a client, GLOBAL, IDLE, or the number of clients plus the position of a piece.
IDLE = -2


class Evaluation:
    """Jobs of this rank, their results, and the metrics.

    Args:
        fleet: the clients.
        data: their test splits.
        kinds: kinds of evaluation.
        at: the moment of the personal metric; by default the first of the algorithm's `moments`.
        clients: number of clients to evaluate, drawn once; None for all, or 1,000 of more.

    Attributes:
        at: the moment of the personal metric.
        in_sessions: what to test in the sessions of a round, by moment.
    """

    def __init__(
        self,
        fleet: Fleet,
        data: FederatedDataModule,
        *,
        kinds: Sequence[Kind],
        at: Moment | None = None,
        clients: int | None = None,
    ) -> None:
        self._fleet, self._data = fleet, data
        self._reports: dict[Kind, list[Report]] = {}
        self._kinds, self._warned = frozenset(kinds), not kinds
        if "finetuned" in kinds and fleet.stateful:
            found = f"finetuned, but clients of {type(fleet.algorithm).__name__} keep rows"
            fix = "leave it out: it is for clients that start from the server's model"
            raise UserError("model.evaluate", found, fix)
        self.at: Moment = fleet.algorithm.moments[0] if at is None else at
        moments, lasting = self._moments(), fleet.algorithm.moments
        self.in_sessions = {m: kind for m, kind in moments.items() if m not in lasting}
        self.clients = self._choose(clients) if self._kinds - {"global"} else []
        # What is tested outside of sessions: the kind of a metric -> that of the model.
        self._tested: dict[Kind, ModelKind] = {k: m for m, k in moments.items() if m in lasting}
        for kind in ("local", "global"):
            if kind in self._kinds:
                self._tested[kind] = kind
        self._members: dict[int, list[int]] = {}
        for client in self.clients:
            self._members.setdefault(fleet.home_group(client), []).append(client)
        self._rows = dict(self._models())
        self._row_tests = dict(self._at_once())
        self._pieces: list[tuple[tuple[Kind, int], Any]] = []

    def _moments(self) -> dict[Moment, Kind]:
        """The moments to test, and the kinds of their metrics."""
        personal = "personal" in self._kinds
        both = personal and self._fleet.algorithm.tests_both
        others: dict[Moment, Kind] = {m: m for m in MOMENTS if m in self._kinds or both}
        return others | ({self.at: "personal"} if personal else {})

    def _choose(self, count: int | None) -> list[int]:
        everyone = self._fleet.clients
        if count is None and everyone > MOST:
            count = MOST
            self._fleet.warn(
                f"model.eval_clients: {MOST:,} of {everyone:,} clients are evaluated; give a number"
            )
        if count is None or count >= everyone:
            return list(range(everyone))
        rng = numpy_generator(self._fleet.seed, "evaluated-clients")
        return sorted(rng.choice(everyone, count, replace=False, shuffle=False).tolist())

    def _models(self) -> Iterator[tuple[tuple[Kind, int], Rows]]:
        """The models to test, by the kind of their metrics and by group."""
        fleet = self._fleet
        for kind, of in self._tested.items():
            for group, clients in [(0, [])] if kind == "global" else self._members.items():
                rows = fleet.algorithm.models(fleet, of, clients)
                if rows is not None:
                    yield (kind, group), rows

    def _at_once(self) -> Iterator[tuple[tuple[Kind, int], TestsAtOnce]]:
        """Tests of several clients at once, where clients also train so."""
        for (kind, group), rows in self._rows.items():
            clients = [] if kind == "global" else self._members[group]
            tests = self._fleet.packs.tests(group, rows, clients)
            if tests is not None:
                yield (kind, group), tests

    def _alone(self, client: int) -> bool:
        """Whether a client has a test that is not run together with those of others."""
        group = self._fleet.home_group(client)
        own = any(
            g == group and kind != "global" for kind, g in self._rows.keys() - self._row_tests
        )
        return own or "finetuned" in self._kinds

    @property
    def jobs(self) -> UserList[int]:
        """This rank's jobs, until clients move, as a data loader; as many on every rank.

        Lightning's loop steps must match. It takes a plain list for a collection of loaders.
        """
        alone = [client for client in self.clients if self._alone(client)]
        ranks = self._fleet.ranks
        shares = [self._share(rank, alone) for rank in range(ranks.world)]
        jobs, self._pieces = shares[ranks.rank]
        longest = max(1, *(len(jobs) for jobs, _ in shares))
        return UserList(jobs + [IDLE] * (longest - len(jobs)))

    def _share(
        self, rank: int, alone: Sequence[int]
    ) -> tuple[list[int], list[tuple[tuple[Kind, int], Any]]]:
        """The jobs of a rank, those of clients that are tested `alone`, and its pieces."""
        fleet, world = self._fleet, self._fleet.ranks.world
        home = fleet.places.owner.__getitem__ if fleet.stateful else None
        jobs = list(alone[rank::world]) if home is None else [k for k in alone if home(k) == rank]
        if ("global", 0) in self._rows.keys() - self._row_tests:
            jobs.insert(0, GLOBAL)
        pieces = [
            (key, piece)
            for key, tests in self._row_tests.items()
            for piece in tests.pieces(rank, world, home)
        ]
        return jobs + [fleet.clients + position for position in range(len(pieces))], pieces

    def start(self) -> None:
        """Called before the first job, on every rank."""
        self._reports = {kind: [] for kind in KINDS}
        for tests in self._row_tests.values():
            tests.start()
        # `validate` and `test` run in inference mode; modules built in it cannot be trained later.
        with torch.inference_mode(False), torch.no_grad():
            self._fleet.algorithm.evaluation_start(self._fleet)
        self._rows = dict(self._models())

    def run(self, job: int) -> None:
        """Run a job; its reports stay on this rank until `finish`."""
        if job == IDLE:
            return
        if job >= self._fleet.clients:
            key, piece = self._pieces[job - self._fleet.clients]
            self._row_tests[key].run(piece, self._rows[key])
            return
        if job == GLOBAL:
            self._run_global(self._rows["global", 0])
            return
        group = self._fleet.home_group(job)
        for kind in self._tested:
            if kind != "global" and (kind, group) not in self._row_tests:
                self._run_client(kind, job)
        if "finetuned" in self._kinds:
            # Lightning evaluates in inference mode, where gradients cannot be computed.
            with torch.inference_mode(False), torch.enable_grad():
                row = self._fleet.deployed(job).row(job)
                self._reports["finetuned"].append(self._fleet.client_sessions.finetune(job, row))

    def _run_client(self, kind: Kind, client: int) -> None:
        """Test a client's model of a kind, if there is one."""
        rows = self._rows.get((kind, self._fleet.home_group(client)))
        if rows is not None:
            report = self._fleet.client_sessions.test(client, rows)
            report.stored = 0 if kind == "local" else self._fleet.stored_bytes(client)
            self._reports[kind].append(report)

    def _run_global(self, rows: Rows) -> None:
        """Test servers' models on this rank's batches, or rank 0's on all."""
        ranks, total = self._fleet.ranks, self._data.global_test_batches()
        for server in rows.clients:
            with rows.bound(server) as module:
                session = self._fleet.client_sessions.session_of(module)
                length = total if needs_whole(module) or is_whole(module) else 1
                for first in range(ranks.rank * length, total, ranks.world * length):
                    batches = map(self._data.global_test_batch, range(first, first + length))
                    seed = derive_seed(self._fleet.seed, "global-evaluation", client=first)
                    seed_default_generators(seed, self._fleet.device)
                    place = server * total + first
                    report = session.evaluate(batches, client=GLOBAL, batch=place, first=first)
                    self._reports["global"].append(report)

    def finish(
        self, tests: Mapping[Moment, Sequence[Report]] | None = None
    ) -> tuple[dict[str, float], dict[Kind, list[Report]]]:
        """The metrics, the same on every rank, and the clients' reports in order.

        `tests` are reports of this round's sessions, on all ranks.
        """
        self._add_row_tests()
        gathered = self._fleet.ranks.gather([self._reports])
        every: dict[Kind, list[Report]] = {}
        for kind in KINDS:
            reports = [report for part in gathered for report in part[kind]]
            moments = (moment for moment, k in self.in_sessions.items() if k == kind)
            reports += [r for moment in moments for r in (tests or {}).get(moment, ())]
            reports.sort(key=lambda r: (r.client, r.batch))
            every[kind] = [r for r in reports if r.samples]
            for report in (r for r in reports if r.error):
                found = f"client {report.client} is left out of the {kind} metrics"
                self._fleet.warn(f"{found}: {report.error}")
        means = reported(weighted_means(every.pop("global")))
        metrics = {f"global/{name}": value for name, value in means.items()}
        names = [state.name for state in self._fleet.groups]
        for kind, reports in every.items():
            groups = [names[self._fleet.home_group(r.client)] for r in reports]
            metrics |= client_metrics(reports, kind, groups if len(names) > 1 else ())
        if not metrics and not self._warned:
            self._warned = True
            found = f"{type(self._fleet.algorithm).__name__} gives no model to test (`models`)"
            found = f"{found}, validation_step logs nothing, or a limit leaves all tests out"
            self._fleet.warn(f"no metrics: {found}")
        return metrics, every

    def _add_row_tests(self) -> None:
        """Add this rank's share of the reports of clients that were tested at once."""
        fleet, rank = self._fleet, self._fleet.ranks.rank
        for (kind, _), tests in self._row_tests.items():
            reports = tests.finish(fleet.ranks)
            if not fleet.stateful or kind == "global":
                self._reports[kind] += reports[rank :: fleet.ranks.world]
                continue
            mine = [report for report in reports if fleet.places.owner[report.client] == rank]
            for report in mine if kind != "local" else ():
                report.stored = fleet.stored_bytes(report.client)
            self._reports[kind] += mine

    def warn_outside_of_rounds(self, *, trained: bool) -> None:
        """Warn if no model is trained, and of models that exist only in a round's sessions."""
        if not trained:
            self._fleet.warn("no model has been trained; ckpt_path names a run to evaluate")
        for moment, kind in self.in_sessions.items():
            if moment not in self._fleet.tests:
                found = f"models that are {moment} exist only during a round"
                self._fleet.warn(f"model.evaluate_at: {found}; there are no {kind} metrics now")


def client_metrics(
    reports: Sequence[Report], kind: str, groups: Sequence[str] = ()
) -> dict[str, float]:
    """Mean, standard deviation, mean of the worst tenth, and mean by group, as `kind/name`.

    All clients have equal weight. The worst values of a metric are the largest if its name says
    that lower is better. `groups` are the names of the reports' groups; without them there are no
    metrics by group.
    """
    metrics: dict[str, float] = {}
    names = sorted({name for report in reports for name in report.metrics})
    for name in names:
        having = [i for i, report in enumerate(reports) if name in report.metrics]
        values = np.array([reports[i].metrics[name] for i in having])
        metrics[f"{kind}/{name}"] = float(values.mean())
        if name.endswith("loss") or name.startswith("perplexity"):
            continue  # a few values would dominate the deviation
        order = np.sort(values)[:: -1 if lower_is_better(name) else 1]
        worst = order[: max(1, int(np.ceil(WORST * len(values))))]
        worst = values if np.isnan(values).any() else worst  # sorted last, NaN would not count
        metrics[f"{kind}/{name}_std"] = float(values.std())
        metrics[f"{kind}/{name}_worst10"] = float(worst.mean())
        of = np.array([groups[i] for i in having] if groups else [])
        for group in dict.fromkeys(of.tolist()):
            metrics[f"{kind}/{name}/{group}"] = float(values[of == group].mean())
    return metrics
