"""Code of a user's own that raises, or returns what it should not."""

from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightfed import Fleet
from lightfed.algorithms.fedavg import FedAvg
from lightfed.data.dataset import Dataset, Samples, Split, Transform
from lightfed.data.partition.schemes import Iid
from lightfed.data.transforms import Functions
from lightfed.datasets.vision import Digits


class Raises(Digits):
    @override
    def load(self, split: Split) -> Samples:
        raise RuntimeError("the disk is on fire")


class Missing(Digits):
    @override
    def load(self, split: Split) -> Samples:
        return torch.load("nowhere.pt")  # type: ignore[no-any-return]


class Unmade(Digits):
    def __init__(self) -> None:
        super().__init__()
        raise KeyError("no such setting")


class Returns(Digits):
    """What `load` returns instead of samples: an expression of them."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    @override
    def load(self, split: Split) -> Samples:
        found = super().load(split)
        return eval(self._what, {"x": found.x, "y": found.y, "Samples": Samples})  # type: ignore[no-any-return]


class Unnamed(Dataset):
    """It lacks `classes`, and `input_shape`."""

    transform = None  # type: ignore[assignment]

    @override
    def load(self, split: Split) -> Samples:
        return Samples(torch.zeros(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64))


class Normalised(Digits):
    def __init__(self, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self._as = Transform(tuple(mean), tuple(std))

    @property
    @override
    def transform(self) -> Transform:
        return self._as


class Transforms(Digits):
    def _raises(self, x: Tensor) -> Tensor:
        raise KeyError("no transform")

    @property
    @override
    def transform(self) -> Functions:  # type: ignore[override]
        return Functions(self._raises, self._raises)


class Deals(Iid):
    @override
    def _owners(self, task: Any) -> np.ndarray:
        return np.zeros(3)[[7]]


class Linear(L.LightningModule):
    """A client that lacks what the others define."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


class Net(Linear):
    """A client that works."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", self.training_step(batch, batch_idx))


class ValidationRaises(Net):
    @override
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("cannot validate")


class LogsText(Net):
    @override
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", "low")  # type: ignore[arg-type]


class LogsVector(Net):
    @override
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("logits", self(batch[0]))


class TrainingLogsVector(Net):
    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("logits", self(batch[0]))
        return super().training_step(batch, batch_idx)


class TrainsOthers(Net):
    @override
    def configure_optimizers(self) -> Any:
        return SGD(nn.Linear(3, 3).parameters(), lr=0.1)


class Rounds(FedAvg):
    @override
    def round(self, fed: Fleet, t: int) -> None:
        raise IndexError("no such round")


class Calls(L.Callback):
    """It raises in the hook of this name, when it has been called so many times."""

    hears = "rounds"

    def __init__(self, hook: str, after: int = 0) -> None:
        self._left = after
        setattr(self, hook, self._raise)

    def _raise(self, *args: Any, **kwargs: Any) -> None:
        self._left -= 1
        if self._left < 0:
            raise LookupError("no such thing")


class Falls(LRScheduler):
    @override
    def get_lr(self) -> list[float]:
        return [0.1 if self.last_epoch < 2 else {}["rate"]]
