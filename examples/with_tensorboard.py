"""Watch a run in TensorBoard: pip install '.[tensorboard]' in the project's folder.

python examples/with_tensorboard.py [FOLDER] [ROUNDS]
tensorboard --logdir runs/tensorboard
"""

import sys

import fedproto
from fedproto.runs import tracking


def main(folder: str = "runs/tensorboard", rounds: str = "50") -> None:
    on_round = tracking.tensorboard(folder)
    result = fedproto.run(dataset="digits", rounds=int(rounds), eval_every=5, on_round=on_round)
    on_round(result)  # the metrics of the finished run
    print(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
