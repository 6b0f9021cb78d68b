"""Trains the federation of `benchmarks/rivals.py` with this package, a printed line per round.

python ours.py '{"algorithm": "fedproto", ...}'    # the keywords of fedproto.stream
python ours.py plain                               # the plain loop of `fedproto bench`
"""

from __future__ import annotations

import json
import sys

import fedproto
from fedproto.data import DataFolders
from fedproto.runs.bench.contenders import run_plain_loop
from fedproto.runs.bench.federations import Work, load_source
from fedproto.runs.result import Result


def main() -> None:
    asked = sys.argv[1]
    if asked.startswith("plain:"):
        work = Work("cnn", 20, asked.removeprefix("plain:"))
        rounds = run_plain_loop(work, load_source(work, DataFolders(None)), work.clients)
    else:
        rounds = fedproto.stream(**json.loads(asked))
    for number, found in enumerate(rounds, start=1):
        if not isinstance(found, Result):  # which a stream ends with
            print(f"round {number} is done", flush=True)


if __name__ == "__main__":
    main()
