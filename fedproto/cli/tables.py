"""Results as tables and sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from fedproto.cli.fitted_tables import TextColumn, fit_tables
from fedproto.cli.numbers import percent, signed_points
from fedproto.core.client_names import are_numbers
from fedproto.runs.sweep import Cell, rank_by_validation

#: The widest minimum, in characters, of the column with the models' names.
MAX_MODEL_WIDTH = 20
#: The widest column with the clients' names, in characters; longer names are cut.
MAX_NAME_WIDTH = 24
#: The most characters of classes that a client's row lists.
MAX_CLASSES_WIDTH = 48
#: The characters that model, classes and number of rows get where the terminal is narrow.
DESCRIPTION_WIDTH = 30
#: Points of accuracy below which two clients are equal: rounding is no difference.
EQUAL_POINTS = 1e-9
#: Clients that a table shows: more would push what was said before off the screen.
MAX_SHOWN_CLIENTS = 50


# --- sweeps and benchmarks


def sweep_tables(
    cells: Sequence[Cell], results: Sequence[dict[str, Any] | None], width: int
) -> list[Table]:
    """Return a table with one row per federation of a sweep; what is too wide is in further ones.

    A row has the settings in which the federations differ, the mean accuracies, and the
    federation's share of the seconds of its stack. The result of one that broke down is None.
    With validation, the best federation by its score on validation rows comes first.
    """
    settings = _varied_settings(cells)
    ways = _ways_to_predict(results)
    ranked = rank_by_validation(results)
    headers = list(settings)
    title = "mean test accuracy over clients, %"
    if ranked is not None:
        title = "ranked by accuracy on validation rows; other accuracies on test rows, means, %"
        headers += ["valida-\ntion", "best\nround"]
    headers += [_break_way(way) for way in ways]
    headers.append("share of\nseconds")
    rows = []
    styles = []
    for position in ranked if ranked is not None else range(len(cells)):
        result = results[position]
        row = [str(cells[position].varied.get(setting, "")) for setting in settings]
        if result is None:
            row += ["" for _ in headers[len(row) :]]
            row[0] += " broke down"
            styles.append("red")
        else:
            if ranked is not None:
                row += [percent(result["validation"]["score"]), str(result["best_round"])]
            row += [_mean_accuracy(result, way) for way in ways]
            row.append(f"{result['seconds']['total']:.1f}")
            styles.append("")
        rows.append(row)
    columns = []
    for place, header in enumerate(headers):
        columns.append(TextColumn(header, [row[place] for row in rows]))
    return fit_tables(columns, width, title, keys=len(settings), styles=styles)


def _break_way(way: str) -> str:
    """Return a way to predict in lines, so that its column is hardly wider than its numbers."""
    return way.replace("_", "\n").replace("+", "\n+")


def _varied_settings(cells: Sequence[Cell]) -> list[str]:
    """Return the settings in which cells differ, in the order of their first appearance."""
    settings: dict[str, None] = {}
    for cell in cells:
        settings |= dict.fromkeys(cell.varied)
    return list(settings)


def _ways_to_predict(results: Sequence[dict[str, Any] | None]) -> list[str]:
    """Return the kinds of accuracy that some result has, in the order of first appearance."""
    ways: dict[str, None] = {}
    for result in results:
        if result is not None:
            ways |= dict.fromkeys(result["accuracy"])
    return list(ways)


def _mean_accuracy(result: dict[str, Any], way: str) -> str:
    if way not in result["accuracy"]:
        return ""
    return percent(result["accuracy"][way]["mean"])


def bench_table(found: dict[str, Any]) -> Table:
    """Return a table with one row per engine that `fedproto bench` measured."""
    machine = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
    table = _plain_table(f"seconds per round; {machine}")
    table.add_column("work")
    table.add_column("contender")
    for header in ("seconds", "times the\nplain loop", "ms per\nclient", "first\nround", "GB"):
        table.add_column(header, justify="right")
    previous_work = None
    for row in found["rows"]:
        work = f"{row['model']}, {row['clients']:,} clients, {row['precision']}, {row['data']}"
        contender = row["contender"]
        if row["counted"] != row["clients"]:
            contender += f" (of {row['counted']})"
        milliseconds = 1000 * row["seconds"] / row["clients"]
        table.add_row(
            "" if work == previous_work else work,
            contender,
            f"{row['seconds']:.4g}",
            "" if row["ratio"] is None else f"{row['ratio']:.1f}",
            f"{milliseconds:.3g}",
            f"{row['start']:.2f}",
            f"{row['memory']:.2f}",
        )
        previous_work = work
    return table


# --- runs


def clients_tables(results: Sequence[dict[str, Any]], width: int) -> list[Table]:
    """Return tables of the clients of one run, or of several runs over the same clients.

    Columns that do not fit a terminal of this width are in a further table.
    """
    is_alone = len(results) == 1
    columns: list[_Column] = []
    for result in results:
        for way in _shown_ways(result, is_alone):
            # In two lines, so that the column is no wider than its numbers need.
            way_lines = _break_way(way)
            header = way_lines if is_alone else f"{result['algorithm']}\n{way_lines}"
            columns.append(_Column(header, result, way))
    names = name_clients(results[0])
    tables = []
    for number, part in enumerate(_split_columns(columns, names, width)):
        tables.append(_clients_table(results[0], names, part, is_first=number == 0))
    return tables


class _Column(NamedTuple):
    """A column of accuracies."""

    header: str
    result: dict[str, Any]
    way: str

    @property
    def width(self) -> int:
        """The characters it needs, with the space before the next column."""
        return max(len(line) for line in (*self.header.split("\n"), "100.0")) + 2


def _split_columns(
    columns: Sequence[_Column], names: Sequence[str], width: int
) -> list[list[_Column]]:
    """Return the columns in parts that fit the width, at least one column in each."""
    longest_name = max(len(name) for name in (*names, "client"))
    name_width = min(longest_name, MAX_NAME_WIDTH) + 2
    parts: list[list[_Column]] = [[]]
    room = width - name_width - DESCRIPTION_WIDTH
    for column in columns:
        if parts[-1] and column.width > room:
            parts.append([])
            room = width - name_width
        parts[-1].append(column)
        room -= column.width
    return parts


def _clients_table(
    first: dict[str, Any], names: Sequence[str], columns: Sequence[_Column], is_first: bool
) -> Table:
    """Return one table of the clients; the first one also describes them."""
    clients = first["clients"]
    title = f"{len(clients)} clients on {first['dataset']}: test accuracy, %"
    table = _plain_table(title if is_first else "continued: test accuracy, %")
    table.padding = (0, 1, 0, 0)
    table.add_column(
        "client",
        justify="right" if are_numbers(names) else "left",
        min_width=min(max(map(len, names)), MAX_NAME_WIDTH),
        max_width=MAX_NAME_WIDTH,
        overflow="ellipsis",
        no_wrap=True,
    )
    if is_first:
        longest_model = max(len(client["model"]) for client in clients)
        table.add_column("model", min_width=min(longest_model, MAX_MODEL_WIDTH))
        table.add_column("classes")
        table.add_column("train", justify="right", no_wrap=True)
    for column in columns:
        table.add_column(
            escape(column.header), justify="right", no_wrap=True, min_width=column.width - 2
        )
    for number, client in enumerate(clients[:MAX_SHOWN_CLIENTS]):
        cells = [escape(names[number])]
        if is_first:
            cells += [
                escape(client["model"]),
                escape(shorten_classes(client["classes"])),  # a class may be called [a]
                str(client["train"]),
            ]
        for column in columns:
            cells.append(percent(column.result["clients"][number]["accuracy"][column.way]))
        table.add_row(*cells)
    if len(clients) > MAX_SHOWN_CLIENTS:
        table.caption = (
            f"the first {MAX_SHOWN_CLIENTS} of {len(clients)} clients, mean and std of all; "
            "result.json lists all"
        )
        table.caption_justify = "left"
    table.add_section()
    descriptions = 3 if is_first else 0
    _add_summary_row(table, "mean", columns, descriptions, style="bold")
    _add_summary_row(table, "std", columns, descriptions, style="dim")
    return table


def name_clients(result: dict[str, Any]) -> list[str]:
    """Return what the clients of a result.json are called; an older version has no names."""
    return [client.get("name", str(client["id"])) for client in result["clients"]]


def shorten_classes(classes: Sequence[str], width: int = MAX_CLASSES_WIDTH) -> str:
    """Return the names of classes, and where they are long only how many others there are.

    >>> shorten_classes(["benign", "malignant"])
    'benign malignant'
    >>> shorten_classes(["benign", "malignant"], 10)
    'benign and 1 more'
    """
    listed = " ".join(classes)
    if len(listed) <= width:
        return listed
    shown: list[str] = []
    for name in classes:
        if len(" ".join([*shown, name])) > width:
            break
        shown.append(name)
    others = len(classes) - len(shown)
    if not shown:
        return f"{others} classes"
    return f"{' '.join(shown)} and {others} more"


def _add_summary_row(
    table: Table, statistic: str, columns: Sequence[_Column], descriptions: int, style: str
) -> None:
    """Add the mean or the std of all clients, after as many empty cells as there are others."""
    cells = [percent(each.result["accuracy"][each.way][statistic]) for each in columns]
    table.add_row(statistic, *[""] * descriptions, *cells, style=style)


def _shown_ways(result: dict[str, Any], is_alone: bool) -> list[str]:
    """Return the kinds of accuracy to show; side by side, there is no room for own classes."""
    ways = list(result["accuracy"])
    if is_alone:
        return ways
    return [way for way in ways if not way.endswith("_own")]


def _plain_table(title: str) -> Table:
    return Table(title=escape(title), title_justify="left", box=SIMPLE, pad_edge=False)


def compare_runs(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return one sentence per later run and way to predict: how it compares with the first's head.

    The runs have the same clients. A further sentence says where their models differ.
    """
    first, *others = results
    first_models = [client["model"] for client in first["clients"]]
    sentences = []
    for other in others:
        models = [client["model"] for client in other["clients"]]
        if models != first_models:
            sentences.append(
                f"{other['algorithm']} has other models than {first['algorithm']}, "
                "whose column is shown"
            )
        ways = _shown_ways(other, is_alone=False)
        sentences.extend(_compare(first, other, way) for way in ways)
    return sentences


