"""The data and the amount of work of sessions: data module, local epochs and steps."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

from torch import Tensor, nn

from lightfed.data.batches import PackBatches
from lightfed.data.datamodule import FederatedDataModule
from lightfed.utils.counts import rounded_down, rounded_up
from lightfed.utils.errors import require
from lightfed.utils.rng import derive_seed, torch_generator
from lightfed.utils.stopwatch import Timings


@dataclass(frozen=True)
class Phase:
    """A part of a session in which some parameters are trained and the others are frozen.

    Neither weight decay nor a pull moves frozen parameters, and they keep their momentum: all
    phases of a session share one optimiser. Buffers, such as BatchNorm statistics, follow every
    batch. Sessions in separate calls of `Fleet.train` start with a fresh optimiser.

    Attributes:
        trained: name prefixes of the parameters to train, such as "net.head."; all if empty.
        epochs: local epochs.
        steps: local steps instead of epochs.
    """

    trained: Sequence[str] = ()
    epochs: int = 1
    steps: int | None = None

    def parameters(self, module: nn.Module) -> list[Tensor]:
        """The parameters of a module that are trained; a UserError if a prefix has none."""
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for prefix in self.trained:
            fits = any(name.startswith(prefix) for name in named)
            found = f"a model without trainable parameters below {prefix}"
            require(fits, "model.clients", found, f"it has {', '.join(named)}")
        return [p for name, p in named.items() if name.startswith(tuple(self.trained) or "")]


@dataclass(frozen=True)
class LocalWork:
    """The length of a session and the sampling of clients.

    Attributes:
        fraction: share of the clients in a round (ceil), unless `clients_per_round` is set.
        clients_per_round: number of clients in a round.
        epochs: local epochs per session.
        steps: local steps instead of epochs.
        limit: maximum batches per session, or per phase (int), or share of them (float).
    """

    fraction: float = 1.0
    clients_per_round: int | None = None
    epochs: int = 1
    steps: int | None = None
    limit: int | float | None = None

    def sampled(self, clients: int) -> int:
        """The number of clients in a round."""
        return self.clients_per_round or rounded_up(self.fraction * clients)

    def check(self, clients: int) -> None:
        """Validate the values; a UserError names the key."""
        count = self.clients_per_round
        found, fix = f"{self.fraction} is outside (0, 1]", "give the share of clients in a round"
        require(0 < self.fraction <= 1, "model.fraction", found, fix)
        fits, found = count is None or 1 <= count <= clients, f"{count} of {clients} clients"
        require(fits, "model.clients_per_round", found, "give a number from 1 to that")
        one, found = count is None or self.fraction == 1.0, f"{count}, and fraction {self.fraction}"
        require(one, "model.clients_per_round", found, "give one of the two")
        require(self.epochs >= 1, "model.local_epochs", self.epochs, "give at least 1")
        one = self.steps is None or self.epochs == 1
        found = f"{self.steps}, and local_epochs {self.epochs}"
        require(one, "model.local_steps", found, "give one of the two")
        fits = self.steps is None or self.steps >= 1
        require(fits, "model.local_steps", self.steps, "give at least 1")

    def phase(self, phase: "Phase", per_epoch: int) -> int:
        """Number of batches of a phase for a client with `per_epoch` batches per epoch."""
        total = phase.steps if phase.steps is not None else phase.epochs * per_epoch
        return self.limited(total)

    def share(self, clients: int) -> float:
        """The share of the clients in a round."""
        if self.clients_per_round is None:
            return self.fraction
        return min(1.0, self.clients_per_round / clients)

    def batches(self, per_epoch: int) -> int:
        """Number of batches of a session for a client with `per_epoch` batches per epoch."""
        return self.limited(self.steps if self.steps is not None else self.epochs * per_epoch)

    def limited(self, total: int) -> int:
        """The number of batches of a session, or of one of its phases, cut at the limit."""
        if isinstance(self.limit, float):
            return max(1, rounded_down(total * self.limit))
        return total if self.limit is None else min(total, self.limit)

    def samples(self, data: FederatedDataModule, client: int, steps: int | None) -> float:
        """Samples of a session; data in chunks counts all chunks, for each session.

        `steps` are the batches of the session; None for as many as configured.
        """
        per_epoch = data.num_batches(client)
        batches = self.batches(per_epoch) if steps is None else self.limited(steps)
        return data.num_samples(client) * batches / per_epoch


@dataclass(frozen=True)
class RoundPlan:
    """What the loop decides about a round before it starts.

    Attributes:
        lr: learning rate, for optimisers that use it; evaluations after the round use it too.
        tested: clients to test in their sessions, by moment: before training, with the aggregated
            model, or after training.
        suspends: the round may be suspended, because the state it started from is on disk.
        call: index of the call of `Fleet.train` that `known` is about.
        known: sessions that have run before a stop, by client.
        scheduled: settings of optimisers besides the rate that the run's schedule changes, such as
            momentum; for those that use the round's rate.
    """

    lr: float | None = None
    tested: Mapping[Any, Collection[int]] = field(default_factory=dict)
    suspends: bool = False
    call: int = 0
    known: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    scheduled: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SessionPlans:
    """What sessions train on: their batches, in named orders, and their lengths.

    `steps` are batches per session by client, if they differ from the configuration, and `phases`
    parts of every session, if it has several. A session takes `repeat` steps on every batch.
    `shares` are those of its steps that a client does who leaves during its session. `run_seed` is
    that of the run.
    """

    data: FederatedDataModule
    work: LocalWork
    run_seed: int
    timings: Timings
    steps: Mapping[int, int] = field(default_factory=dict)
    phases: Sequence[Phase] = ()
    repeat: int = 1
    shares: Mapping[int, float] = field(default_factory=dict)

    def seed(self, client: int, t: int, purpose: str = "") -> int:
        """The seed of dropout and of other draws from the device's default generator."""
        return derive_seed(self.run_seed, f"{purpose}session", t, client)

    def lengths(self, client: int, t: int) -> list[int]:
        """Number of steps of each part of a client's session in round t."""
        given, work = self.steps.get(client), self.work
        per_epoch = self.data.num_batches(client, t)
        batches = [work.phase(phase, per_epoch) for phase in self.phases]
        if not batches:
            batches = [work.batches(per_epoch) if given is None else work.limited(given)]
        if (share := self.shares.get(client)) is not None:
            left = max(1, rounded_down(share * sum(batches)))
            ends = accumulate(batches, initial=0)
            batches = [min(n, max(0, left - end)) for n, end in zip(batches, ends, strict=False)]
        return [self.repeat * count for count in batches]

    def steps_of(self, client: int, t: int, purpose: str = "") -> int:
        """Number of steps of a session; one with a purpose has the configured length."""
        if purpose:
            return self.work.batches(self.data.num_batches(client, t))
        return sum(self.lengths(client, t))

    def phases_of(self, client: int, t: int, module: nn.Module) -> dict[int, Sequence[Tensor]]:
        """The parameters of a module that are trained from a batch on, by its index."""
        if not self.phases:
            return {}
        starts = accumulate(self.lengths(client, t), initial=0)
        phases = zip(starts, self.phases, strict=False)
        return {start: phase.parameters(module) for start, phase in phases}

    def batches(self, client: int, t: int, left: int, purpose: str = "") -> Iterator[Any]:
        """`left` training batches; their order is named (seed, purpose + "order", t, client)."""
        epochs = self.epochs(client, t, left, purpose)
        return self.timings.each("data", chain.from_iterable(map(self.data.batches, epochs)))

    def epochs(self, client: int, t: int, left: int, purpose: str = "") -> Iterator[Any]:
        """The local epochs of `left` training steps, before their samples are gathered."""
        data, repeat = self.data, 1 if purpose else self.repeat
        order = torch_generator(self.run_seed, f"{purpose}order", t, client)
        augment = None
        if data.augments:
            augment = torch_generator(self.run_seed, f"{purpose}augment", t, client)
        while left > 0:
            limit = rounded_up(left / repeat)
            plan = data.train_plan(client, order=order, augment=augment, limit=limit, t=t)
            assert plan.sizes, f"client {client} has no batch"
            plan = plan.repeated(repeat)
            left -= len(plan.sizes)
            yield plan

    def shape(self, client: int, t: int, *, even: bool) -> tuple[Any, ...]:
        """What sessions that train side by side have in common.

        Phases start with the same batches; if `even`, all batches have as many samples.
        """
        lengths = self.lengths(client, t)
        if not even:
            return (*lengths[:-1],)
        steps, sizes = sum(lengths) // self.repeat, self.data.batch_sizes(client, t)
        return (*lengths, *(sizes[:steps] if steps <= len(sizes) else (-1, *sizes)))

    def side_by_side(self, steps: Mapping[int, int], t: int) -> PackBatches:
        """The training batches of several sessions, whose numbers of batches are given."""
        with self.timings.part("data"):
            plans = [[*self.epochs(client, t, left)] for client, left in steps.items()]
            return PackBatches(self.data.train, plans)
