"""The local training of K clients of one group, side by side.

A client's bits depend neither on K nor on the other clients: every operator acts on each client's
part alone, and a pack smaller than the `floor` is padded.
"""

import logging
from typing import Any

import torch
from lightfed_kernels import apply_mask_

from lightfed.local.logbook import reset_metrics
from lightfed.local.packed.forward import PackedForward, Views
from lightfed.local.packed.steps.captured import CapturedSteps
from lightfed.local.packed.steps.packing import Packing, draws
from lightfed.local.packed.steps.report import PackResult
from lightfed.local.packed.steps.steppers import PackedStepper
from lightfed.local.packed.steps.tensors import Members, PackTensors
from lightfed.local.session import Autocast
from lightfed.state.rows import LiveModule, Row
from lightfed.utils.rng import torch_states
from lightfed.utils.stopwatch import Stopwatch

log = logging.getLogger(__name__)


class PackedSession:
    """Trains K clients in one module."""

    def __init__(
        self, live: LiveModule, packing: Packing, *, context: Autocast | None, name: str
    ) -> None:
        assert packing.stepper is not None
        module: Any = live.module
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        self._module = module
        self._span = live.layout.floats.span(live.layout.parameters)
        self._forward = PackedForward(module, live.layout, trained, context=context)
        self._stepper: PackedStepper = packing.stepper
        self._floor, self._fused = packing.floor, packing.fused
        self._recorded: CapturedSteps | None = None
        if packing.fused is not None and packing.recorder is not None:
            self._recorded = CapturedSteps(
                self._forward, live.layout, packing.fused, packing.recorder,
                floor=packing.floor, most=packing.most, draws=draws(module),
            )  # fmt: skip
        self._name, self._said = name, ""

    def train(self, rows: Row, members: Members, *, lr: float | None, shared: Views) -> PackResult:
        """Train K rows (K, P) and (K, Q) in place, in the order of the members.

        `lr` None keeps the optimiser's own rate. `shared` are buffers that are neither in a row nor
        a client's own.
        """
        stopwatch = Stopwatch(rows.floats.device)
        if not self._module.training:
            self._module.train()
        reset_metrics(self._module)
        sizes = members.batches.sizes
        stepper, recorded = self._ways(members)
        if recorded is not None:
            pack = recorded.begin(rows, members, shared)
        else:
            pack = PackTensors(
                self._forward, rows, members, members.buffers, shared,
                steps=sizes.shape[1], floor=self._floor,
            )  # fmt: skip
        values = self._forward.trainable(pack.views)
        hooked = any(hook is not None for hook in members.hooks)
        states = torch_states(rows.floats.device) if hooked else []
        stepper.reset(pack.rows.floats, values, members, span=self._span, lr=lr)
        try:
            for step, active in enumerate((sizes > 0).sum(0).tolist()):
                if step in members.phases:
                    self._forward.train_only(members.phases[step])
                    stepper.train_only(members.phases[step])
                if recorded is not None:
                    recorded.step(step, active)
                else:
                    self._step(stepper, pack, step, active)
        finally:
            self._forward.train_only(None)
            stepper.finish()
        if hooked and torch_states(rows.floats.device) != states:
            raise NotImplementedError("local_gradient draws from a generator of all clients")
        pack.put_buffers_back()
        losses = pack.losses
        if recorded is not None:
            pack.unload(rows)
            losses = losses[: sizes.shape[0], : sizes.shape[1]].clone()
            if recorded.failure:
                recorded.release()
                self._say(recorded.failure)
        for place, mask in enumerate(members.masks):
            if mask is not None:  # ASPG has put its iterates into the rows
                apply_mask_(rows.floats[place], mask)
        stopwatch.stop()
        norms = torch.linalg.vector_norm(rows.floats, dim=1)
        return PackResult(members.clients, sizes, losses, pack.logged, norms, stopwatch)

    def _ways(self, members: Members) -> tuple[PackedStepper, CapturedSteps | None]:
        """The stepper of some sessions, and what replays their steps, if anything does."""
        if self._fused is None:
            return self._stepper, None
        why = self._fused.unfit(members)
        if why:
            if self._recorded is not None:
                self._say(why)
            return self._stepper, None
        recorded = self._recorded
        return self._fused, None if recorded is None or recorded.failure else recorded

    def _say(self, why: str) -> None:
        """Warn of steps that are not replayed, once for each reason."""
        if why and why != self._said:
            log.warning("group %s: its steps are not captured: %s", self._name, why)
            self._said = why

    def _step(self, stepper: PackedStepper, pack: PackTensors, step: int, active: int) -> None:
        stepper.step(pack.gradients(step, active), active)
        if stepper.masks:
            return
        for place, mask in enumerate(pack.members.masks[:active]):
            if mask is not None:
                apply_mask_(pack.rows.floats[place], mask)
