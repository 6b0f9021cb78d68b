"""Six data sets that nobody here made, from raw files to `predict` without a word of configuration.

The files are written as their owners would have them. Then two commands per data set, as a reader
would type them:

    fedproto run --dataset csv:wine.csv --out wine
    fedproto predict wine new.csv

and a scikit-learn baseline on the same rows, pooled. Fortunes and Fashion-MNIST are files of Debian
packages:

    apt-get download fortunes fortunes-min dataset-fashion-mnist
    for deb in *.deb; do dpkg-deb -x $deb debian; done
    python benchmarks/own_data.py debian        # writes results/own-data.md and own-data.json
"""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from sklearn import datasets
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.data import DataFolders, Source

RESULTS = Path(__file__).resolve().parent.parent / "results"
#: How far from the baseline a federation may be, in points.
TOLERANCE = 2.0
#: Topics of fortunes with at least this many texts.
MIN_TEXTS = 100
MNIST_IMAGES = 3000
COLUMNS = (
    "data",
    "rows used for training, test",
    "classes",
    "clients",
    "model",
    "head",
    "prototypes",
    "baseline",
    "points",
    "alone",
    "pooled",
    "FedAvg",
)
FASHION = "usr/share/datasets/fashion-mnist"
FORTUNES = "usr/share/games/fortunes"


class OwnData(NamedTuple):
    """A data set as its owner has it."""

    name: str
    #: What follows `--dataset`.
    dataset: str
    #: A file of new inputs, or one input, for `predict`.
    new: str
    #: Returns the accuracy of the best of some scikit-learn models, and its name.
    baseline: Callable[[], tuple[float, str]]


# --- raw files


def write_table(folder: Path, name: str, loaded: Any) -> OwnData:
    """Write one of scikit-learn's tables as a csv file, and rows without a label as another."""
    path = folder / f"{name}.csv"
    columns = [column.replace(" ", "_") for column in loaded.feature_names]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, "class"])
        for row, label in zip(loaded.data, loaded.target, strict=True):
            writer.writerow([*row, loaded.target_names[label]])
    new = folder / f"new_{name}.csv"
    with new.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(loaded.data[:3])
    dataset = f"csv:{path}"
    return OwnData(name, dataset, str(new), lambda: fit_arrays(load(dataset)))


def write_images(folder: Path, name: str, images: np.ndarray, labels: np.ndarray) -> OwnData:
    """Write images as PNG files, one folder per class."""
    root = folder / name
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = root / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.astype(np.uint8)).save(path)
    dataset = f"folder:{root}"
    new = str(root / str(labels[0]) / "0.png")
    return OwnData(name, dataset, new, lambda: fit_arrays(load(dataset)))


