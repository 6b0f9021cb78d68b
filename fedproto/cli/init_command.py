"""`fedproto init`: a configuration file for somebody's own data."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedproto.cli.output import say
from fedproto.errors import ConfigError, WriteError

if TYPE_CHECKING:
    from fedproto.setup.suggestions import Suggestion

#: Settings that are asked for, with the question.
QUESTIONS = {
    "algorithm": "method",
    "rounds": "communication rounds",
    "validation": "fraction of training rows for validation",
}


def init(
    data: Annotated[
        str | None,
        typer.Argument(help="a file or folder, or a data set such as 'csv:visits.csv'"),
    ] = None,
    out: Annotated[Path, typer.Option(help="the file to write")] = Path("federation.toml"),
    label: Annotated[str | None, typer.Option(help="the column of classes")] = None,
    client: Annotated[str | None, typer.Option(help="the column of clients")] = None,
    group: Annotated[
        str | None, typer.Option(help="the column of what stays together, such as patients")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="a column to leave out; may be repeated")
    ] = None,
    algorithm: Annotated[str | None, typer.Option(help="the method [suggested]")] = None,
    rounds: Annotated[int | None, typer.Option(help="communication rounds [suggested]")] = None,
    validation: Annotated[
        float | None, typer.Option(help="fraction of training rows for validation [suggested]")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="take all suggestions without questions")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="replace an existing file")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="print the JSON schema of such files, and exit")
    ] = False,
) -> None:
    """Look at your data, suggest settings, and write a configuration file that runs as it is."""
    if schema:
        _print_schema()
        return
    if out.suffix != ".toml":
        raise ConfigError(f"--out must name a .toml file, not {out}")
    if out.exists() and not force:
        raise WriteError(f"{out} exists: name another file with --out, or replace it with --force")
    asks = sys.stdin.isatty() and not yes
    if data is None:
        if not asks:
            raise ConfigError("name the data: fedproto init FILE, or fedproto init FOLDER")
        data = typer.prompt("your data: a file or a folder")
    wishes = {"label": label, "client": client, "group": group, "ignore": tuple(ignore or ())}
    chosen = {"algorithm": algorithm, "rounds": rounds, "validation": validation}
    _write(data, wishes, chosen, out, asks)


def _write(
    data: str, wishes: dict[str, Any], chosen: dict[str, Any], out: Path, asks: bool
) -> None:
    """Look at the data, ask, and write the file and its schema, once they would run."""
    import json

    from fedproto.config.schema import json_schema
    from fedproto.core.files import write_atomically
    from fedproto.setup.config_text import SCHEMA_ENDING, write_config_text
    from fedproto.setup.suggestions import suggest
    from fedproto.setup.survey import survey
    from fedproto.setup.trial import prepare_text

    found = survey(data, wishes)
    for sentence in found.describe():
        say(sentence)
    for option, reason in found.reasons.items():
        say(f"{option} = {found.part.options[option]}: {reason}")
    suggestions = suggest(found.source, found.part.name.partition(":")[0])
    suggestions = [_choose(each, chosen, asks) for each in suggestions]
    named = {each.key for each in suggestions}
    for key, value in chosen.items():
        if value is not None and key not in named:
            suggestions.insert(0, _suggestion(key, value))
    for each in suggestions:
        say(f"{each.key} = {each.value}: {each.why}")
    schema_file = out.with_suffix(SCHEMA_ENDING)
    text = write_config_text(found, suggestions, str(out), schema_file.name)
    prepare_text(text, found)  # whatever can be refused is refused before anything is written
    write_atomically(schema_file, json.dumps(json_schema(), indent=1).encode() + b"\n")
    write_atomically(out, text.encode())
    say(f"written to {out}; train with: fedproto run {out}")


def _choose(suggested: Suggestion, chosen: dict[str, Any], asks: bool) -> Suggestion:
    """Return a suggestion with the value that a flag or an answer gives it."""
    value = chosen.get(suggested.key)
    if value is None and asks and suggested.key in QUESTIONS:
        value = typer.prompt(QUESTIONS[suggested.key], default=suggested.value)
    if value is None or value == suggested.value:
        return suggested
    return replace(suggested, value=value, why=f"your choice, instead of {suggested.value}")


def _suggestion(key: str, value: Any) -> Suggestion:
    from fedproto.setup.suggestions import Suggestion

    return Suggestion(key, value, "your choice")


def _print_schema() -> None:
    import json

    from fedproto.config.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))
