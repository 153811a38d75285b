"""The rooms of the package, read from all imports: those for types and within functions, too."""

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.forked import run_script

ROOT = Path(__file__).parents[1]
# The core: what every federation has. A room imports only from itself and from rooms before it.
CORE = (
    "utils",
    "data",
    "models",
    "distributed",
    "state",
    "aggregation",
    "lightning_fits",
    "local",
    "api",
    "runs",
    "engine",
    "cli",
    "testing",
)
# The rings, which import the core, and the rings that each may import besides.
MAY = {
    "datasets": (),
    "networks": (),
    "devices": (),
    "packs": (),
    "algorithms": ("networks", "devices"),
    "lab": ("algorithms", "datasets", "devices", "networks", "packs"),
}
# StackedASPG derives from StackedOptimizer: a protocol for one class would cost more than it saves.
BY_NAME = {("lightfed.algorithms.fedbcd.aspg", "lightfed.packs.stacked_optimizer")}
# The table of names is the one place of the core that names rings; it does not import them.
TABLE = "lightfed.cli.commands"
# Families of algorithms, in the order in which they may import each other.
PARENTS = {
    ("fednova", "fedavg"),
    ("fedper", "fedavg"),
    ("fedbn", "fedavg"),
    ("fedprox", "fedavg"),
    ("moon", "fedavg"),
    ("width", "fedavg"),
    ("fedbcd", "fedavg"),
}  # an algorithm or a family, and the algorithm that it derives from
# What several families share.
SHARED = {"topology", "one_model", "class_means", "contrastive", "interpolated"}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
Graph = Mapping[str, set[str]]


@cache
def trees() -> dict[str, ast.Module]:
    """All modules by their dotted name."""
    found = {}
    for top in (ROOT / "lightfed", ROOT / "kernels/lightfed_kernels", ROOT / "kernels/bench"):
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
    """The room of a module, the first folder below the package; "" of one beside the rooms."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in {*CORE, *MAY} else ""


def imported_modules(tree: ast.Module) -> set[str]:
    """Our own modules that a file imports, also by `from lightfed.runs import checkpoint`."""
    found = set()
    for module, name in imports(tree):
        if module.split(".")[0] in ("lightfed", "lightfed_kernels", "bench"):
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


def allowed(source: str, target: str) -> bool:
    """Whether a room may import another; files beside the rooms may import all."""
    if source in ("", target):
        return True
    if target == "":
        return source not in CORE or source in ("cli", "testing")
    if source in CORE:
        return target in CORE and CORE.index(target) <= CORE.index(source)
    return target in CORE or target in MAY[source]


def against_the_rule(edges: Graph) -> list[str]:
    """A line for every import that the rule does not allow."""
    return sorted(
        f"{source} imports {target}"
        for source, targets in edges.items()
        for target in targets - {"lightfed"}
        if not allowed(room(source), room(target)) and (source, target) not in BY_NAME
    )


def cycles(edges: Graph) -> list[list[str]]:
    """Files that lead back to themselves: what is left when all that import no other are gone."""
    left = {source: set(targets) for source, targets in edges.items()}
    while leaves := [source for source, targets in left.items() if not targets & left.keys()]:
        for leaf in leaves:
            del left[leaf]
    for source in [s for s in left if not any(s in targets for targets in left.values())]:
        del left[source]  # leads to a cycle, and is in none
    return [sorted(left)] if left else []


def test_the_core_imports_no_ring_and_a_ring_only_what_it_may() -> None:
    assert against_the_rule(graph()) == []


def test_the_core_trains_with_every_ring_refused() -> None:
    ended = run_script(ROOT / "tests" / "core_alone.py", ROOT, forgotten="lightfed")
    assert ended.stdout == "the core trains alone\n", ended.stderr


@pytest.mark.parametrize("package", ["lightfed", "lightfed_kernels", "bench"])
def test_no_files_import_each_other(package: str) -> None:
    assert cycles(graph(package)) == []


def test_an_arrow_against_the_rule_and_a_cycle_are_found() -> None:
    up = {"lightfed.state.rows": {"lightfed.api.fleet", "lightfed.networks.mlp"}}
    assert against_the_rule(up) == [
        "lightfed.state.rows imports lightfed.api.fleet",
        "lightfed.state.rows imports lightfed.networks.mlp",
    ]
    (found,) = cycles(graph() | up)
    assert {"lightfed.state.rows", "lightfed.api.fleet"} <= set(found)


def test_every_package_says_what_lives_there() -> None:
    for init in (ROOT / "lightfed").rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(init.read_text())), f"{init} has no docstring"
    assert {room(module) for module in graph()} == {*CORE, *MAY, ""}


PAGES = ("results", "drawing", "studies", "report")  # of the lab; they read files of runs


def test_pages_read_files_of_runs_and_nothing_of_the_engine() -> None:
    known = {"utils", *(f"lab.{page}" for page in PAGES)}
    latency = {"lightfed.lab.studies.latency"}  # computes, and reads nothing
    for source in graph().keys() - latency:
        parts = source.split(".")
        if parts[1:2] == ["lab"] and parts[2:3] and parts[2] in PAGES:
            others = {
                target
                for target in graph()[source]
                if not target.removeprefix("lightfed.").startswith(tuple(known))
            }
            assert not others, f"{source} imports {others}"


def family(module: str) -> str:
    """The folder of a module of the algorithms, or its own name if it has none."""
    return module.split(".")[2]


def test_families_import_each_other_only_as_parent_and_child() -> None:
    pairs = {
        (family(source), family(target))
        for source, tree in trees().items()
        if source.startswith("lightfed.algorithms.")
        for target in imported_modules(tree)
        if target.startswith("lightfed.algorithms.")
        if family(source) != family(target) and family(target) not in SHARED
    }
    assert pairs == PARENTS


def test_kernels_need_torch_numpy_and_triton_alone() -> None:
    known = {"torch", "numpy", "lightfed_kernels", *sys.stdlib_module_names}
    for source, tree in trees().items():
        package = source.split(".")[0]
        if package in ("lightfed_kernels", "bench"):
            allowed = set(known)
            if source.startswith("lightfed_kernels.gpu."):
                allowed.add("triton")
            if package == "bench":
                allowed |= {"bench", "triton", "matplotlib"}
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
