"""HeteroFL's control strings against what the released code reads from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from lightfed.cli import command_line as cli
from lightfed.cli.control import explained, sentences, with_configurations
from lightfed.cli.control_config import SETTINGS, configuration
from lightfed.cli.control_string import FIELDS, NORMS, Control
from lightfed.utils.errors import UserError
from lightfed.utils.keys import LEVELS
from tests.small import GOLDEN

CONFIGS = Path(__file__).parents[2] / "configs" / "heterofl"
OFFICIAL = json.loads((GOLDEN / "heterofl" / "control_names.json").read_text())
STRING = "1_100_0.1_iid_fix_a2-b8_bn_1_1"


def control_of(text: str) -> tuple[str, dict[str, Any]]:
    data, _, string = text.partition(":")
    return data, configuration(Control.parse(string), data)


def arguments_of(node: Any) -> dict[str, Any]:
    return {} if isinstance(node, str) else node.get("init_args", {})


@pytest.mark.parametrize("name", OFFICIAL)
def test_levels_are_those_of_the_released_code(name: str) -> None:
    control, theirs = Control.parse(name.partition(":")[2]), OFFICIAL[name]
    _, config = control_of(name)
    groups = config["model"]["clients"]
    rates = [LEVELS[c.get("level") or c["name"]] for c in groups]
    assert theirs["global_rate"] == rates[0]
    if theirs["proportion"] is None:
        rate_of = [r for r, c in zip(rates, groups, strict=True) for _ in range(c["count"])]
        assert rate_of == theirs["model_rate"]
        assert not control.dynamic
    else:
        assert rates == theirs["model_rate"]
        algorithm = arguments_of(config["model"]["algorithm"])
        assert algorithm["assignment"] == "dynamic"
        weights = algorithm["level_weights"]
        assert [weight / sum(weights) for weight in weights] == theirs["proportion"]


@pytest.mark.parametrize("name", OFFICIAL)
def test_hyper_parameters_are_those_of_the_released_code(name: str) -> None:
    theirs, (data, config) = OFFICIAL[name], control_of(name)
    model, rows = config["model"], SETTINGS[data].rows
    sgd, schedule = (arguments_of(model[key]) for key in ("optimizer", "lr_schedule"))
    assert [sgd["lr"], sgd["momentum"], sgd["weight_decay"]] == [
        theirs[key] for key in ("lr", "momentum", "weight_decay")
    ]
    assert [schedule["milestones"], schedule["gamma"]] == [theirs["milestones"], theirs["factor"]]
    epochs = {"global": config["trainer"]["max_epochs"], "local": model["local_epochs"]}
    assert epochs == theirs["epochs"]
    # The released code counts a batch of text in rows of all clients: 100 of them, one a client.
    batch = {"train": 100 if rows else config["data"]["batch_size"]}
    assert batch | {"test": config["data"]["eval_batch_size"]} == theirs["batch"]
    network = arguments_of(model["clients"][0]["model"])
    if not rows:
        assert network.get("norm", "bn") == theirs["norm"]
        assert network.get("scaler", True) == theirs["scale"]
    assert arguments_of(model["algorithm"]).get("mask", True) == theirs["mask"]


MODES = st.tuples(st.sampled_from(list(LEVELS)), st.integers(1, 9))


@given(st.integers(1, 300), st.lists(MODES, min_size=1, max_size=5))
def test_every_client_has_a_level(users: int, modes: list[tuple[str, int]]) -> None:
    modes.sort()
    written = "-".join(f"{level}{weight}" for level, weight in modes)
    text = f"1_{users}_0.1_iid_fix_{written}_bn_1_1"
    total = sum(weight for _, weight in modes)
    if total > users:
        with pytest.raises(UserError, match=r"control\.modes"):
            Control.parse(text)
        return
    counts = Control.parse(text).counts
    assert sum(counts) == users
    assert counts[:-1] == [weight * (users // total) for _, weight in modes[:-1]]
    assert counts[-1] >= modes[-1][1] * (users // total)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("mnist", "MNIST:1_100_0.1_iid_fix_a1-b1-c1-d1-e1_bn_1_1"),
        ("mnist-noniid", "MNIST:1_100_0.1_non-iid-2_fix_a1-b1-c1-d1-e1_bn_1_1"),
        ("mnist-resnet", "MNIST-ResNet:1_100_0.1_iid_fix_a1-b1-c1-d1-e1_bn_1_1"),
        ("cifar10", "CIFAR10:1_100_0.1_iid_fix_a1-b1-c1-d1-e1_bn_1_1"),
        ("cifar10-noniid", "CIFAR10:1_100_0.1_non-iid-2_fix_a1-b1-c1-d1-e1_bn_1_1"),
        ("wikitext2", "WikiText2:1_100_0.1_iid_fix_a1-b1-c1-d1-e1_bn_1_1"),
        ("prose", "Prose:1_100_0.1_iid_fix_a1-b1-c1-d1-e1_bn_1_1"),
    ],
)
def test_a_shipped_configuration_is_that_of_its_string(config: str, text: str) -> None:
    assert yaml.safe_load((CONFIGS / f"{config}.yaml").read_text()) == control_of(text)[1]


def test_the_global_model_may_be_of_a_narrower_level() -> None:
    """HeteroFL's Scalers divide by widths relative to it, whatever its level."""
    _, config = control_of("MNIST:1_100_0.1_iid_fix_b3-e4_bn_1_1")
    groups = config["model"]["clients"]
    assert [(c["level"], c["model"]) for c in groups] == [
        ("b", {"class_path": "Conv"}),
        ("e", {"class_path": "Conv"}),
    ]


