"""Steps of packs that a device replays without Python.

All sessions of a group have their tensors in one place, so that a step recorded in one of them can
be replayed in the others. Steps of one kind run as they are until one is recorded: no batch is
trained on twice, and nothing has to be undone.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from lightfed.data.batches import Resident
from lightfed.local.packed.forward import PackedForward, Views
from lightfed.local.packed.steps.fused import FusedStepper
from lightfed.local.packed.steps.recorder import Body, Recorder
from lightfed.local.packed.steps.tensors import Members, PackTensors, power_of_two
from lightfed.state.rows import ModelLayout, Row
from lightfed.utils.errors import reason
from lightfed.utils.memory import sent
from lightfed.utils.rng import DeviceStreams, Streams

WARM_UP = 2  # steps of a kind before it is recorded
_KINDS = 64  # recorded at most; each holds memory of the device


@dataclass
class _Kind:
    """Steps of as many clients, with batches of one size.

    Attributes:
        active: number of clients.
        size: samples of a batch.
        places: of the clients, padded to those that are run at once; None if there are enough.
        runs: so far, before it was recorded.
        batch: of the step, if it is not gathered within it.
        replay: the recorded step.
    """

    active: int
    size: int
    places: Tensor | None
    runs: int = 0
    batch: list[Tensor] = field(default_factory=list)
    replay: Body | None = None


@dataclass
class _Home:
    """Where the tensors of all sessions are.

    Attributes:
        pack: of most clients so far.
        step: (1,) int64, position of the batch in the sessions.
        index: (steps, K, B) int64, samples of every batch; None if batches are not gathered by it.
        source: of the samples.
        draws: of the clients, if the device draws.
    """

    pack: PackTensors
    step: Tensor
    index: Tensor | None
    source: Resident
    draws: DeviceStreams | None
    kinds: dict[Hashable, _Kind] = field(default_factory=dict)


class CapturedSteps:
    """The steps of a group's packs.

    Args:
        forward: of the group; its network runs by its graph.
        layout: of the rows.
        stepper: of the rows.
        recorder: of the device.
        floor: fewest clients that are run at once.
        most: clients of the largest pack.
        draws: the network draws.

    Attributes:
        failure: why a step could not be recorded; empty if none failed.
    """

    def __init__(
        self,
        forward: PackedForward,
        layout: ModelLayout,
        stepper: FusedStepper,
        recorder: Recorder,
        *,
        floor: int,
        most: int,
        draws: bool,
    ) -> None:
        self._draws = draws
        self._forward, self._layout, self._stepper = forward, layout, stepper
        self._recorder, self._floor, self._most = recorder, floor, most
        self._home: _Home | None = None
        self.failure = ""

    def begin(self, rows: Row, members: Members, shared: Views) -> PackTensors:
        """Copy the sessions of some clients to where steps are recorded."""
        table = members.batches.table()
        home = self._home
        if home is None or not _fits(home, members, table, shared):
            del home
            home = self._home = self._allocate(rows, members, table, shared)
        home.pack.load(rows, members, shared)
        home.step.zero_()
        if home.draws is not None and isinstance(members.draws, DeviceStreams):
            home.draws.load(members.draws)
            members.draws = home.draws  # of steps that are not recorded, too
        if table is not None and home.index is not None:
            part = home.index[tuple(slice(size) for size in table.shape)]
            part.copy_(sent(torch.from_numpy(table), part.device))
        return home.pack

    def release(self) -> None:
        """Give back the memory of all sessions."""
        self._home = None

    def _allocate(
        self, rows: Row, members: Members, table: np.ndarray | None, shared: Views
    ) -> _Home:
        device, before = rows.floats.device, self._home
        clients, steps = map(power_of_two, members.batches.sizes.shape)
        clients = min(clients, self._most)
        size = 0 if table is None else table.shape[2]
        if before is not None:
            clients, steps = map(max, (clients, steps), before.pack.losses.shape)
            size = max(size, 0 if before.index is None else before.index.shape[2])
        self._home = before = None  # its memory is used again
        room = Row(
            self._layout.floats.new_row(clients, device=device),
            rows.integers.new_zeros(clients, rows.integers.shape[1]),
        )
        pack = PackTensors(
            self._forward,
            room,
            members,
            {n: v.new_zeros(clients, *v.shape[1:]) for n, v in members.buffers.items()},
            {name: value.clone() for name, value in shared.items()},
            steps=steps,
            floor=self._floor,
        )
        index = None
        if table is not None:
            index = torch.zeros(steps, clients, size, dtype=torch.int64, device=device)
        step = torch.zeros(1, dtype=torch.int64, device=device)
        draws = None
        if self._draws:
            keys = torch.zeros(clients, dtype=torch.int64, device=device)
            draws = DeviceStreams(keys, torch.zeros_like(keys))
        return _Home(pack, step, index, members.batches.source, draws)

    def step(self, step: int, active: int) -> None:
        """Train the first `active` clients on their batch at this position."""
        home = self._home
        assert home is not None
        batches = home.pack.members.batches
        sizes = set(batches.sizes[:active, step].tolist())
        if len(sizes) > 1 or (home.draws is not None and active < self._floor):
            self._stepper.step(home.pack.gradients(step, active), active)
            home.step.add_(1)
            return
        kind = self._kind(home, active, *sizes)
        if home.index is None:
            with home.pack.members.timings.part("data"):
                _stage(kind, batches.batch(home.pack.padded(range(active)), step))
        self._run(kind, partial(self._body, home, kind))
        if kind.replay is None:
            kind.batch = []

    def _kind(self, home: _Home, active: int, size: int) -> _Kind:
        key = (active, size, self._stepper.key)
        if key not in home.kinds:
            places = None
            if active < self._floor:
                padded = torch.tensor(home.pack.padded(range(active)))
                places = sent(padded, home.step.device)
            home.kinds[key] = _Kind(active, size, places)
        return home.kinds[key]

    def _run(self, kind: _Kind, body: Body) -> None:
        assert self._home is not None
        if kind.replay is not None:
            kind.replay()
            return
        recorded = sum(other.replay is not None for other in self._home.kinds.values())
        if self.failure or recorded >= _KINDS:
            body()
        elif kind.runs < WARM_UP:
            kind.runs += 1
            with self._recorder.warm():
                body()
        else:
            self._record(kind, body)

    def _record(self, kind: _Kind, body: Body) -> None:
        """Record a step and run it; without a record if that fails."""
        try:
            kind.replay = self._recorder.record(body)
        except Exception as error:  # whatever the device, its libraries or a hook do not allow
            self.failure = reason(error)[:200]
        (kind.replay or body)()

    def _body(self, home: _Home, kind: _Kind) -> None:
        """One step, of tensors that stay where they are."""
        pack, active = home.pack, kind.active
        views = pack.first(active) if kind.places is None else pack.take(kind.places)
        found = self._forward.losses(
            views,
            kind.batch if home.index is None else self._gathered(home, home.index, kind),
            0,
            shared=pack.shared,
            draws=cache(partial(_drawn, home, active)),
            real=None if kind.places is None else active,
        )
        if kind.places is not None:
            pack.keep(views, kind.places[:active])
        losses = found.values.to(pack.losses.dtype).unsqueeze(1)
        pack.losses[:active].index_copy_(1, home.step, losses)
        self._stepper.step(found.gradients, active)
        home.step.add_(1)

    def _gathered(self, home: _Home, index: Tensor, kind: _Kind) -> list[Tensor]:
        """The batch of the step, by its position on the device."""
        mine = index.index_select(0, home.step)[0, : kind.active, : kind.size]
        mine = mine if kind.places is None else mine.index_select(0, kind.places)
        parts = home.source.take(mine.reshape(-1), None)
        return [part.unflatten(0, mine.shape) for part in parts]


def _fits(home: _Home, members: Members, table: np.ndarray | None, shared: Views) -> bool:
    """Whether sessions have room where those before them were, and the same tensors."""
    pack, (clients, steps) = home.pack, members.batches.sizes.shape
    if clients > pack.losses.shape[0] or steps > pack.losses.shape[1]:
        return False
    if (table is None) != (home.index is None) or home.source is not members.batches.source:
        return False
    if table is not None and home.index is not None and table.shape[2] > home.index.shape[2]:
        return False
    return pack.buffers.keys() == members.buffers.keys() and pack.shared.keys() == shared.keys()


def _stage(kind: _Kind, batch: Sequence[Tensor]) -> None:
    """Copy a batch to where the step reads it."""
    if not kind.batch:
        kind.batch = [torch.empty_like(part) for part in batch]
    for place, part in zip(kind.batch, batch, strict=True):
        place.copy_(part)


def _drawn(home: _Home, active: int) -> Streams:
    assert home.draws is not None, "a network without dropout draws"
    return home.draws.part(range(active))
