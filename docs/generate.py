"""Write docs/configuration.md and docs/api.md from the code, and copy figures from results/.

python docs/generate.py
"""

from __future__ import annotations

import inspect
import shutil
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal, Union

import fedproto
from fedproto.config import plugins
from fedproto.config.options import Bounds, FilePath, options_of
from fedproto.config.settings import DEFAULTS, Config

DOCS = Path(__file__).resolve().parent
#: Figures of results/ that pages show.
FIGURES = (
    "table-methods-mnist.png",
    "table-methods-fashion-mnist.png",
    "table-methods-cpu-c*.png",
    "study-gram.png",
)

#: Keys of a run: what each means.
RUN_MEANINGS = {
    "dataset": "the data set, or several with counts: `mnist5k*10,digits*10`",
    "algorithm": "the algorithm; on the command line, several with commas are compared over the "
    "same clients, while `fedproto.run` and an entry of a sweep take one",
    "model": "the model, or several with counts: `cnn*7,mlp*13`; `auto` is the data set's own",
    "metric": "metrics beside those that every run has, separated by commas",
    "transform": "what is done to uploads before they travel, in this order: see "
    "[transforms](transforms.md)",
    "teacher": "a classifier that the server solves from sums beside the algorithm, if any: see "
    "[closed forms](closed-form.md)",
    "feature_map": "the features that a closed form is solved over; empty: `auto`",
    "combiner": "what the server makes of the uploads of a round: see [combiners](combiners.md)",
    "partition": "how the data set is divided among clients; `auto`: `nway` for the data sets that "
    "come with the package, all rows of [data of your own](data.md)",
    "profile": "which [reading of FedProto](fedproto-variants.md) to follow where they differ",
    "clients": "number of clients; none: 20 for the data sets that come with the package and for "
    "`nway`, as many as [data of your own](data.md) names or suits",
    "rounds": "number of communication rounds",
    "batch": "samples per training step",
    "lr": "learning rate",
    "momentum": "momentum of SGD; Adam's are 0.9 and 0.999",
    "optimiser": "how a step follows the gradient: see [training](concepts.md#local-training)",
    "weight_decay": "weight decay: a part of the gradient (SGD, Adam) or beside it (AdamW)",
    "clip_norm": "largest norm of a client's gradient, over all trained parameters; 0: any",
    "schedule": "how the learning rate falls over the rounds",
    "warmup": "rounds in which the learning rate rises, before the schedule begins",
    "class_weights": "`balanced`: a sample counts the more, the rarer its class is with the client",
    "sampling": "`balanced`: an epoch has equally many rows of all classes of the client",
    "epochs": "local epochs per round",
    "local_steps": "batches of every client per round, in place of `epochs`",
    "last_batch": "keep or drop the partial batch at the end of an epoch; "
    "`auto` drops it for models with batch normalisation",
    "dim": "length of the prototypes, to which built-in models project; a model of your own must "
    "give it itself; none: the models' own length",
    "start": "initial weights: one draw per architecture, or one per client",
    "initial": "file with weights of the models' bodies to start from",
    "freeze": "`body` trains the models' heads only, on features that are computed once: see "
    "[frozen bodies](plugins.md#a-frozen-body)",
    "prototypes": "file or run folder with global prototypes to start from",
    "participation": "fraction of the clients sampled each round",
    "lost_uploads": "fraction of the uploads that are lost",
    "stragglers": "fraction of the clients that do half of their steps",
    "buffer": "uploads that an [asynchronous round](concepts.md#asynchronous-rounds) waits for; "
    "0: rounds are synchronous",
    "concurrency": "clients that train at a time in asynchronous rounds; none: `participation` of "
    "the clients",
    "staleness": "exponent by which late uploads count less in asynchronous rounds; 0: they count "
    "as much as others",
    "speed_spread": "how much the durations of local training differ in asynchronous rounds: the "
    "standard deviation of their logarithm",
    "privacy": "what [differential privacy](privacy.md) protects: nothing, a record in what is "
    "released, a record also in what is trained, or a whole client",
    "epsilon": "privacy budget of each record or client over the whole run; none: what the noise "
    "costs",
    "delta": "chance that a privacy claim fails",
    "noise_multiplier": "standard deviation of the noise in units of the sensitivity; none: what "
    "`epsilon` needs",
    "clip": "L2 norm that embeddings (with `privacy=client`: a client's values) are clipped to",
    "step_noise": "noise of each step of training, in units of `gradient_clip`, with "
    "`privacy=training`; none: what `epsilon` needs",
    "gradient_clip": "L2 norm that the gradient of each record is clipped to, with "
    "`privacy=training`",
    "noise_at": "who adds the noise: every client, or the server to the sum; `auto`: clients, but "
    "the server with `privacy=client`",
    "noise_source": "`seeded` noise can be repeated; it is for tests, and nothing is private then",
    "count_threshold": "a class counts above so many standard deviations of the noise on its count",
    "noise_shape": "whether noise at the clients has one size for all coordinates of an embedding, "
    "or follows their mean squares",
    "client_sampling": "with `privacy=client`: cohorts of a fixed size, or each client by itself "
    "with probability `participation`, in secret, so that the accountant may count it",
    "seed": "seed of partition, initial weights, shuffles and samples",
    "engine": "how clients are trained: see [engines](engines.md)",
    "device": "where clients are trained; `auto` takes a GPU if there is one",
    "precision": "floating-point type; `tf32` rounds products on a GPU, `bf16` needs stacks",
    "threads": "threads of torch on a CPU, per process",
    "workers": "processes of the engine `processes`; none: one per core",
    "stack": "clients trained at a time; none: what suits the device",
    "states": "where clients' models are kept between rounds",
    "compile": "fuse the kernels of a step on a GPU",
    "eval_every": "evaluate every so many rounds, and in the last",
    "validation": "fraction of each client's training rows, per class, that are set apart to "
    "choose the best round by; at least one row of each class stays, and at least one is taken "
    "where there are two; none: only where the data has a validation set of its own, 0: never",
    "select_by": "what the best round is chosen by: `accuracy` (by the nearest prototype where "
    "the algorithm has prototypes, else by the head), one accuracy by its name, "
    "`balanced_accuracy`, `macro_f1` or `auroc`",
    "report_last": "measure the last round of a run with validation on test rows, too: "
    "`last_round` of result.json",
    "patience": "end a run with validation after so many evaluations without improvement",
    "baselines": "also train the same model locally and on the rows of all clients together",
    "checkpoint_every": "write a checkpoint every so many rounds; 0: never",
    "data_dir": "folder with data files; none: `$FEDPROTO_DATA`, then `~/.cache/fedproto`, "
    "then `/usr/share/datasets`",
}

