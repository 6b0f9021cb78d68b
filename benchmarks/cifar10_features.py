"""Write the 512 values that a pre-trained ResNet18 gives for every image of CIFAR-10 to one file.

    python -m benchmarks.cifar10_features            # writes $FEDPROTO_DATA/cifar10-resnet18.npz

About two minutes on a CPU core. `fedproto reproduce table-methods --size cpu` trains perceptrons on
these values: the same as ResNet18 with a frozen body, but the body runs once and not in every run.
The weights are those of `fedproto reproduce table-cifar10`, made from Tiny-ImageNet.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from fedproto.data import DataFolders, Split
from fedproto.data.cifar10 import IMAGENET_MEAN, IMAGENET_STD, cifar10
from fedproto.models import Fit
from fedproto.models.resnet18 import resnet18

WEIGHTS = "weights/resnet18-tiny-imagenet-32.safetensors"
NAME = "cifar10-resnet18.npz"
IMAGES_AT_ONCE = 500


@torch.no_grad()
def compute_features(split: Split, module: torch.nn.Module) -> np.ndarray:
    """Return the values of all images, (n, 512) in float16."""
    mean = torch.tensor(IMAGENET_MEAN).reshape(3, 1, 1)
    std = torch.tensor(IMAGENET_STD).reshape(3, 1, 1)
    parts = []
    for start in range(0, len(split.x), IMAGES_AT_ONCE):
        images = torch.from_numpy(split.x[start : start + IMAGES_AT_ONCE]).float() / 255
        features, _ = module((images - mean) / std)
        parts.append(features.half().numpy())
    return np.concatenate(parts)


def main(folder: Path | None = None) -> None:
    """Write the file to a folder, or to the first data folder."""
    folders = DataFolders()
    source = cifar10(folders)
    weights = folders.find(WEIGHTS)
    module = resnet18(Fit((3, 32, 32), classes=10), weights=str(weights)).eval()
    target = (folder or weights.parents[1]) / NAME
    np.savez(
        target,
        x=compute_features(source.train, module),
        y=source.train.y,
        x_test=compute_features(source.test, module),
        y_test=source.test.y,
        classes=np.array(source.classes),
    )
    print(f"written to {target}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
