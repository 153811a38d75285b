"""`FromTorch`: data sets and transforms of torch, and data modules."""

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from PIL import Image
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)
from torchvision.datasets import FakeData
from torchvision.transforms import v2

from lightfed.data.batches import ResidentConverted, resident
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.dataset import Samples, Transform, moments
from lightfed.data.partition.schemes import Dirichlet, Iid, Natural
from lightfed.data.torch_data import FromTorch
from lightfed.data.transforms import Functions, transformed
from tests.datasets import kit
from tests.datasets.kit import prepared
from tests.small import CPU

IMAGES = {"image_size": (3, 10, 8), "num_classes": 3}
FIXED = v2.Compose([v2.Resize(6), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [2])])
RANDOM = v2.Compose([v2.RandomCrop(6), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32)])


def pairs(count: int, *, seed: int = 0) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, torch.arange(count) % 2)


def test_tensors_stay_as_they_are() -> None:
    train, test = pairs(12), pairs(6, seed=1)
    data = FromTorch(train, test, groups=["b", "a", "a"] * 4)
    loaded = data.load("train")
    assert torch.equal(loaded.x, train.tensors[0])
    assert torch.equal(loaded.y, train.tensors[1])
    assert loaded.groups is not None
    assert loaded.groups.tolist() == [1, 0, 0] * 4
    assert (data.classes, data.input_shape, data.num_classes) == (("0", "1"), (4,), 2)
    module = prepared(data, Natural())
    assert sorted(module.num_samples(client) for client in range(2)) == [4, 8]
    assert torch.equal(module.global_test_batch(0)[0], test.tensors[0])


def test_images_of_torchvision_are_standardised() -> None:
    train, test = FakeData(20, **IMAGES), FakeData(10, **IMAGES, random_offset=99)
    data = FromTorch(train, test, classes=["ant", "bee", "cow"])
    loaded = data.load("train")
    assert (loaded.x.dtype, loaded.x.shape) == (torch.uint8, (20, 3, 10, 8))
    np.testing.assert_array_equal(loaded.x[3].permute(1, 2, 0), np.asarray(train[3][0]))
    assert data.transform == Transform(*moments(loaded.x))
    assert prepared(data, Dirichlet(1.0)).dataset.classes == ("ant", "bee", "cow")


def test_a_fixed_transform_is_that_of_every_sample() -> None:
    train, test = FakeData(9, **IMAGES), FakeData(5, **IMAGES, random_offset=9)
    data = prepared(FromTorch(train, test, train_transform=FIXED, test_transform=FIXED))
    assert data.input_shape == (3, 7, 6)
    x, _ = data.global_test_batch(0)
    for i in range(5):
        sample = torch.from_numpy(np.array(test[i][0])).permute(2, 0, 1)
        torch.testing.assert_close(x[i], FIXED(sample))
    assert not data.augments


def test_a_transform_may_change_its_input() -> None:
    inplace = v2.Normalize([1.0], [2.0], inplace=True)
    both = (TensorDataset(torch.ones(4, 1, 2, 2), torch.arange(4) % 2) for _ in range(2))
    data = prepared(FromTorch(*both, train_transform=inplace, test_transform=inplace))
    for _ in range(3):
        assert not data.global_test_batch(0)[0].any()
        assert not next(data.test_batches(0))[0].any()


def cropped(**given: Any) -> ResidentConverted:
    x = torch.randint(0, 256, (30, 3, 6, 6), generator=torch.Generator().manual_seed(0)).byte()
    both = (TensorDataset(x[i : i + 30], torch.arange(30)) for i in (0, 0))
    crop = v2.Compose([v2.Pad(2), *RANDOM.transforms])
    data = FromTorch(*both, train_transform=crop, test_transform=v2.ToDtype(torch.float32))
    samples = Samples(x, torch.arange(30))
    found = resident(samples, data, device=CPU, train=True, **{"place": "device"} | given)
    assert isinstance(found, ResidentConverted)
    return found


def test_every_sample_has_draws_of_its_own() -> None:
    split = cropped()
    state = torch.random.get_rng_state()
    x, _ = split.batch(torch.zeros(40, dtype=torch.int64), torch.Generator().manual_seed(1))
    assert len({sample.numpy().tobytes() for sample in x}) > 20
    assert torch.equal(torch.random.get_rng_state(), state)
    plain, _ = split.batch(torch.arange(30))
    assert torch.equal(plain, split.batch(torch.arange(30))[0])
    assert torch.equal(plain, split.stored.float())


def test_an_epoch_does_not_depend_on_what_is_gathered_together() -> None:
    def epoch(split: ResidentConverted) -> Tensor:
        generators = {name: torch.Generator().manual_seed(1) for name in ("generator", "order")}
        return torch.cat(
            [x for x, _ in split.batches(split.plan(np.arange(30), batch_size=7, **generators))]
        )

    one, other = cropped(), cropped(place="host")
    other.gather_bytes = 0
    assert torch.equal(epoch(one), epoch(other))
    last = cropped(last=True)
    assert torch.equal(epoch(last), epoch(one))
    assert last.batch(torch.arange(2))[0].is_contiguous(memory_format=torch.channels_last)