_IMAGE_OPTIONS = {
    "mean": "mean per channel, of values in [0, 1]",
    "std": "standard deviation per channel, of values in [0, 1]",
    "augment": "random crop and flip in training",
    "size": "resize images to size x size; none: all must have one size",
    "levels": "what the levels of folders are, such as `client/class` or `class/group`; none: "
    "`class`, and `class/group` if every image is in a folder inside its class",
    "window": "centre and width of the values of DICOM files; none: each file's own",
    "broken": "what to do about image files that cannot be read",
    "grey": "one channel (true) or three (false); none: one if every file has one",
}

#: Options of plug-ins: what each means. Within a kind, a name has one meaning.
OPTION_MEANINGS = {
    "algorithm": {
        "solve": "what the server solves from the sums: see [closed forms](closed-form.md)",
        "shrinkage": "of `lda`: how far the covariance moves towards its mean diagonal",
        "closed-form.individual": "of `lda`: how much of the covariance is the client's own",
        "strength": "of `ridge`'s penalty, in units of the mean diagonal of the Gram matrix",
        "lam": "λ, the weight of the distance to the prototypes (`ditto`: to the global model)",
        "distance": "distance between an embedding and its prototype in the loss",
        "weighting": "weight of a client in a class: its samples, equal, or Eq. 6 as printed",
        "regularise": "distance of every sample, or of the batch's class means (Eq. 8)",
        "collect": "prototypes from the trained model, or from the batches of the last epoch",
        "absent": "whether the last upload of a client outside the cohort still counts",
        "fixed": "keep the prototypes that the run starts from",
        "mu": "μ, the weight of the distance to the global model (`moon`: of the contrast between "
        "embeddings)",
        "temperature": "τ, by which the cosines between embeddings are divided",
        "rho": "ρ, how much of its prototypes the server keeps in a round",
        "scale": "s, by which the cosines to the prototypes are multiplied to be logits "
        "(`protonorm`: the length of all prototypes)",
        "threshold": "τ, the largest margin between the prototypes of two classes",
        "server_epochs": "epochs of the server over the uploads of a round",
        "server_batch": "prototypes, or mixtures, per step of the server",
        "server_steps": "how often the server moves its prototypes apart in a round",
        "personal": "layers that stay with the client, separated by commas",
        "head_epochs": "epochs per round for the head",
        "body_epochs": "epochs per round for the body",
        "clusters": "number of clusters",
        "gamma": "γ, the weight of the distance to the mean logits of the class "
        "(`fedorgp`: of the cosines to the prototypes of other classes)",
        "distil": "distance to these logits: between logits, or between softmax outputs",
        "server_lr": "η, the length of the server's step",
        "server_momentum": "β, how much of its last step the server repeats",
        "beta1": "β1, how much the server keeps of the mean of its steps",
        "beta2": "β2, how much the server keeps of the mean of their squares",
        "tau": "τ, which divides distances to prototypes before a softmax over classes (`fedadam`: "
        "which keeps the server's step small where the squares are)",
        "tau_unit": "whether τ is in units of the mean squared distance between the prototypes",
        "m": "how much of the mean body of its architecture a client mixes into its own",
        "calibration": "κ, the weight of the head's cross-entropy on the anchors",
        "contrast": "β, the weight of the contrast between the prototypes of all classes",
    },
    "dataset": {
        **_IMAGE_OPTIONS,
        "channel_order": "where the channels of images are: `first`, behind the rows, or `last`; "
        "`auto` finds an axis of 1, 3 or 4 entries",
        "coarse": "the 20 groups instead of the 100 classes",
        "form": "which of the three published forms to read",
        "subset": "configuration of the data set on the hub",
        "image": "column of images or of their paths; none: found by its type or name",
        "group": "column of groups, such as patients, whose rows stay together; none: found by "
        "its name",
        "split": "column of the words train, test and val; none: found by its name",
        "outside": "whether a list may name files outside of its own folder",
        "label": "column of classes; none: found by its name",
        "client": "column of clients, for the partition `natural`; none: found by its name",
        "ignore": "columns to leave out, separated by commas",
        "keep": "columns to keep although they look like names, ids or dates, separated by commas",
        "missing": "marks of missing values, besides nothing, NA and ?, separated by commas",
        "decimal": "what stands before the decimals of a number",
        "text": "column of texts; none: the one called text",
        "text_encoding": "encoding of text files; a byte order mark wins over it",
        "sheet": "sheet of an Excel file; none: the first",
        "encoding": "`encoding.json` for rows or words; none: made from the training rows",
        "vocabulary": "number of the most frequent training words that are known",
        "length": "words to which a text is cut or padded",
    },
    "model": {
        "channels": "channels of the second convolution",
        "width": "length of the embedding",
        "kernel": "side of the convolutions' kernels",
        "dropout": "probability of dropout",
        "hidden": "units of the hidden layer",
        "strides": "strides of conv1 and of the max-pool",
        "weights": "file with torchvision's weights; none: random weights",
        "fresh": "layers that are not read from `weights`, separated by commas",
        "words": "number of words with a vector of their own",
        "embedding": "length of the word vectors",
        "filters": "convolutions per width",
        "pretrained": "whether weights come from the files; false: drawn from the seed",
        "input_size": "side to which images are scaled; none: that of the model, or none",
        "head": "path of the last linear layer; none: it is found",
    },
    "partition": {
        "ways": "classes per client (mean); none: 3, or all if there are fewer",
        "shots": "training samples per class (mean); none: the data set's number, or all",
        "stdev": "spread of `ways`",
        "shots_stdev": "spread of `shots`; none: `stdev`",
        "noise": "of the spread: whole numbers within ± stdev, or a rounded Gaussian",
        "test_shots": "test samples per class; none: all",
        "names": "classes to use, separated by commas; empty: all",
        "alpha": "concentration of the Dirichlet distribution; small: few classes per client",
        "smallest": "samples that every client has at least",
        "rows": "training rows per client (mean); none: all rows are used",
    },
    "transform": {
        "norm": "largest L2 norm of a row",
        "bits": "of a code: 8 or 4",
        "fraction": "of the values of a tensor that travel",
    },
    "teacher": {
        "shrinkage": "how far the covariance moves towards its mean diagonal",
        "individual": "how much of the covariance is the client's own; 0: all have one solution",
        "strength": "of the penalty, in units of the mean diagonal of the centred Gram matrix",
        "scale": "what scores are divided by before they count as log-probabilities",
    },
    "feature_map": {
        "filters": "number of random filters",
        "kernel": "pixels per side of a filter",
        "threshold": "what is subtracted from a response, in standard deviations of an image",
        "pool": "fields per side over which responses are averaged",
        "seed": "of the map's own draws; all members must use the same",
        "values": "number of random features",
        "bandwidth": "width of the kernel, for columns of variance 1",
        "n": "the most words of an n-gram",
        "weights": "a file with the weights of a ResNet18, the same for all members",
    },
    "combiner": {
        "fraction": "fraction of the uploads that is cut at each end of a coordinate",
        "attackers": "wrong uploads to withstand, f; none: as many as the uploads allow",
        "chosen": "uploads to average; more than 1 is Multi-Krum",
        "weighted": "count an upload by its weight; false: all alike",
        "smoothing": "ν, the least distance that counts",
        "iterations": "steps of the search",
        "threshold": "fraction of a round's clients that must stay to its end; at least a majority",
        "largest": "largest weight × value of one client; a client with a larger one sends nothing",
        "error": "by which rounding may move a value of one client",
        "simulate": "what a simulated run does: round and count, or run the whole protocol, too",
    },
}

