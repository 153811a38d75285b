"""How a group is packed, and whether its steps are fused and captured."""

from dataclasses import dataclass, replace
from typing import Literal

import lightning.pytorch as L
import torch
from torch import nn

from lightfed.local.client_group import GroupState
from lightfed.local.optimizer import Stepper
from lightfed.local.packed.forward import Losses, graph_of
from lightfed.local.packed.steps.fused import FusedStepper
from lightfed.local.packed.steps.optimizers import fused_stepper
from lightfed.local.packed.steps.recorder import Recorder, recorder_of
from lightfed.local.packed.steps.steppers import PackedStepper
from lightfed.utils.rng import DeviceStreams, streams

Capture = Literal["auto", "off"] | bool


@dataclass(frozen=True)
class Packing:
    """How a group is packed.

    Attributes:
        most: clients of the largest pack; 0 for one after the other.
        floor: fewest clients whose bits do not depend on how many there are.
        stepper: of K rows; None for one after the other.
        reason: why the clients train one after the other; empty if they do not.
        fused: steps K rows in one pass, where the sessions allow it; None where they cannot.
        recorder: records steps; None if they are not captured.
        eager: why steps are not captured; empty if they are.
    """

    most: int = 0
    floor: int = 1
    stepper: PackedStepper | None = None
    reason: str = ""
    fused: FusedStepper | None = None
    recorder: Recorder | None = None
    eager: str = ""

    @property
    def matrices(self) -> int:
        """Copies of a pack's rows that such steps keep, and others do not."""
        if self.fused is None:
            return 0
        return self.fused.matrices + (self.recorder is not None)


def on_device(
    packing: Packing,
    state: GroupState,
    stepper: Stepper,
    tried: Losses,
    *,
    pull: float | None,
    capture: Capture,
) -> Packing:
    """The packing with steps that a device runs faster, where it has recorded ones.

    Args:
        packing: of the group.
        state: the group.
        stepper: of its sessions.
        tried: a training step.
        pull: of the algorithm to the model received; None if it changes gradients otherwise.
        capture: as configured.
    """
    recorder = recorder_of(state.store.device)
    if recorder is None:
        return replace(packing, eager="no CUDA device")
    why = _why_not_fused(state.module, tried, state.store.device)
    if not why and pull is None:
        why = "the algorithm changes gradients in Python"
    fused = why or fused_stepper(stepper, state.layout, state.live.trainable, pull=pull or 0.0)
    if isinstance(fused, str):
        return replace(packing, eager=fused)
    packing = replace(packing, fused=fused)
    if capture == "off":
        return replace(packing, eager="model.capture: off")
    return replace(packing, recorder=recorder)


def draws(module: nn.Module) -> bool:
    """Whether a network draws in training."""
    return any(isinstance(part, nn.modules.dropout._DropoutNd) for part in module.modules())


def _why_not_fused(module: L.LightningModule, tried: Losses, device: torch.device) -> str:
    if graph_of(module) is None:
        return "its training step runs in Python"
    if draws(module) and not isinstance(streams([0], device), DeviceStreams):
        return "the host draws for dropout"
    found = [gradient for gradient in tried.gradients if gradient is not None]
    return "" if len(found) == len(list(module.parameters())) else "a parameter has no gradient"