def test_any_function_may_be_a_transform() -> None:
    x = torch.arange(6.0).view(3, 2)
    doubled = transformed(v2.Compose([torch.nn.Identity(), lambda s: s * 2]), x, None)
    assert torch.equal(doubled, x * 2)
    noise = v2.Compose([lambda sample: sample + torch.rand(2)])
    assert Functions(noise).augments
    seeds = torch.tensor([4, 5, 4])
    added = transformed(noise, torch.zeros(3, 2), seeds)
    assert torch.equal(added[0], added[2])
    assert not torch.equal(added[0], added[1])


class Given(LightningDataModule):
    """A user's own module, with the loader that tests."""

    def __init__(self, test: Any) -> None:
        super().__init__()
        self.test = test

    def setup(self, stage: str) -> None:
        self.train = pairs(8)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=3)

    def test_dataloader(self) -> Any:
        return self.test


def test_a_data_module_gives_its_data_sets() -> None:
    data = FromTorch(Given(DataLoader(pairs(4, seed=1))))
    assert (len(data.load("train")), len(data.load("test"))) == (8, 4)
    assert len(prepared(data).test) == 4


class Drawn(Given):
    """Its splits and its samples are drawn from torch's and numpy's global random state."""

    def setup(self, stage: str) -> None:
        if stage == "fit":
            noise = torch.from_numpy(np.random.rand(20)).float()
            self.train, test = random_split([(x, i % 2) for i, x in enumerate(noise)], [15, 5])
            self.test = DataLoader(test)


def test_what_is_drawn_from_global_random_state_is_the_same_in_every_process() -> None:
    state = torch.get_rng_state()
    loaded = []
    for seed in range(2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        data = FromTorch(Drawn(None))
        loaded.append(torch.cat((data.load("train").x, data.load("test").x)))
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())
    assert torch.equal(*loaded)
    torch.set_rng_state(state)


def refused(key: str, *given: Any, **named: Any) -> str:
    return kit.refused(key, lambda: prepared(FromTorch(*given, **named)))


def test_what_is_no_data_set_is_refused() -> None:
    good = pairs(4)
    refused("test", good)
    refused("test", Given(DataLoader(good)), good)
    refused("train", Given([DataLoader(good)]))
    refused("test", good, (i for i in range(3)))
    refused("train", [], good)
    refused("train", torch.zeros(4, 3), good)
    assert "sample 1" in refused("train", [good[0], (torch.zeros(3), 0)], good)
    assert "sample 2" in refused("train", [*good, 5][2:], good)
    assert "sample 1" in refused("train", [good[0], (torch.zeros(4), 0.5)], good)
    half = [(torch.zeros(4), 0.0), (torch.zeros(4), 0.5)]
    assert "sample 1 has the class 0.5" in refused("train", half, good, classes=["a", "b"])
    assert "Image" not in refused("test", good, [(Image.new("L", (2, 2)), "cat")])


def test_transforms_that_do_not_fit_are_refused() -> None:
    images, others = FakeData(6, **IMAGES), FakeData(6, **IMAGES, random_offset=9)
    inside = FakeData(6, **IMAGES, transform=v2.Compose([v2.RandomCrop(4)]))
    assert "read again" in refused("train", inside, images)
    assert "read again" in refused("test", images, Subset(inside, range(3)))
    wrong = v2.Normalize([0.5] * 4, [1.0] * 4)
    refused("test_transform", images, others, train_transform=wrong, test_transform=wrong)
    refused("test_transform", images, others, train_transform=FIXED)


def test_samples_are_trained_on_with_their_own_transform() -> None:
    ones = [TensorDataset(torch.ones(8, 3), torch.arange(8) % 2) for _ in range(2)]
    others = {"train_transform": lambda x: x * 2, "test_transform": torch.neg}
    for given, level in ((others, 2.0), ({"test_transform": torch.neg}, 1.0)):
        data = prepared(FromTorch(*ones, **given))
        plan = data.train_plan(0, order=torch.Generator(), augment=torch.Generator())
        assert data.augments
        assert all((x == level).all() for x, _ in data.batches(plan))
        assert (data.global_test_batch(0)[0] == -1).all()


def test_images_have_colours_on_the_first_axis_or_none() -> None:
    def images(*shape: int) -> TensorDataset:
        pixels = torch.randint(0, 256, (6, *shape), generator=torch.Generator().manual_seed(0))
        return TensorDataset(pixels.byte(), torch.arange(6) % 2)

    assert "(3, 8, 6)" in refused("train", images(8, 6, 3), images(8, 6, 3))
    grey = images(8, 6)
    x, _ = prepared(FromTorch(grey, images(8, 6))).global_test_batch(0)
    levels = grey.tensors[0].double()
    expected = (levels - levels.mean()) / levels.std(correction=0)
    torch.testing.assert_close(x.double(), expected, rtol=0, atol=1e-5)


