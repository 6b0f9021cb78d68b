"""Rules for the whole package: one-way imports, plug-ins of one form, a light front door."""

import ast
import doctest
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import fedproto
from fedproto import errors
from fedproto.config import plugins

ROOT = Path(fedproto.__file__).parent

#: Rooms from the ground up. A module may import from earlier rows and from its own room.
LAYERS = [
    {"errors"},
    {"core"},
    {"config"},
    {"privacy"},
    {"teachers"},
    {"algorithms", "combiners", "data", "metrics", "models", "partitions", "transforms"},
    {"feature_maps"},
    {"engines"},
    {"runs"},
    {"theory"},
    {"setup"},
    {"membership"},
    {"inference"},
    {"deploy"},
    {"plots"},
    {"watch"},
    {"report"},
    {"audit"},
    {"reproduce"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
LAYER = {unit: number for number, units in enumerate(LAYERS) for unit in units}

MODULES = sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.rglob("*.py"))
PLUG_INS = [(kind, name) for kind in plugins.FOLDERS for name in plugins.names(kind)]

#: What a plug-in is given before its options; a path follows where one is written after a colon.
CONTEXT = {
    "algorithm": [],
    "dataset": ["data_folders"],
    "model": ["fit"],
    "partition": ["request"],
    "metric": ["probabilities", "y", "classes"],
    "combiner": [],
    "transform": [],
    "teacher": [],
    "feature_map": [],
}


# --- imports go one way


def for_type_checkers(tree: ast.Module) -> set[ast.AST]:
    """The statements under `if TYPE_CHECKING`, which nobody runs."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found.update(node.body)
    return found


def imports(module: str) -> Iterator[str]:
    """The full names a module imports, wherever in it: `from a import b` is `a.b`."""
    tree = ast.parse((ROOT / f"{module}.py").read_text())
    skipped = for_type_checkers(tree)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports by dots"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unit_of(name: str) -> str:
    """Return the file or folder of `fedproto.x.y`; that of `fedproto.run` is `__init__.py`."""
    first = name.split(".")[1] if "." in name else "__init__"
    return (
        first
        if first in LAYER or (ROOT / first).exists() or (ROOT / f"{first}.py").exists()
        else "__init__"
    )


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    own = module.split("/")[0]
    assert own in LAYER, f"give {own} a place in LAYERS"
    ours = {unit_of(name) for name in imports(module) if name.split(".")[0] == "fedproto"}
    upwards = {unit for unit in ours - {own} if LAYER[unit] >= LAYER[own]}
    assert not upwards, f"{own} imports {upwards}, which does not stand below it"


def test_every_place_in_the_layers_is_taken() -> None:
    assert set(LAYER) == {module.split("/")[0] for module in MODULES}


#: The modules that know Flower.
FLOWER = (
    "deploy/server_app",
    "deploy/client_app",
    "deploy/flower_transport",
    "deploy/reply_pulling",
    "deploy/flower_node",
    "deploy/warm_worker",
)


#: The folders of modules that draw.
MATPLOTLIB = ("plots/", "report/", "audit/figures/", "reproduce/pictures/")


@pytest.mark.parametrize("module", MODULES)
def test_the_core_knows_neither_flower_nor_matplotlib(module: str) -> None:
    """Only where Flower or figures need them; in `deploy`, only in the files that Flower calls."""
    allowed = {"matplotlib"} if module.startswith(MATPLOTLIB) else set()
    allowed |= {"flwr"} if module in FLOWER else set()
    assert {name.split(".")[0] for name in imports(module)}.isdisjoint(
        {"flwr", "matplotlib"} - allowed
    )


def test_pure_modules_know_no_files() -> None:
    """The arithmetic and the algorithms are functions of tensors: no disk, no clock."""
    core = [
        "core/types",
        "core/prototypes",
        "core/tensors",
        "core/rng",
        "core/sampling",
        "core/uploads",
    ]
    pure = [*core, *(module for module in MODULES if module.startswith("algorithms/"))]
    impure = {"os", "pathlib", "io", "json", "time", "datetime", "random", "tempfile"}
    found = {module: impure & {name.split(".")[0] for name in imports(module)} for module in pure}
    assert not any(found.values()), found


# --- plug-ins look alike


@pytest.mark.parametrize(("kind", "name"), PLUG_INS)
def test_a_plug_in_is_a_function_of_its_files_name(kind: str, name: str) -> None:
    stem = name.replace("-", "_")
    tree = ast.parse((ROOT / plugins.FOLDERS[kind] / f"{stem}.py").read_text())
    assert stem in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert inspect.isfunction(plugins.find(kind, name))


@pytest.mark.parametrize(("kind", "name"), PLUG_INS)
def test_a_plug_in_says_in_its_first_line_what_it_is(kind: str, name: str) -> None:
    """`fedproto list` shows that line."""
    first, *others = (plugins.find(kind, name).__doc__ or "").splitlines()
    assert len(first) > 20 and first == first.strip()
    assert not others or others[0] == ""


@pytest.mark.parametrize(("kind", "name"), PLUG_INS)
def test_a_plug_in_takes_its_context_and_then_only_options_with_defaults(
    kind: str, name: str
) -> None:
    parameters = list(inspect.signature(plugins.find(kind, name)).parameters.values())
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert positional in (CONTEXT[kind], [*CONTEXT[kind], "path"], [*CONTEXT[kind], "name"])
    for option in parameters[len(positional) :]:
        assert option.default is not option.empty, f"{name}'s {option.name} has no default"
        assert option.annotation is not option.empty, f"{name}'s {option.name} has no type"


def test_no_run_key_is_called_like_a_kind_of_plug_in() -> None:
    """`--set model.dropout=0` must not be readable in two ways."""
    from fedproto.config.settings import RUN_FIELDS

    assert RUN_FIELDS.isdisjoint({*plugins.FOLDERS, "run"})


# --- errors are a tree


def own_classes(module: ModuleType) -> list[type]:
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__
    ]


def test_every_error_is_one_that_the_command_line_prints() -> None:
    classes = own_classes(errors)
    assert len(classes) > 1
    assert all(issubclass(error, errors.FedProtoError) for error in classes)


@pytest.mark.parametrize(
    "module", [module for module in MODULES if module not in ("__main__", "errors")]
)
def test_errors_are_defined_in_one_place(module: str) -> None:
    """All but `Interrupted`, which must pass every `except Exception` on its way out."""
    loaded = (
        importlib.import_module("fedproto." + module.replace("/", "."))
        if module != "__init__"
        else fedproto
    )
    raised = [each.__name__ for each in own_classes(loaded) if issubclass(each, BaseException)]
    assert raised in ([], ["Interrupted"])


def test_the_tree_in_the_documentation_names_every_error() -> None:
    assert all(error.__name__ in str(errors.__doc__) for error in own_classes(errors))


# --- the front door


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(fedproto, name) is not None for name in fedproto.__all__)
    assert fedproto.__all__ == sorted(
        set(fedproto.__all__), key=lambda name: (name.islower(), name)
    )


def test_the_public_names_are_those_that_type_checkers_see() -> None:
    """They are imported twice, lazily for python and plainly for tools: the two must agree."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (checking,) = [node for node in tree.body if isinstance(node, ast.If)]
    homes = {alias.name: node.module for node in checking.body for alias in node.names}  # type: ignore[attr-defined]
    assert set(homes) == set(fedproto.__all__)
    for name, home in homes.items():
        assert getattr(importlib.import_module(str(home)), name) is getattr(fedproto, name)


def test_dir_shows_the_public_names() -> None:
    assert set(fedproto.__all__) <= set(dir(fedproto))
    assert "__version__" in dir(fedproto)


def test_a_name_that_is_not_public_is_refused_as_python_does() -> None:
    with pytest.raises(AttributeError, match="module 'fedproto' has no attribute 'prototype'"):
        fedproto.prototype  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, fedproto; dir(fedproto); fedproto.FedProtoError; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "fedproto" in loaded
    assert not {"torch", "numpy", "sklearn"} & set(loaded)


def test_a_run_does_not_import_scikit_learn() -> None:
    """Its digits are read from its file: its import takes as long as torch's."""
    code = (
        "import sys, fedproto; fedproto.run(dataset='digits', clients=2, rounds=1, shots=2); "
        "print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "fedproto.data.digits" in loaded
    assert not {"sklearn", "pandas", "pyarrow", "pydantic", "flwr", "pydicom"} & set(loaded)


def test_the_version_is_that_of_the_project() -> None:
    import tomllib

    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    assert fedproto.__version__ == project["version"]


#: Modules whose docstrings have examples.
WITH_EXAMPLES = [
    "algorithms",
    "cli.numbers",
    "config.options",
    "core.class_names",
    "core.engine",
    "core.rng",
    "core.tensors",
    "watch.freeze",
    "watch.guard",
    "watch.numbers",
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_in_docstrings_are_true(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"fedproto.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
