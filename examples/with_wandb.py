"""A run in Weights & Biases: pip install wandb. Every round is logged as it comes, the final accuracies at the end.

python examples/with_wandb.py [ROUNDS]
"""

import sys

import wandb

import fedproto
from fedproto.runs import tracking


def main(rounds: str = "50") -> None:
    settings = {"dataset": "digits", "rounds": int(rounds), "eval_every": 5}
    with wandb.init(project="fedproto", config=settings) as run:
        for found in fedproto.stream(**settings):
            run.log(tracking.scalars(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
