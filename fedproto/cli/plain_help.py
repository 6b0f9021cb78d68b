"""Help texts that show brackets as they are."""

from __future__ import annotations

from typing import Any

import click
import typer
from typer.core import TyperCommand


class PlainCommand(TyperCommand):
    """A command whose help shows `[required]` and `[default: 10]` without a backslash.

    Typer below 0.21, which Flower requires, escapes these brackets for rich even where rich is off.
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for kind, title in (("argument", "Arguments"), ("option", "Options")):
            rows = []
            for param in self.get_params(ctx):
                record = param.get_help_record(ctx)
                if record is not None and param.param_type_name == kind:
                    name, text = record
                    rows.append((name, text.replace("\\[", "[")))
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class PlainTyper(typer.Typer):
    """An app without rich markup, whose commands are `PlainCommand`s."""

    def __init__(self, **options: Any) -> None:
        super().__init__(rich_markup_mode=None, **options)  # [20] is a default, not markup

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, cls=PlainCommand, **options)
