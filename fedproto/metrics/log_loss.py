import numpy as np

#: Probabilities below this count as this, or one certain error would make the mean infinite.
SMALLEST_PROBABILITY = 2.0**-52


def log_loss(probabilities: np.ndarray, y: np.ndarray, classes: tuple[str, ...]) -> float:
    """The mean of −log p of the true class, the loss that training minimises; lower is better."""
    of_true_class = probabilities[np.arange(len(y)), y]
    return float(-np.log(of_true_class.clip(min=SMALLEST_PROBABILITY)).mean())


log_loss.lower_is_better = True  # type: ignore[attr-defined]
