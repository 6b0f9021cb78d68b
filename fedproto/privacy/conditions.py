"""Where a claim holds: what is refused, because one record or client could do more than is said."""

from __future__ import annotations

from collections.abc import Collection

from fedproto.config.options import Part
from fedproto.config.settings import Config
from fedproto.core.closed_form import CLASS_SUMS, GRAM
from fedproto.core.federation import Federation
from fedproto.errors import ConfigError

#: The algorithms whose uploads are sums over records, and the options with which they are.
RECORD_SUMS: dict[str, dict[str, object]] = {
    "fedproto": {"weighting": "samples", "collect": "after"},
    "fedproto-mh": {"weighting": "samples", "collect": "after"},
    "closed-form": {},
    "local": {},
    "fedre": {},
}
#: The combiners that add uploads.
SUMS = ("sum", "secure-sum")


def refuse_settings(config: Config) -> None:
    """Refuse settings that no claim covers, before any data is read."""
    if config.privacy == "client" and config.noise_at == "client":
        raise ConfigError(
            "privacy=client adds noise to the sum of all clients, at the server: leave noise_at out"
        )
    if config.client_sampling == "poisson" and config.combiner.name == "secure-sum":
        raise ConfigError(
            "client_sampling=poisson needs cohorts that nobody but the server knows, and the "
            "members of a secure sum know each other: leave client_sampling or combiner out"
        )
    if config.buffer:
        raise ConfigError(
            "asynchronous rounds weigh uploads by their age, for which there is no privacy claim: "
            "leave buffer or privacy out"
        )
    if config.baselines:
        raise ConfigError(
            "baselines trains on the rows of all clients without any protection: leave baselines "
            "or privacy out"
        )
    is_summed = config.algorithm.name in RECORD_SUMS  # else only trained weights may be sent
    if config.privacy == "release" or (config.privacy == "training" and is_summed):
        refuse_other_sums(config.algorithm, config.privacy)
    if is_noise_at_server(config):
        _refuse_changed_sums(config)


def is_noise_at_server(config: Config) -> bool:
    """Return whether the server adds the noise."""
    return config.privacy == "client" or config.noise_at == "server"


def refuse_other_sums(algorithm: Part, setting: str) -> None:
    """Refuse algorithms whose uploads are not known to be sums over records.

    setting  release or training
    """
    name = algorithm.name
    if name not in RECORD_SUMS:
        raise ConfigError(
            f"privacy={setting} is for uploads that are sums over records, which those of "
            f"{name} are not known to be: use {', '.join(RECORD_SUMS)}, or privacy=client"
        )
    for option, value in RECORD_SUMS[name].items():
        found = algorithm.options.get(option, value)
        if found != value:
            raise ConfigError(
                f"privacy={setting} needs {option}={value}, not {option}={found}: else the "
                "upload is not a sum in which every record counts once"
            )


def _refuse_changed_sums(config: Config) -> None:
    """Refuse what would change the uploads between their clipping and the noise on their sum."""
    if config.transform:
        raise ConfigError(
            f"transform {config.transform[0].name} changes uploads after they were clipped, and "
            "the noise is added to their sum: leave transform out, or add the noise at the clients"
        )
    if config.combiner.name not in SUMS:
        raise ConfigError(
            f"noise at the server is added to a sum, and combiner {config.combiner.name} makes "
            "something else of the uploads: leave combiner out, or add the noise at the clients"
        )
    for part in (config.algorithm, *config.teacher):
        if part.options.get("individual"):
            raise ConfigError(
                "individual solves from each client's own sums, which noise at the server does "
                "not protect: leave individual out, or add the noise at the clients"
            )


def refuse_federation(config: Config, federation: Federation, groups: Collection[str]) -> None:
    """Refuse a federation whose models or rows break the claim."""
    if federation.has_validation:
        raise ConfigError(
            "the best round is chosen by validation rows, which no privacy claim covers: set "
            "validation to 0, or leave privacy out"
        )
    if federation.architectures and is_noise_at_server(config):
        raise ConfigError(
            "noise at the server is for one architecture: with several, each would make a release "
            "of its own of the same class means; use one model, or add the noise at the clients"
        )
    if config.privacy == "release" and not set(groups) <= {CLASS_SUMS, GRAM}:
        _refuse_trained_encoder(config, federation)


def _refuse_trained_encoder(config: Config, federation: Federation) -> None:
    """Refuse embeddings of a model that is trained on the records that they are of."""
    if config.freeze != "body":
        raise ConfigError(
            "privacy=release needs an encoder that no private row has trained: set freeze to body "
            "(with initial, weights from public data), use closed-form, or privacy=training"
        )
    for member in federation.members:
        trained = [name for name in member.initial if not name.startswith("head")]
        if trained:
            raise ConfigError(
                f"privacy=release needs embeddings of the frozen body alone, but {trained[0]} of "
                f"client {member.name} is trained on private rows: leave dim out"
            )
