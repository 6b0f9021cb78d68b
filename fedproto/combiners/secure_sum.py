from typing import Literal

from fedproto.config.options import PositiveFloat, PositiveFraction
from fedproto.core.combination import Combiner
from fedproto.core.tensors import sum_group
from fedproto.errors import need
from fedproto.privacy.secure_sum.simulated import SecureSum


def secure_sum(
    *,
    threshold: PositiveFraction = 0.67,
    largest: PositiveFloat = 1e6,
    error: PositiveFloat = 1e-6,
    simulate: Literal["rounding", "protocol"] = "rounding",
) -> Combiner:
    """Add the uploads so that the server learns only their sum (Bonawitz et al. 2017).

    Every client masks its upload, and the masks cancel in the sum. `threshold` is the fraction of
    the clients of a round that must stay to its end; it is at least a majority. Values travel as
    whole numbers of 32 or 64 bits: a client whose weight × value is above `largest` refuses to
    send, and rounding moves each value of a client by at most `error`. A simulated run adds such
    numbers and counts the bytes of all messages; `simulate=protocol` makes the keys, shares and
    masks, too, which changes no bit of the result. The server cannot check what it does not see:
    wrong uploads are not detected.
    """
    need("cryptography", "'fedproto[privacy]'", "a secure sum")
    summation = SecureSum(simulate, threshold, largest, error)
    return Combiner("secure-sum", sum_group, needs=3, additive=True, summation=summation)
