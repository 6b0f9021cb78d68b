"""results/theory.{json,md,png}: what `benchmarks/theory.py` measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedproto.core.files import write_atomically
from fedproto.plots.theory import save_theory
from fedproto.theory.along_run import PROOF, RUN
from fedproto.theory.summary import ESTIMATES, summarise_rounds, summarise_statements
from fedproto.theory.words import (
    CAVEAT,
    HEADERS,
    explain,
    list_rows,
    percent,
    short,
)

RESULTS = Path(__file__).resolve().parent.parent / "results"
NAME = "theory"
#: Between the proof's setting and the run's: with dropout, without momentum, with the norm.
NORM = "norm"
DIGITS = 4
#: The settings in the order of the page.
TITLES = {
    PROOF: "the norm, plain SGD, no dropout",
    NORM: "the norm, plain SGD, dropout",
    RUN: "the mean square, momentum, dropout",
}
#: What the JSON keeps of each client, by name: where its record has it.
COLUMNS: dict[str, tuple[str, ...]] = {
    "steps": ("steps",),
    "loss_start": ("loss_start",),
    "loss_end": ("loss_end",),
    "loss_after": ("loss_after",),
    "square_sum": ("square_sum",),
    "square_start": ("square_start",),
    "movement": ("movement",),
    "L1_power": ("smoothness", "power"),
    "L1_quotient": ("smoothness", "quotient"),
    "sigma2_largest": ("variance", "largest"),
    "sigma2_mean": ("variance", "mean"),
    "G_largest": ("gradient", "largest"),
    "L2_jacobian": ("lipschitz", "jacobian"),
    "L2_largest": ("lipschitz", "largest"),
    "lemma_1_bound": ("lemma_1", "bound"),
    "lemma_1_error": ("lemma_1", "error"),
    "lemma_2_bound": ("lemma_2", "bound"),
    "theorem_1_bound": ("theorem_1", "bound"),
}

Record = dict[str, Any]


def write_page(
    raw: Path, results: Path, settings: Mapping[str, Any], machine: Mapping[str, str]
) -> None:
    """Write the three files from the measurements in a folder."""
    runs = {name: _read_runs(raw, name) for name in TITLES if any(raw.glob(f"{name}-*.json"))}
    content: Record = {"settings": dict(settings), "machine": dict(machine), "measured": {}}
    for name, by_seed in runs.items():
        content["measured"][name] = {"title": TITLES[name]} | _summarise(by_seed)
    content["tuning"] = _read_tuning(raw)
    figure = save_theory({TITLES[name]: _join(runs[name]) for name in runs})
    text = json.dumps(content, indent=None, separators=(",", ":"))
    write_atomically(results / f"{NAME}.json", (text + "\n").encode())
    write_atomically(results / f"{NAME}.png", figure)
    write_atomically(results / f"{NAME}.md", render_page(content).encode())


# --- reading


def _read_runs(raw: Path, setting: str) -> dict[int, Record]:
    """Return what was measured by seed; rounds of several passes are put together."""
    runs: dict[int, Record] = {}
    for path in sorted(raw.glob(f"{setting}-*.json")):
        content = json.loads(path.read_text())
        seed = content["seed"]
        if seed in runs:
            rounds = [*runs[seed]["rounds"], *content["rounds"]]
            content["rounds"] = sorted(rounds, key=lambda record: record["round"])
        runs[seed] = content
    return runs


def _join(by_seed: Mapping[int, Record]) -> Record:
    """Return the rounds of all seeds together."""
    first = next(iter(by_seed.values()))
    rounds = [record for run in by_seed.values() for record in run["rounds"]]
    return first | {"rounds": rounds}


def _summarise(by_seed: Mapping[int, Record]) -> Record:
    """Return what the JSON holds of one setting."""
    joined = _join(by_seed)
    eta, lam = joined["eta"], joined["lam"]
    per_seed = {}
    for seed, run in by_seed.items():
        per_seed[seed] = summarise_rounds(run["rounds"], eta, lam)
    seconds = sum(sum(each["seconds"].values()) for each in joined["rounds"])
    theorem_2 = [summary["theorem_2"] for summary in per_seed.values()]
    kept = ("eta", "lam", "momentum", "distance", "batch", "replays", "hessian_rows")
    summary = summarise_statements(joined["rounds"])
    # Of Theorem 2 the first seed's; all of them are kept by seed.
    summary["theorem_2"] = theorem_2[0]
    return {
        **{name: joined[name] for name in kept},
        "departures": joined["departures"],
        "seeds": sorted(by_seed),
        "rounds_measured": sorted({record["round"] for record in joined["rounds"]}),
        "seconds": round(seconds),
        "summary": _shorten(summary),
        "theorem_2_by_seed": _shorten(theorem_2),
        "holds_by_seed": {seed: _list_shares(each) for seed, each in per_seed.items()},
        "rounds": [
            _compact(run["seed"], record) for run in by_seed.values() for record in run["rounds"]
        ],
    }


def _list_shares(summary: Record) -> Record:
    """Return how often each statement holds with one seed."""
    shares = {}
    for name, found in summary["statements"].items():
        shares[name] = None if found is None else found["holds"]
    return shares


def _compact(seed: int, record: Record) -> Record:
    """Return a round with a column of all clients for each quantity."""
    columns = {}
    for name, path in COLUMNS.items():
        columns[name] = [_follow(client, path) for client in record["clients"]]
    return _shorten(
        {
            "seed": seed,
            "round": record["round"],
            "constants": record["constants"],
            "federation": record["federation"],
            "clients": columns,
        }
    )


def _follow(client: Record, path: Sequence[str]) -> float | None:
    value: Any = client
    for key in path:
        if value is None:
            return None
        value = value[key]
    return value


def _shorten(value: Any) -> Any:
    """Return the same with numbers of four digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _shorten(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shorten(each) for each in value]
    return value


