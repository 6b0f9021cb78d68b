"""`fedproto list`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedproto.errors import unknown

if TYPE_CHECKING:
    from fedproto.core.types import Algorithm

#: plural, as typed -> kind, as in `--algorithm`
LISTS = {
    "algorithms": "algorithm",
    "datasets": "dataset",
    "models": "model",
    "partitions": "partition",
    "metrics": "metric",
    "combiners": "combiner",
    "transforms": "transform",
    "teachers": "teacher",
    "feature-maps": "feature_map",
}


def list_plugins(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=(
                "algorithms, datasets, models, partitions, metrics, combiners, transforms, "
                "teachers, feature-maps [all]"
            )
        ),
    ] = None,
) -> None:
    """Show the names that can be used, with their options."""
    if kind is not None and kind not in LISTS:
        raise unknown("list", kind, LISTS)
    from rich.table import Table

    for plural in [kind] if kind else LISTS:
        table = Table(title=plural, title_justify="left", show_edge=False, pad_edge=False)
        for header in ("name", "what it is", "options and their defaults"):
            table.add_column(header, overflow="fold")
        for name, description, options in _describe_plugins(LISTS[plural]):
            table.add_row(name, description, options)
        Console().print(table, "", highlight=False)


def _describe_plugins(kind: str) -> list[tuple[str, str, str]]:
    """Return name, description and options of each plug-in and preset of a kind."""
    from fedproto.config import plugins
    from fedproto.config.options import options_of

    rows = []
    for name in plugins.names(kind):
        function = plugins.find(kind, name)
        docstring = function.__doc__ or ""
        first_line = docstring.strip().split("\n")[0]
        if kind == "algorithm":
            first_line += f"\n{_describe_algorithm(name)}"
        options = [str(option) for option in options_of(function).values()]
        rows.append((name, first_line, ", ".join(options)))
    for name, mix in plugins.presets(kind).items():
        rows.append((name, f"in equal blocks: {mix}", ""))
    return rows


def _describe_algorithm(name: str) -> str:
    """Return what an algorithm sends with its default options, and what else sets it apart."""
    from fedproto.config import plugins
    from fedproto.config.options import Part

    algorithm = plugins.build("algorithm", Part(name))
    groups = _describe_groups(algorithm)
    features = [f"Sends {', '.join(groups)}" if groups else "Sends nothing"]
    if algorithm.keeps_state:
        features.append("clients keep state")
    if groups and not algorithm.combinable:
        features.append("takes no combiner")
    return "; ".join(features) + "."


def _describe_groups(algorithm: Algorithm) -> list[str]:
    """Return the groups of an upload, such as `prototypes per class`, for a small perceptron."""
    from fedproto.config import plugins
    from fedproto.config.options import Part
    from fedproto.core.types import Task
    from fedproto.models import Fit

    model = plugins.build("model", Part("mlp"), Fit(shape=(2,), classes=2, dim=2))
    layouts = algorithm.declare(model.state_dict(), Task(2, 2, 2, 0, fixed=2))
    groups = []
    for name, layout in layouts.items():
        once = " once" if name in algorithm.once else ""
        groups.append(f"{name} per {layout.per}{once}")
    return groups
