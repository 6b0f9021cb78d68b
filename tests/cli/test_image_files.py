"""From image files to `predict`, by the command line: DICOM, 16 bits, sites and broken files."""

import json
import shutil

import numpy as np
import pytest

from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import DataError, RunFolderError
from fedproto.inference.export.read import read_exported
from fedproto.inference.export.write import export_client
from fedproto.inference.input_files import read_inputs
from fedproto.inference.trained_client import load_client
from fedproto.runs.client_models import INDEX
from fedproto.runs.folder import RunFolder
from tests.helpers.command_line import fedproto
from tests.helpers.image_files import write_dicom, write_image
from tests.helpers.sources import build

SITES = ("Köln", "Ulm")
WINDOW = "500.5,1001"


def write_scans(root):
    """DICOM files in site/class/patient: `sick` ones have a bright half, in Hounsfield units."""
    generator = np.random.default_rng(0)
    for site in SITES:
        for label in ("sick", "well"):
            for patient in range(5):
                for number in range(2):
                    pixels = generator.integers(0, 600, (12, 12)).astype(np.int16)
                    if label == "sick":
                        pixels[:6] += 700
                    path = root / site / label / f"{site}-{label}-{patient}" / f"{number}.dcm"
                    write_dicom(path, pixels, RescaleIntercept=-100, RescaleSlope=1)
    (root / "Ulm" / "well" / "Ulm-well-0" / "2.dcm").write_bytes(b"no image")
    return root


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    return write_scans(tmp_path_factory.mktemp("scans"))


@pytest.fixture(scope="module")
def run(scans, tmp_path_factory):
    """A run of the scans' two sites, and what it said."""
    folder = tmp_path_factory.mktemp("run") / "run"
    name = f'folder:{scans}(levels=client/class/group, broken=skip, window="{WINDOW}")'
    answer = fedproto(
        *("run", "--dataset", name, "--partition", "natural", "--rounds", "3"),
        *("--lr", "0.1", "--out", str(folder), "--device", "cpu"),
    )
    assert answer.code == 0, answer.err
    return folder, answer


def test_a_run_says_how_many_files_it_skipped(run):
    _, answer = run
    said = answer.out + answer.err
    assert "1 of 41 image files was skipped" in " ".join(said.split())


def test_sites_are_clients_by_name(run):
    folder, _ = run
    names = [
        client["name"] for client in json.loads((folder / "result.json").read_text())["clients"]
    ]
    assert names == list(SITES)


def test_window_and_bits_are_kept_with_the_models_and_by_an_export(run, scans, tmp_path):
    folder, _ = run
    trained = load_client(folder, 0)
    assert trained.preprocessing.window == (500.5, 1001.0)
    assert trained.preprocessing.scale == 65535
    exported = tmp_path / "member"
    answer = fedproto("export", str(folder), "--client", "0", "--to", str(exported), "--no-onnx")
    assert answer.code == 0, answer.err
    manifest = json.loads((exported / "manifest.json").read_text())
    assert manifest["input"]["window"] == [500.5, 1001.0]
    assert read_exported(exported).preprocessing == trained.preprocessing


def test_new_scans_are_read_as_those_in_training(run, scans):
    """The window is the run's, not the one that a new file states."""
    folder, _ = run
    preprocessing = load_client(folder, 1).preprocessing
    source = build(f"folder:{scans}", levels="client/class/group", broken="skip", window=WINDOW)
    path = scans / "Köln" / "sick" / "Köln-sick-0" / "0.dcm"
    (found,) = read_inputs(path, preprocessing)
    x = preprocessing.normalise(found.x[None])
    for split in (source.train, source.test):
        rows = source.tensor(split, np.arange(len(split.y)))
        if any(x[0].equal(row) for row in rows):
            return
    raise AssertionError("no row is that image")


def test_predict_tells_scans_apart(run, scans):
    folder, _ = run
    path = scans / "Ulm" / "sick" / "Ulm-sick-1" / "1.dcm"
    answer = fedproto("predict", str(folder), str(path), "--client", "Ulm", "--json")
    assert answer.code == 0, answer.err
    assert "sick" in answer.out


def test_a_trained_client_takes_other_kinds_of_files(run, tmp_path):
    """A PNG export of a scan has no window: its white is white."""
    folder, _ = run
    preprocessing = load_client(folder, 0).preprocessing
    assert isinstance(preprocessing, Preprocessing)
    for ending, mode in (("png", "L"), ("tif", "I;16"), ("jpg", "RGB")):
        path = write_image(tmp_path / f"a.{ending}", mode, 12, 12)
        (found,) = read_inputs(path, preprocessing)
        assert found.x.shape == (1, 12, 12) and 255 < found.x.max() <= 65535


@pytest.mark.parametrize(
    "wrong", [3, [40], [40, 0], [40, "wide"], [40, True], [1e300, 2], "40,400"]
)
def test_a_window_that_is_none_is_refused(run, tmp_path, wrong):
    """In a run folder that is sealed again, as a stranger could, and in an export's manifest."""
    folder, _ = run
    shutil.copytree(folder, tmp_path / "run")
    copy = RunFolder(tmp_path / "run")
    content = copy.read_json(INDEX)
    content["clients"][0]["preprocessing"]["window"] = wrong
    copy.write_json(INDEX, content)
    with pytest.raises(RunFolderError, match="must have a `window` of centre and width, not"):
        load_client(tmp_path / "run", 0)
    export_client(load_client(folder, 0), tmp_path / "member", onnx=False)
    path = tmp_path / "member" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["input"]["window"] = wrong
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="and a `window` of centre and width"):
        read_exported(tmp_path / "member")
