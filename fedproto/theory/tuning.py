"""`fedproto tune --by theory`: what the theory proposes, judged on validation rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedproto.core.files import write_atomically
from fedproto.runs.experiment import Experiment
from fedproto.runs.tune.search import OpenReporter, Search, SearchOptions
from fedproto.theory.along_run import TheoryOptions, measure_experiment
from fedproto.theory.conditions import refuse_unsuited
from fedproto.theory.proposal import MEASURED_ROUNDS, propose

#: The file with the proposals beside tune.json, and the folder of their runs.
PROPOSALS = "proposals.json"
RUNS = "theory"
VERSION = 1


def refuse_search(search: Search) -> None:
    """Raise ConfigError where the theory says nothing about the settings of a search."""
    refuse_unsuited(search.config)


def judge_proposals(
    search: Search,
    settings: Mapping[str, Any],
    assigned: Mapping[str, Any],
    folder: Path,
    open_reporter: OpenReporter,
) -> list[dict[str, Any]]:
    """Return the theory's proposals with their scores, and write them beside a finished search.

    Rounds of the default settings are measured, with the first of the search's seeds. Each
    proposal is then trained and judged as the search's last candidates are.

    settings, assigned  those that the search was prepared from
    """
    cell = search.cells_of(search.trials[0].candidate)[0]
    config = replace(cell.config, device="cpu", eval_every=cell.config.rounds, checkpoint_every=0)
    first, last = MEASURED_ROUNDS
    options = TheoryOptions(rounds=last, first=first)
    measured = measure_experiment(Experiment.prepare(config), options)
    single = SearchOptions(
        budget=1, rounds=search.rungs[-1], seeds=len(search.seeds), strategy="random"
    )
    judged = []
    for number, proposal in enumerate(propose(measured)):
        change = {"lr": proposal.lr, "lam": proposal.lam}
        alone = Search.prepare({**settings, **change}, {**assigned, **change}, single)
        content = alone.run(folder / RUNS / str(number), open_reporter)
        score = content["candidates"][0]["validation"]
        judged.append(proposal._asdict() | {"validation": score})
    record = {"version": VERSION, "constants": measured["summary"]["constants"], "found": judged}
    text = json.dumps(record, indent=1) + "\n"
    write_atomically(folder / PROPOSALS, text.encode())
    return judged
