from pathlib import Path

import numpy as np

from fedproto.data import DataFolders, Source, Split, check
from fedproto.data.shared.pickles import load_arrays
from fedproto.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation a channel


def cifar10(places: DataFolders) -> Source:
    """CIFAR-10, 50,000 + 10,000 colour images, from the python batches; random crop and flip in training."""
    folder = places.find("cifar10/cifar-10-batches-py", "cifar-10-batches-py")
    batches = [read_batch(folder / f"data_batch_{number}") for number in range(1, 6)]
    train = Split(
        np.concatenate([batch.x for batch in batches]),
        np.concatenate([batch.y for batch in batches]),
    )
    test = read_batch(folder / "test_batch")
    return Source(
        "cifar10",
        CLASSES,
        train,
        test,
        *IMAGENET,
        augment=True,
        model="resnet18",
        mixed_model="resnet18-mh",
    )


def read_batch(path: Path) -> Split:
    try:
        batch = load_arrays(path.read_bytes(), encoding="bytes")
        x = np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32)
        y = np.asarray(batch[b"labels"], np.int64)
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is missing: the folder must hold data_batch_1 to 5 and test_batch"
        ) from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(f"{path} is damaged or no CIFAR-10 python batch: {error}") from error
    check(
        str(path), Split(x, y), len(CLASSES)
    )  # batch by batch, lest two wrong lengths make up for each other
    return Split(x, y)
