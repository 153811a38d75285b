"""Every public method has a shipped configuration, and `lightfed plan` plans it."""

import re
from pathlib import Path

import pytest

from lightfed.cli.command_line import main
from tests.configs.test_configs import CONFIGS, files, needs, on_digits, small, sources
from tests.methods import methods

__all__ = ["files", "sources"]  # fixtures
METHODS = methods()
SLOW = pytest.mark.matrix  # a tiny base is made for each
# Rules of a configuration whose sweep names the others.
SIBLINGS = {
    name: folder
    for folder, names in {
        "flexifed/digits-vgg": "BasicCommon ClusteredCommon ClusteredFL",
        "lora/chars": (
            "ZeroPadded HetLoRA FLoRA FedExLoRA FFALoRA FedSALoRA FlexLoRA RoLoRA FedSVD LoRAFAIR "
            "FedRotLoRA FedMomentum FedDPA FedSB RAVAN"
        ),
    }.items()
    for name in names.split()
}


def shipped(method: str) -> Path:
    """The method's configuration, on digits if there is one."""
    root = Path(__file__).parents[2] / "configs"
    if method in SIBLINGS:
        return root / f"{SIBLINGS[method]}.yaml"
    named = re.compile(rf"(algorithm|class_path): {method}\b")
    found = [path for path in CONFIGS if named.search(path.read_text())]
    return min(found, key=lambda path: (not on_digits(path), path))


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=SLOW if shipped(m).parent.name == "lora" else ()) for m in METHODS],
)
def test_a_configuration_of_every_method_is_planned(
    method: str,
    files: Path,
    sources: dict[str, list[Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = shipped(method)
    needs(config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(files / "cache"))
    monkeypatch.setattr("lightfed.datasets.text.source_folders", lambda: sources)
    words = [*small(config, files, tmp_path), "--world-size=2"]
    if method in SIBLINGS:
        words.append(f"--model.algorithm={method}")
    main(["plan", "--config", *words])
    assert capsys.readouterr().out.startswith(f"{method}, ")
