"""HeteroFL's control strings against what the released code reads from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from lightfed.algorithms.width.control import (
    DATA,
    FIELDS,
    configuration,
    explain,
    with_configurations,
)
from lightfed.cli import command_line as cli
from lightfed.utils.errors import UserError
from lightfed.utils.keys import LEVELS
from tests.small import GOLDEN

CONFIGS = Path(__file__).parents[3] / "configs" / "heterofl"
OFFICIAL = json.loads((GOLDEN / "heterofl" / "control_names.json").read_text())
STRING = "1_100_0.1_iid_fix_a2-b8_bn_1_1"


def arguments_of(node: Any) -> dict[str, Any]:
    return {} if isinstance(node, str) else node.get("init_args", {})


@pytest.mark.parametrize("name", OFFICIAL)
def test_it_is_what_the_released_code_reads_from_it(name: str) -> None:
    official, config = OFFICIAL[name], configuration(name)
    model, groups = config["model"], config["model"]["clients"]
    algorithm, text = arguments_of(model["algorithm"]), config["data"]["partition"] == "Natural"
    rates = [LEVELS[group["level"]] for group in groups]
    assert official["global_rate"] == rates[0]
    if official["proportion"] is None:
        rate_of = [r for r, group in zip(rates, groups, strict=True) for _ in range(group["count"])]
        assert rate_of == official["model_rate"]
        assert "assignment" not in algorithm
    else:
        assert rates == official["model_rate"]
        assert algorithm["assignment"] == "dynamic"
        weights = algorithm["level_weights"]
        assert [weight / sum(weights) for weight in weights] == official["proportion"]
    epochs = {"global": config["trainer"]["max_epochs"], "local": model["local_epochs"]}
    # The released code counts a batch of text in rows of all clients: 100 of them, one a client.
    train = 100 if text else config["data"]["batch_size"]
    schedule = arguments_of(model["lr_schedule"])
    found = arguments_of(model["optimizer"]) | {
        "milestones": schedule["milestones"],
        "factor": schedule["gamma"],
        "epochs": epochs,
        "batch": {"train": train, "test": config["data"]["eval_batch_size"]},
        "mask": algorithm.get("mask", True),
    }
    if not text:
        network = arguments_of(groups[0]["model"])
        found |= {"norm": network.get("norm", "bn"), "scale": network.get("scaler", True)}
    assert found == {key: official[key] for key in found}


MODES = st.tuples(st.sampled_from(list(LEVELS)), st.integers(1, 9))


@given(st.integers(1, 300), st.lists(MODES, min_size=1, max_size=5))
def test_every_client_has_a_level(users: int, modes: list[tuple[str, int]]) -> None:
    modes.sort()
    written = "-".join(f"{level}{weight}" for level, weight in modes)
    text = f"Digits:1_{users}_0.1_iid_fix_{written}_bn_1_1"
    total = sum(weight for _, weight in modes)
    if total > users:
        with pytest.raises(UserError, match=r"control\.modes"):
            configuration(text)
        return
    counts = [group["count"] for group in configuration(text)["model"]["clients"]]
    assert sum(counts) == users
    assert counts[:-1] == [weight * (users // total) for _, weight in modes[:-1]]
    assert counts[-1] >= modes[-1][1] * (users // total)


@pytest.mark.parametrize("split", ["iid", "non-iid-2"])
@pytest.mark.parametrize("data", DATA)
def test_a_shipped_configuration_is_that_of_its_string(data: str, split: str) -> None:
    path = CONFIGS / f"{data.lower()}{'-noniid' * (split != 'iid')}.yaml"
    if path.exists():
        text = f"{data}:1_100_0.1_{split}_fix_a1-b1-c1-d1-e1_bn_1_1"
        assert yaml.safe_load(path.read_text()) == configuration(text)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("federated", ["0"]),
        ("users", ["x", "0"]),
        ("fraction", ["1.5", "0", "nan"]),
        ("split", ["noniid", "non-iid-0"]),
        ("assignment", ["fixed"]),
        ("modes", ["a2-f8", "a", "a0", "a9-b92"]),
        ("norm", ["batch"]),
        ("scale", ["2"]),
        ("mask", ["yes"]),
    ],
)
def test_an_unknown_field_is_named(
    field: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for word in words:
        fields = dict(zip(FIELDS, STRING.split("_"), strict=True)) | {field: word}
        text = "_".join(fields.values())
        assert_refused(["configs", f"control:MNIST:{text}"], f"control.{field}", capsys)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["configs", "control:MNIST:1_100_0.1_iid_fix_a1_bn_1"], "control"),
        (["configs", f"control:MINST:{STRING}"], "control.data"),
        (["configs", f"control:{STRING}"], "control.data"),
        (["configs", "control:Prose:1_9_0.1_non-iid-2_fix_a1_bn_1_1"], "control.split"),
        (["configs", "control:"], "control"),
        (["configs", f"control:MNIST:{STRING}", "more"], "configs"),
        (["fit", "--config", f"control:{STRING}"], "control.data"),
        (["fit", "--config", f"control:MNIST:{STRING}x"], "control.mask"),
    ],
)
def test_a_command_that_means_nothing_is_refused(
    words: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(words, key, capsys)


def assert_refused(words: list[str], key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(words)
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lightfed: error: {key}: ")


@pytest.mark.parametrize("data", DATA)
def test_what_is_printed_is_the_configuration_and_a_line_for_each_field(
    data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"{data}:1_100_0.1_iid_dynamic_b1-d2_none_0_0"
    explain(text)
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed) == configuration(text)
    assert [line.split()[1:3] for line in printed.splitlines()[1:10]] == [
        list(pair) for pair in zip(FIELDS, text.partition(":")[2].split("_"), strict=True)
    ]


def test_options_name_it_in_every_way() -> None:
    named = f"control:Digits:{STRING}"
    plain = ["fit", "--config", "a.yaml", "--trainer.name", named]
    assert with_configurations(plain) == plain
    for words in (["--config", named], [f"--config={named}"], ["-c", named]):
        inline = with_configurations(["fit", *words])[-1].removeprefix("--config=")
        config = json.loads(inline)
        assert config["trainer"].pop("name") == f"Digits-{STRING}"
        assert config == configuration(named.removeprefix("control:"))


def test_the_printed_file_trains_and_so_does_the_string(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "Digits:1_20_0.1_non-iid-2_fix_c1-e1_bn_1_1"
    with pytest.raises(SystemExit, match="0"):
        cli.main(["configs", f"control:{text}"])
    Path("my.yaml").write_text(capsys.readouterr().out)
    limits = {"max_epochs": "1", "limit_train_batches": "1", "accelerator": "cpu"}
    words = [f"--trainer.{key}={value}" for key, value in limits.items()]
    rows = []
    for name, config in (("my", "my.yaml"), (text.replace(":", "-"), f"control:{text}")):
        cli.main(["fit", "--config", config, *words])
        header, row = (tmp_path / "runs" / name / "metrics.csv").read_text().splitlines()
        pairs = zip(header.split(","), row.split(","), strict=True)
        rows.append({key: value for key, value in pairs if key not in ("seconds", "wire_bytes")})
    assert rows[0] == rows[1]
