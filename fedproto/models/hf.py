"""Backbones of the optional package `transformers`, from a folder or from the hub's local cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fedproto.config.options import PositiveInt
from fedproto.errors import ConfigError, FedProtoError, need
from fedproto.models import Fit
from fedproto.models.shared.hub_cache import find_model_folder, list_weights, read_model_config
from fedproto.models.shared.image_inputs import ImageInputs, check_channels
from fedproto.models.shared.word_ids import PADDING_ID, read_word_ids
from fedproto.models.shared.wrap import Wrapped, wrap

EXTRA = "'.[hf]'"
#: Settings of random draws within attention and of skipped layers, by their usual names. Modules
#: make these draws themselves, so that they would differ between engines.
OWN_DRAWS = (
    "attention_probs_dropout_prob",
    "attention_dropout",
    "attn_pdrop",
    "attn_dropout",
    "drop_path_rate",
    "layerdrop",
)
#: Parts of a backbone that many checkpoints lack, and that are trained with the head.
TRAINED_LATER = ("pooler",)
#: Names of tensors that an error lists.
MAX_NAMED_TENSORS = 3


def hf(
    fit: Fit,
    name: str,
    *,
    pretrained: bool = True,
    input_size: PositiveInt | None = None,
    head: str | None = None,
) -> Wrapped:
    """A model of the package transformers: a folder, or a name that is in the hub's local cache.

    Nothing is downloaded, and no code from the folder runs: weights are .safetensors files.
    `pretrained=false` draws all weights from the seed instead. Images are scaled to the size that
    the model was made for, or to `input_size`, and grey ones get its number of channels. Texts are
    rows of token numbers. `head` is the path of the last layer, which is found by itself as a rule;
    the features are what this layer is given. Dropout within attention is off.
    """
    transformers = need("transformers", EXTRA, "model hf")
    folder = find_model_folder(name, "hf", EXTRA)
    where = f"model hf:{name}"
    loader = _Loader(transformers, folder, where)
    if len(fit.shape) == 3:
        backbone = loader.load(transformers.AutoModelForImageClassification, pretrained)
        module: nn.Module = _take_images(backbone, fit, input_size, where)
    elif len(fit.shape) == 1:
        backbone = loader.load(transformers.AutoModelForSequenceClassification, pretrained)
        module = _take_tokens(backbone, fit, where)
    else:
        raise ConfigError(
            f"{where} takes images (channels, height, width) or rows of token numbers, not inputs "
            f"of shape {fit.shape}"
        )
    path = head or _find_head(backbone, where)
    return wrap(module, head=f"backbone.{path}")


# --- from a folder to a module


class _Loader:
    """Builds a module from a folder: its architecture, and its weights if they are wanted."""

    def __init__(self, transformers: ModuleType, folder: Path, where: str) -> None:
        self.folder = folder
        self.where = where
        self.transformers = transformers
        stated = read_model_config(folder, "hf")
        if "quantization_config" in stated:
            raise ConfigError(f"{where} is quantised, and such weights cannot be trained")
        with self._explained():
            config = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        for name in OWN_DRAWS:
            if hasattr(config, name):
                setattr(config, name, 0.0)
        self.config = config

    def load(self, auto_class: Any, pretrained: bool) -> nn.Module:
        """Return a module that classifies; `auto_class` says whether images or texts."""
        known = auto_class._model_mapping
        if type(self.config) not in known:
            raise ConfigError(
                f"{self.where} is a {self.config.model_type}, for which transformers has no "
                f"{auto_class.__name__.removeprefix('Auto')}: it does not fit these inputs"
            )
        module_type = known[type(self.config)]
        # Said here, because a configuration may name kernels of somebody else's.
        attention = "sdpa" if module_type._supports_sdpa else "eager"
        if not pretrained:
            self.config.pad_token_id = PADDING_ID
            with self._explained():
                return module_type._from_config(
                    self.config, attn_implementation=attention, dtype=torch.float32
                )
        list_weights(self.folder, "hf")
        with self._explained():
            module, facts = module_type.from_pretrained(
                self.folder,
                config=self.config,
                attn_implementation=attention,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        self._refuse_missing(module, facts["missing_keys"])
        self._refuse_infinite(module)
        return module

    def _refuse_missing(self, module: Any, missing: Any) -> None:
        """Refuse files that lack weights of the backbone; a head may be new."""
        prefix = f"{module.base_model_prefix}."
        names = []
        for name in sorted(missing):
            is_late = any(part in name.split(".") for part in TRAINED_LATER)
            if name.startswith(prefix) and not is_late:
                names.append(name)
        if names:
            listed = ", ".join(names[:MAX_NAMED_TENSORS])
            raise ConfigError(
                f"{self.where}: its files lack {len(names)} tensors of the model, such as {listed}"
            )

    def _refuse_infinite(self, module: nn.Module) -> None:
        for name, value in module.named_parameters():
            if not torch.isfinite(value).all():
                raise ConfigError(f"{self.where} has {name} with values that are not finite")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what transformers raises into one sentence, and keep its messages to itself."""
        logging = self.transformers.utils.logging
        verbosity = logging.get_verbosity()
        had_bars = logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except FedProtoError:
            raise
        except Exception as error:  # a damaged file, a model of another kind
            lines = str(error).splitlines() or [type(error).__name__]
            raise ConfigError(f"{self.where} cannot be loaded: {lines[0]}") from error
        finally:
            logging.set_verbosity(verbosity)
            if had_bars:
                logging.enable_progress_bar()


