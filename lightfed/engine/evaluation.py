"""Evaluation, shared among the ranks, with one gather per evaluation.

These kinds exist, each with a name of its own in the metrics:

    global      the server's models on the global test set; the mean of several models
    local       the server's model on a client's test split, if the client's model is another one
    personal    a client's model on its own test split, after aggregation or after its session, as
                `evaluate_at` says
    trained     what `personal` would be after the session
    aggregated  what `personal` would be after aggregation
    finetuned   the server's model after a session of the client, on the client's test split

All of these are about clients that can take part in training. With `data.unseen` each evaluation
has three more kinds, about those that never do; see `lightfed.local.hooks.Newcomers`:

    unseen            the server's model, as it is, on the client's test split
    unseen_finetuned  after the client has trained what the method leaves with its clients
    gap               the participation gap: the mean over clients that take part minus that over
                      those that do not

With `data.validation` each of them is also measured on validation samples: a client's own, and for
`global` those of all clients together. The names of these metrics begin with validation/.

The tests of a rank are a list of jobs: a client's own test split, the rank's share of the global
test set, or a piece of a test of several clients at once (`lightfed.local.alone.TestsAtOnce`). The
global test set is cut into the same batches on any number of ranks, and means are taken over them
in order, so the metrics do not depend on the ranks.

A model that the rest of the round overwrites is tested in the session (`ClientSessions.tests`).
`finish` adds the reports of these tests to those of the jobs.
"""

from collections import UserList
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch

from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.tested_samples import TEST_SPLITS, TestSplit
from lightfed.local.alone import TestsAtOnce
from lightfed.local.hooks import Newcomers
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
UnseenKind = Literal["unseen", "unseen_finetuned"]  # on clients that never train
UNSEEN_KINDS: tuple[UnseenKind, ...] = get_args(UnseenKind)
MOMENTS: tuple[Moment, ...] = get_args(Moment)
WORST = 0.1  # share of the clients in the "worst" metric
MOST = 1_000  # clients to evaluate by default; testing more of them costs more than a round

# What a job is, as a number that passes through Lightning's loop: a client from 0 on, GLOBAL for
# this rank's share of the global test set, or IDLE for a rank with fewer jobs than others. From the
# number of clients on, it is a piece of the tests of several clients, by its position.
IDLE = -2

# The kind of a metric, and the position of the group whose models are tested.
ModelKey = tuple[Kind | UnseenKind, int]

# The samples of a test, the kind of its metric, and the position of the group.
TestKey = tuple[TestSplit, Kind | UnseenKind, int]


