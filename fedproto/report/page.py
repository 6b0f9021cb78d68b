"""The page and its Markdown twin. Whatever comes from a file is escaped where it is put into either."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from fedproto.config.plugins import FOLDERS
from fedproto.report.read import WAYS, Group, Run

if TYPE_CHECKING:
    from fedproto.report.figures import Figure, Section

#: Light and dark, from a telephone to paper. Pictures have no background of their own, so they follow.
CSS = """
:root { --ink: #1b1f24; --soft: #59616a; --line: #d5d9de; --back: #fff; --box: #f5f6f8; --link: #005a8f; }
:root { color-scheme: light dark; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #a3abb4; --line: #3a4149; --back: #14171a; --box: #1d2125; --link: #7cc4f5; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
h1, h2, h3, p, li, figcaption, td, th { overflow-wrap: anywhere; }
a { color: var(--link); }
.lead { font-size: 1.1rem; margin: 0; }
.soft, figcaption { color: var(--soft); font-size: .875rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
.scroll:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; font-size: .8125rem; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .45rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
thead th { border-top: 0; color: var(--soft); vertical-align: bottom; white-space: normal; overflow-wrap: normal; }
th:first-child, td.text, th.text { text-align: left; }
th { font-weight: 600; }
tbody th { white-space: normal; min-width: 6.5rem; }
tr > :first-child { position: sticky; left: 0; background: var(--back); }
td small { display: block; color: var(--soft); }
.figures { display: grid; gap: 1.5rem; align-items: start; }
.figures { grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figure img { display: block; width: 100%; max-width: 31rem; height: auto; }
pre { background: var(--box); border-radius: 6px; padding: .75rem 1rem; overflow-x: auto; }
pre, code { font: .8125rem/1.5 ui-monospace, monospace; }
@media print {
  body { font-size: 10.5pt; } main { max-width: none; padding: 0; }
  .scroll { overflow: visible; border: 0; } table { font-size: 6.5pt; } th, td { padding: .15rem .2rem; }
  tbody th { min-width: 0; } .figures { grid-template-columns: 1fr 1fr; } figcaption, .soft { font-size: 8pt; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; } h2, h3 { break-after: avoid; }
}
"""
#: The page asks nobody for anything, and runs nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Report:
    title: str
    summary: str
    notes: list[str]
    groups: list[Group]
    sections: list[Section]

    @property
    def figures(self) -> list[Figure]:
        return [figure for _, figures, _ in self.sections for figure in figures]


def report_of(
    groups: list[Group], left_out: list[str], draw: Callable[[Sequence[Group]], list[Section]]
) -> Report:
    return Report(_title(groups), _summary(groups), _notes(groups) + left_out, groups, draw(groups))


# --- sentences


def _title(groups: Sequence[Group]) -> str:
    names = list(dict.fromkeys(each.first.algorithm for each in groups))
    methods = listed(names) if len(names) <= 4 else f"{len(names)} methods"
    datasets = list(dict.fromkeys(each.first.dataset for each in groups))
    return (
        f"{methods} on {listed(datasets) if len(datasets) <= 3 else f'{len(datasets)} data sets'}"
    )


def _summary(groups: Sequence[Group]) -> str:
    """One run: what it reached. Several: the best of each way to predict over all classes."""
    clients = sorted({len(each.first.clients) for each in groups})
    rounds = sorted({len(each.first.rounds) for each in groups})
    size = f"{listed(map(str, clients))} clients, {listed(map(str, rounds))} rounds"
    if len(groups) == 1:
        return f"{size}{_seeds_of(groups[0])}: {_reached(groups[0])} over all classes, mean over clients."
    ranked = [
        (each.accuracy(way).mean, each.label, way)
        for each in groups
        for way in each.ways
        if "own" not in way
    ]
    mean, label, way = max(ranked)
    return (
        f"{len(groups)} configurations ({sum(len(each.runs) for each in groups)} runs), {size}: the highest mean "
        f"accuracy over all classes is that of {label} by the {_by(way)}, {mean:.2%}."
    )


def _reached(group: Group) -> str:
    return listed(
        f"{group.accuracy(way).mean:.2%} by the {_by(way)}"
        for way in group.ways
        if "own" not in way
    )


def _by(way: str) -> str:
    return "nearest prototype" if way == "prototype" else way


def _seeds_of(group: Group) -> str:
    return f", {len(group.runs)} seeds" if len(group.runs) > 1 else ""


def _notes(groups: Sequence[Group]) -> list[str]:
    first = "Accuracies are in %, mean over clients ± standard deviation over clients, after the last round."
    many = max(len(each.runs) for each in groups)
    second = (
        "Runs that differ in nothing but the seed share a row: everything in it is the mean over their seeds; "
        "“seeds ±” is the standard deviation of the mean over them."
    )
    third = (
        "“Own classes”: scored among the classes the client has; else all classes compete. Values uploaded in a round, "
        "and bytes in all rounds, are those of all clients together."
    )
    return [first, *([second] if many > 1 else []), third, *_divergence(groups)]


def _divergence(groups: Sequence[Group]) -> list[str]:
    """A warning for each run whose loss exploded."""
    sentences = []
    for group in groups:
        for run in group.runs:
            if run.diverged:
                who = f"{run.diverged} of {len(run.clients)} clients"
                sentences.append(
                    f"Warning: {group.label} with seed {run.seed} diverged: the loss of {who} exploded, "
                    "so its accuracies say little."
                )
    return sentences


def listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


# --- the summary table, as text


def summary_table(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    ways = [way for way in WAYS if any(way in each.ways for each in groups)]
    seeds = any(len(each.runs) > 1 for each in groups)
    header = ["method", "data set", *(["seeds"] if seeds else []), "clients", "rounds"]
    header += [f"{WAYS[way]}, %" for way in ways]
    header += ["values a round", "bytes up", "bytes down", "seconds"]
    return header, [_summary_row(each, ways, seeds) for each in groups]


def _summary_row(group: Group, ways: Sequence[str], seeds: bool) -> list[str]:
    run = group.first
    row = [group.label, run.dataset, *([str(len(group.runs))] if seeds else [])]
    row += [str(len(run.clients)), str(len(run.rounds))]
    row += [_cell(group, way) if way in group.ways else "–" for way in ways]
    means = [
        group.mean(lambda run, name=name: getattr(run, name)) for name in ("bytes_up", "bytes_down")
    ]  # type: ignore[misc]
    values, seconds = (
        group.mean(lambda run: run.values_per_round),
        group.mean(lambda run: run.seconds),
    )
    return [*row, f"{values:,.0f}", *(f"{mean:,.0f}" for mean in means), f"{seconds:.1f}"]


def _cell(group: Group, way: str) -> str:
    """`84.72 ± 4.30`, and on a second line how far the seeds lie apart."""
    accuracy, apart = group.accuracy(way), group.over_seeds(way)
    own = f"{100 * accuracy.mean:.2f} ± {100 * (accuracy.std or 0):.2f}"
    return own if apart is None else f"{own}\nseeds ± {100 * apart:.2f}"


# --- configuration, as text


def common(groups: Sequence[Group]) -> str:
    """The settings all runs share, as a configuration file's lines."""
    return _lines(_shared([run for each in groups for run in each.runs]))


def own(group: Group, groups: Sequence[Group]) -> str:
    """The settings that are not common to all; with the common ones they are a whole configuration file."""
    everywhere = _shared([run for each in groups for run in each.runs])
    settings = {key: value for key, value in _shared(group.runs).items() if key not in everywhere}
    seeds = f"# seed = {listed(map(str, group.seeds))}\n" if len(group.runs) > 1 else ""
    return seeds + _lines(settings)


def _shared(runs: Sequence[Run]) -> dict[str, Any]:
    first = runs[0].config
    return {
        key: value
        for key, value in first.items()
        if all(run.config.get(key, ...) == value for run in runs)
    }


def _lines(settings: dict[str, Any]) -> str:
    """TOML with dotted keys, so that lines of two lists may be put into one file in any order."""
    return "\n".join(
        f"{key}.name = {_toml(value)}" if key in FOLDERS else f"{key} = {_toml(value)}"
        for key, value in settings.items()
    )


def _toml(value: Any) -> str:
    return json.dumps(
        value, ensure_ascii=False
    )  # of what TOML can hold, and a run writes, the two say the same


def again(group: Group) -> str:
    """The command that runs each of a group again, or why there is none."""
    if "python" in (group.first.config.get("dataset"), group.first.config.get("model")):
        return "# started from Python with arrays or modules of its own, which no file can name"
    return "\n".join(
        f"fedproto run {shlex.quote(str(run.path / 'config.toml'))}" for run in group.runs
    )


# --- HTML


def html(report: Report, generator: str) -> str:
    body = [
        f'<header><h1>{escape(report.title)}</h1><p class="lead">{escape(report.summary)}</p></header>',
        _section("Summary", _html_table(report.groups) + "".join(map(_soft, report.notes))),
        *(
            _section(heading, _html_figures(figures, notes))
            for heading, figures, notes in report.sections
            if figures or notes
        ),
        _section("Configuration", _html_configuration(report.groups)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'{generator}\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(heading: str, content: str) -> str:
    name = heading.lower().replace(" ", "-")
    return (
        f'<section aria-labelledby="{name}">\n<h2 id="{name}">{heading}</h2>\n{content}\n</section>'
    )


def _soft(sentence: str) -> str:
    return f'<p class="soft">{escape(sentence)}</p>\n'


def _html_table(groups: Sequence[Group]) -> str:
    header, rows = summary_table(groups)
    head = "".join(
        f'<th scope="col"{_text(column)}>{escape(name)}</th>' for column, name in enumerate(header)
    )
    body = "".join(f"<tr>{_html_row(row)}</tr>\n" for row in rows)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-labelledby="summary"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n"
    )


def _html_row(row: Sequence[str]) -> str:
    cells = [f'<th scope="row">{escape(row[0])}</th>']
    for column, cell in enumerate(row[1:], 1):
        first, _, second = cell.partition("\n")
        cells.append(
            f"<td{_text(column)}>{escape(first)}{f'<small>{escape(second)}</small>' if second else ''}</td>"
        )
    return "".join(cells)


def _text(column: int) -> str:
    return ' class="text"' if column == 1 else ""


def _html_figures(figures: Sequence[Figure], notes: Sequence[str]) -> str:
    drawn = "\n".join(map(_html_figure, figures))
    return "".join(map(_soft, notes)) + (
        f'<div class="figures">\n{drawn}\n</div>\n' if figures else ""
    )


def _html_figure(figure: Figure) -> str:
    wide, high = re.findall(r'(?:width|height)="([\d.]+)pt"', figure.svg)[:2]
    return (
        '<figure><picture><source media="screen and (prefers-color-scheme: dark)" '
        f'srcset="{_uri(figure.dark)}"><img src="{_uri(figure.svg)}" width="{float(wide) * 4 / 3:.0f}" '
        f'height="{float(high) * 4 / 3:.0f}" alt="{escape(figure.alt)}"></picture>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def _uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _html_configuration(groups: Sequence[Group]) -> str:
    if len(groups) == 1 and len(groups[0].runs) == 1:
        return f"{_pre(groups[0].first.toml)}\n<h3>To run it again</h3>\n{_pre(again(groups[0]))}"
    parts = [f"<h3>Common to all runs</h3>\n{_pre(common(groups))}"]
    for each in groups:
        settings = own(each, groups)
        parts.append(
            f"<h3>{escape(each.label)}</h3>\n{_pre(settings) if settings else ''}{_pre(again(each))}"
        )
    return "\n".join(parts) + _soft(AGAIN)


AGAIN = "The commands run each of them again, into a new folder; `--out` names it."


def _pre(text: str) -> str:
    return f'<pre tabindex="0"><code>{escape(text.strip())}</code></pre>\n'


# --- Markdown


def markdown(report: Report, folder: str) -> str:
    parts = [f"# {_md(report.title)}", _md(report.summary), "## Summary", _md_table(report.groups)]
    parts += map(_md, report.notes)
    for heading, figures, notes in report.sections:
        if figures or notes:
            parts += [
                f"## {heading}",
                *map(_md, notes),
                *(_md_figure(figure, folder) for figure in figures),
            ]
    return "\n\n".join([*parts, "## Configuration", *_md_configuration(report.groups)]) + "\n"


def _md(text: str) -> str:
    """As one line of text that Markdown leaves as it is."""
    return re.sub(r"([\\`*_\[\]|#<>&~])", r"\\\1", " ".join(text.split()))


def _md_table(groups: Sequence[Group]) -> str:
    header, rows = summary_table(groups)
    rules = ["---", "---"] + ["---:"] * (len(header) - 2)
    cells = [[_md(cell.replace("\n", "; ")) for cell in row] for row in [header, *rows]]
    lines = [cells[0], rules, *cells[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _md_figure(figure: Figure, folder: str) -> str:
    place = f"{folder.replace(' ', '%20')}/{figure.name}"
    return f"![{_md(figure.alt)}]({place}.png)\n\n{_md(figure.caption)} [Numbers]({place}.csv)"


def _md_configuration(groups: Sequence[Group]) -> list[str]:
    if len(groups) == 1 and len(groups[0].runs) == 1:
        return [
            _fence(groups[0].first.toml, "toml"),
            "To run it again:",
            _fence(again(groups[0]), "sh"),
        ]
    parts = ["Common to all runs:", _fence(common(groups), "toml")]
    for each in groups:
        settings = own(each, groups)
        parts += [
            f"### {_md(each.label)}",
            *([_fence(settings, "toml")] if settings else []),
            _fence(again(each), "sh"),
        ]
    return [*parts, AGAIN]


def _fence(text: str, language: str) -> str:
    """Longer than any row of backticks in the text."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.strip()}\n{fence}"