def write_fortunes(folder: Path, debian: Path) -> OwnData:
    """Write the texts of Debian's fortunes as csv files, a topic per file of fortunes."""
    texts: dict[str, list[str]] = {}
    for path in sorted((debian / FORTUNES).iterdir()):
        if path.suffix == ".dat" or path.is_symlink() or path.suffix == ".u8":
            continue
        content = path.read_text(encoding="utf-8", errors="replace")
        cookies = [cookie.strip() for cookie in content.split("\n%\n")]
        cookies = [cookie for cookie in dict.fromkeys(cookies) if cookie]
        if len(cookies) >= MIN_TEXTS:
            texts[path.name] = cookies
    root = folder / "fortunes"
    root.mkdir()
    generator = np.random.default_rng(0)
    parts: dict[str, list[tuple[str, str]]] = {"train": [], "test": []}
    for topic, cookies in texts.items():
        order = generator.permutation(len(cookies))
        test_count = len(cookies) // 5
        for place, number in enumerate(order):
            part = "test" if place < test_count else "train"
            parts[part].append((cookies[number], topic))
    for part, rows in parts.items():
        with (root / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
    new = folder / "new_fortune.txt"
    new.write_text(parts["test"][0][0])
    return OwnData(
        "fortunes", f"text:{root}", str(new), lambda: fit_texts(parts["train"], parts["test"])
    )


def write_fashion(folder: Path, debian: Path) -> OwnData:
    """Write Fashion-MNIST, which Debian packages as idx files, as arrays with their test set."""
    arrays = {}
    for part, ending in (("train", ""), ("t10k", "_test")):
        for kind, letter, offset in (("images-idx3", "x", 16), ("labels-idx1", "y", 8)):
            content = gzip.decompress((debian / FASHION / f"{part}-{kind}-ubyte.gz").read_bytes())
            values = np.frombuffer(content, np.uint8, offset=offset)
            is_image = letter == "x"
            arrays[letter + ending] = values.reshape(-1, 28, 28) if is_image else values
    path = folder / "fashion.npz"
    np.savez(path, **arrays)
    new = folder / "new_fashion.png"
    Image.fromarray(arrays["x_test"][0]).save(new)
    dataset = f"npz:{path}"
    return OwnData("fashion", dataset, str(new), lambda: fit_arrays(load(dataset)))


def write_all(folder: Path, debian: Path) -> list[OwnData]:
    """Write the raw files of all six data sets."""
    digits = datasets.load_digits()
    mnist = load("mnist")
    rows = np.random.default_rng(0).permutation(len(mnist.train.y))[:MNIST_IMAGES]
    return [
        write_table(folder, "breast", datasets.load_breast_cancer()),
        write_table(folder, "wine", datasets.load_wine()),
        write_images(folder, "digits", digits.images * 15, digits.target),
        write_fortunes(folder, debian),
        write_images(folder, "mnist_png", mnist.train.x[rows], mnist.train.y[rows]),
        write_fashion(folder, debian),
    ]


# --- the baseline: scikit-learn on the pooled rows


def load(dataset: str) -> Source:
    return plugins.build("dataset", Part(dataset), DataFolders())


def fit_arrays(source: Source) -> tuple[float, str]:
    """Return the best test accuracy among three usual models on the federation's own rows."""
    train_x = _flatten(source.train.x[:])
    test_x = _flatten(source.test.x[:])
    models = {
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)),
        "SVM (RBF)": make_pipeline(StandardScaler(with_std=False), SVC()),
        "random forest": RandomForestClassifier(300, random_state=0, n_jobs=-1),
    }
    if len(train_x) > 20_000:  # the other two take hours
        models = {"random forest": models["random forest"]}
    found = {}
    for name, model in models.items():
        model.fit(train_x, source.train.y)
        found[name] = float(model.score(test_x, source.test.y))
    best = max(found, key=lambda name: found[name])
    return found[best], best


def _flatten(x: np.ndarray) -> np.ndarray:
    values = x.reshape(len(x), -1).astype(np.float32)
    return values / 255 if x.dtype == np.uint8 else values


def fit_texts(
    train: Sequence[tuple[str, str]], test: Sequence[tuple[str, str]]
) -> tuple[float, str]:
    """Return the test accuracy of TF-IDF with logistic regression, C by cross-validation."""
    pipeline = make_pipeline(
        TfidfVectorizer(sublinear_tf=True, min_df=2), LogisticRegression(max_iter=2000)
    )
    search = GridSearchCV(pipeline, {"logisticregression__C": [1, 10, 100]}, cv=3)
    texts, labels = zip(*train, strict=True)
    search.fit(texts, labels)
    test_texts, test_labels = zip(*test, strict=True)
    return float(search.score(test_texts, test_labels)), "TF-IDF and logistic regression"


# --- the federation, as a reader would run it