class Evaluation:
    """Runs this rank's tests, and makes metrics from those of all ranks.

    Args:
        fleet: The clients.
        data: Their test splits.
        kinds: The kinds of evaluation.
        at: The moment of the personal metric; by default the first of the algorithm's `moments`.
        clients: The number of clients to evaluate, drawn once. None for all, but at most
            1,000.
        unseen_epochs: Local epochs in which unseen clients train what the method leaves with its
            clients; as many as in a session of a round by default.

    Attributes:
        at: The moment of the personal metric.
        in_sessions: What to test in the sessions of a round: the kind of the metric, by moment.
        clients: The clients to evaluate, ascending, of those that can train.
        unseen: The clients to evaluate, ascending, of those that never train.
        rows: The models to test outside of sessions, by the kind of the metric and the group; each
            evaluation finds them anew.
        tests_at_once: Those of these tests that are run for several clients at once.

    Raises:
        UserError: `finetuned` is asked for, but clients do not start from the server's model; or
            nothing trains in `unseen_epochs`.
    """

    def __init__(
        self,
        fleet: Fleet,
        data: FederatedDataModule,
        *,
        kinds: Sequence[Kind],
        at: Moment | None = None,
        clients: int | None = None,
        unseen_epochs: int | None = None,
    ) -> None:
        if "finetuned" in kinds and fleet.stateful:
            found = f"finetuned, but clients of {type(fleet.algorithm).__name__} keep rows"
            fix = "leave it out: it is for clients that start from the server's model"
            raise UserError("model.evaluate", found, fix)

        self._fleet = fleet
        self._data = data
        self._kinds = frozenset(kinds)
        self._expects_metrics = bool(kinds)  # an evaluation without any is still to be warned of
        self._reports: dict[Kind | UnseenKind, list[Report]] = {}
        self.at: Moment = fleet.algorithm.moments[0] if at is None else at

        # At a moment that does not last until the end of the round, models are tested in sessions.
        # `_tested` has the others: which model is tested for which metric.
        self.in_sessions: dict[Moment, Kind] = {}
        self._tested: dict[Kind, ModelKind] = {}
        for moment, kind in self._kinds_by_moment().items():
            if moment in fleet.algorithm.moments:
                self._tested[kind] = moment
            else:
                self.in_sessions[moment] = kind
        if "local" in self._kinds:
            self._tested["local"] = "local"
        if "global" in self._kinds:
            self._tested["global"] = "global"

        self.clients: list[int] = []
        if self._kinds - {"global"}:
            self.clients = self._choose_clients(clients, fleet.seen, "evaluated-clients")
        self._clients_by_group = self._by_group(self.clients)

        self.unseen: list[int] = []
        if self._kinds and fleet.unseen:
            self.unseen = self._choose_clients(clients, fleet.unseen, "evaluated-unseen")
        self._unseen_by_group = self._by_group(self.unseen)
        self._never_train = frozenset(self.unseen)
        self._unseen_epochs = unseen_epochs
        self._newcomers = self._find_newcomers()
        if unseen_epochs is not None:
            self._check_unseen_epochs(unseen_epochs)

        self.rows = self._find_models()
        self.tests_at_once = self._find_tests_at_once()
        self._pieces: list[tuple[TestKey, Any]] = []

    def _kinds_by_moment(self) -> dict[Moment, Kind]:
        """Return the moments at which clients' models are tested, and the metrics of each."""
        tests_personal = "personal" in self._kinds
        tests_both = tests_personal and self._fleet.algorithm.tests_both

        kinds: dict[Moment, Kind] = {}
        for moment in MOMENTS:
            if moment in self._kinds or tests_both:
                kinds[moment] = moment
        if tests_personal:
            kinds[self.at] = "personal"
        return kinds

    def _choose_clients(
        self, count: int | None, candidates: Sequence[int], purpose: str
    ) -> list[int]:
        """Draw the clients to evaluate; all of them if there are no more than `count`.

        Args:
            count: The number of clients to draw; None for all, but at most 1,000.
            candidates: The clients to draw from, ascending.
            purpose: Names the draw.
        """
        everyone = len(candidates)
        if count is None and everyone > MOST:
            count = MOST
            self._fleet.warn(
                f"model.eval_clients: {MOST:,} of {everyone:,} clients are evaluated; "
                "set a number to change that"
            )
        if count is None or count >= everyone:
            return list(candidates)

        rng = numpy_generator(self._fleet.seed, purpose)
        chosen = rng.choice(everyone, count, replace=False, shuffle=False)
        return sorted(candidates[position] for position in chosen.tolist())

    def _by_group(self, clients: Sequence[int]) -> dict[int, list[int]]:
        """Return clients by the position of their group."""
        clients_by_group: dict[int, list[int]] = {}
        for client in clients:
            clients_by_group.setdefault(self._fleet.home_group(client), []).append(client)
        return clients_by_group

    def _find_newcomers(self) -> dict[int, Newcomers]:
        """Return what the method has for the unseen clients of each group."""
        newcomers_by_group = {}
        for group, clients in self._unseen_by_group.items():
            newcomers = self._fleet.algorithm.newcomers(self._fleet, clients)
            if newcomers is not None:
                newcomers_by_group[group] = newcomers
        return newcomers_by_group

    def _check_unseen_epochs(self, epochs: int) -> None:
        """Refuse epochs in which no client would train."""
        key = "model.unseen_epochs"
        if not self._fleet.unseen:
            raise UserError(key, f"{epochs}, and no client is unseen", "give data.unseen, too")
        if self._kinds and not any(map(self._finetunes, self._newcomers)):
            name = type(self._fleet.algorithm).__name__
            found = f"{epochs}, and clients of {name} have nothing of their own to train"
            raise UserError(key, found, "leave it out, or add finetuned to model.evaluate")

    def _finetunes(self, group: int) -> bool:
        """Whether the unseen clients of a group train before they are tested a second time.

        Without parts of their own, they train the server's model if other clients do so, too.
        """
        return bool(self._newcomers[group].trained) or "finetuned" in self._kinds

    def _find_models(self) -> dict[ModelKey, Rows]:
        """Return the models to test; the algorithm may have none for a kind and a group."""
        models: dict[ModelKey, Rows] = {}
        for kind, model_kind in self._tested.items():
            # The global models are those of no client, and are in the layout of the first group.
            clients_by_group = {0: []} if kind == "global" else self._clients_by_group
            for group, clients in clients_by_group.items():
                rows = self._fleet.algorithm.models(self._fleet, model_kind, clients)
                if rows is not None:
                    models[kind, group] = rows

        self._newcomers = self._find_newcomers()
        for group, newcomers in self._newcomers.items():
            if newcomers.served is not None:
                models["unseen", group] = newcomers.served
        return models

    def _clients_of(self, key: ModelKey) -> list[int]:
        """Return the clients of a group that are tested for a kind; none for `global`."""
        kind, group = key
        if kind == "global":
            return []
        if kind == "unseen":
            return self._unseen_by_group[group]
        return self._clients_by_group[group]

    def _find_tests_at_once(self) -> dict[TestKey, TestsAtOnce]:
        """Return tests of several clients at once, for groups whose clients also train so."""
        tests_at_once: dict[TestKey, TestsAtOnce] = {}
        for (kind, group), rows in self.rows.items():
            clients = self._clients_of((kind, group))
            for split in self._data.tested:
                tests = self._fleet.packs.tests(group, rows, clients, split)
                if tests is not None:
                    tests_at_once[split, kind, group] = tests
        return tests_at_once

    def _is_at_once(self, kind: Kind | UnseenKind, group: int) -> bool:
        """Whether all tests of these models are run for several clients at once."""
        return all((split, kind, group) in self.tests_at_once for split in self._data.tested)

    def _has_own_job(self, client: int) -> bool:
        """Whether a client has a test that is not run together with those of other clients."""
        group = self._fleet.home_group(client)
        if client in self._never_train:
            kinds: list[Kind | UnseenKind] = ["unseen"]
            if self._finetunes(group):
                return True
        else:
            kinds = [kind for kind in self._tested if kind != "global"]
            if "finetuned" in self._kinds:
                return True
        return any((k, group) in self.rows and not self._is_at_once(k, group) for k in kinds)

    @property
    def jobs(self) -> UserList[int]:
        """This rank's jobs, as a data loader. They hold until clients move to other ranks.

        Every rank gets as many, because the steps of Lightning's loop must match. It would take a
        plain list for a collection of loaders.
        """
        ranks = self._fleet.ranks
        tested_clients = sorted([*self.clients, *self.unseen])
        clients_with_own_job = [client for client in tested_clients if self._has_own_job(client)]
        shares = [self._share(rank, clients_with_own_job) for rank in range(ranks.world)]

        jobs, self._pieces = shares[ranks.rank]
        longest = max(1, *(len(jobs_of_rank) for jobs_of_rank, _ in shares))
        return UserList(jobs + [IDLE] * (longest - len(jobs)))

    def _share(
        self, rank: int, clients_with_own_job: Sequence[int]
    ) -> tuple[list[int], list[tuple[TestKey, Any]]]:
        """Return the jobs of a rank, and the pieces of tests of several clients among them."""
        fleet = self._fleet
        world = fleet.ranks.world

        # Clients that keep rows are tested where the rows are; any rank can test the others.
        rank_of_client: Callable[[int], int] | None = None
        if fleet.stateful:
            rank_of_client = fleet.places.owner.__getitem__
        if rank_of_client is None:
            jobs = list(clients_with_own_job[rank::world])
        else:
            jobs = [client for client in clients_with_own_job if rank_of_client(client) == rank]

        if ("global", 0) in self.rows and not self._is_at_once("global", 0):
            jobs.insert(0, GLOBAL)

        pieces: list[tuple[TestKey, Any]] = []
        for key, tests in self.tests_at_once.items():
            for piece in tests.pieces(rank, world, rank_of_client):
                pieces.append((key, piece))
        jobs += [fleet.clients + position for position in range(len(pieces))]
        return jobs, pieces

    @property
    def tests_anything(self) -> bool:
        """Whether any model is tested; if not, the algorithm's hooks are not called."""
        return bool(self._kinds)

    def start(self) -> None:
        """Prepare an evaluation; called before its first job, on every rank."""
        self._reports = {kind: [] for kind in (*KINDS, *UNSEEN_KINDS)}
        for tests in self.tests_at_once.values():
            tests.start()
        if not self.tests_anything:
            return  # what a method prepares for its tests can take longer than a round

        # `validate` and `test` run in inference mode; modules built in it cannot be trained later.
        with torch.inference_mode(False), torch.no_grad():
            self._fleet.algorithm.evaluation_start(self._fleet)
        self.rows = self._find_models()

    def run(self, job: int) -> None:
        """Run a job of `jobs`; its reports stay on this rank until `finish`."""
        if job == IDLE:
            return
        if job == GLOBAL:
            for split in self._data.tested:
                if (split, "global", 0) not in self.tests_at_once:
                    self._test_global(self.rows["global", 0], split)
        elif job in self._never_train:
            self._test_unseen(job)
        elif job < self._fleet.clients:
            self._test_client(job)
        else:
            key, piece = self._pieces[job - self._fleet.clients]
            _, kind, group = key
            self.tests_at_once[key].run(piece, self.rows[kind, group])

    def _test_client(self, client: int) -> None:
        """Run the tests that a client has for itself alone."""
        fleet = self._fleet
        group = fleet.home_group(client)
        for kind in self._tested:
            if kind == "global" or (kind, group) not in self.rows:
                continue
            for split in self._data.tested:
                if (split, kind, group) in self.tests_at_once:
                    continue
                rows = self.rows[kind, group]
                report = fleet.client_sessions.test(client, rows, split=split)
                report.stored = 0 if kind == "local" else fleet.stored_bytes(client)
                self._reports[kind].append(report)

        if "finetuned" in self._kinds:
            # Lightning evaluates in inference mode, where gradients cannot be computed.
            with torch.inference_mode(False), torch.enable_grad():
                row = fleet.deployed(client).row(client)
                self._reports["finetuned"] += fleet.client_sessions.finetune(client, row)

    def _test_unseen(self, client: int) -> None:
        """Test an unseen client: with the server's model, and with what it makes of that."""
        fleet = self._fleet
        group = fleet.home_group(client)
        if ("unseen", group) in self.rows:
            for split in self._data.tested:
                if (split, "unseen", group) not in self.tests_at_once:
                    rows = self.rows["unseen", group]
                    report = fleet.client_sessions.test(client, rows, split=split)
                    self._reports["unseen"].append(report)

        if self._finetunes(group):
            newcomers = self._newcomers[group]
            # Lightning evaluates in inference mode, where gradients cannot be computed.
            with torch.inference_mode(False), torch.enable_grad():
                self._reports["unseen_finetuned"] += fleet.client_sessions.finetune(
                    client,
                    newcomers.start.row(client),
                    trained=newcomers.trained,
                    epochs=self._unseen_epochs,
                )

    def _test_global(self, rows: Rows, split: TestSplit) -> None:
        """Test the server's models on this rank's batches of the samples of all together.

        Some modules and metrics need the whole test set at once: then rank 0 runs all batches.
        """
        fleet = self._fleet
        ranks = fleet.ranks
        samples = self._data.tested[split]
        total = samples.num_whole_batches
        for server in rows.clients:
            with rows.bound(server) as module:
                session = fleet.client_sessions.session_of(module)
                length = total if needs_whole(module) or is_whole(module) else 1
                for first in range(ranks.rank * length, total, ranks.world * length):
                    batches = map(samples.whole_batch, range(first, first + length))
                    seed = derive_seed(fleet.seed, "global-evaluation", client=first)
                    seed_default_generators(seed, fleet.device)
                    position = server * total + first
                    report = session.evaluate(batches, client=GLOBAL, batch=position, first=first)
                    report.split = split
                    self._reports["global"].append(report)

    def finish(
        self, tests: Mapping[Moment, Sequence[Report]] | None = None
    ) -> tuple[dict[str, float], dict[str, list[Report]]]:
        """Gather the reports of all ranks, and make metrics of them.

        Args:
            tests: Reports of tests in this round's sessions, on all ranks.

        Returns:
            The metrics by name, the same on every rank, and the reports of clients in their order,
            by kind, as in the names of metrics.
        """
        all_reports = self._gather(tests or {})
        metrics: dict[str, float] = {}
        reports_of_kind: dict[str, list[Report]] = {}
        for split in TEST_SPLITS:
            prefix = "" if split == "test" else f"{split}/"
            for kind, reports_of_splits in all_reports.items():
                reports = [report for report in reports_of_splits if report.split == split]
                if kind == "global":
                    means = reported(weighted_means(reports))
                    metrics |= {f"{prefix}global/{name}": mean for name, mean in means.items()}
                else:
                    reports_of_kind[prefix + kind] = reports
                    metrics |= self._client_metrics(reports, prefix + kind)
            metrics |= self._gaps(reports_of_kind, prefix)

        if not metrics and self._expects_metrics:
            self._expects_metrics = False  # one warning is enough
            self._fleet.warn(
                f"no metrics: {type(self._fleet.algorithm).__name__} returns no model to test "
                "(`models`), validation_step logs nothing, or a limit skips all tests"
            )
        return metrics, reports_of_kind

    def _gaps(
        self, reports_of_kind: Mapping[str, Sequence[Report]], prefix: str
    ) -> dict[str, float]:
        """Return the participation gap of each metric, and half the width of its interval.

        Clients that have trained are compared by the models that they hold. Those that never do
        hold what they have trained in this evaluation, or else the server's model. Clients that
        hold the server's model, too, are compared by it, and not by what a session has made of it.
        """
        tuned = reports_of_kind.get(f"{prefix}unseen_finetuned", ())
        if tuned:
            kind_of_seen: Kind = "finetuned" if "finetuned" in self._kinds else "personal"
            return participation_gaps(
                reports_of_kind.get(prefix + kind_of_seen, ()), tuned, f"{prefix}gap"
            )

        for kind, model_kind in self._tested.items():
            if model_kind == "aggregated":
                unseen = reports_of_kind.get(f"{prefix}unseen", ())
                seen = reports_of_kind.get(prefix + kind, ())
                return participation_gaps(seen, unseen, f"{prefix}gap")
        return {}

    def _client_metrics(self, reports: Sequence[Report], kind: str) -> dict[str, float]:
        """Summarize the metrics of clients, by group if there are several."""
        group_names = [state.name for state in self._fleet.groups]
        groups: list[str] = []
        if len(group_names) > 1:
            groups = [group_names[self._fleet.home_group(report.client)] for report in reports]
        return client_metrics(reports, kind, groups)

    def _gather(
        self, tests: Mapping[Moment, Sequence[Report]]
    ) -> dict[Kind | UnseenKind, list[Report]]:
        """Return the reports of all ranks by kind, sorted; name clients whose test has failed."""
        self._add_tests_at_once()
        reports_of_ranks = self._fleet.ranks.gather([self._reports])

        reports_of_kind: dict[Kind | UnseenKind, list[Report]] = {}
        kinds = (*KINDS, *UNSEEN_KINDS) if self.unseen else KINDS
        for kind in kinds:
            reports: list[Report] = []
            for reports_of_rank in reports_of_ranks:
                reports += reports_of_rank[kind]
            for moment, kind_of_moment in self.in_sessions.items():
                if kind_of_moment == kind:
                    reports += tests.get(moment, ())

            # The order fixes the bits of sums over reports.
            reports.sort(key=lambda report: (report.client, report.batch))
            reports_of_kind[kind] = [report for report in reports if report.samples]
            for report in reports:
                if report.error:
                    skipped = f"client {report.client} is skipped in the {kind} metrics"
                    self._fleet.warn(f"{skipped}: {report.error}")
        return reports_of_kind

    def _add_tests_at_once(self) -> None:
        """Add this rank's share of the reports of clients that were tested at once.

        Every rank has the reports of all of them, and the gather must see each report once.
        """
        fleet = self._fleet
        rank = fleet.ranks.rank
        for (_, kind, _), tests in self.tests_at_once.items():
            reports = tests.finish(fleet.ranks)
            if not fleet.stateful or kind == "global":
                self._reports[kind] += reports[rank :: fleet.ranks.world]
                continue
            for report in reports:
                if fleet.places.owner[report.client] != rank:
                    continue
                if kind not in ("local", "unseen"):
                    report.stored = fleet.stored_bytes(report.client)
                self._reports[kind].append(report)

    def warn_outside_of_rounds(self, *, trained: bool) -> None:
        """Warn of what cannot be tested in an evaluation outside of a fit.

        Args:
            trained: Whether there are models that have been trained.
        """
        if not trained:
            self._fleet.warn("no model has been trained; name a run to evaluate by ckpt_path")
        for moment, kind in self.in_sessions.items():
            if moment not in self._fleet.tests:
                self._fleet.warn(
                    f"model.evaluate_at: models that are {moment} exist only during a round; "
                    f"there are no {kind} metrics now"
                )


