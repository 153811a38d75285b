"""How the cohorts nest into the server's models: coverages, made when they are first asked for."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from lightfed.core.algorithm import Algorithm, ServerModel
from lightfed.core.cohort import CohortState
from lightfed.core.coverage import Coverage
from lightfed.core.parts import shared_floats
from lightfed.utils.errors import UserError


@dataclass(frozen=True)
class Parts:
    """What travels of a server model.

    Attributes:
        buffers: the float and integer buffers, too.
        tensors: names of the only tensors that do; None for all.
    """

    buffers: bool = True
    tensors: frozenset[str] | None = None

    @classmethod
    def of(cls, *, buffers: bool, tensors: Collection[str] | None) -> "Parts":
        return cls(buffers, None if tensors is None else frozenset(tensors))

    @property
    def integers(self) -> bool:
        """Integer buffers go with the whole model only."""
        return self.buffers and self.tensors is None


class Nesting:
    """What every cohort's rows cover of a server model, or of a part of it."""

    def __init__(
        self,
        cohorts: Sequence[CohortState],
        algorithm: Algorithm,
        *,
        num_classes: int,
        device: torch.device,
    ) -> None:
        self._cohorts = cohorts
        self._algorithm = algorithm
        self._num_classes = num_classes
        self._device = device
        # By the server model's layout, which a coverage holds on to, and what travels of it.
        self._made: dict[tuple[int, Parts], Coverage] = {}

    def coverage(self, model: ServerModel, parts: Parts) -> Coverage:
        """What the cohorts cover of a server model; those that do not fit are left out.

        Raises:
            UserError: none fits, or one in a way that no table describes; names the layer.
        """
        layout = model.layout.floats
        made = self._made.get((id(layout), parts))
        if made is not None:
            return made
        buffers = {entry.name for entry in layout.entries[model.layout.parameters :]}
        names = {entry.name for entry in layout} if parts.tensors is None else parts.tensors
        rows = (*self._cohorts[0].output_layer(self._num_classes), *model.layout.label_rows)
        try:
            made = Coverage.build(
                layout,
                [shared_floats(model, i, c.layout) for i, c in enumerate(self._cohorts)],
                tensors=names if parts.buffers else names - buffers,
                groups=dict(model.layout.groups),
                label_rows=rows if self._algorithm.label_rows else (),
                device=self._device,
            )
        except ValueError as error:
            raise self._refusal("the cohorts do not fit", str(error)) from error
        self._made[id(layout), parts] = made
        return made

    def fitting(self, model: ServerModel, cohort: int, parts: Parts) -> Coverage:
        """The coverage of a server model that a cohort's rows are slices of.

        Raises:
            UserError: they are not; names the cohort and the layer.
        """
        coverage = self.coverage(model, parts)
        if cohort in coverage.unfit:
            name = self._cohorts[cohort].name
            raise self._refusal(f"cohort {name} does not fit", coverage.unfit[cohort])
        return coverage

    def _refusal(self, who: str, why: str) -> UserError:
        return UserError(
            "model.cohorts",
            f"{who} into the server model: {why}",
            f"use models that {type(self._algorithm).__name__} can nest",
        )

    def bytes(self, model: ServerModel, cohort: int, parts: Parts) -> float:
        """Client bytes of what a cohort covers: 4 a float, 8 an integer."""
        integers = model.layout.integers.numel if parts.integers else 0
        floats = self.fitting(model, cohort, parts).elements[cohort]
        return 4 * floats + 8 * integers
