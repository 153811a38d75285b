"""How the cohorts nest into the server's models: coverages, made when they are first asked for."""

from collections.abc import Sequence

import torch

from lightfed.core.algorithm import Algorithm, ServerModel
from lightfed.core.cohort import CohortState
from lightfed.core.coverage import Coverage
from lightfed.utils.errors import UserError


class Nesting:
    """What every cohort's rows cover of a server model, with or without its buffers."""

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
        # By the server model's layout, which a coverage holds on to, and whether buffers travel.
        self._made: dict[tuple[int, bool], Coverage] = {}

    def coverage(self, model: ServerModel, *, buffers: bool) -> Coverage:
        """What the cohorts cover of a server model; those that do not fit are left out.

        Raises:
            UserError: none fits, or one in a way that no table describes; names the layer.
        """
        layout = model.layout.floats
        made = self._made.get((id(layout), buffers))
        if made is not None:
            return made
        rows = self._cohorts[0].output_layer(self._num_classes)
        try:
            made = Coverage.build(
                layout,
                [state.layout.floats for state in self._cohorts],
                label_rows=rows if self._algorithm.label_rows else (),
                tensors=None if buffers else model.layout.parameters,
                device=self._device,
            )
        except ValueError as error:
            raise self._refusal("the cohorts do not fit", str(error)) from error
        self._made[id(layout), buffers] = made
        return made

    def fitting(self, model: ServerModel, cohort: int, *, buffers: bool) -> Coverage:
        """The coverage of a server model that a cohort's rows are slices of.

        Raises:
            UserError: they are not; names the cohort and the layer.
        """
        coverage = self.coverage(model, buffers=buffers)
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

    def bytes(self, model: ServerModel, cohort: int, *, buffers: bool) -> float:
        """Client bytes of what a cohort covers: 4 a float, 8 an integer."""
        integers = self._cohorts[cohort].layout.integers.numel if buffers else 0
        floats = self.fitting(model, cohort, buffers=buffers).elements[cohort]
        return 4 * floats + 8 * integers