def run_commands(own: OwnData, folder: Path) -> dict[str, Any]:
    """Run `run` and `predict`; return the commands, the rows, the accuracies and the answer."""
    run = folder / f"run_{own.name}"
    commands = [
        ["fedproto", "run", "--dataset", own.dataset, "--out", str(run)],
        ["fedproto", "predict", str(run), own.new],
    ]
    start = time.perf_counter()
    outputs = []
    for words in commands:
        done = subprocess.run(
            [sys.executable, "-m", *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
        outputs.append(done.stdout)
    result = json.loads((run / "result.json").read_text())
    accuracies = {way: value["mean"] for way, value in result["accuracy"].items()}
    shown = [" ".join(words).replace(f"{folder}/", "") for words in commands]
    return {
        "commands": shown,
        "rows": result["rows"],
        "classes": len(result["classes"]),
        "clients": len(result["clients"]),
        "model": result["clients"][0]["model"],
        "accuracy": accuracies,
        "seconds": round(time.perf_counter() - start, 1),
        "predicted": outputs[1].strip(),
    }


def compare(own: OwnData, folder: Path) -> dict[str, float]:
    """Return head accuracies of the same model: alone, trained on all rows, and by FedAvg.

    They say where a distance to the baseline comes from: the model, or dividing the rows.
    """
    accuracies = {}
    for name, options in (("fedproto", ["--baselines"]), ("FedAvg", ["--algorithm", "fedavg"])):
        run = folder / f"compare_{own.name}_{name}"
        words = ["fedproto", "run", "--dataset", own.dataset, "--out", str(run), *options]
        subprocess.run([sys.executable, "-m", *words], capture_output=True, check=True)
        result = json.loads((run / "result.json").read_text())
        if name == "FedAvg":
            accuracies["FedAvg"] = result["accuracy"]["head"]["mean"]
            continue
        accuracies["alone"] = result["baselines"]["local"]["metrics"]["accuracy"]["mean"]
        accuracies["pooled"] = result["baselines"]["pooled"]["metrics"]["accuracy"]["mean"]
    return accuracies


def percent(fraction: float | None) -> str:
    """Return a fraction in percent, or a dash where it was not measured."""
    return "–" if fraction is None else f"{100 * fraction:.1f}"


def describe(found: dict[str, dict[str, Any]]) -> str:
    """Return the page results/own-data.md."""
    lines = [
        "# Data of one's own, with no setting at all",
        "",
        "Written by `benchmarks/own_data.py`. Each data set is run by",
        "`fedproto run --dataset KIND:PATH --out RUN` and used by `fedproto predict RUN FILE`.",
        "The baseline is the best of some scikit-learn models, trained on the rows of all clients",
        "and tested on the same rows; `points` is the better of head and prototypes minus the",
        "baseline. Accuracies are in percent, means over the clients.",
        "",
        "The last three columns are the same model with the same settings: every client alone, all",
        "rows in one place, and FedAvg. Where FedProto is behind, they say why: it shares",
        "prototypes, not weights, so each client's body learns from its own rows only. Where all",
        "clients have all classes and one architecture, as here, averaging weights may gain more.",
        "One seed each; a dash is a figure that was not measured.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    for name, one in found.items():
        rows = one["rows"]
        used = f"{rows['train']['used']:,} of {rows['train']['there']:,}, {rows['test']['used']:,}"
        same_model = one["same model"]
        baseline = one["baseline"]
        cells = [
            name,
            used,
            str(one["classes"]),
            str(one["clients"]),
            one["model"],
            percent(one["accuracy"]["head"]),
            percent(one["accuracy"]["prototype"]),
            f"{percent(baseline['accuracy'])} ({baseline['model']})",
            f"{one['points']:+.1f}",
            percent(same_model["alone"]),
            percent(same_model["pooled"]),
            percent(same_model["FedAvg"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(debian: str, *names: str) -> None:
    """Run all data sets, or those that are named, and write the results beside the others'."""
    stored = RESULTS / "own-data.json"
    found: dict[str, dict[str, Any]] = {}
    if stored.exists():
        found = json.loads(stored.read_text())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for own in write_all(folder, Path(debian)):
            if names and own.name not in names:
                continue
            one = run_commands(own, folder)
            accuracy, model = own.baseline()
            one["baseline"] = {"accuracy": accuracy, "model": model}
            best = max(one["accuracy"]["head"], one["accuracy"]["prototype"])
            one["points"] = round(100 * (best - accuracy), 2)
            one["is_within"] = one["points"] >= -TOLERANCE
            one["same model"] = compare(own, folder)
            found[own.name] = one
            stored.write_text(json.dumps(found, indent=2) + "\n")
            (RESULTS / "own-data.md").write_text(describe(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
