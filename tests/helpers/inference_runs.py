"""Settings of small runs whose trained models are used afterwards."""

DIGITS = {
    "dataset": "digits",
    "clients": 4,
    "rounds": 3,
    "shots": 5,
    "lr": 0.05,
    "engine": "reference",
}
#: Beside DIGITS: dropout, convolutions, two sources, a projection.
MIXED = {
    "dataset": "digits*2,mnist5k*1",
    "model": "mlp*2,cnn*1",
    "clients": 3,
    "dim": 20,
    "rounds": 1,
}
