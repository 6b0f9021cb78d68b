"""Quotes in the text of a setting: what they hold is taken as it is.

A double quote opens a quoted text anywhere, a single one where a name or value begins, so that an
apostrophe within a word is just that. Within quotes, a backslash stands before the quote itself and
before another backslash.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedproto.errors import ConfigError

#: Stands for a quoted character in `Marked.syntax`; outside of quotes it cannot occur.
QUOTED = '"'


class Marked:
    """A text without its quotes that still tells which characters were quoted.

    text    the characters, without the quotes
    syntax  as long as `text`, with `QUOTED` in the place of every quoted character
    """

    def __init__(self, text: str, syntax: str) -> None:
        self.text = text
        self.syntax = syntax

    def slice(self, start: int, stop: int) -> Marked:
        """Return the characters from `start` up to `stop`, without the blanks around them."""
        syntax = self.syntax[start:stop]
        start += len(syntax) - len(syntax.lstrip())
        stop = start + len(syntax.strip())
        return Marked(self.text[start:stop], self.syntax[start:stop])

    def split(self, places: Sequence[int]) -> list[Marked]:
        """Return the pieces between the characters at these places."""
        starts = [0, *(place + 1 for place in places)]
        stops = [*places, len(self.text)]
        return [self.slice(start, stop) for start, stop in zip(starts, stops, strict=True)]


def read_quotes(text: str, where: str) -> Marked:
    """Return a text without its quotes; `where` begins the error for one that is not closed.

    >>> read_quotes('"a,b",c', "it").text, read_quotes('"a,b",c', "it").syntax
    ('a,b,c', '\"\"\",c')
    """
    characters = []
    syntax: list[str] = []
    opening: str | None = None
    position = 0
    while position < len(text):
        character = text[position]
        following = text[position + 1 : position + 2]
        position += 1
        if opening is None and _opens(character, syntax):
            opening = character
        elif opening is None:
            characters.append(character)
            syntax.append(character)
        elif character == opening:
            opening = None
        else:
            if character == "\\" and following in (opening, "\\"):
                character = following
                position += 1
            characters.append(character)
            syntax.append(QUOTED)
    if opening is not None:
        raise ConfigError(
            f"{where} has a quote that is not closed: write {quote(opening)} for the quote itself"
        )
    return Marked("".join(characters), "".join(syntax))


def _opens(character: str, syntax_before: list[str]) -> bool:
    """Return whether an unquoted character opens a quoted text."""
    if character != "'":
        return character == '"'
    before = "".join(syntax_before).rstrip()
    return before == "" or before[-1] in ",(=:"


def split_elements(text: str, where: str) -> list[str]:
    """Split a list such as `1,4` or `"a,b",c` at its commas, except those inside quotes."""
    marked = read_quotes(text, where)
    commas = [place for place, character in enumerate(marked.syntax) if character == ","]
    return [element.text for element in marked.split(commas)]


def quote_if(pattern: str, text: str) -> str:
    """Return a text as `read_quotes` reads it back: quoted if it has what the pattern finds."""
    return quote(text) if re.search(pattern, text) else text


def quote(text: str) -> str:
    """Return a text in double quotes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
