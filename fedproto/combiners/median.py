from fedproto.core.combination import Combiner, combine_rows, take_median


def median() -> Combiner:
    """Take the median of each coordinate (Yin et al. 2018, Definition 1).

    v_k = median over the n uploads of x_ik; of an even number, the mean of the two in the middle.
    Weights do not count, so nobody gains by a wrong number of samples. While fewer than n/2 uploads
    are wrong, every coordinate stays within the range of the right ones.
    """
    return combine_rows("median", take_median)
