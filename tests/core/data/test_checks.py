"""What every data set is checked for after loading."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.dataset import Dataset, Samples, Split, Transform
from lightfed.data.partition.schemes import Iid
from lightfed.utils.errors import UserError

GOOD = Samples(torch.zeros(8, 3), torch.arange(8) % 2, torch.zeros(8, dtype=torch.int64))


class Given(Dataset):
    classes = ("a", "b")
    input_shape = (3,)

    def __init__(self, **splits: Samples) -> None:
        self.splits = splits

    @property
    def transform(self) -> Transform:
        return Transform((0.0,), (1.0,))

    def load(self, split: Split) -> Samples:
        return self.splits.get(split, GOOD)


def of(place: int, value: float, like: torch.Tensor) -> torch.Tensor:
    changed = like.clone()
    changed[place] = value
    return changed


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"x": torch.zeros(0, 3), "y": torch.zeros(0, dtype=torch.int64)}, "0 samples"),
        ({"x": GOOD.x[:7]}, "7 samples, 8 labels"),
        ({"y": GOOD.y[:6]}, "8 samples, 6 labels"),
        ({"groups": torch.zeros(5)}, "5 natural owners"),
        ({"y": GOOD.y.float()}, "float32"),
        ({"y": GOOD.y[:, None]}, "(8, 1)"),
        ({"y": of(5, 2, GOOD.y)}, "sample 5 has class 2"),
        ({"y": of(4, -1, GOOD.y)}, "sample 4 has class -1"),
        ({"x": torch.zeros(8, 4)}, "(4,), not (3,)"),
        ({"x": of(6, float("nan"), GOOD.x)}, "sample 6 is not finite"),
        ({"x": of(1, float("inf"), GOOD.x)}, "sample 1 is not finite"),
    ],
)
def test_the_first_bad_sample_is_named(changed: dict[str, Any], found: str, split: str) -> None:
    data = FederatedDataModule(Given(**{split: replace(GOOD, **changed)}), Iid())
    with pytest.raises(UserError) as error:
        data.prepare(clients=2, seed=0, device=torch.device("cpu"))
    assert error.value.key == "data.dataset"
    assert error.value.status == 2
    assert f"{split} split" in error.value.found
    assert found in error.value.found
