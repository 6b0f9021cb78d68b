"""CIFAR-10 as its python batches, which are pickles and are read without running code."""

from pathlib import Path

import numpy as np

from fedproto.data import DataFolders, Source, Split, check_split, join_splits
from fedproto.data.shared.pickles import load_arrays
from fedproto.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGENET_MEAN = (0.485, 0.456, 0.406)  # per channel
IMAGENET_STD = (0.229, 0.224, 0.225)


def cifar10(data_folders: DataFolders, *, augment: bool = True) -> Source:
    """CIFAR-10, 50,000 + 10,000 colour images, from the python batches.

    Training images are randomly cropped and flipped, unless `augment` is false.
    """
    folder = data_folders.find(
        "cifar10/cifar-10-batches-py", "cifar-10-batches-py", dataset="cifar10"
    )
    batches = [read_batch(folder / f"data_batch_{number}") for number in range(1, 6)]
    test = read_batch(folder / "test_batch")
    return Source(
        "cifar10",
        CLASSES,
        join_splits(batches),
        test,
        IMAGENET_MEAN,
        IMAGENET_STD,
        augment=augment,
        model="resnet18",
        mixed_model="resnet18-mh",
    )


def read_batch(path: Path) -> Split:
    """Return the images, (n, 3, 32, 32), and labels of one python batch, or raise DataError."""
    try:
        batch = load_arrays(path.read_bytes(), encoding="bytes")
        x = np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32)
        y = np.asarray(batch[b"labels"], np.int64)
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is missing: the folder must hold data_batch_1 to 5 and test_batch"
        ) from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(
            f"{path} is not a CIFAR-10 python batch (or is damaged): {error}"
        ) from error
    split = Split(x, y)
    # Each batch is checked: after joining them, two wrong lengths could cancel out.
    check_split(str(path), split, len(CLASSES))
    return split
