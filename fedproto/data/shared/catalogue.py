"""Where data sets come from, under which terms, and which files they must have, byte for byte."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fedproto.data import cifar10, cifar100, fashion_mnist, femnist, mnist
from fedproto.data.shared.archives import pack_fonts, unpack


@dataclass(frozen=True)
class File:
    """A file as published, with its checksum and size in bytes where they are known.

    `content_md5` is the checksum of what `read_content` returns: the content of the file, which
    stays the same when it is packed again.
    """

    name: str
    md5: str | None = None
    size: int | None = None
    content_md5: str | None = None
    read_content: Callable[[Path], bytes] | None = None


@dataclass(frozen=True)
class DataSet:
    """What is downloaded, and the files that the loader then finds.

    If the download is an archive, `open_archive` takes it and a folder, and writes `unpacked`.
    """

    url: str  # the names of the files are appended to it
    folder: str  # inside the data folder, for downloads
    files: tuple[File, ...]
    search_folders: tuple[str, ...]  # where the loader looks
    licence: str
    source: str
    open_archive: Callable[[Path, Path], None] | None = None
    unpacked: tuple[File, ...] = ()

    @property
    def loader_files(self) -> tuple[File, ...]:
        """The files that the loader reads."""
        return self.unpacked or self.files


def _read_unzipped(path: Path) -> bytes:
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def _read_cifar10_rows(path: Path) -> bytes:
    """Return a CIFAR-10 batch as in the binary edition, whose checksums are known, too.

    It holds one row per image: the label, then the pixels.
    """
    batch = cifar10.read_batch(path)
    labels = batch.y[:, None].astype(np.uint8)
    pixels = batch.x[:].reshape(-1, 3072)
    return np.concatenate([labels, pixels], 1).tobytes()


def _idx_file(name: str, md5: str, size: int, content_md5: str) -> File:
    """Return a gzipped idx file, which may also lie there unpacked."""
    return File(f"{name}-ubyte.gz", md5, size, content_md5, _read_unzipped)


def _cifar10_batch(name: str, md5: str, content_md5: str) -> File:
    """Return a CIFAR-10 batch, which may also have been pickled again."""
    return File(name, md5, None, content_md5, _read_cifar10_rows)


#: Data sets by name; checksums and sizes are those that publishers and other libraries give.
CATALOGUE = {
    "mnist": DataSet(
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        folder="mnist",
        files=(
            _idx_file(
                "train-images-idx3",
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                9_912_422,
                "6bbc9ace898e44ae57da46a324031adb",
            ),
            _idx_file(
                "train-labels-idx1",
                "d53e105ee54ea40749a09fcbcd1e9432",
                28_881,
                "a25bea736e30d166cdddb491f175f624",
            ),
            _idx_file(
                "t10k-images-idx3",
                "9fb629c4189551a2d022fa330f9573f3",
                1_648_877,
                "2646ac647ad5339dbf082846283269ea",
            ),
            _idx_file(
                "t10k-labels-idx1",
                "ec29112dd5afa0611ce80d1b7f02629c",
                4_542,
                "27ae3e4e09519cfbb04c329615203637",
            ),
        ),
        search_folders=mnist.FOLDERS,
        licence="CC BY-SA 3.0",
        source="http://yann.lecun.com/exdb/mnist/",
    ),
    "fashion-mnist": DataSet(
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        folder="fashion-mnist",
        files=(
            _idx_file(
                "train-images-idx3",
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                26_421_880,
                "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            ),
            _idx_file(
                "train-labels-idx1",
                "25c81989df183df01b3e8a0aad5dffbe",
                29_515,
                "9018921c3c673c538a1fc5bad174d6f9",
            ),
            _idx_file(
                "t10k-images-idx3",
                "bef4ecab320f06d8554ea6380940ec79",
                4_422_102,
                "8181f5470baa50b63fa0f6fddb340f0a",
            ),
            _idx_file(
                "t10k-labels-idx1",
                "bb300cfdad3c16e7a12a480ee83cd310",
                5_148,
                "15d484375f8d13e6eb1aabb0c3f46965",
            ),
        ),
        search_folders=fashion_mnist.FOLDERS,
        licence="MIT",
        source="https://github.com/zalandoresearch/fashion-mnist",
    ),
    "cifar10": DataSet(
        url="https://www.cs.toronto.edu/~kriz/",
        folder="cifar10",
        files=(File("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", 170_498_071),),
        search_folders=("cifar10/cifar-10-batches-py", "cifar-10-batches-py"),
        licence="none stated; cite Krizhevsky 2009",
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
        open_archive=partial(unpack, pattern="cifar-10-batches-py/*"),
        unpacked=(
            _cifar10_batch(
                "data_batch_1",
                "c99cafc152244af753f735de768cd75f",
                "5dd7e06a14cb22eb9f671a540d1b7c25",
            ),
            _cifar10_batch(
                "data_batch_2",
                "d4bba439e000b95fd0a9bffe97cbabec",
                "5ea93a67294ea407fff1d09f752e9692",
            ),
            _cifar10_batch(
                "data_batch_3",
                "54ebc095f3ab1f0389bbae665268c751",
                "942cd6a4bcdd0dd3c604fbe906cb4421",
            ),
            _cifar10_batch(
                "data_batch_4",
                "634d18415352ddfa80567beed471001a",
                "ae636b3ba5c66a11e91e8cb52e771fcb",
            ),
            _cifar10_batch(
                "data_batch_5",
                "482c414d41f54cd18b22e5b47cb7c3cb",
                "53f37980c15c3d472c316c40844f3f0d",
            ),
            _cifar10_batch(
                "test_batch", "40351d587109b95175f43aff81a1287e", "803d5f7f4d78ea53de84dbe85f74fb6d"
            ),
        ),
    ),
    "cifar100": DataSet(
        url="https://www.cs.toronto.edu/~kriz/",
        folder="cifar100",
        files=(File("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", 169_001_437),),
        search_folders=cifar100.FOLDERS,
        licence="none stated; cite Krizhevsky 2009",
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
        open_archive=partial(unpack, pattern="cifar-100-python/*"),
        unpacked=(
            File("train", "16019d7e3df5f24257cddd939b257f8d"),
            File("test", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
            File("meta", "7973b15100ade9c7d40fb424638fde48"),
        ),
    ),
    "femnist": DataSet(
        url="https://biometrics.nist.gov/cs_links/EMNIST/",
        folder="femnist",
        files=(File("gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e", 561_753_746),),
        search_folders=femnist.IDX_FOLDERS,
        licence="NIST open data",
        source="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        open_archive=partial(unpack, pattern="gzip/emnist-byclass-*"),
        unpacked=(
            File("emnist-byclass-train-images-idx3-ubyte.gz"),
            File("emnist-byclass-train-labels-idx1-ubyte.gz"),
            File("emnist-byclass-test-images-idx3-ubyte.gz"),
            File("emnist-byclass-test-labels-idx1-ubyte.gz"),
        ),
    ),
    "femnist-nist": DataSet(
        url="https://s3.amazonaws.com/nist-srd/SD19/",
        folder="femnist",
        files=(File("by_class.zip", "79572b1694a8506f2b722c7be54130c4"),),
        search_folders=("femnist", "."),
        licence="NIST open data",
        source="https://www.nist.gov/srd/nist-special-database-19",
        open_archive=partial(unpack, pattern="by_class/*.png"),
        unpacked=(File("by_class"),),
    ),
    "chars74k": DataSet(
        url="http://www.ee.surrey.ac.uk/CVSSP/demos/chars74k/",
        folder="chars74k-fnt",
        files=(File("EnglishFnt.tgz"),),
        search_folders=("chars74k-fnt", "."),
        licence="none stated; cite de Campos et al. 2009",
        source="http://www.ee.surrey.ac.uk/CVSSP/demos/chars74k/",
        open_archive=pack_fonts,
        unpacked=(File("chars74k_fnt_28.npz"),),
    ),
}
