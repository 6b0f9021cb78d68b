"""The commands of docs/data.md, section by section, on tiny files under the names that it uses."""

import gzip
import hashlib
import io
import json
import pickle
import re
import shlex
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import fedproto
from helpers.data_files import (
    CIFAR10_BATCHES,
    CIFAR100_META,
    SYMBOLS,
    as_npy,
    as_npz,
    cifar10_batch,
    encode_image,
    idx,
    leaf_file,
    png,
    tgz,
    write,
    zipped,
)
from helpers.image_files import write_dicom
from helpers.sources import images
from PIL import Image

from fedproto.config import plugins
from fedproto.data.shared.catalogue import CATALOGUE, File

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = dict(
    re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", (ROOT / "docs" / "data.md").read_text(), re.M | re.S)
)
MIRROR = "http://files.example.org/cifar"
#: What an extra brings.
MODULES = {"hub": "datasets", "flower": "flwr_datasets", "dicom": "pydicom", "tables": "pandas"}
SCREEN = 45  # lines


def commands(section):
    """The words of each command in the indented lines, without comments."""
    return [
        shlex.split(line.partition("  #")[0])
        for line in re.findall(r"^    (fedproto .*)$", section, re.M)
    ]


# --- what publishers publish: as few images as four clients need


def some(classes, each, *shape):
    """`each` images of every class, and their labels."""
    return images(classes * each, *shape), np.repeat(np.arange(classes), each)


def published_idx(name, parts, classes):
    """The four gzipped files of MNIST's form."""
    files = {}
    for part, each in zip(parts, (4, 1), strict=True):
        x, y = some(classes, each, 28, 28)
        files[f"{name}{part}-images-idx3-ubyte.gz"] = gzip.compress(idx(x), 1)
        files[f"{name}{part}-labels-idx1-ubyte.gz"] = gzip.compress(idx(y.astype(np.uint8)), 1)
    return files


def published_cifar10():
    return {
        f"cifar-10-batches-py/{name}": pickle.dumps(cifar10_batch(number), 2)
        for number, name in enumerate(CIFAR10_BATCHES)
    }


def published_cifar100():
    files = {"cifar-100-python/meta": pickle.dumps(CIFAR100_META, 2)}
    for part, each in (("train", 20), ("test", 5)):
        x, y = some(20, each, 3072)
        content = {b"data": x, b"fine_labels": (y * 5).tolist(), b"coarse_labels": y.tolist()}
        files[f"cifar-100-python/{part}"] = pickle.dumps(content, 2)
    return files


def published_nist():
    page, codes = (
        png(np.full((128, 128), 255, np.uint8)),
        [symbol.encode().hex() for symbol in SYMBOLS],
    )
    places = [
        f"{code}/{where}"
        for code in codes
        for where in ([f"train_{code}/{n}" for n in range(4)] + ["hsf_4/0"])
    ]
    return {f"by_class/{place}.png": page for place in places}


def published_fonts():
    """Return twenty typefaces for training and fifty for testing; all have the first character."""
    raw = io.BytesIO()
    Image.new("L", (128, 128), 255).save(raw, "png")
    names = [
        f"English/Fnt/Sample{label:03}/img{label:03}-{1 + 4 * typeface:05}.png"
        for label in range(1, 63)
        for typeface in (range(70) if label == 1 else (0, 69))
    ]
    return dict.fromkeys(names, raw.getvalue())


PUBLISHED = {
    "mnist": lambda: published_idx("", ("train", "t10k"), 10),
    "fashion-mnist": lambda: published_idx("", ("train", "t10k"), 10),
    "cifar10": lambda: {"cifar-10-python.tar.gz": tgz(published_cifar10())},
    "cifar100": lambda: {"cifar-100-python.tar.gz": tgz(published_cifar100())},
    "femnist": lambda: {
        "gzip.zip": zipped(published_idx("gzip/emnist-byclass-", ("train", "test"), 62))
    },
    "femnist-nist": lambda: {"by_class.zip": zipped(published_nist())},
    "chars74k": lambda: {"EnglishFnt.tgz": tgz(published_fonts())},
}


@pytest.fixture
def publish(monkeypatch, tmp_path):
    """Put a data set on a local server, and the checksums of its files into the catalogue."""
    (tmp_path / "published").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path / "published"))
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
    thread.start()

    def put(name):
        files = []
        for file, raw in PUBLISHED[name]().items():
            write(tmp_path / "published" / name / file, raw)
            files.append(File(file, hashlib.md5(raw).hexdigest(), len(raw)))
        url = f"http://127.0.0.1:{server.server_port}/{name}/"
        inside = tuple(File(file.name) for file in CATALOGUE[name].unpacked)
        monkeypatch.setitem(
            CATALOGUE, name, replace(CATALOGUE[name], url=url, files=tuple(files), unpacked=inside)
        )
        return url

    yield put
    server.shutdown()
    server.server_close()
    thread.join()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


# --- what people have: thirty of each class, so that nothing need be said of shots


def own_femnist(_):
    """LEAF's files, which no command gets: two characters by each of 50 people."""
    names = [f"f{writer:04}_10" for writer in range(50) for _ in range(2)]
    for part in ("train", "test"):
        content = leaf_file(images(100, 28, 28), np.arange(100) % 62, names)
        write(Path("data/femnist") / part / "all_data_0_niid_0.json", json.dumps(content).encode())


def own_npz(path):
    as_npz(Path(), some(3, 30, 28, 28), some(3, 10, 28, 28))
    Path("own.npz").rename(path)


def own_npy(path):
    path.mkdir()
    as_npy(path, some(3, 30, 28, 28), some(3, 10, 28, 28))


