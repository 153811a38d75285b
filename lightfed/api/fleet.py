"""The clients of a federation as an algorithm sees them: participants, send, train, merge.

Every rank runs the same algorithm on its own Fleet and holds its share of the clients. The methods
of a Fleet hide the placement. `Messenger` has those that send and average, `Clients` those that
look at single clients.
"""

import io
import math
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from lightfed_kernels import FIXED_LIMIT
from torch import Tensor
from typing_extensions import override

from lightfed.api import client_states
from lightfed.api.failures import Outcomes, Verdict, judge
from lightfed.api.messenger import Messenger, Weights
from lightfed.api.participants import participants
from lightfed.local.client_metrics import weighted_means
from lightfed.local.local_work import Phase, RoundPlan
from lightfed.local.session import Report
from lightfed.local.sessions.rank_sessions import Training, Waves
from lightfed.state.chain import Saved
from lightfed.state.client_state import Kept
from lightfed.state.rows import Moment
from lightfed.state.server_model import ServerModel, part_of, with_prefix
from lightfed.utils.errors import require

__all__ = ["Fleet", "Weights"]

T = TypeVar("T")


class _Pickler(pickle.Pickler):
    """Pickles a view of a row without the rows of all other clients, whose memory it shares."""

    @override
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        return obj.detach().clone().__reduce_ex__(pickle.DEFAULT_PROTOCOL)