FLOWER_OPTION = "option of Flower's partitioner of the same name"


def configuration_page() -> str:
    """Return the configuration reference: the keys of a run, and the options of every plug-in."""
    lines = [
        "# Configuration",
        "",
        "<!-- Made by `python docs/generate.py`; do not edit. -->",
        "",
        "Write a key in a TOML file (`fedproto run FILE.toml`), set it on the command line",
        "(`--set KEY=VALUE`; many keys also have a flag, see `fedproto run --help`), or pass it to",
        "`fedproto.run` in Python. `--set` wins over flags, and flags win over the file.",
        "",
        "```toml",
        'dataset = "mnist5k"',
        "clients = 10",
        "rounds = 50",
        "[algorithm]",
        'name = "fedproto"',
        "lam = 0.5",
        "```",
        "",
        "## Keys of a run",
        "",
        *_table(_run_rows()),
    ]
    for kind in plugins.FOLDERS:
        lines += ["", f"## Options of `{kind}`", "", *_syntax(kind)]
        for name in plugins.names(kind):
            lines += _plugin_section(kind, name)
    return "\n".join(lines) + "\n"


def _syntax(kind: str) -> list[str]:
    return [
        "Options are written in parentheses behind the name, with `--set OPTION=VALUE`",
        f"(`--set {kind}.OPTION=VALUE` if the name alone is ambiguous), or in a table",
        f"`[{kind}]` of the file, which has the key `name`. In parentheses, a value with a comma,",
        "a bracket or a quote is quoted.",
    ]


