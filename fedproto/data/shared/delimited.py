"""Reading text files in any encoding, and delimited ones with a header."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO

from fedproto.errors import ConfigError, DataError

TABLE_ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
UTF_8 = "utf-8"
DELIMITERS = ",;\t"
#: Characters of a field; Python's own limit is 131,072, and a text may be longer.
MAX_FIELD_CHARACTERS = 2**31 - 1
#: The first bytes of a file that say how it is encoded; the longer ones come first.
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
#: The header of the column of row numbers that pandas writes, and what it reads that back as.
INDEX_HEADER = re.compile(r"|Unnamed: 0(\.\d+)?")
#: What the header of a column to leave out becomes.
LEFT_OUT = ""

csv.field_size_limit(MAX_FIELD_CHARACTERS)

Rows = Iterator[tuple[int, list[str]]]  # the header, then the rows, each with its number


def check_text_encoding(name: str) -> str:
    """Return the name of a text encoding, or raise ConfigError if Python knows none of that name.

    >>> check_text_encoding("latin-1")
    'latin-1'
    """
    try:
        "".encode(name)
    except (LookupError, UnicodeError, ValueError) as error:
        raise ConfigError(
            f"text_encoding {name!r} is not known: name one such as utf-8, latin-1, cp1252 or "
            "utf-16"
        ) from error
    return name


@contextmanager
def open_text(path: Path, text_encoding: str = UTF_8) -> Iterator[IO[str]]:
    """Open a text file, gzipped or not; whatever is wrong with it becomes a DataError.

    A byte order mark at its beginning wins over `text_encoding`.
    """
    encoding = text_encoding
    open_file = gzip.open if path.suffix == ".gz" else open
    try:
        with open_file(path, "rb") as file:
            encoding = _find_encoding(file.read(4)) or text_encoding
            file.seek(0)
            yield io.TextIOWrapper(file, encoding, newline="")
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except UnicodeDecodeError as error:
        name = "UTF-8" if encoding in (UTF_8, "utf-8-sig") else encoding
        raise DataError(
            f"{path} is not in {name}: {error}; name its encoding, as in text_encoding=latin-1"
        ) from error
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def _find_encoding(first_bytes: bytes) -> str | None:
    """Return the encoding that a file's byte order mark states, if there is one."""
    for mark, encoding in BYTE_ORDER_MARKS:
        if first_bytes.startswith(mark):
            return encoding
    return None


def read_rows(path: Path, text_encoding: str = UTF_8) -> Rows:
    """Yield the header, then the rows, each with the number of its last line.

    Blank lines are skipped. A first column without a name, such as the index that pandas writes,
    is called `LEFT_OUT`. Raises DataError if the header is unusable or a row does not fit it.
    """
    with open_text(path, text_encoding) as file:
        first_line = file.readline()
        if "\0" in first_line:
            raise DataError(
                f"{path} is not in {text_encoding}: its first line holds NUL characters; name its "
                "encoding, as in text_encoding=utf-16-le"
            )
        delimiter = _find_delimiter(first_line)
        rows = csv.reader(chain([first_line], file), delimiter=delimiter, strict=True)
        header = check_header(str(path), next(rows, []))
        yield rows.line_num, header
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise DataError(
                    f"{path}, line {rows.line_num} has {len(row)} values, "
                    f"but the header names {len(header)} columns"
                )
            yield rows.line_num, row


def _find_delimiter(line: str) -> str:
    """Return the delimiter that divides a line into the most values."""

    def count_values(delimiter: str) -> int:
        reader = csv.reader([line], delimiter=delimiter)
        return len(next(reader, []))

    return max(DELIMITERS, key=count_values)


def check_header(where: str, header: Sequence[str], takes_numbers: bool = False) -> list[str]:
    """Return the names of the columns without blanks around them, or raise DataError.

    A text file whose first line holds a number has no header; with `takes_numbers` the names are
    known to be names.
    """
    names = [name.strip() for name in header]
    if len(names) > 1 and INDEX_HEADER.fullmatch(names[0]):
        names[0] = LEFT_OUT
    named = names[1:] if names and names[0] == LEFT_OUT else names
    wrong = [name for name in named if not name or (_is_number(name) and not takes_numbers)]
    if not named or wrong:
        found = repr(wrong[0]) if wrong else "nothing"
        raise DataError(
            f"{where} has no header: its first line must name every column in words, but it holds "
            f"{found}"
        )
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise DataError(f"{where} names two columns {repeated[0]!r}")
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
