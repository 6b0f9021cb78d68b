"""Model folders of the Hugging Face hub that are on this machine; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedproto.core.files import read_json
from fedproto.errors import ConfigError, need

CONFIG = "config.json"
WEIGHTS = "*.safetensors"


def find_model_folder(name: str, plugin: str, extra: str) -> Path:
    """Return the folder of a model: `name` is its path, or its name on the hub.

    A name is looked up in the hub's cache on this machine. `plugin` (`hf`) and `extra`
    (`'.[hf]'`) are named in errors.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    hub = need("huggingface_hub", extra, f"model {plugin}")
    try:
        return Path(hub.snapshot_download(name, local_files_only=True))
    except Exception as error:  # it is not there, or is not a name
        raise ConfigError(
            f"model {plugin} finds no folder {name!r}, and no model of that name in the cache of "
            f"this machine ({hub.constants.HF_HUB_CACHE}); a run downloads nothing: fetch it first "
            f"with `hf download {name}`, or name a folder"
        ) from error


def read_model_config(folder: Path, plugin: str) -> dict[str, Any]:
    """Return what config.json says in a model's folder."""
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(f"model {plugin} needs a folder with {CONFIG}, and {folder} has none")
    config = read_json(path, ConfigError)
    if not isinstance(config, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return config


def list_weights(folder: Path, plugin: str) -> list[Path]:
    """Return the files of weights in a model's folder, which must be .safetensors files.

    Others may hold code that runs when they are read, so they are never opened.
    """
    found = sorted(folder.glob(WEIGHTS))
    if not found:
        raise ConfigError(
            f"model {plugin} finds no .safetensors file in {folder}, and reads no other weights; "
            "pretrained=false takes the architecture only"
        )
    return found