def participation_gaps(
    seen: Sequence[Report], unseen: Sequence[Report], kind: str
) -> dict[str, float]:
    """Return how much better clients fare that take part in training than those that never do.

    Args:
        seen: The reports of clients that take part, one for each.
        unseen: Those of clients that never do.
        kind: The kind of evaluation in the names of the metrics.

    Returns:
        `<kind>/<name>`, the mean over the former minus that over the latter. With two clients or
        more of each, also `<kind>/<name>_half`, half the width of its interval of 95 % by Welch's
        rule, which takes the clients for draws from two populations.
    """
    gaps: dict[str, float] = {}
    names = {name for report in seen for name in report.metrics}
    for name in sorted(names & {name for report in unseen for name in report.metrics}):
        of_seen = np.array([r.metrics[name] for r in seen if name in r.metrics])
        of_unseen = np.array([r.metrics[name] for r in unseen if name in r.metrics])
        gaps[f"{kind}/{name}"] = float(of_seen.mean() - of_unseen.mean())
        if min(len(of_seen), len(of_unseen)) > 1:
            gaps[f"{kind}/{name}_half"] = _half_width(of_seen, of_unseen)
    return gaps


def _half_width(a: np.ndarray, b: np.ndarray) -> float:
    """Return half the width of the 95 % interval of a difference of means, by Welch's rule."""
    from scipy.special import stdtrit  # takes a third of a second to import

    variances = np.array([a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)])
    variance = float(variances.sum())
    if not variance > 0:
        return variance  # 0, or NaN of metrics that are not finite
    degrees = variance**2 / (variances**2 / np.array([len(a) - 1, len(b) - 1])).sum()
    return float(stdtrit(degrees, 0.975)) * variance**0.5


