"""A method that declares what nothing reads is refused; names of its own are its author's."""

import pytest

from lightfed import FedAvg
from lightfed.devices.devices import Devices
from lightfed.devices.timing import Timing
from lightfed.utils.errors import UserError


def test_a_method_with_devices_of_an_earlier_version_is_not_trained_without_them() -> None:
    class Timed(FedAvg):
        devices = Devices()

    class Derived(Timed):
        pass

    for kind in (Timed, Derived):
        with pytest.raises(UserError) as refused:
            kind()
        assert str(refused.value) == (
            "model.algorithm: Timed declares devices, which is not read; "
            "write timing = Timing(devices), of lightfed.devices.timing"
        )


def test_what_an_author_calls_devices_otherwise_stays() -> None:
    class Hierarchy(FedAvg):
        devices: int
        timing = Timing(Devices())

        def __init__(self) -> None:
            super().__init__()
            self.devices = 3

    class Served(FedAvg):
        @property
        def devices(self) -> int:
            return 3

    assert Hierarchy().devices == Served().devices == 3
