"""Write tests/MUTATIONS.md from what `mutmut run` left in the folder `mutants`.

`tests/mutations.toml` says why a mutant survives. A reason is found by the module and the changed
line, since the numbers in mutants' names move with every change to the code.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

HERE = Path(__file__).parent
PAGE = HERE / "MUTATIONS.md"
REASONS = HERE / "mutations.toml"
DETECTED = ("killed", "timeout", "segfault", "suspicious", "caught by type check")
UNKNOWN_REASON = "not explained yet (tried with the fast tests only)"
INTRODUCTION = """# Which small errors the tests notice

`make mutants` changes the code in one small way at a time (with mutmut) and runs the fast tests
that reach the changed function. A change is noticed if a test fails or never ends. A change that no
test notices is listed below with the reason. Tests that train for longer are not part of the run.
Made by `tests/mutants.py` from the folder `mutants` and the reasons in `tests/mutations.toml`.
"""


class Mutant(NamedTuple):
    """One change of one module, and what became of it."""

    module: str
    name: str
    status: str


class Change(NamedTuple):
    """The line a mutant changed."""

    before: str
    after: str


def read_mutants(folder: Path) -> Iterator[Mutant]:
    """All mutants that were made, in the order of the modules."""
    for meta in sorted(folder.rglob("*.py.meta")):
        module = str(meta.relative_to(folder)).removesuffix(".meta")
        for name, exit_code in json.loads(meta.read_text())["exit_code_by_key"].items():
            yield Mutant(module, name, status_by_exit_code[exit_code])


def read_change(mutant: Mutant) -> Change:
    """The first changed line before and after, without its indentation."""
    lines = get_diff_for_mutant(mutant.name, path=mutant.module).splitlines()[2:]
    before = [line[1:].strip() for line in lines if line.startswith("-")]
    after = [line[1:].strip() for line in lines if line.startswith("+")]
    return Change(before[0] if before else "", after[0] if after else "")


def read_reasons(path: Path) -> dict[tuple[str, str], str]:
    """(module, changed line) -> why no test notices it; the module `*` stands for all of them."""
    if not path.exists():
        return {}
    entries = tomllib.loads(path.read_text())["survives"]
    return {(entry["module"], line): entry["why"] for entry in entries for line in entry["lines"]}


def find_reason(reasons: dict[tuple[str, str], str], module: str, change: Change) -> str:
    """The reason given for exactly this line, or by a pattern between slashes that it matches."""
    exact = reasons.get((module, change.after))
    if exact is not None:
        return exact
    for (of_module, line), why in reasons.items():
        is_pattern = line.startswith("/") and line.endswith("/")
        if of_module in (module, "*") and is_pattern and re.search(line[1:-1], change.after):
            return why
    return UNKNOWN_REASON


def make_table(mutants: list[Mutant]) -> list[str]:
    """One line per module: mutants, noticed, survived, reached by no test, not run."""
    rows = [
        "| module | mutants | noticed | survived | no test | not run |",
        "|---|---|---|---|---|---|",
    ]
    modules = sorted({mutant.module for mutant in mutants})
    for module in (*modules, "all"):
        statuses = Counter(mutant.status for mutant in mutants if module in (mutant.module, "all"))
        total = sum(statuses.values())
        noticed = sum(statuses[status] for status in DETECTED)
        untested = statuses["no tests"]
        survived = statuses["survived"]
        left = total - noticed - untested - survived
        share = f"{noticed / total:.0%}" if total else "–"
        rows.append(
            f"| {module} | {total} | {noticed} ({share}) | {survived} | {untested} | {left} |"
        )
    return rows


def make_list(mutants: list[Mutant], reasons: dict[tuple[str, str], str]) -> Iterator[str]:
    """The survivors of each module by the reason they survive."""
    survivors = [mutant for mutant in mutants if mutant.status in ("survived", "no tests")]
    for module in sorted({mutant.module for mutant in survivors}):
        yield from ("", f"## {module}", "")
        by_reason: dict[str, list[Change]] = {}
        for mutant in survivors:
            if mutant.module == module:
                change = read_change(mutant)
                by_reason.setdefault(find_reason(reasons, module, change), []).append(change)
        for why, changes in by_reason.items():
            yield f"{why[0].upper()}{why[1:]}:"
            yield ""
            for change in changes:
                yield f"- `{shorten(change.before)}` → `{shorten(change.after)}`"
            yield ""


def shorten(line: str) -> str:
    return line if len(line) <= 90 else f"{line[:87]}..."


def main() -> None:
    mutants = list(read_mutants(Path("mutants")))
    lines = [INTRODUCTION, *make_table(mutants), *make_list(mutants, read_reasons(REASONS))]
    PAGE.write_text("\n".join(lines).rstrip() + "\n")
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
