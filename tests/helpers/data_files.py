"""Data files written byte by byte, as publishers and users write them."""

import io
import os
import string
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
from helpers.sources import images
from PIL import Image

#: Where real data lies, if it does.
REAL_DATA = Path(
    os.environ.get("FEDPROTO_DATA") or Path(__file__).parents[3] / "shared" / "data"
).absolute()
#: The 62 characters of FEMNIST and Chars74K, in the order of their labels.
SYMBOLS = string.digits + string.ascii_uppercase + string.ascii_lowercase
#: The names of CIFAR-10's batches.
CIFAR10_BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
#: CIFAR-100's file `meta`.
CIFAR100_META = {
    b"fine_label_names": [b"fine %d" % number for number in range(100)],
    b"coarse_label_names": [b"kind %d" % number for number in range(20)],
}


def write(path, content, pack=bytes):
    """Write bytes or text to a file, packed by a function, and make the folders it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(pack(raw))
    return path


# --- formats


def idx(array):
    """Return bytes in the idx format.

    Zero, zero, type 8 (bytes), the number of axes; each size in four bytes, big-endian; the data.
    """
    magic = bytes([0, 0, 8, array.ndim])
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return magic + sizes + array.tobytes()


def png(pixels):
    """Return a grey PNG of 8 bits, chunk by chunk."""

    def chunk(kind, content):
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    height, width = pixels.shape
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)
    data = chunk(b"IDAT", zlib.compress(lines))
    return b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND", b"")


def tgz(members):
    """Return a tar archive of name -> bytes, or -> (kind of the TarInfo, target of the link)."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, tuple):
                info.type, info.linkname = content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return archive.getvalue()


def zipped(members):
    """Return a zip archive of name -> bytes, or -> (anything, target of a symbolic link)."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            if isinstance(content, tuple):
                info.external_attr = 0o120777 << 16
                content = content[1]
            file.writestr(info, content)
    return archive.getvalue()


# --- data sets as they are published


def cifar10_batch(number, labels=(0, 9)):
    """Return two images as CIFAR-10 stores them: all red values, then green, then blue."""
    return {
        b"data": images(2, 3072, seed=number),
        b"labels": list(labels),
        b"batch_label": b"of a test",
    }


def leaf_file(x, y, names):
    """Return what LEAF writes, writer by writer.

    Ink is dark on paper of 1.0, and each image is a list of 784 numbers.
    """
    users = sorted(set(names))
    data = {}
    for user in users:
        pixels = []
        labels = []
        for image, label, name in zip(x, y, names, strict=True):
            if name == user:
                pixels.append([(255 - int(value)) / 255 for value in image.reshape(-1)])
                labels.append(int(label))
        data[user] = {"x": pixels, "y": labels}
    counts = [len(data[user]["y"]) for user in users]
    return {"users": users, "num_samples": counts, "user_data": data}


# --- a user's own data; each of these returns the data set's name


def as_npz(folder, train, test):
    """Write (x, y) and (x_test, y_test) as one npz file."""
    np.savez(folder / "own.npz", x=train[0], y=train[1], x_test=test[0], y_test=test[1])
    return f"npz:{folder}/own.npz"


def as_npy(folder, train, test):
    """Write (x, y) and (x_test, y_test) as four npy files."""
    for name, array in zip(("x", "y", "x_test", "y_test"), (*train, *test), strict=True):
        np.save(folder / f"{name}.npy", array)
    return f"npy:{folder}"


def encode_image(image, form="PNG"):
    """Return an image as the hub's parquet files hold it."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, form)
    return {"bytes": file.getvalue(), "path": None}
