"""Log a run to MLflow, every round as it finishes: pip install mlflow.

python examples/with_mlflow.py [ROUNDS]
"""

import sys

import mlflow

import fedproto
from fedproto.runs import tracking


def main(rounds: str = "50") -> None:
    settings = {"dataset": "digits", "rounds": int(rounds), "eval_every": 5}
    with mlflow.start_run():
        mlflow.log_params(settings)
        for result in fedproto.stream(**settings):
            numbers = tracking.scalars(result)
            mlflow.log_metrics(numbers, step=int(numbers["round"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