def _find_head(backbone: Any, where: str) -> str:
    """Return the path of the last linear layer that gives one value per class."""
    classes = backbone.config.num_labels
    found = None
    for path, layer in backbone.named_modules():
        if isinstance(layer, nn.Linear) and layer.out_features == classes:
            found = path
    if found is None:
        raise ConfigError(f"{where} has no linear layer at its end: name one with head=PATH")
    return found


# --- images


def _take_images(backbone: Any, fit: Fit, size: int | None, where: str) -> ImageInputs:
    channels = getattr(backbone.config, "num_channels", 3)
    check_channels(where, fit.shape, channels)
    return ImageInputs(backbone, channels, _image_size(backbone.config, size))


def _image_size(config: Any, size: int | None) -> tuple[int, int] | None:
    """Return (height, width) of the images that the model works on; None: any."""
    stated = size or getattr(config, "image_size", None)
    if stated is None:
        return None
    if isinstance(stated, int):
        return (stated, stated)
    height, width = stated
    return (int(height), int(width))


# --- texts


class TokenInputs(nn.Module):
    """A backbone that is given token numbers as whole numbers, and which of them are padding.

    Which tokens may see which is said by a mask (n, 1, tokens, tokens) where the model takes one:
    unlike one (n, tokens), it can be used for many clients at once.
    """

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.vocabulary = int(backbone.config.vocab_size)
        padding = backbone.config.pad_token_id
        self.padding = PADDING_ID if padding is None else int(padding)
        self.takes_pairs = _gives_the_same(self._run_by_token, self._run_by_pair, self._probe())

    def forward(self, x: Tensor) -> Tensor:
        """Return what the backbone makes of token numbers (n, tokens), which come as floats."""
        run = self._run_by_pair if self.takes_pairs else self._run_by_token
        return run(read_word_ids(x, self.vocabulary))

    def _run_by_token(self, ids: Tensor) -> Tensor:
        is_token = (ids != self.padding).long()
        return self.backbone(input_ids=ids, attention_mask=is_token)

    def _run_by_pair(self, ids: Tensor) -> Tensor:
        is_token = ids != self.padding
        may_see = is_token[:, None, None, :].expand(-1, -1, ids.shape[1], -1)
        return self.backbone(input_ids=ids, attention_mask=may_see)

    def _probe(self) -> Tensor:
        """Return two rows of tokens; one ends in padding."""
        other = max(0, min(self.vocabulary - 1, self.padding + 1))
        ids = torch.full((2, 6), other)
        ids[0, :4] = torch.arange(4) % self.vocabulary
        ids[1, 3:] = self.padding
        return ids


@torch.no_grad()
def _gives_the_same(one: Callable, other: Callable, inputs: Tensor) -> bool:
    """Return whether two functions make the same logits of some inputs; False if one fails."""
    try:
        return torch.allclose(one(inputs).logits, other(inputs).logits, rtol=1e-4, atol=1e-5)
    except Exception:  # a model that does not take such a mask may raise anything
        return False


def _take_tokens(backbone: Any, fit: Fit, where: str) -> TokenInputs:
    longest = getattr(backbone.config, "max_position_embeddings", None)
    tokens = fit.shape[0]
    if longest is not None and tokens > longest:
        raise ConfigError(f"{where} takes at most {longest} tokens, not {tokens}: use shorter rows")
    return TokenInputs(backbone.eval()).train()
