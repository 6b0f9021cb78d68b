from fedproto.data import DataFolders, Source, Split
from fedproto.data.shared.idx import read_pair

FOLDERS = (
    "fashion-mnist",
    "FashionMNIST/raw",
)  # never the data folder itself: MNIST's files have the same names
CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def fashion_mnist(places: DataFolders) -> Source:
    """Fashion-MNIST, 60,000 + 10,000 grey images of ten kinds of clothes, from its four idx files, gzipped or not."""
    train, test = (Split(*read_pair(places, FOLDERS, part)) for part in ("train", "t10k"))
    return Source("fashion-mnist", CLASSES, train, test, mean=(0.2860,), std=(0.3530,))
