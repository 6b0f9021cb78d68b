"""A configuration file with comments, for people who have not seen one."""

from __future__ import annotations

from collections.abc import Sequence

from fedproto.config import plugins
from fedproto.config.config_file import VERSION, format_value
from fedproto.config.options import Part
from fedproto.setup.suggestions import Suggestion
from fedproto.setup.survey import Survey

#: The schema is written beside the file under this ending.
SCHEMA_ENDING = ".schema.json"


def write_config_text(
    found: Survey, suggestions: Sequence[Suggestion], file_name: str, schema_name: str
) -> str:
    """Return the text of a configuration file.

    `file_name` is what the file will be called, and `schema_name` the schema beside it.
    """
    settings = [each for each in suggestions if each.key not in plugins.FOLDERS]
    choices = [each for each in suggestions if each.key in plugins.FOLDERS]
    lines = [
        f"#:schema ./{schema_name}",
        "# A federation, written by `fedproto init`.",
        f"#   check it:  fedproto check {file_name}",
        f"#   train it:  fedproto run {file_name}",
        "# `fedproto list` shows all methods and models; docs/configuration.md all settings.",
        "",
        f"version = {VERSION}",
    ]
    for each in settings:
        lines += ["", _comment(each.why), f"{each.key} = {format_value(each.value)}"]
    lines += ["", "[dataset]"]
    lines += [_comment(sentence) for sentence in found.describe()]
    lines.append(f"name = {format_value(str(Part(found.part.name)))}")
    for option, value in found.part.options.items():
        if option in found.reasons:
            lines.append(_comment(found.reasons[option]))
        lines.append(f"{option} = {format_value(value)}")
    for each in choices:
        lines += ["", f"[{each.key}]", _comment(each.why), f"name = {format_value(each.value)}"]
    return "\n".join(lines) + "\n"


def _comment(sentence: str) -> str:
    """Return a sentence as one comment, whatever a class or a file is called."""
    printable = "".join(letter if letter.isprintable() else " " for letter in sentence)
    return f"# {' '.join(printable.split())}"
