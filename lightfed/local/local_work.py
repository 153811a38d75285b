"""The amount of work in a session, and the batches that it trains on."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from math import inf
from typing import Any

from torch import Tensor, nn

from lightfed.data.batches import PackBatches
from lightfed.data.datamodule import FederatedDataModule
from lightfed.utils.counts import rounded_down, rounded_up
from lightfed.utils.errors import UserError
from lightfed.utils.rng import derive_seed, torch_generator
from lightfed.utils.stopwatch import Timings


@dataclass(frozen=True)
class Phase:
    """A part of a session in which some parameters are trained and the others are frozen.

    All phases of a session share one optimizer. Neither weight decay nor a pull moves frozen
    parameters, and they keep their momentum. Buffers, such as BatchNorm statistics, follow every
    batch. Sessions in separate calls of `Fleet.train` start with a fresh optimizer.

    Attributes:
        trained: Prefixes of the names of the parameters to train, such as "net.head."; all
            parameters if it is empty.
        epochs: Number of local epochs.
        steps: Number of local steps, instead of epochs.
    """

    trained: Sequence[str] = ()
    epochs: int = 1
    steps: int | None = None

    def parameters(self, module: nn.Module) -> list[Tensor]:
        """Return the parameters of a module that this phase trains.

        Raises:
            UserError: No trainable parameter has one of the prefixes.
        """
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.trained:
            return list(trainable.values())

        for prefix in self.trained:
            if not any(name.startswith(prefix) for name in trainable):
                raise UserError(
                    "model.clients",
                    f"a model without trainable parameters below {prefix}",
                    f"it has {', '.join(trainable)}",
                )
        prefixes = tuple(self.trained)
        return [p for name, p in trainable.items() if name.startswith(prefixes)]


@dataclass(frozen=True)
class LocalWork:
    """The length of sessions, and how many clients take part in a round.

    Attributes:
        fraction: Share of the clients in a round, rounded up, unless `clients_per_round` is set.
        clients_per_round: Number of clients in a round.
        epochs: Local epochs of a session.
        steps: Local steps of a session, instead of epochs.
        seconds: Virtual seconds of computation in a session, instead of epochs: each client takes
            as many steps as its device does in them. Without devices' numbers of steps, such as in
            a session that serves a test, a session has one epoch.
        limit: The most batches of a session, or of each of its phases, as a number (int) or as a
            share (float).
    """

    fraction: float = 1.0
    clients_per_round: int | None = None
    epochs: int = 1
    steps: int | None = None
    seconds: float | None = None
    limit: int | float | None = None

    def check(self, clients: int, *, unseen: int = 0) -> None:
        """Check the values.

        Args:
            clients: Number of clients of the federation that can take part in a round.
            unseen: Number of those that never do.

        Raises:
            UserError: A value cannot be used; it names the key.
        """
        if not 0 < self.fraction <= 1:
            found = f"{self.fraction} is outside (0, 1]"
            raise UserError("model.fraction", found, "give the share of clients in a round")

        count = self.clients_per_round
        if count is not None and not 1 <= count <= clients:
            found = f"{count} of {clients} clients"
            if unseen:
                found += f" that are not unseen (data.unseen has {unseen})"
            raise UserError("model.clients_per_round", found, "give a number from 1 to that")
        if count is not None and self.fraction != 1.0:
            found = f"{count}, and fraction {self.fraction}"
            raise UserError("model.clients_per_round", found, "give one of the two")

        if self.epochs < 1:
            raise UserError("model.local_epochs", f"{self.epochs}", "give at least 1")
        if self.steps is not None and self.epochs != 1:
            found = f"{self.steps}, and local_epochs {self.epochs}"
            raise UserError("model.local_steps", found, "give one of the two")
        if self.steps is not None and self.steps < 1:
            raise UserError("model.local_steps", f"{self.steps}", "give at least 1")

        if self.seconds is None:
            return
        if not 0 < self.seconds < inf:
            raise UserError("model.local_seconds", f"{self.seconds}", "give seconds above 0")
        if self.steps is not None or self.epochs != 1:
            name = "local_epochs" if self.steps is None else "local_steps"
            found = f"{self.seconds:g}, and {name} {self.steps or self.epochs}"
            raise UserError("model.local_seconds", found, "give one of the two")

    def sampled(self, clients: int) -> int:
        """Return the number of clients in a round, out of so many."""
        if self.clients_per_round:
            return self.clients_per_round
        return rounded_up(self.fraction * clients)

    def share(self, clients: int) -> float:
        """Return the share of the clients in a round, out of so many."""
        if self.clients_per_round is None:
            return self.fraction
        return min(1.0, self.clients_per_round / clients)

    def batches(self, per_epoch: int) -> int:
        """Return the number of batches of a session.

        Args:
            per_epoch: Batches of one epoch of the client.
        """
        if self.steps is not None:
            return self.limited(self.steps)
        return self.limited(self.epochs * per_epoch)

    def phase(self, phase: Phase, per_epoch: int) -> int:
        """Return the number of batches of a phase, for a client with so many in an epoch."""
        if phase.steps is not None:
            return self.limited(phase.steps)
        return self.limited(phase.epochs * per_epoch)

    def limited(self, batches: int) -> int:
        """Return a number of batches, of a session or of one of its phases, cut at the limit."""
        if self.limit is None:
            return batches
        if isinstance(self.limit, float):
            return max(1, rounded_down(batches * self.limit))
        return min(batches, self.limit)

    def samples(self, data: FederatedDataModule, client: int, steps: int | None) -> float:
        """Return the number of samples that a session trains on; data in chunks counts all chunks.

        Args:
            data: The samples of the clients.
            client: Number of the client.
            steps: Batches of the session; None for as many as configured.
        """
        per_epoch = data.num_batches(client)
        batches = self.batches(per_epoch) if steps is None else self.limited(steps)
        return data.num_samples(client) * batches / per_epoch


@dataclass(frozen=True)
class RoundPlan:
    """What the loop decides about a round before it starts.

    Attributes:
        lr: Learning rate of the round, for optimizers that use it. Evaluations after the round use
            it, too.
        tested: Clients to test in their sessions, by moment: before training, with the aggregated
            model, or after training.
        suspends: Whether a signal may stop the round in the middle: the state that it started from
            is on disk.
        call: Index of the call of `Fleet.train` that `known` is about.
        known: Results of the sessions that have run before a stop, by client.
        scheduled: Settings of optimizers that the run's schedule changes besides the learning rate,
            such as momentum. They are for optimizers that use the round's rate.
    """

    lr: float | None = None
    tested: Mapping[Any, Collection[int]] = field(default_factory=dict)
    suspends: bool = False
    call: int = 0
    known: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    scheduled: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SessionPlans:
    """The batches that each session trains on, in a reproducible order.

    Attributes:
        data: The samples of the clients.
        work: The configured length of sessions.
        run_seed: Seed of the run.
        timings: The stopwatch of the run's parts.
        steps: Number of batches in each client's session, where it differs from the configured
            number.
        phases: The parts of a session, for methods that train some layers first.
        repeat: Number of optimizer steps taken on each batch.
        shares: For clients that leave early, the share of their steps that they complete.
    """

    data: FederatedDataModule
    work: LocalWork
    run_seed: int
    timings: Timings
    steps: Mapping[int, int] = field(default_factory=dict)
    phases: Sequence[Phase] = ()
    repeat: int = 1
    shares: Mapping[int, float] = field(default_factory=dict)

    # Placement, packs and sessions each ask for the lengths of all sessions of a round: with tiny
    # networks that takes a noticeable part of the round. Every call of `Fleet.train` has plans of
    # its own, so that nothing has to be forgotten.
    _known_lengths: dict[tuple[int, int], tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def seed(self, client: int, t: int, purpose: str = "") -> int:
        """Return the seed of a session's dropout and of other draws from the default generator."""
        return derive_seed(self.run_seed, f"{purpose}session", t, client)

    def lengths(self, client: int, t: int) -> tuple[int, ...]:
        """Return the number of steps of each phase of a client's session in round t."""
        lengths = self._known_lengths.get((client, t))
        if lengths is None:
            lengths = self._find_lengths(client, t)
            self._known_lengths[client, t] = lengths
        return lengths

    def _find_lengths(self, client: int, t: int) -> tuple[int, ...]:
        """Return what `lengths` returns."""
        batches = self._batches_of_phases(client, t)
        share = self.shares.get(client)
        if share is not None:
            batches = _cut(batches, max(1, rounded_down(share * sum(batches))))
        return tuple(self.repeat * count for count in batches)

    def _batches_of_phases(self, client: int, t: int) -> list[int]:
        """Return the number of batches of each phase, of a client that does not leave."""
        per_epoch = self.data.num_batches(client, t)
        if self.phases:
            return [self.work.phase(phase, per_epoch) for phase in self.phases]
        if client in self.steps:
            return [self.work.limited(self.steps[client])]
        return [self.work.batches(per_epoch)]

    def steps_of(self, client: int, t: int, purpose: str = "") -> int:
        """Return the number of steps of a session; one with a purpose has the configured length."""
        if purpose:
            return self.work.batches(self.data.num_batches(client, t))
        return sum(self.lengths(client, t))

    def phases_of(self, client: int, t: int, module: nn.Module) -> dict[int, Sequence[Tensor]]:
        """Return the parameters to train from a step on, by the number of that step."""
        if not self.phases:
            return {}
        first_steps = accumulate(self.lengths(client, t), initial=0)
        phase_by_step = zip(first_steps, self.phases, strict=False)
        return {step: phase.parameters(module) for step, phase in phase_by_step}

    def batches(self, client: int, t: int, total: int, purpose: str = "") -> Iterator[Any]:
        """Return an iterator over the training batches of a session, on the device.

        Their order is drawn by (seed, purpose + "order", t, client).

        Args:
            client: Number of the client.
            t: The round.
            total: Number of steps; a batch is repeated for several steps if `repeat` says so.
            purpose: What the session serves, unless it is one of the round.
        """
        epochs = self.epochs(client, t, total, purpose)
        batches = chain.from_iterable(map(self.data.batches, epochs))
        return self.timings.each("data", batches)

    def epochs(self, client: int, t: int, total: int, purpose: str = "") -> Iterator[Any]:
        """Yield the local epochs of so many steps, before their samples are gathered."""
        data = self.data
        repeat = 1 if purpose else self.repeat
        order = torch_generator(self.run_seed, f"{purpose}order", t, client)
        augment = None
        if data.augments:
            augment = torch_generator(self.run_seed, f"{purpose}augment", t, client)

        remaining = total
        while remaining > 0:
            most_batches = rounded_up(remaining / repeat)
            epoch = data.train_plan(client, order=order, augment=augment, limit=most_batches, t=t)
            assert epoch.sizes, f"client {client} has no batch"
            epoch = epoch.repeated(repeat)
            remaining -= len(epoch.sizes)
            yield epoch

    def shape(self, client: int, t: int, *, even: bool) -> tuple[Any, ...]:
        """Return what sessions need to have in common to train side by side.

        Their phases start at the same steps. If `even`, all their batches have as many samples.
        """
        lengths = self.lengths(client, t)
        if not even:
            return lengths[:-1]

        # Of a session of several epochs the sizes of one epoch say all.
        batches = sum(lengths) // self.repeat
        sizes = self.data.batch_sizes(client, t)
        return (*lengths, *sizes[:batches])

    def side_by_side(self, steps: Mapping[int, int], t: int) -> PackBatches:
        """Return the training batches of several sessions, of so many steps each."""
        with self.timings.part("data"):
            epochs_by_client = [
                list(self.epochs(client, t, total)) for client, total in steps.items()
            ]
            return PackBatches(self.data.train, epochs_by_client)


def _cut(lengths: Sequence[int], total: int) -> list[int]:
    """Return the lengths of consecutive phases of which only the first `total` batches are done."""
    remaining = total
    cut_lengths = []
    for length in lengths:
        done = min(length, remaining)
        cut_lengths.append(done)
        remaining -= done
    return cut_lengths
