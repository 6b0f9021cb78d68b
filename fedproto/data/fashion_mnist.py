from fedproto.data import DataFolders, Source, Split
from fedproto.data.shared.idx import read_pair

#: Never the data folder itself: MNIST's files have the same names.
FOLDERS = ("fashion-mnist", "FashionMNIST/raw")
CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def fashion_mnist(data_folders: DataFolders) -> Source:
    """Fashion-MNIST, 60,000 + 10,000 grey images of clothes, from its four idx files.

    The files may be gzipped.
    """
    train = Split(*read_pair(data_folders, FOLDERS, "train"))
    test = Split(*read_pair(data_folders, FOLDERS, "t10k"))
    return Source("fashion-mnist", CLASSES, train, test, mean=(0.2860,), std=(0.3530,))
