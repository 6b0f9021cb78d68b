from typing import Annotated

from torch import Tensor

from fedproto.config.options import Bounds
from fedproto.core.combination import Combiner, average_middle, combine_rows


def trimmed_mean(*, fraction: Annotated[float, Bounds(0, 0.5)] = 0.1) -> Combiner:
    """Average each coordinate without its extremes (Yin et al. 2018, Definition 2).

    v_k = the mean of x_ik over the n uploads but the ⌊β n⌋ smallest and the ⌊β n⌋ largest, where β
    is `fraction`. It should be at least the fraction of wrong uploads. Of three uploads or more, at
    least one is cut on each side, unless β is 0; of one or two, none is. At least one is left, so
    0.5 gives the median. Weights do not count.
    """

    def average(values: Tensor, weight: Tensor) -> Tensor:
        holders = (weight > 0).sum(0)
        cut = (holders.double() * fraction).floor().long()
        if fraction > 0:
            cut = cut.clamp(min=1)
        most = (holders - 1).clamp(min=0) // 2
        return average_middle(values, weight, cut.minimum(most))

    return combine_rows("trimmed-mean", average)
