"""The rooms of the package, read from all imports: those for types and within functions, too."""

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A room imports only from itself and from rooms before it; files beside the rooms from all.
ROOMS = (
    "utils",
    "data.datasets",
    "data.partition",
    "data",
    "models.networks",
    "models.composites",
    "models",
    "distributed",
    "topology",
    "state",
    "aggregation",
    "simulation",
    "fits",
    "local",
    "api",
    "runs",
    "algorithms.shared",
    "algorithms",
    "results",
    "drawing",
    "studies",
    "report",
    "engine",
    "previews",
    "cli",
    "testing",
    "",
)
CATALOGUES = {"utils", "algorithms", "models.networks", "data.datasets"}  # files apart
PAGES = ("results", "drawing", "studies", "report")  # they read files of runs
PARENTS = {
    ("fednova", "fedavg"),
    ("fedper", "fedavg"),
    ("fedbn", "fedavg"),
    ("fedprox", "fedavg"),
    ("fedtgp", "fedproto"),
    ("moon", "fedavg"),
    ("heterofl", "fedavg"),
    ("fedrolex", "heterofl"),
    ("cloudfedavg", "fedavg"),
    ("fedbcdi", "fedbcd"),
    ("my1", "dispfl"),
    ("my2", "dispfl"),
}  # algorithm, and the one that it imports
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
Graph = Mapping[str, set[str]]


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


def room(module: str) -> str:
    """The room of a module, "" of one beside the rooms; a package belongs to itself."""
    name = module.removeprefix("lightfed.")
    return next(
        (r for r in sorted(ROOMS, key=len, reverse=True) if f"{name}.".startswith(f"{r}.")), ""
    )


def imported_modules(tree: ast.Module) -> set[str]:
    """Our own modules that a file imports, also by `from lightfed.runs import checkpoint`."""
    found = set()
    for module, name in imports(tree):
        if module.split(".")[0] in ("lightfed", "lightfed_kernels"):
            whole = f"{module}.{name}"
            found.add(whole if whole in trees() else module)
    return found


@cache
def graph(package: str = "lightfed") -> Graph:
    """What every module of a package imports of it."""
    ours = {name: tree for name, tree in trees().items() if name.split(".")[0] == package}
    return {
        name: {t for t in imported_modules(tree) if t.split(".")[0] == package} - {name}
        for name, tree in ours.items()
    }


def against_the_order(edges: Graph) -> list[str]:
    return [
        f"{source} imports {target}"
        for source, targets in edges.items()
        for target in sorted(targets)
        if ROOMS.index(room(target)) > ROOMS.index(room(source))
    ]


def cycles(edges: Graph) -> list[list[str]]:
    """Files that lead back to themselves: what is left when all that import no other are gone."""
    left = {source: set(targets) for source, targets in edges.items()}
    while leaves := [source for source, targets in left.items() if not targets & left.keys()]:
        for leaf in leaves:
            del left[leaf]
    for source in [s for s in left if not any(s in targets for targets in left.values())]:
        del left[source]  # leads to a cycle, and is in none
    return [sorted(left)] if left else []


def test_no_room_imports_one_that_comes_after_it() -> None:
    assert against_the_order(graph()) == []


@pytest.mark.parametrize("package", ["lightfed", "lightfed_kernels"])
def test_no_files_import_each_other(package: str) -> None:
    assert cycles(graph(package)) == []


def test_an_arrow_against_the_order_and_a_cycle_are_found() -> None:
    up = {"lightfed.state.rows": {"lightfed.api.fleet"}}
    assert against_the_order(graph() | up) == ["lightfed.state.rows imports lightfed.api.fleet"]
    (found,) = cycles(graph() | up)
    assert {"lightfed.state.rows", "lightfed.api.fleet"} <= set(found)


def test_every_room_has_its_sign_and_three_to_sixteen_files() -> None:
    for name in filter(None, ROOMS):
        folder = ROOT / "lightfed" / name.replace(".", "/")
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert text, f"{name}/__init__.py does not say what lives there"
        files = len(list(folder.glob("*.py")))  # with the sign
        assert name in CATALOGUES or files <= 16, f"{files} files in {name}"
        assert files >= 3 or any(folder.glob("*/")), f"{files} files in {name}"
    found = {room(module) for module in graph()}
    assert found == set(ROOMS)


def test_pages_read_files_of_runs_and_nothing_of_the_engine() -> None:
    known = {*PAGES, "utils"}
    latency = {"lightfed.lab.studies.latency"}  # computes, and reads nothing
    for source in graph().keys() - latency:
        if source.split(".")[1:2] and source.split(".")[1] in PAGES:
            others = {t for t in graph()[source] if t.split(".")[1] not in known}
            assert not others, f"{source} imports {others}"


def test_algorithms_import_their_declared_parents_alone() -> None:
    pairs = {
        (source.split(".")[-1], target.split(".")[-1])
        for source, tree in trees().items()
        if room(source) == "algorithms"
        for target in imported_modules(tree)
        if room(target) == "algorithms"
    }
    assert pairs == PARENTS


def test_kernels_need_torch_numpy_and_triton_alone() -> None:
    known = {"torch", "numpy", "lightfed_kernels", *sys.stdlib_module_names}
    for source, tree in trees().items():
        if source.split(".")[0] == "lightfed_kernels":
            allowed = set(known)
            if source.startswith("lightfed_kernels.gpu."):
                allowed.add("triton")
            if source.startswith("lightfed_kernels.bench."):
                allowed |= {"triton", "matplotlib"}
            foreign = {module.split(".")[0] for module, _ in imports(tree)} - allowed
            assert not foreign, f"{source} imports {foreign}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.Module, packages: set[str]) -> set[str]:
    return {
        f"{module}.{name}"
        for module, name in imports(tree)
        if module.split(".")[0] in packages
        and any(is_private(part) for part in [*module.split("."), name])
    }


@pytest.mark.parametrize(
    ("packages", "file"),
    [(LIGHTNING, "lightning_private"), ({"torch", "torchvision", "torchaudio"}, "torch_private")],
)
def test_private_names_of_a_library_are_imported_in_one_file(packages: set[str], file: str) -> None:
    found = {source for source, tree in trees().items() if private_names(tree, packages)}
    assert found == {f"lightfed.utils.{file}"}


DRAWS = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "normal", "poisson"}


def global_draws(tree: ast.Module) -> list[str]:
    """Calls that draw from random state that nobody named, or set it."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = ast.unparse(node.func)
        given = {keyword.arg for keyword in node.keywords}
        if name in {f"torch.{draw}" for draw in DRAWS} and "generator" not in given:
            found.append(name)
        if name.startswith(("np.random.", "numpy.random.")) and name.split(".")[-1] not in (
            "default_rng",
            "get_state",
        ):
            found.append(name)
        if name in ("torch.manual_seed", "torch.seed", "L.seed_everything"):
            found.append(name)
    return found


# utils/rng.py names the draws of a user's code from default generators.
@pytest.mark.parametrize("source", sorted(trees().keys() - {"lightfed.utils.rng"}))
def test_nothing_draws_from_global_random_state(source: str) -> None:
    if source == "lightfed.utils.rng":  # `repeatable` sets it for a user's code
        names = {f"np.random.{name}" for name in ("get_state", "seed", "set_state")}
        assert {*global_draws(trees()[source])} == names
        return
    assert not global_draws(trees()[source])
    reads = source == "lightfed.utils.rng"  # the state, to see whether a user's code draws
    assert reads or "random" not in {module for module, _ in imports(trees()[source])}


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
