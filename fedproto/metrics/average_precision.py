import numpy as np

from fedproto.core.metrics import compute_average_precision


def average_precision(probabilities: np.ndarray, y: np.ndarray, classes: tuple[str, ...]) -> float:
    """The area under the precision-recall curve, of rare classes a stricter measure than AUROC.

    With two classes it is that of the second one, with more the mean over the classes that occur.
    NaN if all rows are of one class.
    """
    return compute_average_precision(probabilities, y)
