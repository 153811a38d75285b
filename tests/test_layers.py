"""The import direction, read from the source:

cli -> algorithms -> core -> comm | data | models -> utils        report -> utils.errors
algorithms, core -> lightfed_kernels -> torch, triton
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOWER = {"comm", "data", "models", "utils"}
ALLOWED = {
    "algorithms": {"algorithms", "core", "lightfed_kernels"} | LOWER,
    "core": {"core", "lightfed_kernels"} | LOWER,
    "comm": {"comm", "utils"},
    "data": {"data", "utils"},
    "models": {"models", "utils"},
    "utils": {"utils"},
    "report": {"report", "utils"},
    "lightfed_kernels": {"lightfed_kernels"},
}
ALLOWED["cli"] = {"cli", "report"} | set(ALLOWED)
PARENTS = {
    ("fedprox", "fedavg"),
    ("heterofl", "fedavg"),
    ("cloudfedavg", "fedavg"),
    ("fedbcdi", "fedbcd"),
    ("my1", "dispfl"),
    ("my2", "dispfl"),
}  # algorithm, and the one that it imports
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}


@cache
def trees() -> dict[str, ast.Module]:
    """All modules by their dotted name."""
    found = {}
    for top in (ROOT / "lightfed", ROOT / "kernels" / "lightfed_kernels"):
        for path in sorted(top.rglob("*.py")):
            parts = path.relative_to(top.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text())
    return found


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of every import, wherever it stands; name is "" for a module as a whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield from ((node.module, alias.name) for alias in node.names)


def layer(module: str) -> str:
    """The folder of a module; files beside the folders belong to the command line."""
    parts = module.split(".")
    if parts[0] == "lightfed_kernels":
        return "lightfed_kernels"
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "cli"


def imported_modules(tree: ast.Module) -> set[str]:
    """Our own modules that a file imports, also by `from lightfed.core import checkpoint`."""
    found = set()
    for module, name in imports(tree):
        if module.split(".")[0] in ("lightfed", "lightfed_kernels"):
            whole = f"{module}.{name}"
            found.add(whole if whole in trees() else module)
    return found


@pytest.mark.parametrize("source", trees())
def test_imports_go_down(source: str) -> None:
    for target in imported_modules(trees()[source]):
        assert layer(target) in ALLOWED[layer(source)], f"{source} imports {target}"


def test_every_layer_is_seen() -> None:
    edges = {(layer(s), layer(t)) for s, tree in trees().items() for t in imported_modules(tree)}
    assert {layer(module) for module in trees()} == set(ALLOWED)
    assert {
        ("cli", "algorithms"), ("algorithms", "core"), ("core", "comm"), ("core", "utils"),
        ("core", "lightfed_kernels"), ("data", "utils"), ("report", "utils"),
    } <= edges  # fmt: skip


def test_reports_know_run_folders_and_errors_alone() -> None:
    used = {
        t for s, tree in trees().items() if layer(s) == "report" for t in imported_modules(tree)
    }
    assert {t for t in used if layer(t) != "report"} == {"lightfed.utils.errors"}


def test_algorithms_import_their_declared_parents_alone() -> None:
    pairs = {
        (source.split(".")[-1], target.split(".")[-1])
        for source, tree in trees().items()
        if layer(source) == "algorithms"
        for target in imported_modules(tree)
        if layer(target) == "algorithms"
    }
    assert pairs == PARENTS


def test_kernels_need_torch_numpy_and_triton_alone() -> None:
    known = {"torch", "numpy", "lightfed_kernels", *sys.stdlib_module_names}
    for source, tree in trees().items():
        if layer(source) == "lightfed_kernels":
            allowed = set(known)
            if source.startswith("lightfed_kernels.gpu."):
                allowed.add("triton")
            if source.startswith("lightfed_kernels.bench."):
                allowed |= {"triton", "matplotlib"}
            foreign = {module.split(".")[0] for module, _ in imports(tree)} - allowed
            assert not foreign, f"{source} imports {foreign}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_lightning_names(tree: ast.Module) -> set[str]:
    return {
        f"{module}.{name}"
        for module, name in imports(tree)
        if module.split(".")[0] in LIGHTNING
        and any(is_private(part) for part in [*module.split("."), name])
    }


def test_private_names_of_lightning_are_imported_in_one_file() -> None:
    found = {source for source, tree in trees().items() if private_lightning_names(tree)}
    assert found == {"lightfed.core._lightning"}


DRAWS = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "normal", "poisson"}


def global_draws(tree: ast.Module) -> list[str]:
    """Calls that read or set random state that nobody named."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = ast.unparse(node.func)
        given = {keyword.arg for keyword in node.keywords}
        if name in {f"torch.{draw}" for draw in DRAWS} and "generator" not in given:
            found.append(name)
        if (
            name.startswith(("np.random.", "numpy.random."))
            and name.split(".")[-1] != "default_rng"
        ):
            found.append(name)
        if name in ("torch.manual_seed", "torch.seed", "L.seed_everything"):
            found.append(name)
    return found


@pytest.mark.parametrize("source", trees())
def test_nothing_draws_from_global_random_state(source: str) -> None:
    assert not global_draws(trees()[source])
    assert "random" not in {module for module, _ in imports(trees()[source])}


@pytest.mark.parametrize(
    ("code", "draws"),
    [
        ("torch.randn(3)", 1),
        ("torch.randn(3, generator=g)", 0),
        ("np.random.default_rng(seed)", 0),
        ("np.random.permutation(3)", 1),
        ("torch.manual_seed(0)", 1),
    ],
)
def test_global_draws_are_found(code: str, draws: int) -> None:
    assert len(global_draws(ast.parse(code))) == draws
