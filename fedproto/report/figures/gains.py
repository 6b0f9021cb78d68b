"""Each client's gain over local training, which is what it joins a federation for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fedproto.core.best_round import main_accuracy
from fedproto.plots.labels import shorten
from fedproto.plots.style import marker_at
from fedproto.report.figures.figure import (
    MAX_NAME_LETTERS,
    MAX_NAMED_CLIENTS,
    Figure,
    Section,
    add_series_legend,
    count_legend_rows,
    finish_figure,
    make_panel,
)
from fedproto.report.groups import Group
from fedproto.report.read import Run

ROW_INCHES = 0.17
MAX_HEIGHT_INCHES = 9.0
LOCAL = "local"
#: Differences of fractions below this are rounding.
SAME = 1e-9


class Gains(NamedTuple):
    """What the clients of a group gain over those of a local run of the same partition."""

    group: Group
    position: int
    by_client: dict[str, float]  # differences of fractions

    def count_signs(self) -> str:
        """Return how many clients gain and lose, such as `3 better, 4 equal, 1 worse`."""
        better = sum(gain > SAME for gain in self.by_client.values())
        worse = sum(gain < -SAME for gain in self.by_client.values())
        equal = len(self.by_client) - better - worse
        return f"{better} better, {equal} equal, {worse} worse"


def draw_gains(groups: Sequence[Group]) -> Section:
    """Return the section of gains; without a local run of the same partition, only a note."""
    found = list_gains(groups)
    if not found:
        note = (
            "No run of the method “local” on the same partition is here, so no client's gain over "
            "local training is known."
        )
        return Section("Gain over local training", [], [note])
    return Section("Gain over local training", [_draw(found)])


def list_gains(groups: Sequence[Group]) -> list[Gains]:
    """Return the gains of all groups whose first run has a local one of the same partition."""
    local_runs: dict[str, Run] = {}  # by partition
    for group in groups:
        if group.first.algorithm == LOCAL:
            local_runs.setdefault(group.first.partition, group.first)
    found = []
    for position, group in enumerate(groups):
        local = local_runs.get(group.first.partition)
        if local is None or group.first.algorithm == LOCAL:
            continue
        alone = _accuracy_by_client(local)
        gains = {}
        for name, accuracy in _accuracy_by_client(group.first).items():
            if name in alone:
                gains[name] = accuracy - alone[name]
        if gains:
            found.append(Gains(group, position, gains))
    return found


def _accuracy_by_client(run: Run) -> dict[str, float]:
    """Return each client's accuracy by the way that the run is judged by."""
    way = main_accuracy(run.accuracy)
    return {client.name: client.accuracy[way] for client in run.clients}


def _draw(found: Sequence[Gains]) -> Figure:
    """Draw a row per client and a dot per method; the axis is zoomed to the gains."""
    names = sorted(found[0].by_client, key=lambda name: -found[0].by_client[name])
    others = {name for gains in found for name in gains.by_client} - set(names)
    names += sorted(others)
    labels = [f"{gains.group.label}: {gains.count_signs()}" for gains in found]
    height = min(MAX_HEIGHT_INCHES, 0.8 + ROW_INCHES * len(names))
    canvas, axes = make_panel(height, count_legend_rows(labels))
    axes.axvline(0, color="#999999", linewidth=1)
    place = {name: row for row, name in enumerate(names)}
    entries = []
    for gains, label in zip(found, labels, strict=True):
        points = [100 * gain for gain in gains.by_client.values()]
        rows = [place[name] for name in gains.by_client]
        (dots,) = axes.plot(
            points, rows, marker_at(gains.position), color=gains.group.colour, linestyle=""
        )
        entries.append((dots, label))
    axes.set(title="gain over local training", xlabel="percentage points")
    axes.set_ylim(len(names) - 0.4, -0.6)
    if len(names) <= MAX_NAMED_CLIENTS:
        axes.set_yticks(range(len(names)), [shorten(name, MAX_NAME_LETTERS) for name in names])
        axes.tick_params(axis="y", labelsize=8)
    else:
        axes.set_yticks([])
        axes.set_ylabel("clients")
    add_series_legend(canvas, entries)
    caption = (
        "Each client's accuracy minus that of the same client trained alone on the same rows, over "
        f"all classes, first seed: {'; '.join(labels)}."
    )
    alt = f"Dot plot with a row per client. {caption}"
    return finish_figure(canvas, "gains", "gain over local training", caption, alt, _table(found))


def _table(found: Sequence[Gains]) -> Iterator[Sequence[Any]]:
    yield "run", "client", "gain"
    for gains in found:
        for name, gain in gains.by_client.items():
            yield gains.group.label, name, gain