def _run_rows() -> list[tuple[str, str, str, str]]:
    hints = typing.get_type_hints(Config, include_extras=True)
    rows = []
    for field in fields(Config):
        if field.name in plugins.FOLDERS:
            type_text = "name, with options"
            default = DEFAULTS[field.name]
        else:
            assert field.default is not MISSING
            type_text = describe_type(hints[field.name])
            default = field.default
        rows.append((field.name, type_text, _default(default), RUN_MEANINGS[field.name]))
    return rows


def _plugin_section(kind: str, name: str) -> list[str]:
    function = plugins.find(kind, name)
    summary = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    lines = ["", f"### `{name}`", "", summary]
    rows = [
        (
            option.name,
            describe_type(option.kind),
            _default(option.default),
            _meaning(kind, name, option.name),
        )
        for option in options_of(function).values()
    ]
    return [*lines, "", *_table(rows)] if rows else lines


def _meaning(kind: str, plugin: str, option: str) -> str:
    if plugin == "flower" and option != "test_shots":
        return FLOWER_OPTION
    meanings = OPTION_MEANINGS[kind]
    return meanings.get(f"{plugin}.{option}") or meanings[option]


def _table(rows: list[tuple[str, str, str, str]]) -> list[str]:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, type_text, default, meaning in rows:
        lines.append(f"| `{key}` | {type_text} | {default} | {meaning} |")
    return lines


