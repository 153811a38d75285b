"""The scripts and commands of docs/howto/real_data.md, on small files of the same form."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from lightfed.cli import command_line
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.partition.schemes import Natural
from lightfed.datasets.hub import Hub
from tests.datasets.kit import prepared

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "real_data.md").read_text()
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("lightfed fit")
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def own_samples(data: FederatedDataModule) -> list[tuple[int, int]]:
    """The numbers of training and test samples of each client."""
    partition = data.partition_
    assert partition.meta["test"] == "owner"
    counts = []
    for client in range(partition.clients):
        counts.append((len(partition.train(client)), len(partition.test(client))))
    return counts


def test_speakers_become_clients(folder: Path) -> None:
    recordings = folder / "data" / "recordings" / "recordings"
    recordings.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for speaker, count in (("anna", 7), ("ben", 9)):
        for word in range(2):
            for number in range(count):
                # The second one is longer than a second.
                length = 9000 if number == 1 else 3000
                sound = rng.integers(-20000, 20000, length).astype(np.int16)
                wavfile.write(recordings / f"{word}_{speaker}_{number}.wav", 8000, sound)

    exec(SCRIPTS[0], {})
    data = prepared(Hub("data/speakers", group="speaker"), Natural())
    assert data.input_shape == (1, 32, 32)
    assert own_samples(data) == [(4, 10), (8, 10)]


def test_people_become_clients(folder: Path) -> None:
    raw = folder / "data" / "hapt" / "RawData"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    stretches = []
    for trial, person in ((1, 1), (2, 1), (3, 2), (4, 2)):
        for sensor in ("acc", "gyro"):
            readings = rng.normal(size=(600, 3)) + 10 * trial
            np.savetxt(raw / f"{sensor}_exp{trial:02}_user{person:02}.txt", readings)
        # 300 readings hold 3 windows of 128 with half overlap, 128 hold one, and 127 none.
        stretches += [(trial, person, 1, 1, 300), (trial, person, 2, 301, 428)]
        stretches += [(trial, person, 2, 429, 555)]
    np.savetxt(raw / "labels.txt", np.array(stretches), fmt="%d")

    exec(SCRIPTS[1], {})
    table = Hub("data/activities", features="signal", shape=[6, 128], group="person")
    data = prepared(table, Natural())
    assert own_samples(data) == [(4, 4), (4, 4)]

    # The first window of the first trial, as it is in the files.
    signal = [np.loadtxt(raw / f"{sensor}_exp01_user01.txt") for sensor in ("acc", "gyro")]
    expected = torch.from_numpy(np.hstack(signal)[:128].T.astype(np.float32))
    first = data.partition_.train(0)[0]
    assert torch.equal(table.load("train").x[first], expected)


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_the_commands_of_the_page_are_read(command: str, folder: Path) -> None:
    with pytest.raises(SystemExit, match="0"):
        command_line.main([*shlex.split(command)[1:], "--print_config"])


def test_the_page_has_commands_for_all_of_its_data_sets() -> None:
    assert len(COMMANDS) == 9
    assert len(SCRIPTS) == 2
