"""The keywords of `fedproto.run` and `fedproto.stream`, so that editors complete and check them.

They are the keys of a configuration file: the settings of a run (`config.settings.Config`) and the
options of the plug-ins that come with the package. A comment states the default. All values are
converted and checked by `config.settings.configure`; a test compares this list with the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypeAlias, TypedDict

FileName: TypeAlias = str | PathLike[str]


class RunSettings(TypedDict, total=False):
    """Settings of the run itself; `algorithm`, `dataset` and `model` are parameters of `run`."""

    metric: str  # ''
    transform: str  # ''
    teacher: str  # ''
    feature_map: str  # ''
    partition: str  # auto
    combiner: str  # sum
    profile: Literal[  # paper
        "paper", "released", "pfllib", "htfllib", "fl-bench", "euclidean"
    ]
    clients: int | None  # None
    rounds: int  # 100
    batch: int  # 8
    lr: float  # 0.01
    momentum: float  # 0.5
    optimiser: Literal["sgd", "adam", "adamw"]  # sgd
    weight_decay: float  # 0.0
    clip_norm: float  # 0.0
    schedule: Literal["constant", "cosine", "linear", "step"]  # constant
    warmup: int  # 0
    class_weights: Literal["none", "balanced"]  # none
    sampling: Literal["shuffle", "balanced"]  # shuffle
    epochs: int  # 1
    local_steps: int | None  # None
    last_batch: Literal["auto", "keep", "drop"]  # auto
    dim: int | None  # None
    start: Literal["shared", "own"]  # shared
    initial: FileName | None  # None
    freeze: Literal["nothing", "body"]  # nothing
    prototypes: FileName | None  # None
    participation: float  # 1.0
    lost_uploads: float  # 0.0
    stragglers: float  # 0.0
    buffer: int  # 0
    concurrency: int | None  # None
    staleness: float  # 0.5
    speed_spread: float  # 0.0
    privacy: Literal["none", "release", "training", "client"]  # none
    epsilon: float | None  # None
    delta: float  # 1e-05
    noise_multiplier: float | None  # None
    clip: float | Literal["none"]  # 1.0
    step_noise: float | None  # None
    gradient_clip: float | Literal["none"]  # 1.0
    noise_at: Literal["auto", "client", "server"]  # auto
    noise_source: Literal["system", "seeded"]  # system
    count_threshold: float  # 2.0
    noise_shape: Literal["equal", "variance"]  # equal
    client_sampling: Literal["fixed", "poisson"]  # fixed
    seed: int  # 0
    engine: Literal["auto", "reference", "vectorised", "processes"]  # auto
    device: Literal["auto", "cpu", "cuda"]  # auto
    precision: Literal["float32", "float64", "tf32", "bf16"]  # float32
    threads: int  # 1
    workers: int | None  # None
    stack: int | None  # None
    states: Literal["auto", "device", "host", "disk"]  # auto
    compile: Literal["auto", "on", "off"]  # auto
    eval_every: int  # 10
    validation: float | None  # None
    select_by: str  # accuracy
    patience: int | None  # None
    report_last: bool  # False
    baselines: bool  # False
    checkpoint_every: int  # 10
    data_dir: FileName | None  # None


class AlgorithmOptions(TypedDict, total=False):
    """Options of the algorithms."""

    absent: Literal["remember", "drop"]  # one per plug-in
    beta1: float  # 0.9
    beta2: float  # 0.99
    body_epochs: int  # 1
    calibration: float  # 1.0
    clusters: int  # 3
    collect: Literal["after", "during"]  # after
    contrast: float  # one per plug-in
    distil: Literal["mse", "cross-entropy"]  # mse
    distance: Literal["mse", "l2", "sql2", "l1", "emd", "cosine"]  # mse
    fixed: bool  # False
    gamma: float  # 1.0
    head_epochs: int  # 1
    individual: float  # 0
    lam: float  # 1.0
    m: float | Literal["auto"]  # 0.1
    mu: float  # 0.1 (feddyn), 0.1 (fedprox), 1.0 (moon)
    personal: str  # one per plug-in
    regularise: Literal["sample", "class"]  # sample
    rho: float  # 0.9 (fednh), 0.9999 (fedsa)
    scale: float  # 10.0
    server_batch: int  # 10
    server_epochs: int  # 1 (fedgh), 1 (fedorgp), 1 (fedre), 100 (fedtgp)
    server_lr: float  # one per plug-in
    server_momentum: float  # 0.9
    server_steps: int  # 500
    shrinkage: float  # 0.1
    solve: Literal["lda", "ridge", "ncm"]  # lda
    strength: float  # 0.1
    tau: float  # one per plug-in
    tau_unit: Literal["relative", "absolute"]  # relative
    temperature: float  # 0.5
    threshold: float  # 100.0
    weighting: Literal["samples", "uniform", "eq6"]  # samples


class DatasetOptions(TypedDict, total=False):
    """Options of the data sets."""

    augment: bool  # one per plug-in
    broken: Literal["refuse", "skip"]  # refuse
    channel_order: Literal["auto", "first", "last"]  # auto
    client: str | None  # None
    coarse: bool  # False
    decimal: Literal[".", ","]  # .
    encoding: FileName | None  # None
    form: Literal["auto", "leaf", "emnist", "nist"]  # auto
    grey: bool | None  # None
    group: str | None  # None
    ignore: Sequence[str]  # ()
    image: str | None  # None
    keep: Sequence[str]  # ()
    label: str | None  # None
    length: int  # 100
    levels: str | None  # None
    mean: Sequence[float]  # (0.0,)
    missing: Sequence[str]  # ()
    outside: bool  # False
    sheet: str | None  # None
    size: int | None  # None
    split: str | None  # None
    std: Sequence[float]  # (1.0,)
    subset: str | None  # None
    text: str | None  # None
    text_encoding: str  # utf-8
    vocabulary: int  # 5000
    window: Sequence[float] | None  # None


class ModelOptions(TypedDict, total=False):
    """Options of the models."""

    channels: int  # 20
    dropout: float  # 0.5
    embedding: int  # 50
    filters: int  # 50
    fresh: str  # fc
    head: str | None  # None
    hidden: int  # 100
    input_size: int | None  # None
    kernel: int  # 5
    pretrained: bool  # True
    strides: Sequence[int]  # (2, 2)
    weights: FileName | None  # None
    width: int  # 50
    words: int  # 5000


class PartitionOptions(TypedDict, total=False):
    """Options of the partitions."""

    alpha: float | None  # 0.5 (dirichlet), None (flower)
    class_assignment_mode: Literal["random", "deterministic", "first-deterministic"] | None  # None
    group_size: int | None  # None
    keep_incomplete_shard: bool | None  # None
    min_partition_size: int | None  # None
    names: str  # ''
    noise: Literal["uniform", "normal"]  # uniform
    num_classes_per_partition: int | None  # None
    num_shards_per_partition: int | None  # None
    rows: int | None  # None
    self_balancing: bool | None  # None
    shard_size: int | None  # None
    shots: int | None  # None
    shots_stdev: float | None  # None
    smallest: int  # 10
    stdev: float  # 2.0
    strictness: float | None  # None
    test_shots: int | None  # None
    ways: int | None  # None


class TransformOptions(TypedDict, total=False):
    """Options of the transforms."""

    bits: int  # 8
    fraction: float  # 0.1
    norm: float  # 1.0


class CombinerOptions(TypedDict, total=False):
    """Options of the combiners."""

    attackers: int | None  # None
    chosen: int  # 1
    error: float  # 1e-06
    fraction: float  # 0.1
    iterations: int  # 100
    largest: float  # 1000000.0
    simulate: Literal["rounding", "protocol"]  # rounding
    smoothing: float  # 1e-06
    threshold: float  # 0.67
    weighted: bool  # True


class TeacherOptions(TypedDict, total=False):
    """Options of the teachers."""

    individual: float  # 0
    scale: float  # 3.0 (lda), 0.05 (ncm), 0.1 (ridge)
    shrinkage: float  # 0.1
    strength: float  # 0.1


class FeatureMapOptions(TypedDict, total=False):
    """Options of the feature maps."""

    bandwidth: float  # 1.0
    filters: int  # 128
    kernel: int  # 5
    n: int  # 2
    pool: int  # 4
    seed: int  # 0
    threshold: float  # 0.25
    values: int  # one per plug-in
    weights: FileName | None  # None


class RunKeywords(
    RunSettings,
    AlgorithmOptions,
    DatasetOptions,
    ModelOptions,
    PartitionOptions,
    CombinerOptions,
    TransformOptions,
    TeacherOptions,
    FeatureMapOptions,
    total=False,
):
    """Every keyword of `fedproto.run` beside its named parameters."""
