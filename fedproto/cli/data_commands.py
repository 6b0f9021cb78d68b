"""`fedproto data`: download data sets and check their files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from fedproto.cli.output import print_table, say
from fedproto.cli.plain_help import PlainTyper
from fedproto.errors import DataError

data_app = PlainTyper(
    help="Download data sets, list those that are there, and check their files.",
    no_args_is_help=True,
)

DataDir = Annotated[
    str | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="folder with data files [$FEDPROTO_DATA, or ~/.cache/fedproto]",
    ),
]


@data_app.command("get")
def get_data(
    name: Annotated[str, typer.Argument(help="a data set that `fedproto data list` shows")],
    mirror: Annotated[
        str | None,
        typer.Option(metavar="URL", help="a folder with the same files [the publisher's]"),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Download a data set; run again, it continues where it broke off."""
    from fedproto.data import DataFolders
    from fedproto.data.shared.download import get

    try:
        with _download_bar() as on_progress:
            folder = get(name, DataFolders(data_dir), mirror, on_progress)
    except KeyboardInterrupt:
        say(f"stopped; `fedproto data get {name}` goes on", stderr=True)
        raise typer.Exit(130) from None
    say(f"{name} is in {folder}")


@contextmanager
def _download_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """Yield a function that shows one bar per file; it takes the file, its bytes, and the total."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    is_hidden = not console.is_terminal
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as bar:

        def show(file: str, done_bytes: int, total_bytes: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total_bytes)
            bar.update(tasks[file], completed=done_bytes, total=total_bytes)

        yield show


@data_app.command("list")
def list_data(data_dir: DataDir = None) -> None:
    """Show the data sets that can be downloaded, and where those are that are there."""
    from fedproto.data import DataFolders
    from fedproto.data.shared.inventory import describe_data_sets

    rows = describe_data_sets(DataFolders(data_dir))
    print_table(("name", "there", "download", "licence", "source"), rows)


@data_app.command("check")
def check_data(
    name: Annotated[str | None, typer.Argument(help="one data set [all that are there]")] = None,
    data_dir: DataDir = None,
) -> None:
    """Compare files with their published checksums; exit code 2 if one is wrong or missing."""
    from fedproto.data import DataFolders
    from fedproto.data.shared.inventory import check_all

    findings = check_all(name, DataFolders(data_dir))
    rows = [(dataset, str(finding.path), finding.state) for dataset, finding in findings]
    print_table(("data set", "file", "state"), rows)
    wrong = [finding.path for _, finding in findings if not finding.good]
    if wrong:
        raise DataError(
            f"{len(wrong)} of {len(findings)} files are wrong or missing, first {wrong[0]}"
        )
