"""The floors of the package: imports go down, neighbours stay apart, light parts stay light."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_hosts import python

ROOT = Path(__file__).parents[1]
PACKAGE, KERNELS = ROOT / "mcretrofit", ROOT / "kernels" / "mcretrofit_kernels"
# from the ground up; a name is a module or a folder of the package, `mcretrofit` its __init__
FLOORS = (
    {"mcretrofit_kernels", "mcretrofit", "errors", "rules"},
    {"registry", "atomic", "rawfile", "tokenizer", "_bundle", "ledger", "results", "clock"}
    | {"ranks", "tunelog", "ordertable", "_interpreter", "yamlfile"},
    {"config", "sources", "tensorfile", "pooling", "_legacy", "memories"},
    {"settings", "pickled", "aggregators", "segments", "gates", "tasks"},
    {"routers", "ops", "dyadic", "_hosts", "corpus", "catalogue", "questions", "positions"}
    | {"tunedata", "stock", "each"},
    {"plan"},
    {"reads", "recurrence"},
    {"caching", "models", "checkpoint", "evaluate", "recommend", "_tables", "recipe"} | {"tuning"},
    {"decoder", "retrofit", "_shards", "_canvas", "hosted", "beside"},
    {"surprise"},
    {"planted"},
    {"hits", "heldout", "doubts"},
    {"calibrate", "loading", "exported", "wrapped", "bench", "doctor", "controls"} | {"training"},
    {"cards", "exporting", "parity", "pushing", "skeleton", "_charts", "frozen"},
    {"model", "_figures", "together", "steps", "choices"},
    {"rows", "costs", "streaming", "baseback", "tunefolder", "budget", "refine"} | {"pretrain"},
    {"compare", "needs", "search", "confirm", "order", "preview"},
    {"generate", "wrap", "sweep"},
    {"harness", "tune", "serving"},
    {"harness_tasks"},
    {"worker"},
    {"executors"},
    {"report"},
    {"cli"},
    {"__main__"},
)
HEIGHT = {name: height for height, floor in enumerate(FLOORS) for name in floor}
# folders where every file is one entry beside the others; `_` files are helpers that they share
PLUGS = ("memories", "routers", "aggregators", "ops", "models", "tasks")
# what runs without torch: request and text handling, so that --help and probes are quick
LIGHT = {
    *("mcretrofit", "errors", "registry", "atomic", "rawfile", "tokenizer", "config", "sources"),
    *("tensorfile", "settings", "pickled", "tasks", "corpus", "catalogue", "cards", "cli"),
    *("ledger", "results", "pooling", "recommend", "report", "_tables", "_canvas", "_charts"),
    *("_figures", "_legacy", "yamlfile"),
    "__main__",
}
HEAVY = {"torch", "transformers", "triton", "fla"}
LINES = 250


def modules(where: Path = PACKAGE) -> list[Path]:
    return sorted(where.rglob("*.py"))


def unit(path: Path) -> str:
    """The name on its floor of a file of the package."""
    first = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return "mcretrofit" if first == "__init__" else first


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module imported anywhere, also inside functions; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def first(name: str) -> str:
    return name.split(".")[0]


def inner(name: str) -> str | None:
    """The unit of our package that an imported name belongs to."""
    if first(name) != "mcretrofit":
        return "mcretrofit_kernels" if first(name) == "mcretrofit_kernels" else None
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in HEIGHT else "mcretrofit"


def at_import(tree: ast.Module) -> Iterator[str]:
    """What importing a module imports: all but functions and what only type checkers read."""
    for node in tree.body:
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not typing and not isinstance(node, ast.FunctionDef):
            yield from imports(node)


def wrong_ways(name: str, tree: ast.AST) -> list[str]:
    """Imports of a unit that don't go down."""
    units = {inner(one) for one in imports(tree)} - {None, name}
    return sorted(u for u in units if HEIGHT[u] >= HEIGHT[name])


def test_every_module_has_a_floor():
    names = {unit(path) for path in modules()}
    assert names <= set(HEIGHT), f"give {sorted(names - set(HEIGHT))} a floor in FLOORS"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    assert not wrong_ways(unit(path), parsed(path))


def test_wrong_ways_are_found():
    up = "def f():\n    from mcretrofit.retrofit import retrofit_\n"
    assert wrong_ways("caching", ast.parse(up)) == ["retrofit"]
    assert wrong_ways("loading", ast.parse("from mcretrofit import calibrate, errors")) == [
        "calibrate"
    ]
    assert wrong_ways("gates", ast.parse("import mcretrofit.segments")) == ["segments"]
    assert wrong_ways("cli", ast.parse(up)) == []


@pytest.mark.parametrize("folder", PLUGS)
def test_neighbours_in_a_folder_stay_apart(folder):
    entries = {p.stem for p in (PACKAGE / folder).glob("*.py") if not p.stem.startswith("_")}
    assert entries
    for path in (PACKAGE / folder).glob("*.py"):
        for name in imports(parsed(path)):
            head, _, rest = name.partition(f"mcretrofit.{folder}.")
            neighbour = rest.split(".")[0]
            assert head or neighbour not in entries - {path.stem}, f"{path.name} imports {name}"


def test_kernels_know_nothing_of_the_package():
    assert modules(KERNELS) and not (ROOT / "kernels" / "__init__.py").exists()
    for path in modules(KERNELS):
        assert "mcretrofit" not in {first(name) for name in imports(parsed(path))}, path


def test_nobody_imports_click():
    for path in [*modules(), *modules(KERNELS), *modules(ROOT / "tests")]:
        assert "click" not in {first(name) for name in imports(parsed(path))}, path


def test_light_modules_import_nothing_heavy():
    for path in modules():
        if unit(path) in LIGHT:
            names = list(at_import(parsed(path)))
            assert not HEAVY & {first(name) for name in names}, path
            ours = {inner(name) for name in names} - {None}
            assert ours <= LIGHT, f"{path} imports {sorted(ours - LIGHT)} at once"


def test_importing_the_package_is_light():
    code = """
import sys
import mcretrofit, mcretrofit.config, mcretrofit.registry, mcretrofit.cli, mcretrofit.tasks
import mcretrofit_kernels
for task in mcretrofit.registry.names("tasks"):
    mcretrofit.registry.load("tasks", task)
mcretrofit.config.CachingConfig()
print(sorted({"torch", "triton", "fla", "transformers"} & set(sys.modules)))
"""
    assert python(code) == "[]\n"


def test_files_stay_short():
    for path in [*modules(), *modules(KERNELS)]:
        name = str(path.relative_to(ROOT))
        count = len(path.read_text(encoding="utf-8").splitlines())
        assert count <= LINES, f"{name} has {count} lines"