class Fleet(Messenger):
    """The clients in rounds, as an algorithm sees them; construction ends with its `setup`.

    Args:
        *args: client groups, algorithm and data, as `PlacedClients`.
        rounds: number of rounds of the run, if known.
        max_failed: number of sessions of a round that may fail; by default all but one may raise.
        **settings: as `Messenger` and `PlacedClients`.

    Attributes:
        fruitless_rounds: number of rounds in a row, up to now, without a usable update.
        metrics: of this round.
        tests: reports of the tests in this round's sessions, on all ranks.
        plan: of this round, or of the last one.
    """

    def __init__(
        self, *args: Any, rounds: int | None = None, max_failed: int | None = None, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.rounds, self.max_failed = rounds, max_failed
        self.fruitless_rounds = 0
        self.metrics: dict[str, float] = {}
        self.tests: dict[Moment, list[Report]] = {}
        self.plan = RoundPlan()
        self.training = Training(self)
        self.algorithm.setup(self)
        own = "models" in {**vars(self.algorithm), **self.algorithm._modules}
        found = f"{type(self.algorithm).__name__} has an attribute `models`"
        require(not own, "model.algorithm", found, "rename it: a method of that name is a hook")

    def participants(self, t: int) -> list[int]:
        """S_t: clients drawn uniformly without replacement, ascending; the same on every rank."""
        return participants(self.work, self.clients, seed=self.seed, t=t)

    def assign(self, groups: Mapping[int, int]) -> None:
        """Put stateless clients into other groups for this round (HeteroFL's dynamic levels)."""
        assert not self.algorithm.stateful, "a client that keeps its row cannot change its shape"
        self._assigned = dict(groups)

    def new_model(self, group: int = 0) -> ServerModel:
        """A server model in the layout of a group, with its initial values."""
        state = self.groups[group]
        return ServerModel(state.layout, state.initial.clone()).to(self.device)

    def new_part(self, prefix: str) -> ServerModel:
        """A server model of the first group's tensors with this name prefix.

        Initial values are that group's; groups may have more tensors.

        Raises:
            UserError: a group lacks one of them, or has it in another shape.
        """
        names = with_prefix(self.groups[0].layout, prefix)
        return self.new_common([names] * len(self.groups))

    def new_common(self, names: Sequence[Sequence[str]]) -> ServerModel:
        """A server model of tensors that groups have by different names.

        Initial values are those of the first group.

        Args:
            names: per group; the i-th name of each group is the same tensor.

        Raises:
            UserError: a group lacks one of them, or has it in another shape.
        """
        state = self.groups[0]
        model = part_of(state.layout, state.initial, names).to(self.device)
        for group in range(len(self.groups)):
            self.check_nested(model, group)
        return model

    def keep(self, name: str, *, durable: bool = True) -> Kept:
        """Declare a tensor that clients keep in addition to their rows; call it in `setup`.

        Args:
            name: in checkpoints.
            durable: it outlives its round; see `Kept`. Stateful algorithms only.
        """
        assert name not in self.kept, f"{name} is kept already"
        found, fix = f"keeps {name}, but is not stateful", "set stateful = True in its class"
        require(self.algorithm.stateful or not durable, "model.algorithm", found, fix)
        place = torch.device("cpu") if self.host_rows else self.device
        self.kept[name] = Kept(name, place=place, device=self.device, durable=durable)
        return self.kept[name]

    def keep_masks(self) -> Kept:
        """A mask per client: packed words (P / 32,) of the elements that it holds and trains.

        The rest of the row stays 0. Only covered values are stored. A dense client has no mask.
        """
        self.masks = self.keep("mask")
        return self.masks

    def train(
        self,
        clients: Sequence[int],
        t: int,
        *,
        steps: Mapping[int, int] | None = None,
        phases: Sequence[Phase] = (),
        tally: Mapping[str, Mapping[int, Tensor]] | None = None,
    ) -> None:
        """Train every client locally, in waves; metrics are means weighted by samples.

        A client whose session raises, or whose update is not finite, is named in the log and left
        out of this round's merges.

        Args:
            clients: clients to train.
            t: the round.
            steps: batches per session by client; as configured by default.
            phases: parts of every session, one after the other, instead of `steps`.
            tally: integers that clients keep after their sessions, such as a `Kept`; their sum over
                the clients of all ranks is a metric of that name.

        Raises:
            Suspended: a signal asked the run to stop before all sessions finished.
            UserError: too many clients failed, or all.
        """
        self._open(clients)
        waves = max(Counter(self._owner[k] for k in clients).values(), default=0)
        training = self.training
        reports, tallies = training.sessions(
            clients, waves, t, tally or {}, steps=steps, phases=phases
        )
        self.metrics |= tallies
        trained = [report.client for report in reports]
        flops = [3 * report.flops * report.samples + report.besides for report in reports]
        self.ledger.computed(trained, flops)
        for report, group in zip(reports, self.groups_of(trained), strict=True):
            self.rates.add(group, samples=report.samples, seconds=report.seconds)
        verdict = self._judge(reports, t)
        self._outcomes.add(reports, verdict)
        good = [r for r in reports if verdict.usable[r.client]]
        self.metrics |= weighted_means(good)
        self.metrics["participants"] = float(len(reports))
        self.metrics["excluded"] = float(len(reports) - len(good))
        for moment, tests in training.tests.items():
            self.tests.setdefault(moment, []).extend(tests)

    def _judge(self, reports: Sequence[Report], t: int) -> Verdict:
        """Which updates can be used; called by every rank.

        The others are named in the log. A client that keeps a non-finite row is reset.
        """
        limit = FIXED_LIMIT if self.accumulate == "fixed" else math.inf
        verdict = judge(reports, t, limit=limit)
        if self.algorithm.stateful:
            for client in self.mine(verdict.not_finite):
                client_states.reset(self, client)
        self.fruitless_rounds = verdict.check(
            t, allowed=self.max_failed, fruitless=self.fruitless_rounds
        )
        for warning in verdict.warnings:
            self.warn(warning)
        return verdict

    def gradient(self, client: int, t: int) -> Tensor:
        """(P,) on the device: the gradient of one training batch at the client's row, in eval mode.

        Drawn by (seed, "gradient", t, client); the client must be on this rank. Its FLOPs count
        with the client's next session in the round, as three dense forward passes.
        """
        return self.training.gradient(client, self._row_here(client), t)

    def loss(self, client: int, t: int) -> float:
        """The mean loss of the client's training samples at its row, in eval mode, not augmented.

        After `send` and before `train` it is that of the model received. The client must be on this
        rank; `collect` gives all ranks those of all. FLOPs count as for `gradient`, once.
        """
        return self.training.loss(client, self._row_here(client), t)

    def collect(self, mine: Mapping[int, T]) -> dict[int, T]:
        """Gather a value per client from every rank, by client, on all ranks.

        They are copies, on one rank too: otherwise a view of a row would train on.
        """
        file = io.BytesIO()
        _Pickler(file).dump(dict(mine))
        every = self.ranks.gather([file.getvalue()])
        return dict(sorted(item for part in every for item in pickle.loads(part).items()))

    def usable(self, client: int) -> bool:
        """Whether the client's session of this round gave a finite update."""
        return bool(self._outcomes.contributing([client]))

    def states(self) -> Saved | None:
        """The state of this rank's clients for a checkpoint; None for a stateless algorithm."""
        return client_states.saved(self) if self.algorithm.stateful else None

    def load_states(self, shards: Sequence[Saved]) -> None:
        """Load this rank's clients from a checkpoint's shards, written on any number of ranks."""
        for shard in shards if self.algorithm.stateful else ():
            states = client_states.by_client(shard)
            for client in self.mine(list(states)):
                client_states.restore(self, client, states[client])

    def group_costs(self) -> Tensor:
        """(groups, 3) bytes up, bytes down and FLOPs of each group's clients since the start."""
        ends = np.cumsum([0] + [state.group.count for state in self.groups])
        return torch.from_numpy(np.add.reduceat(self.ledger.totals, ends[:-1]))

    def open_round(self, plan: RoundPlan | None = None, waves: Waves | None = None) -> None:
        """Begin a round. Its participants are open: this frees the rows of stateless clients.

        The plan is that of the last round by default; `waves` as of `Training.start`.
        """
        self.plan = plan or self.plan
        self.training.start(waves)
        self.metrics, self.tests, self._assigned = {}, {}, {}
        self._outcomes, self.moved = Outcomes(), 0
        for kept in self.kept.values():
            if not kept.durable:
                kept.clear()
        if not self.algorithm.stateful:
            self._owner, self._packs = {}, {}
            self._inbox.clear()

    def close_round(self) -> dict[str, float]:
        """The round's metrics and sums, the same on every rank."""
        return self.metrics | self.ledger.close_round()
