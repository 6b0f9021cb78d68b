"""What a deployed server cannot have together with secure sums."""

from __future__ import annotations

from collections.abc import Mapping

from fedproto.config import plugins
from fedproto.core.types import Algorithm, GroupLayout
from fedproto.deploy.settings import ServerSettings, TrainingTerms
from fedproto.errors import ConfigError
from fedproto.privacy.secure_sum.flat_uploads import count_values
from fedproto.runs.composition import refuse_recoding, refuse_single_uploads

#: Limits of single uploads, which the server does not see.
_UNCHECKED = ("max_count", "max_norm", "max_count_ratio", "max_norm_ratio")
_BYTES_PER_VALUE = 8


def refuse_unfit_settings(
    algorithm: Algorithm,
    layouts: Mapping[str, GroupLayout],
    settings: ServerSettings,
    terms: TrainingTerms,
    classes: tuple[str, ...],
) -> None:
    """Raise ConfigError if the settings want something that secure sums do not allow."""
    summation = algorithm.summation
    assert summation is not None
    name = summation.name
    transforms = [plugins.build("transform", part) for part in terms.transform_parts()]
    refuse_single_uploads(name, settings.buffer, algorithm, transforms)
    refuse_recoding(name, transforms, layouts)
    if any("@" in group for group in layouts):
        raise ConfigError(f"{name} needs members of one model, but `model` lists several")
    if settings.new_classes or not classes:
        raise ConfigError(
            f"{name} needs all classes from the start, so that nobody sees who has which: list "
            "them as `classes`, without new-classes"
        )
    if settings.participation < 1 and algorithm.once:
        raise ConfigError(
            f"{algorithm.name} sends {algorithm.once[0]} once, which {name} adds only where all "
            "members of a cohort send it together: leave participation out"
        )
    for limit in _UNCHECKED:
        if getattr(settings, limit) != getattr(ServerSettings, limit):
            key = limit.replace("_", "-")
            raise ConfigError(
                f"{key} is a limit of single uploads, which {name} hides from the server: leave it "
                "out; members keep to the option `largest` of the combiner"
            )
    size = count_values(layouts)[0] * _BYTES_PER_VALUE
    if size > settings.max_bytes:
        raise ConfigError(
            f"a masked upload of {algorithm.name} has up to {size} bytes, but max-bytes is "
            f"{settings.max_bytes}: raise it"
        )
    summation.check(settings.quorum, settings.quorum)
