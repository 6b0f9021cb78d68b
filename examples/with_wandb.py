"""Log a run to Weights & Biases, every round as it finishes: pip install wandb.

python examples/with_wandb.py [ROUNDS]
"""

import sys

import wandb

import fedproto
from fedproto.runs import tracking


def main(rounds: str = "50") -> None:
    settings = {"dataset": "digits", "rounds": int(rounds), "eval_every": 5}
    with wandb.init(project="fedproto", config=settings) as run:
        for result in fedproto.stream(**settings):
            run.log(tracking.scalars(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
