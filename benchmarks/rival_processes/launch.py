"""Starts another library's own script, with the paper's CNN where that library looks for models.

    python launch.py LIBRARY CHANNELS SCRIPT ARGUMENT...

`benchmarks/rivals.py` calls it in a working copy of a checkout, with the Python that the user
names. CHANNELS are those of the second convolution, one number per client with commas between.
Nothing of the library is changed but its table of models.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import paper_cnn
import torch

#: Where the models of HtFLlib's clients are written; rivals.py names it on the command line.
MODELS_FOLDER = "paper_models"
#: What keeps declared operators alive.
DECLARED: list[torch.library.Library] = []


def import_torchvision() -> None:
    """Import torchvision, also where its compiled operators do not fit this build of torch.

    The operators that it insists on are then declared without code; FedProto calls none of them.
    """
    try:
        importlib.import_module("torchvision")
        return
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    DECLARED.append(library)
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module("torchvision")


def use_in_pfllib(channels: list[int]) -> None:
    """Replace the network that `--model CNN` names; all clients of PFLlib have the same."""
    models = importlib.import_module("flcore.trainmodel.models")
    models.FedAvgCNN = lambda **_: paper_cnn.BodyAndFc(channels[0])


def use_in_htfllib(channels: list[int]) -> None:
    """Write one model per client to a folder, which is what HtFLlib offers for one's own models."""
    paper_cnn.save_client_models(Path(MODELS_FOLDER), channels)


def use_in_fl_bench(channels: list[int]) -> None:
    """Enter the network as `custom`; all clients of FL-bench have the same."""
    models = importlib.import_module("src.utils.models")

    class PaperCNN(models.DecoupledModel):
        def __init__(self, **_: object) -> None:
            super().__init__()
            self.base = paper_cnn.make_body(channels[0])
            self.classifier = paper_cnn.Head(paper_cnn.WIDTH, paper_cnn.CLASSES)

    models.MODELS["custom"] = PaperCNN


def leave_alone(channels: list[int]) -> None:
    """Do nothing: the released code has the paper's network, and chooses the channels by itself."""


USES = {
    "pfllib": use_in_pfllib,
    "htfllib": use_in_htfllib,
    "fl-bench": use_in_fl_bench,
    "released": leave_alone,
}


def main() -> None:
    library, channels, script, *arguments = sys.argv[1:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv = [script, *arguments]
    import_torchvision()
    USES[library]([int(number) for number in channels.split(",")])
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
