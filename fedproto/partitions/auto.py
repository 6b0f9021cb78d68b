from fedproto.config.options import PositiveInt
from fedproto.partitions import ClientRows, PartitionRequest
from fedproto.partitions.iid import iid
from fedproto.partitions.natural import natural


def auto(request: PartitionRequest, *, test_shots: PositiveInt | None = None) -> list[ClientRows]:
    """All rows of data of one's own: `natural` where it names its clients, else `iid`.

    The data sets that come with the package are divided by `nway` instead, and so is data of one's
    own where an option is set that only `nway` has.
    """
    divide = iid if request.train_writer is None else natural
    return divide(request, test_shots=test_shots)