def test_it_is_reported_in_sentences() -> None:
    stated = sentences(Control.parse("1_100_0.1_iid_fix_a2-b5_bn_1_1"), "CIFAR10")
    assert "_".join(line.split()[0] for line in stated) == "1_100_0.1_iid_fix_a2-b5_bn_1_1"
    assert "a weight of 1 is 14 clients; the remaining 2 have the last level" in stated[4]
    assert "a (width 1: clients 0 to 27), b (width 0.5: clients 28 to 99)" in stated[5]
    assert "the global model is of level a" in stated[5]
    drawn = sentences(Control.parse("1_10_0.1_iid_dynamic_a1-b1-c1_bn_0_0"), "MNIST")
    assert "probabilities 0.333333, 0.333333, 0.333333" in drawn[4]
    assert "no Scaler" in drawn[7]
    assert "no mask" in drawn[8]
    text = sentences(Control.parse(STRING), "WikiText2")
    assert all("no effect: a Transformer" in line for line in text[6:8])


@pytest.mark.parametrize(
    ("edits", "key", "fragment"),
    [
        ({"federated": "0"}, "federated", "'0'; give 1"),
        ({"users": "x"}, "users", "'x'; give a number of clients"),
        ({"users": "0"}, "users", "'0'; give a number"),
        ({"fraction": "1.5"}, "fraction", "'1.5'; give the share"),
        ({"fraction": "0"}, "fraction", "'0'; give the share"),
        ({"fraction": "nan"}, "fraction", "'nan'; give the share"),
        ({"split": "noniid"}, "split", "'noniid'; give iid, or non-iid-n"),
        ({"split": "non-iid-0"}, "split", "give iid, or non-iid-n"),
        ({"assignment": "fixed"}, "assignment", "'fixed'; give fix or dynamic"),
        ({"modes": "a2-f8"}, "modes", "'a2-f8'; give levels of a to e"),
        ({"modes": "a"}, "modes", "'a'; give levels"),
        ({"modes": "a0"}, "modes", "'a0'; give levels"),
        ({"modes": "b2-a8"}, "modes", "level a is wider than the global level b; put the widest"),
        ({"modes": "a9-b92"}, "modes", "add up to 101, for 100 clients"),
        ({"norm": "batch"}, "norm", "'batch'; give one of bn, in, ln, gn, none"),
        ({"scale": "2"}, "scale", "'2'; give 0 or 1"),
        ({"mask": "yes"}, "mask", "'yes'; give 0 or 1"),
    ],
)
def test_an_unknown_field_is_named(
    edits: dict[str, str], key: str, fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = dict(zip(FIELDS, STRING.split("_"), strict=True)) | edits
    assert_refused(["control", "_".join(fields.values())], f"control.{key}: ", fragment, capsys)


@pytest.mark.parametrize(
    ("words", "key", "fragment"),
    [
        (["control", "1_100_0.1_iid_fix_a1_bn_1"], "control", "8 fields in"),
        (["control", STRING, "--data", "MINST"], "control.data", "'MINST'; give one of MNIST"),
        (["control", f"CIFAR10:{STRING}", "--data", "MNIST"], "--data", "name the data set once"),
        (["control", "Prose:1_9_0.1_non-iid-2_fix_a1_bn_1_1"], "control.split", "; give iid"),
        (["control"], "control", "lightfed control --help"),
        (["fit", "--config", f"control:{STRING}"], "control.data", f"write DATA:{STRING}"),
        (["fit", "--config", f"control:MNIST:{STRING}x"], "control.mask", "'1x'; give 0 or 1"),
    ],
)  # fmt: skip
def test_a_command_that_means_nothing_is_refused(
    words: list[str], key: str, fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(words, f"{key}: ", fragment, capsys)


def assert_refused(
    words: list[str], key: str, fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(words)
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lightfed: error: {key}")
    assert fragment in line


@pytest.mark.parametrize("data", SETTINGS)
@pytest.mark.parametrize("norm", NORMS)
def test_what_is_printed_is_the_configuration(data: str, norm: str) -> None:
    text = f"1_100_0.1_iid_dynamic_b1-d2_{norm}_0_0"
    assert yaml.safe_load(explained(text, data)) == control_of(f"{data}:{text}")[1]


def test_options_name_it_in_every_way() -> None:
    named = f"control:Digits:{STRING}"
    plain = ["fit", "--config", "a.yaml", "--trainer.name", named]
    assert with_configurations(plain) == plain
    for words in (["--config", named], [f"--config={named}"], ["-c", named]):
        inline = with_configurations(["fit", *words])[-1].removeprefix("--config=")
        config = json.loads(inline)
        assert config["trainer"].pop("name") == f"Digits-{STRING}"
        assert config == control_of(named.removeprefix("control:"))[1]


def test_the_printed_file_trains_and_so_does_the_string(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "Digits:1_20_0.1_non-iid-2_fix_c1-e1_bn_1_1"
    with pytest.raises(SystemExit, match="0"):
        cli.main(["control", text])
    Path("my.yaml").write_text(capsys.readouterr().out)
    limits = [
        "--trainer.max_epochs=1",
        "--trainer.limit_train_batches=1",
        "--trainer.accelerator=cpu",
    ]
    rows = []
    for name, config in (("my", "my.yaml"), (text.replace(":", "-"), f"control:{text}")):
        cli.main(["fit", "--config", config, *limits])
        header, row = (tmp_path / "runs" / name / "metrics.csv").read_text().splitlines()
        timed = ("seconds", "wire_bytes")
        pairs = zip(header.split(","), row.split(","), strict=True)
        rows.append({key: value for key, value in pairs if key not in timed})
    assert rows[0] == rows[1]