def client_metrics(
    reports: Sequence[Report], kind: str, groups: Sequence[str] = ()
) -> dict[str, float]:
    """Summarize the metrics of clients.

    All clients have equal weight. The worst values of a metric are the largest if its name says
    that lower is better, and the smallest otherwise.

    Args:
        reports: One for each client.
        kind: The kind of evaluation.
        groups: The name of each report's group; without them there are no means by group.

    Returns:
        `<kind>/<name>`, the mean of each metric. Where a metric is no loss and no perplexity, of
        which a few values would dominate, also its standard deviation `<kind>/<name>_std`, the mean
        of the worst tenth `<kind>/<name>_worst10`, and the means by group `<kind>/<name>/<group>`.
    """
    metrics: dict[str, float] = {}
    names = sorted({name for report in reports for name in report.metrics})
    for name in names:
        positions = [i for i, report in enumerate(reports) if name in report.metrics]
        values = np.array([reports[i].metrics[name] for i in positions])
        metrics[f"{kind}/{name}"] = float(values.mean())
        if name.endswith("loss") or name.startswith("perplexity"):
            continue

        worst_first = np.sort(values)[:: -1 if lower_is_better(name) else 1]
        worst = worst_first[: max(1, int(np.ceil(WORST * len(values))))]
        if np.isnan(values).any():
            worst = values  # NaN is sorted last, and would not count among the worst
        metrics[f"{kind}/{name}_std"] = float(values.std())
        metrics[f"{kind}/{name}_worst10"] = float(worst.mean())

        if groups:
            group_of = np.array([groups[i] for i in positions])
            for group in dict.fromkeys(group_of.tolist()):
                metrics[f"{kind}/{name}/{group}"] = float(values[group_of == group].mean())
    return metrics
