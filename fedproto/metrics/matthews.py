import numpy as np

from fedproto.core.metrics import compute_matthews, count_confusions, predict_classes


def matthews(probabilities: np.ndarray, y: np.ndarray, classes: tuple[str, ...]) -> float:
    """Matthews' correlation of predicted and true classes: 1 is perfect, 0 is chance.

    It is 0 if one class is predicted throughout, or if all rows are of one class.
    """
    predicted = predict_classes(np.where(probabilities > 0, probabilities, -np.inf))
    return compute_matthews(count_confusions(y, predicted, len(classes)))
