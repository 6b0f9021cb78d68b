"""Small data of six kinds, each as people have it, and a table with everything that goes wrong."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_digits

DIGITS = load_digits()
WORDS = {"good": "great fine happy lovely", "bad": "awful sad poor horrid"}


def digit(row: int) -> np.ndarray:
    """Return a digit of 8x8 bytes."""
    return (DIGITS.images[row] * 15).astype(np.uint8)


def as_images(folder: Path) -> Path:
    """One folder per class; images of two sizes, one that is none, and one that is cut off."""
    for row in range(60):
        name = str(DIGITS.target[row] % 3)
        (folder / name).mkdir(parents=True, exist_ok=True)
        side = 30 if row == 7 else 20
        Image.fromarray(digit(row)).resize((side, side)).save(folder / name / f"{row}.png")
    (folder / "0" / "none.png").write_bytes(b"not an image")
    whole = (folder / "1" / "1.png").read_bytes()
    (folder / "1" / "cut.png").write_bytes(whole[: len(whole) // 2])
    return folder


def as_table(folder: Path) -> Path:
    """Visits of patients in three hospitals, with missing values, dates and ids."""
    tumours = load_breast_cancer()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "visits.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        names = [name.replace(" ", "_") for name in tumours.feature_names]
        writer.writerow(["visit", "date", "PatientId", "hospital", *names, "finding"])
        for row, measured in enumerate(tumours.data[:240]):
            values = ["" if row == 3 and column == 0 else x for column, x in enumerate(measured)]
            hospital = ("Aachen", "Köln", "Ulm")[row % 3]
            date = f"2024-{1 + row % 12:02}-{1 + row % 28:02}"
            finding = tumours.target_names[tumours.target[row]]
            patient = f"{hospital} {row // 6}"
            writer.writerow([f"V{row:04}", date, patient, hospital, *values, finding])
    return path


def as_texts(folder: Path) -> Path:
    """Sentences in a table, in a column that is not called text."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "reviews.csv"
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["review", "verdict"])
        for row in range(80):
            verdict = list(WORDS)[row % 2]
            words = rng.choice([*WORDS[verdict].split(), "the", "a", "film", "plot"], 8)
            writer.writerow([" ".join(words), verdict])
    return path


def as_arrays(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.flatnonzero(DIGITS.target < 4)[:200]
    np.savez(folder / "own.npz", x=DIGITS.images[rows], y=DIGITS.target[rows])
    return folder / "own.npz"


def as_pfllib(folder: Path) -> Path:
    """Three clients, each with two of four classes, as PFLlib divides them."""
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for client in range(3):
            rows = np.flatnonzero(np.isin(DIGITS.target, [client, client + 1]))[:60]
            rows = rows[::5] if part == "test" else np.setdiff1d(rows, rows[::5])
            content = {"x": DIGITS.images[rows].astype(np.float32), "y": DIGITS.target[rows]}
            np.savez(folder / part / f"{client}.npz", data=content)  # type: ignore[arg-type]
    return folder


def as_hub_folder(folder: Path) -> Path:
    """A folder of parquet files, as the Hugging Face hub has them."""
    import datasets
    from helpers.data_files import encode_image

    folder.mkdir(parents=True, exist_ok=True)
    rows = np.flatnonzero(DIGITS.target < 3)[:90]
    names = datasets.ClassLabel(names=["0", "1", "2"])
    features = datasets.Features({"image": datasets.Image(), "label": names})
    columns = {
        "image": [encode_image(digit(row)) for row in rows],
        "label": DIGITS.target[rows].tolist(),
    }
    table = datasets.Dataset.from_dict(columns, features=features)
    table.to_parquet(str(folder / "train-00000-of-00001.parquet"))
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "folder": as_images,
    "csv": as_table,
    "text": as_texts,
    "npz": as_arrays,
    "pfllib": as_pfllib,
    "hf": as_hub_folder,
}