def own_folder(path):
    if path.name == "sites":
        for site in ("Köln", "Ulm"):
            for label in ("cat", "dog"):
                for number, image in enumerate(images(10, 28, 28)):
                    write(path / site / label / f"{number}.png", png(image))
        return
    for label in ("cat", "dog"):
        for number, image in enumerate(images(30, 28, 28)):
            write(path / "train" / label / f"{number}.png", png(image))
            write(path / "test" / label / f"{number}.png", png(image))


def own_images(path):
    """Write a list of DICOM files."""
    pytest.importorskip("pydicom")
    rows = ["path,label"]
    for number, image in enumerate(images(40, 28, 28)):
        write_dicom(Path(f"scans/{number}.dcm"), image)
        rows.append(f"scans/{number}.dcm,{'sick' if number % 2 else 'well'}")
    path.write_text("\n".join(rows) + "\n")


def own_hf(path):
    """Write the columns that the two data sets have on the hub as parquet files in a folder."""
    datasets = pytest.importorskip("datasets")
    x, y = some(2, 30, 28, 28)
    columns = {"image": list(map(encode_image, x)), "label": y}
    if path.name == "femnist":
        writers = [f"f{number % 20}" for number in range(60)]
        columns = {"image": columns["image"], "writer_id": writers, "hsf_id": y * 0, "character": y}
    table = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    path.mkdir(parents=True)
    for part in ("train", "test"):
        table.to_parquet(path / f"{part}-00000-of-00001.parquet")


def own_pfllib(path):
    for part in ("train", "test"):
        (path / part).mkdir(parents=True)
        for client in range(20):
            x, y = some(2, 3, 1, 28, 28)
            np.savez(path / part / f"{client}.npz", data={"x": x.astype(np.float32) / 255, "y": y})


def own_csv(path):
    if path.name == "visits.csv":
        hospitals = ("north", "south", "east", "west")
        rows = [f"{n % 7},{hospitals[n // 2 % 4]},{'ill' if n % 2 else 'well'}" for n in range(80)]
        path.write_text("\n".join(["age,hospital,finding", *rows]) + "\n")
        return
    rows = [f"{number},{number % 7},{'red' if number % 2 else 'white'}" for number in range(60)]
    path.write_text("id,acid,kind\n" + "\n".join(rows) + "\n")


def own_parquet(path):
    own_csv(Path("visits.csv"))
    pd.read_csv("visits.csv").to_parquet(path)


def own_excel(path):
    own_csv(Path("visits.csv"))
    pd.read_csv("visits.csv").to_excel(path, sheet_name="2024")


def own_text(path):
    if path.name == "letters.csv":
        rows = [f"dear sir {n % 5},{'ab'[n % 2]},{'east' if n % 3 else 'west'}" for n in range(60)]
        path.write_text("\n".join(["body,topic,office", *rows]) + "\n")
        return
    lines = [
        {"text": f"a {'good' if n % 2 else 'bad'} film {n}", "label": n % 2} for n in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


OWN = {
    "femnist": own_femnist,
    "npz": own_npz,
    "npy": own_npy,
    "folder": own_folder,
    "images": own_images,
    "hf": own_hf,
    "pfllib": own_pfllib,
    "csv": own_csv,
    "parquet": own_parquet,
    "excel": own_excel,
    "text": own_text,
}


# --- the guide


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """A newcomer's folder, with nothing in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDPROTO_DATA", "data")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")


def prepare(words):
    """Makes the files that a run reads and no command gets; the kind of its data."""
    dataset = words[words.index("--dataset") + 1] if "--dataset" in words else "mnist5k"
    kind, path = re.match(r"([\w-]+):?([^(]*)", dataset).groups()
    if kind in OWN and not (path and Path(path).exists()):
        OWN[kind](Path(path))
    return kind


def smaller(kind, words):
    """Return flags that make a command quick: one round, few tests, only the published images."""
    tests = [] if kind in OWN else ["--test-shots", "1"]
    shots = (
        ["--clients", "4", "--shots", "1", "--shots-stdev", "0"]
        if kind in PUBLISHED and "natural" not in words
        else []
    )
    return ["--rounds", "1", *tests, *shots]


@pytest.mark.parametrize("title", [title for title in SECTIONS if commands(SECTIONS[title])])
def test_every_command_of_the_guide_does_what_it_says(title, publish, monkeypatch, tmp_path):
    for extra in re.findall(r"pip install '\.\[(\w+)\]'", SECTIONS[title]):
        pytest.importorskip(MODULES[extra])
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for number, words in enumerate(commands(SECTIONS[title])):
        if words[1] == "run":
            words = [*words, *smaller(prepare(words), words), "--out", f"run {number}"]
        if words[1:3] == ["data", "get"]:
            url = publish(words[3])
            words = [url if word == MIRROR else word for word in words]
        answer = fedproto(*words[1:])
        assert answer.code == 0, answer.err
        if words[1] == "run":
            assert (
                json.loads((tmp_path / f"run {number}" / "result.json").read_text())["rounds"] == 1
            )


def test_the_python_of_the_guide_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", "\n".join(SECTIONS.values()), re.M | re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "data.md", "exec"), {})


@pytest.mark.parametrize("title", SECTIONS)
def test_every_section_of_the_guide_is_a_screen_at_most(title):
    assert SECTIONS[title].count("\n") <= SCREEN


def test_every_source_has_its_section_in_the_guide():
    named = {name for title in SECTIONS for name in re.findall(r"`([\w-]+)(?::[^`]*)?`", title)}
    assert set(plugins.names("dataset")) <= named
