"""Evaluation, split over the ranks; one gather per evaluation.

The kinds, each with its own name:

    global      the server's model on the global test set
    local       the server's model on a client's test split, if the client's model is another one
    personal    a client's model on its own test split, after aggregation or after its session:
                `evaluate_at`; at the other moment it is `trained` or `aggregated`
    finetuned   the server's model after a session, on the client's test split

A job is one client's own test split, a rank's share of the global test set, or a piece of a test of
many clients at once (`lightfed.local.packed.evaluation`). The global test set has the
same batches on any number of ranks, and means are taken over them in order, so the metrics do not
depend on the ranks. Models that no longer exist at the end of the round are tested in the
sessions (`Training.tested`); their reports are added here.
"""

from collections import UserList
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.local.client_metrics import client_metrics, weighted_means
from lightfed.local.client_module import reported
from lightfed.local.hooks import Hooks, Moment, Tested
from lightfed.local.local_work import ClientData
from lightfed.local.logbook import needs_whole
from lightfed.local.packed.evaluation import Tests
from lightfed.local.packed.rules import together
from lightfed.local.packs.rules import Packs
from lightfed.local.session import Report
from lightfed.results.units import lower_is_better
from lightfed.utils.errors import UserError
from lightfed.utils.rng import derive_seed, numpy_generator, seed_default_generators