def _default(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`" + ",".join(map(str, value)) + "`"
    return f"`{value}`" if value != "" else "empty"


def describe_type(kind: Any) -> str:
    """Return a type of an option in words, such as "whole number of at least 1"."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is Annotated:
        base, mark = arguments
        if isinstance(mark, FilePath):
            return "path"
        assert isinstance(mark, Bounds)
        return describe_type(base) + str(mark)
    if origin in (Union, types.UnionType):
        inner, *words = [argument for argument in arguments if argument is not type(None)]
        return f"{describe_type(inner)}, or {describe_type(words[0]) if words else 'none'}"
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in arguments)
    if origin is tuple:
        return f"{describe_type(arguments[0])}; several with commas"
    return {int: "whole number", float: "number", bool: "true or false", str: "text"}[kind]


#: Public names of types: what each stands for, and what it is used for.
ALIASES = {
    "Tree": ("dict[str, torch.Tensor]", "Tensors by name, such as a model's parameters."),
    "State": (
        "dict[str, Any]",
        "Tensors by name, or trees of them by name: what a server keeps and sends, and what a "
        "client keeps beside its model.",
    ),
    "Upload": ("dict[str, Group]", "What a client sends: groups by name."),
}


def api_page() -> str:
    """Return the API reference: the signature and docstring of every public name."""
    lines = [
        "# Python API",
        "",
        "<!-- Made by `python docs/generate.py`; do not edit. -->",
        "",
        "The public names of the package `fedproto`. `run`, `stream` and `join` take every key of",
        "the [configuration](configuration.md) as a keyword.",
    ]
    functions_first = sorted(fedproto.__all__, key=lambda name: (name[0].isupper(), name))
    for name in functions_first:
        lines += ["", f"## {name}", "", *_api_section(name, getattr(fedproto, name))]
    return "\n".join(lines) + "\n"


def _api_section(name: str, value: Any) -> list[str]:
    if name in ALIASES:
        definition, meaning = ALIASES[name]
        return ["```text", f"{name} = {definition}", "```", "", meaning]
    if inspect.isclass(value) and issubclass(value, Exception):
        sentence = f"Exception, subclass of `{value.__base__.__name__}`. {_own_docstring(value)}"
        return [sentence.rstrip()]
    lines = ["```text", *_signature(name, value), "```"]
    documentation = _own_docstring(value)
    if documentation:
        lines += ["", "```text", *documentation.splitlines(), "```"]
    if inspect.isclass(value):
        lines += _methods(value)
    return lines


def _own_docstring(value: Any) -> str:
    """Return a docstring that was written for this very object, cleaned; "" where there is none."""
    written = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    text = inspect.cleandoc(written or "")
    return "" if text.startswith(f"{value.__name__}(") else text


def _signature(name: str, value: Callable) -> list[str]:
    """Return one line per parameter, without the addresses that reprs of functions hold."""
    signature = inspect.signature(value)
    lines = [f"{name}("]
    star_is_due = True
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            star_is_due = False
        if parameter.kind is parameter.KEYWORD_ONLY and star_is_due:
            lines.append("    *,")
            star_is_due = False
        lines.append(f"    {_parameter(parameter)},")
    returned = signature.return_annotation
    if inspect.isclass(value) or returned is inspect.Signature.empty:
        return [*lines, ")"]
    return [*lines, f") -> {_type_text(returned)}"]


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_type_text(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return text
    is_plain = parameter.default is None or isinstance(parameter.default, (bool, int, float, str))
    return f"{text} = {parameter.default!r}" if is_plain else f"{text} = ..."


def _type_text(annotation: Any) -> str:
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _methods(value: type) -> list[str]:
    """Return a table of the public methods and properties that this class itself documents."""
    rows = []
    for name, member in vars(value).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        documentation = getattr(function, "__doc__", None)
        if name.startswith("_") or not inspect.isfunction(function) or not documentation:
            continue
        paragraph = inspect.cleandoc(documentation).split("\n\n")[0]
        cell = paragraph.replace("\n", " ").replace("|", "\\|")
        rows.append(f"| `{name}` | {cell} |")
    return ["", "| member | |", "|---|---|", *rows] if rows else []


PAGES = {"configuration.md": configuration_page, "api.md": api_page}


def main() -> None:
    for name, make in PAGES.items():
        (DOCS / name).write_text(make())
    for pattern in FIGURES:
        for path in sorted((DOCS.parent / "results").glob(pattern)):
            shutil.copyfile(path, DOCS / "images" / path.name)


if __name__ == "__main__":
    main()