def test_what_a_loader_does_with_a_data_set_is_not_lost() -> None:
    good = pairs(8)
    sampler = SubsetRandomSampler(range(4))
    assert "SubsetRandomSampler" in refused("train", Given(DataLoader(good, sampler=sampler)))
    batches = BatchSampler(sampler, 2, drop_last=False)
    assert "SubsetRandomSampler" in refused("train", Given(DataLoader(good, batch_sampler=batches)))
    assert "collate_fn" in refused("train", Given(DataLoader(good, collate_fn=list)))
    FromTorch(Given(DataLoader(good, shuffle=True))).load("test")


def test_no_test_sample_is_a_training_sample() -> None:
    good = pairs(8)
    assert "8 of its samples" in refused("test", good, good)
    part = Subset(good, range(2, 8))
    assert "2 of its samples" in refused("test", Subset(good, [0, 4, 5]), Subset(part, [2, 3]))
    prepared(FromTorch(Subset(good, [0, 1]), Subset(part, [0, 3])))


class Alone(LightningDataModule):
    """A user's own module without a loader that tests."""

    def train_dataloader(self) -> Any:
        return DataLoader(pairs(8), batch_size=3)


def test_a_data_module_without_a_test_loader_is_one_line() -> None:
    assert "Alone has no test_dataloader" in refused("train", Alone())
    nothing = type("Nothing", (Alone,), {"test_dataloader": lambda self: None})
    assert "test_dataloader returns None" in refused("train", nothing())


class Detailed(Given):
    """Its loaders have settings of all kinds."""

    closed: tuple[str, ...] = ()

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=3, drop_last=True, shuffle=True, pin_memory=True)

    def val_dataloader(self) -> Any:
        return self.test

    def teardown(self, stage: str) -> None:
        self.closed += (stage,)


def test_test_samples_have_owners_too() -> None:
    """A client is tested on those of its owner, whatever the order of names in the splits."""
    train, test = pairs(6), pairs(5, seed=1)
    owners = ["ben", "anna", "cleo"] * 2
    data = FromTorch(
        train, test, groups=owners, test_groups=["cleo", "ben", "dora", "cleo", "anna"]
    )
    module = prepared(data, Natural(), clients=3)

    tested_of_owner = {"anna": [4], "ben": [1], "cleo": [0, 3]}
    for client in range(3):
        (owner,) = {owners[sample] for sample in module.partition_.train(client)}
        assert module.test_index(client).tolist() == tested_of_owner[owner]


def test_owners_of_test_samples_need_those_of_training_samples() -> None:
    line = kit.refused("groups", FromTorch, pairs(6), pairs(2, seed=1), test_groups=["a", "b"])
    assert "give the owners of training samples, too" in line


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("owner", "data.personal_test: 1 of 3 clients have no test samples of their owners"),
        ("auto", "so all are tested on samples of their classes"),
    ],
)
def test_clients_without_test_samples_of_their_owner_are_named(
    rule: Any, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = FromTorch(pairs(6), pairs(2, seed=1), groups=[0, 1, 2] * 2, test_groups=[2, 0])
    module = prepared(data, Natural(), clients=3, personal_test=rule)
    assert line in caplog.text
    assert (len(module.test_index(1)) == 0) == (rule == "owner")


def test_settings_of_loaders_are_followed_or_named(caplog: pytest.LogCaptureFixture) -> None:
    module = Detailed(DataLoader(pairs(4, seed=1), batch_size=2))
    prepared(FromTorch(module))
    (said,) = (r.getMessage() for r in caplog.records if r.name == "lightfed.data.datamodule")
    for part in (
        "batch_size=3 (train; data.batch_size is ",
        "drop_last=True (train; data.last_batch is keep)",
        "pin_memory (train; samples are read once)",
        "batch_size=2 (test; data.eval_batch_size is ",
        "val_dataloader",
    ):
        assert part in said
    assert "shuffle" not in said
    assert module.closed == ("fit", "test")


def test_settings_that_a_run_follows_need_no_line(caplog: pytest.LogCaptureFixture) -> None:
    class Same(Detailed):
        val_dataloader = LightningDataModule.val_dataloader

        def train_dataloader(self) -> Any:
            return DataLoader(self.train, batch_size=3, drop_last=True, shuffle=True)

    dataset = FromTorch(Same(DataLoader(pairs(4, seed=1), batch_size=2)))
    settings: dict[str, Any] = {"batch_size": 3, "eval_batch_size": 2, "last_batch": "drop"}
    data = FederatedDataModule(dataset, Iid(), **settings)
    data.prepare(clients=2, seed=0, device=torch.device("cpu"))
    assert not [r for r in caplog.records if r.name == "lightfed.data.datamodule"]
    assert "8 training samples, 4 test samples" in str(data)


class Sorted(BatchSampler):
    """Batches of a user's own."""


def test_batches_of_a_user_s_own_are_refused() -> None:
    batches = Sorted(range(8), 2, drop_last=False)
    assert "Sorted" in refused("train", Given(DataLoader(pairs(8), batch_sampler=batches)))
