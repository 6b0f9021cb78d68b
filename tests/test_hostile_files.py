"""Files that somebody made to do harm, or that a disk damaged: one sentence each, never a crash."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy._core.multiarray import _reconstruct, scalar
from numpy._core.numeric import _frombuffer

from fedproto.data._pickles import load_arrays
from fedproto.data.cifar10 import read_batch
from fedproto.errors import DataError

# --- pickles


class Call:
    """Pickled as a call with these arguments, followed by a state."""

    def __init__(self, function, arguments, state=None):
        self.function = function
        self.arguments = arguments
        self.state = state

    def __reduce__(self):
        call = (self.function, self.arguments)
        return call if self.state is None else (*call, self.state)


RAW = b"A" * 8  # what numpy would take for a pointer
OBJECT = np.dtype("O")
#: A type with an object field whose flags say that it has none, so that numpy's own checks pass it.
HIDDEN = Call(np.dtype, ("V8", False, True), (4, "|", None, ("a",), {"a": (OBJECT, 0)}, 8, 1, 0))
ARRAY = (np.ndarray, (0,), b"b")
CRAFTED = {
    "objects in a buffer": Call(np.ndarray, ((1,), OBJECT, RAW)),
    "hidden objects in a buffer": Call(np.ndarray, ((1,), HIDDEN, RAW)),
    "hidden objects of protocol 5": Call(_frombuffer, (RAW, HIDDEN, (1,), "C")),
    "a hidden object as a number": Call(scalar, (HIDDEN, RAW)),
    "hidden objects as a state": Call(_reconstruct, ARRAY, (1, (1,), HIDDEN, False, RAW)),
    "objects as a state": Call(_reconstruct, ARRAY, (1, (1,), OBJECT, False, RAW)),
    "more numbers than bytes": Call(_reconstruct, ARRAY, (1, (9,), np.dtype("i8"), False, RAW)),
    "a shape of fractions": Call(_reconstruct, ARRAY, (1, (1.0,), np.dtype("i8"), False, RAW)),
    "text": np.array(["a"]),
    "times": np.array(["2020-01-01"], "M8[D]"),
}
#: LONG_BINPUT: remember the dictionary at place 2**32 - 1, for which C's unpickler makes room.
CLAIMED = b"\x80\x02}r\xff\xff\xff\xff."
READ_ALL = """
import resource, sys
from pathlib import Path
from fedproto.data.cifar10 import read_batch
from fedproto.errors import DataError
resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
for path in sys.argv[1:]:
    try:
        read_batch(Path(path))
    except DataError as error:
        print(error, flush=True)
"""


def test_crafted_pickles_are_refused(tmp_path):
    """In a process of its own, since five of these ended it with SIGSEGV, and one filled the memory."""
    files = [tmp_path / f"data_batch_{number}" for number in range(len(CRAFTED) + 1)]
    for file, crafted in zip(files, CRAFTED.values(), strict=False):
        file.write_bytes(pickle.dumps({b"data": crafted, b"labels": [0]}, 2))
    files[-1].write_bytes(CLAIMED)
    command = [sys.executable, "-c", READ_ALL, *map(str, files)]
    found = subprocess.run(command, capture_output=True, text=True)
    sentences = found.stdout.splitlines()
    assert (found.returncode, len(sentences)) == (0, len(files)), found.stderr
    for file, sentence in zip(files, sentences, strict=True):
        assert sentence.startswith(f"{file} is damaged or no CIFAR-10 python batch")
    assert sentences[-1].endswith(": b'data'")  # read, and found to lack its images


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", ["u1", "<i8", ">i4", "f4", ">f8", "?"])
def test_arrays_of_numbers_come_back_as_they_were(kind, protocol):
    values = np.arange(6).reshape(2, 3).astype(kind)
    content = {"rows": values, "columns": np.asfortranarray(values), "one": values[1, 2]}
    found = load_arrays(pickle.dumps(content, protocol))
    for name, value in content.items():
        read = np.asarray(found[name])
        np.testing.assert_array_equal(read, value)
        assert read.shape == value.shape


def test_a_real_batch_is_read(tmp_path):
    batch = tmp_path / "data_batch_1"
    images = np.arange(2 * 3072).astype(np.uint8).reshape(2, 3072)
    batch.write_bytes(pickle.dumps({b"data": images, b"labels": [3, 9]}, 2))
    split = read_batch(batch)
    np.testing.assert_array_equal(split.x.reshape(2, 3072), images)
    assert split.y.tolist() == [3, 9]


def test_a_pickle_that_calls_functions_is_refused(tmp_path):
    batch = tmp_path / "data_batch_1"
    batch.write_bytes(pickle.dumps({b"data": Call(Path.touch, (tmp_path / "there",))}, 2))
    with pytest.raises(DataError, match="which a data file has no business with"):
        read_batch(batch)
    assert not (tmp_path / "there").exists()
