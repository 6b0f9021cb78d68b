from fedproto.data import DIGITS, DataFolders, Source, Split
from fedproto.data.shared.idx import read_pair

FOLDERS = ("mnist", "MNIST/raw", ".")


def mnist(data_folders: DataFolders) -> Source:
    """All of MNIST, 60,000 + 10,000 images, from its four idx files, gzipped or not."""
    train = Split(*read_pair(data_folders, FOLDERS, "train"))
    test = Split(*read_pair(data_folders, FOLDERS, "t10k"))
    return Source("mnist", DIGITS, train, test, mean=(0.1307,), std=(0.3081,))