def _compare(first: dict[str, Any], other: dict[str, Any], way: str) -> str:
    gains = []
    for before, after in zip(first["clients"], other["clients"], strict=True):
        gains.append(100 * (after["accuracy"][way] - before["accuracy"]["head"]))
    better = sum(gain > EQUAL_POINTS for gain in gains)
    worse = sum(gain < -EQUAL_POINTS for gain in gains)
    equal = len(gains) - better - worse
    return (
        f"{other['algorithm']} {way} against {first['algorithm']} head: "
        f"{signed_points(statistics.fmean(gains))} points, {better} better, {equal} equal, "
        f"{worse} worse"
    )


def describe_divergence(result: dict[str, Any]) -> str | None:
    """Return a warning for a run that finished although its loss exploded, otherwise None."""
    exploded = result.get("diverged")
    if not exploded:
        return None
    first = min(exploded, key=lambda each: each["round"])
    name = first.get("name", first["client"])
    return (
        f"warning: {result['algorithm']} diverged: the loss of {len(exploded)} of "
        f"{len(result['clients'])} clients exploded, first that of client {name} in "
        f"round {first['round']}; its accuracies say little, and a smaller lr may help"
    )


def describe_validation(result: dict[str, Any]) -> str | None:
    """Return which round was chosen by what, and what the table shows; None without validation."""
    if "validation" not in result:
        return None
    chosen = result["validation"]
    rounds = f"{result['best_round']} of {result['stopped_round']}"
    return (
        f"{result['algorithm']}: round {rounds} was chosen by {chosen['select_by']} on "
        f"validation rows, {percent(chosen['score'])}%; the accuracies above are those of that "
        "round on test rows, which were looked at once"
    )


def describe_privacy(result: dict[str, Any]) -> str | None:
    """Return what a run claims, and what its clients have spent; None if it was not private."""
    claim = result.get("privacy")
    if claim is None:
        return None
    return f"{result['algorithm']}: {claim['statement']}; details in privacy.json"


def describe_traffic(result: dict[str, Any]) -> str:
    """Return one sentence on what a run sent, and on how long it took."""
    sent = result["communication"]
    transform = result.get("transform")
    method = f"{result['algorithm']} with {transform}" if transform else result["algorithm"]
    rounds = "1 round" if result["rounds"] == 1 else f"{result['rounds']} rounds"
    return (
        f"{method}: {sent['values_per_round']:,.0f} values uploaded per round by all "
        f"clients, {sent['bytes_up']:,} bytes up and {sent['bytes_down']:,} down in "
        f"{rounds}, {result['seconds']['total']:.1f} s"
    )