def _read_tuning(raw: Path) -> Record:
    """Return what searches on validation rows found beside the theory's proposals, by data set."""
    found = {}
    for path in sorted(raw.glob("tune-*/proposals.json")):
        search = json.loads((path.parent / "tune.json").read_text())
        proposals = json.loads(path.read_text())["found"]
        candidates = search["candidates"]
        name = path.parent.name.removeprefix("tune-")
        found[name] = {
            "tried": search["tried"],
            "rounds": search["rungs"][-1],
            "seeds": len(search["seeds"]),
            "default": _describe_candidate(candidates[search["default"]]),
            "best": _describe_candidate(candidates[search["best"]]),
            "proposals": _shorten(proposals),
        }
    return found


def _describe_candidate(candidate: Record) -> Record:
    return _shorten(candidate["settings"] | {"validation": candidate["validation"]})


# --- the page


def render_page(content: Record) -> str:
    """Return results/theory.md."""
    measured = content["measured"]
    proof = next(iter(measured.values()))
    lines = [
        "# The paper's convergence proof, measured on MNIST",
        "",
        "<!-- Made by `python3 -m benchmarks.theory page RAW`; do not edit. -->",
        "",
        f"FedProto with 20 clients (n = 3, stdev 2, k = 100), batch {proof['batch']}, "
        f"η = {proof['eta']:g}, λ = {proof['lam']:g}; {len(proof['seeds'])} seeds, "
        f"{proof['replays']} replays of each measured round, Hessians over "
        f"{proof['hessian_rows']} rows per client. What the statements are, how they are measured "
        "and where the proof has gaps: [docs/theory.md](../docs/theory.md).",
        "",
        "![measured changes beside bounds](theory.png)",
    ]
    for setting in measured.values():
        lines += ["", *_render_setting(setting["title"], setting)]
    lines += ["", CAVEAT, "", *_render_constants(measured)]
    if content["tuning"]:
        lines += ["", *_render_tuning(content["tuning"])]
    machine = content["machine"]
    seconds = sum(setting["seconds"] for setting in measured.values())
    lines += [
        "",
        f"Measured in {seconds / 60:.0f} minutes of one shared CPU core ({machine['device']}), "
        f"torch {machine['torch']}, fedproto {machine['fedproto']}.",
    ]
    return "\n".join(lines) + "\n"


def _render_setting(title: str, setting: Record) -> list[str]:
    rounds = ", ".join(str(round) for round in setting["rounds_measured"])
    what = f"momentum {setting['momentum']:g}, distance {setting['distance']}"
    lines = [
        f"## {title[0].upper()}{title[1:]}",
        "",
        f"{what}; rounds {rounds}; {setting['summary']['client_rounds']} client-rounds.",
        "",
        *_render_table(HEADERS, list_rows(setting["summary"])),
        "",
    ]
    lines += [f"- {sentence}" for sentence in explain(setting)]
    shares = []
    for seed, found in setting["holds_by_seed"].items():
        held = " / ".join(percent(value) for value in found.values() if value is not None)
        shares.append(f"seed {seed}: {held}")
    lines.append(f"- Lemma 1 / Lemma 2 / Theorem 1 hold by seed: {'; '.join(shares)}.")
    lines += [f"- {sentence}" for sentence in setting["departures"]]
    return lines


def _render_constants(measured: Mapping[str, Record]) -> list[str]:
    """Return the table of the estimated constants."""
    rows = []
    for name in ESTIMATES:
        row = [name]
        for setting in measured.values():
            found = setting["summary"]["constants"][name]
            middle = f"{short(found['lower_quartile'])} to {short(found['upper_quartile'])}"
            row.append(f"{short(found['median'])} ({middle}; {short(found['largest'])})")
        rows.append(row)
    titles = [setting["title"] for setting in measured.values()]
    return [
        "## The constants",
        "",
        "Medians over client-rounds (quartiles; the largest).",
        "",
        *_render_table(["constant", *titles], rows),
    ]


def _render_tuning(tuning: Mapping[str, Record]) -> list[str]:
    """Return what the theory proposes beside what a search finds."""
    rows = []
    for name, found in tuning.items():
        tried = f"{found['tried']} settings, {found['rounds']} rounds, {found['seeds']} seeds"
        named = [("the default", found["default"]), (f"search ({tried})", found["best"])]
        named += [(each["name"], each) for each in found["proposals"]]
        for label, each in named:
            score = each["validation"]
            accuracy = "broke down" if score is None else f"{100 * score:.2f}"
            rows.append([name, label, short(each["lr"]), short(each["lam"]), accuracy])
    return [
        "## Tuning by theory",
        "",
        "`fedproto tune --by theory`: accuracy on validation rows, in %.",
        "",
        *_render_table(["data", "chosen by", "lr", "λ", "validation"], rows),
    ]


def _render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return lines