Kind = Literal["global", "personal", "local", "trained", "aggregated", "finetuned"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOMENTS: tuple[Moment, ...] = get_args(Moment)
MOST = 1_000  # clients to evaluate by default; their number costs more than a round beyond that


# A job is a client, one of these two, or the number of clients plus the position of a piece.
GLOBAL = -1
IDLE = -2


class Evaluation:
    """Jobs of this rank, their results, and the metrics.

    Args:
        fleet: the clients.
        data: their test splits.
        kinds: kinds of evaluation.
        at: the moment of the personal metric; by default the first of the algorithm's `moments`.
        clients: number of clients to evaluate, drawn once; None for all, or 1,000 of more.
        packed: how clients are trained, and tested, at once.

    Attributes:
        at: the moment of the personal metric.
        in_sessions: what to test in the sessions of a round, by moment.
    """

    def __init__(
        self,
        fleet: Fleet,
        data: ClientData,
        *,
        kinds: Sequence[Kind],
        at: Moment | None = None,
        clients: int | None = None,
        packed: Packs | None = None,
    ) -> None:
        self._fleet, self._data = fleet, data
        self._reports: dict[Kind, list[Report]] = {}
        self._kinds, self._warned = frozenset(kinds), not kinds
        if type(fleet.algorithm).local is Hooks.local:
            self._kinds -= {"local"}  # there is nothing to test
        if "finetuned" in kinds and fleet.algorithm.stateful:
            found = f"finetuned, but clients of {type(fleet.algorithm).__name__} keep rows"
            fix = "leave it out: it is for clients that start from the server's model"
            raise UserError("model.evaluate", found, fix)
        self.at: Moment = fleet.algorithm.moments[0] if at is None else at
        moments = self._moments()
        self._at_rest = {m: kind for m, kind in moments.items() if self._lasts(m)}
        self.in_sessions = {m: kind for m, kind in moments.items() if not self._lasts(m)}
        self.clients = self._choose(clients) if self._kinds - {"global"} else []
        self._together = self._test_together(packed or Packs())
        self._pieces: list[tuple[Tests, Any]] = []

    def _moments(self) -> dict[Moment, Kind]:
        """The moments to test, and the kinds of their metrics."""
        personal = "personal" in self._kinds
        both = personal and self._fleet.algorithm.tests_both
        others: dict[Moment, Kind] = {m: m for m in MOMENTS if m in self._kinds or both}
        return others | ({self.at: "personal"} if personal else {})

    def _lasts(self, moment: Moment) -> bool:
        """Whether a client's model of a moment still exists at the end of the round."""
        algorithm = self._fleet.algorithm
        kept = type(algorithm).aggregated is not Algorithm.aggregated
        return moment in algorithm.moments or (moment == "aggregated" and kept)

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

    def _test_together(self, packed: Packs) -> dict[tuple[Kind, int], tuple[Tests, int]]:
        """Tests of many clients at once, with the sizes of their packs, by kind and group."""
        fleet, algorithm, found = self._fleet, self._fleet.algorithm, {}
        asked: dict[Kind, Tested] = {
            kind: "personal" for m, kind in self._at_rest.items() if m in algorithm.moments
        }
        if "local" in self._kinds:
            asked["local"] = "local"
        members: dict[int, list[int]] = {}
        for client in self.clients:
            members.setdefault(fleet.home_group(client), []).append(client)
        cases = [(kind, group, members[group]) for kind in asked for group in members]
        if "global" in self._kinds and algorithm.global_models == 1:
            asked["global"] = "global"
            cases.append(("global", 0, [GLOBAL]))
        for kind, group, clients in cases:
            given = together(packed, fleet, asked[kind], group)
            if given is None:
                continue
            flops, context = fleet.groups[group].flops, fleet.training.context
            tests = Tests(
                given[0], clients, self._data, flops=flops, context=context, device=fleet.device
            )
            found[kind, group] = tests, given[1]
        return found

    def _alone(self, client: int) -> bool:
        """Whether a client has a test that is not run together with those of others."""
        kinds = [*self._at_rest.values(), *(self._kinds & {"local", "finetuned"})]
        group = self._fleet.home_group(client)
        return any((kind, group) not in self._together for kind in kinds)

    @property
    def jobs(self) -> UserList[int]:
        """This rank's jobs, until clients move, as a data loader; as many on every rank.

        Lightning's loop steps must match. It takes a plain list for a collection of loaders.
        """
        alone = [client for client in self.clients if self._alone(client)]
        ranks = self._fleet.ranks
        shares = [self._share(rank, alone) for rank in range(ranks.world)]
        jobs, self._pieces = shares[ranks.rank]
        longest = max(1, *(len(theirs) for theirs, _ in shares))
        return UserList(jobs + [IDLE] * (longest - len(jobs)))

    def _share(self, rank: int, alone: Sequence[int]) -> tuple[list[int], list[tuple[Tests, Any]]]:
        """The jobs of a rank, those of clients that are tested `alone`, and its pieces."""
        fleet, world = self._fleet, self._fleet.ranks.world
        home = fleet.home if fleet.algorithm.stateful else None
        jobs = list(alone[rank::world]) if home is None else [k for k in alone if home(k) == rank]
        if "global" in self._kinds and ("global", 0) not in self._together:
            jobs.insert(0, GLOBAL)
        pieces = [
            (tests, piece)
            for tests, most in self._together.values()
            for piece in tests.pieces(rank, world, home, most)
        ]
        return jobs + [fleet.clients + position for position in range(len(pieces))], pieces

    def start(self) -> None:
        """Called before the first job, on every rank."""
        self._reports = {kind: [] for kind in KINDS}
        for tests, _ in self._together.values():
            tests.start()
        # `validate` and `test` run in inference mode; modules built in it cannot be trained later.
        with torch.inference_mode(False), torch.no_grad():
            self._fleet.algorithm.evaluation_start(self._fleet)

    def run(self, job: int) -> None:
        """Run a job; its reports stay on this rank until `finish`."""
        if job == IDLE:
            return
        if job >= self._fleet.clients:
            tests, piece = self._pieces[job - self._fleet.clients]
            tests.run(piece)
            return
        if job == GLOBAL:
            for server in range(self._fleet.algorithm.global_models):
                self._run_global(server)
            return
        algorithm, group = self._fleet.algorithm, self._fleet.home_group(job)
        for moment, kind in self._at_rest.items():
            if (kind, group) in self._together:
                continue
            kept = moment in algorithm.moments
            module = (algorithm.evaluated if kept else algorithm.aggregated)(self._fleet, job)
            if module is not None:
                report = self._fleet.training.test(job, module)
                report.stored = self._fleet.stored_bytes(job)
                self._reports[kind].append(report)
        if "local" in self._kinds and ("local", group) not in self._together:
            module = algorithm.local(self._fleet, job)
            if module is not None:
                self._reports["local"].append(self._fleet.training.test(job, module))
        if "finetuned" in self._kinds:
            self._reports["finetuned"].append(self._run_finetuned(job))

    def _run_finetuned(self, client: int) -> Report:
        """Test a client after an unreported session; no samples if the session raises."""
        fleet, training = self._fleet, self._fleet.training
        state = fleet.groups[fleet.home_group(client)]
        # Lightning evaluates in inference mode, where gradients cannot be computed.
        with torch.inference_mode(False), torch.enable_grad():
            _, row = fleet.algorithm.client_row(fleet, client)
            try:
                module = training.finetune(client, row)
            except UserError:
                raise
            except Exception as error:  # as in a round
                return Report(client, 0, error=training.abandon(client, state, error))
        report = training.test(client, module)
        state.live.restore()
        return report

    def _run_global(self, server: int) -> None:
        """Test a server's model on this rank's batches, or rank 0's on all."""
        module = self._fleet.algorithm.evaluated_server(self._fleet, server)
        if module is None:
            return
        if module.training:
            module.eval()
        session, ranks = self._fleet.training.session_of(module), self._fleet.ranks
        total = self._data.global_test_batches()
        length = total if needs_whole(module) else 1
        for first in range(ranks.rank * length, total, ranks.world * length):
            batches = map(self._data.global_test_batch, range(first, first + length))
            seed = derive_seed(self._fleet.seed, "global-evaluation", client=first)
            seed_default_generators(seed, self._fleet.device)
            report = session.evaluate(batches, client=GLOBAL, batch=server * total + first)
            self._reports["global"].append(report)

    def finish(
        self, tests: Mapping[Moment, Sequence[Report]] | None = None
    ) -> tuple[dict[str, float], dict[Kind, list[Report]]]:
        """The metrics, the same on every rank, and the clients' reports in order.

        `tests` are reports of this round's sessions, on all ranks.
        """
        self._report_together()
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
            group_of = [self._fleet.home_group(r.client) for r in reports]
            metrics |= client_metrics(
                reports, kind, lower_is_better, groups=names, group_of=group_of
            )
        if not metrics and not self._warned:
            self._warned = True
            found = f"{type(self._fleet.algorithm).__name__} gives no model to test (`evaluated`)"
            found = f"{found}, validation_step logs nothing, or a limit leaves all tests out"
            self._fleet.warn(f"no metrics: {found}")
        return metrics, every

    def _report_together(self) -> None:
        """Add this rank's share of the reports of clients that were tested at once."""
        fleet, rank = self._fleet, self._fleet.ranks.rank
        for (kind, _), (tests, _) in self._together.items():
            reports = tests.finish(fleet.ranks)
            if not fleet.algorithm.stateful or kind == "global":
                self._reports[kind] += reports[rank :: fleet.ranks.world]
                continue
            mine = [report for report in reports if fleet.home(report.client) == rank]
            for report in mine if kind in self._at_rest.values() else ():
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
