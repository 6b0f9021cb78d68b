"""The contract of an algorithm as its author meets it: what is wrong is said in one sentence."""

import itertools
from pathlib import Path

import pytest
from helpers.tiny import finished

from fedproto.config.plugin_trust import trust_plugins
from fedproto.errors import FedProtoError

#: The beginning of every plug-in below; its functions are for clients that keep a tree `extra`.
PRELUDE = """
from dataclasses import replace

import torch

from fedproto.algorithms import samples, supervised
from fedproto.algorithms.fedavg import fedavg
from fedproto.core.tensors import make_group
from fedproto.core.types import Group, GroupLayout, Phase, per_client

BASE = fedavg()


def keep_bias(params, task):
    return {"extra": {"head.fc3.bias": torch.zeros_like(params["head.fc3.bias"])}}


def keep_model(params, task):
    return {"extra": dict(params)}

"""


class Author:
    """Writes plug-ins into a folder of their own, and runs them."""

    numbers = itertools.count()  # Python imports a module of one name once

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, fields: str, engine: str) -> None:
        """Run the algorithm `replace(BASE, name="mine", FIELDS)`."""
        module = f"author_{next(self.numbers)}"
        source = f"def mine():\n    return replace(BASE, name='mine', {fields})\n"
        (self.folder / f"{module}.py").write_text(PRELUDE + source)
        trust_plugins(f"{module}:mine")
        finished(f"{module}:mine", engine=engine, rounds=2)


@pytest.fixture
def author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Author:
    monkeypatch.syspath_prepend(str(tmp_path))
    return Author(tmp_path)


#: What an author may write, and what the error says.
MISTAKES = {
    "client_init returns a tensor": (
        "client_init=lambda params, task: params['head.fc3.bias']",
        r"client_init must return trees of tensors by name, as in .*, not Tensor$",
    ),
    "client_init returns tensors without a tree": (
        "client_init=lambda params, task: {'extra': params['head.fc3.bias']}",
        "client_init must return trees of tensors by name, as in .*, but 'extra' is Tensor$",
    ),
    "client_init returns numbers": (
        "client_init=lambda params, task: {'extra': {'rounds': 0}}",
        "client_init must return trees of tensors by name, .* but 'rounds' is int$",
    ),
    "client_update changes a shape": (
        "client_init=keep_bias, client_update=lambda step: {'extra': {'head.fc3.bias': "
        "step.params['head.fc3.bias'][:2]}}",
        r"client_update must return what client_init does: extra/head.fc3.bias is \(2,\) of "
        r"torch.float64, where \(10,\) of torch.float64 is wanted$",
    ),
    "client_update changes a type": (
        "client_init=keep_bias, client_update=lambda step: {'extra': {'head.fc3.bias': "
        "step.params['head.fc3.bias'].float()}}",
        "client_update must return what client_init does: .* of torch.float32, where",
    ),
    "client_update forgets a tree": (
        "client_init=keep_bias, client_update=lambda step: {}",
        "client_update must return what client_init does: there is no extra/head.fc3.bias$",
    ),
    "client_update without return": (
        "client_init=keep_bias, client_update=lambda step: None",
        "client_update must return a dict of trees, not NoneType$",
    ),
    "client_start adds a tree": (
        "client_init=keep_bias, client_start=lambda kept, received: kept | {'more': received}",
        "client_start must return what client_init does: it has no",
    ),
    "an unknown tree in a phase": (
        "client_init=keep_model, phases=(Phase(model='personal'),)",
        "a phase trains 'personal', but the trees that client_init returns are: extra$",
    ),
    "a phase that trains a tree of clients that keep none": (
        "phases=(Phase(model='personal'),)",
        "a phase trains 'personal', but the trees that client_init returns are: none$",
    ),
    "a phase's loss with two parameters": (
        "phases=(Phase(loss=lambda step, other: {}),)",
        r"a phase's loss must be a function of \(step\): missing a required argument: 'other'$",
    ),
    "forward outside of a loss": (
        "upload=lambda step: {'model': make_group(step.forward(step.params)[0], 1)}",
        "step.forward can be called in a loss or in client_validate only$",
    ),
    "an upload without groups": (
        "upload=lambda step: (dict(step.params), {'weight': samples(step)})",
        "upload must return a dict of fedproto.Group by name, not tuple$",
    ),
    "an upload of plain tensors": (
        "upload=lambda step: dict(step.params)",
        "upload must return a dict of fedproto.Group, but '.*' is Tensor$",
    ),
    "an upload under another name than declared": (
        "upload=lambda step: {'body': BASE.upload(step)['model']}, aggregate=lambda s, u: s",
        "the upload of mine has the groups body, but it declares model$",
    ),
    "an upload with a tensor that is not declared": (
        "declare=lambda params, task: per_client({'head.fc3.bias': params['head.fc3.bias']})",
        "the upload of mine: 'model/sums/.*' is only in one of the upload and its declaration$",
    ),
    "an upload of another shape than declared": (
        "declare=lambda params, task: {'model': GroupLayout({name: (3,) for name in params})}",
        r"the upload of mine: model/sums/.* is \(.*\), where \(3,\) is declared$",
    ),
    "a weight that does not fit its sums": (
        "upload=lambda step: {'model': Group(BASE.upload(step)['model'].sums, torch.ones(10))},"
        "aggregate=lambda s, u: s",
        r"the weight of the group 'model' is \(10,\), so its tensors must begin with these axes, "
        r"but .* is \(\d.*\)$",
    ),
    "a weight per class where one per client is declared": (
        "upload=lambda step: {'model': Group({'head.fc3.bias': torch.ones(10)}, torch.ones(10))},"
        "declare=lambda params, task: per_client({'head.fc3.bias': params['head.fc3.bias']}),"
        "aggregate=lambda s, u: s",
        r"the upload of mine: model/weight is \(10,\), where \(\) is declared$",
    ),
    "a declaration of tensors": (
        "declare=lambda params, task: dict(params)",
        "declare must return a dict of fedproto.GroupLayout by name, but '.*' is Tensor$",
    ),
    "a declaration that is no dict": (
        "declare=lambda params, task: None",
        "declare must return a dict of fedproto.GroupLayout by name, not NoneType$",
    ),
    "a group sent once that is not declared": (
        "once=('statistics',), additive=False",
        "once names 'statistics', but the declared groups are: model$",
    ),
    "a server that forgets a tensor": (
        "aggregate=lambda server, uploads: {'head.fc3.bias': server['head.fc3.bias']}",
        "aggregate must return a state like the one it is given: there is no body.fc1.bias$",
    ),
    "a server that changes a type": (
        "aggregate=lambda server, uploads: {n: value.float() for n, value in server.items()}",
        "aggregate must return a state like the one it is given: .* of torch.float32, where",
    ),
    "a server that keeps a number": (
        "init=lambda params, task: BASE.init(params, task) | {'rounds': 0}",
        "init must return a dict of tensors by name, but 'rounds' is int$",
    ),
    "once as text": (
        "once='model', additive=False",
        "once must be a tuple of names of groups, not 'model'$",
    ),
    "send with the parameters of old": (
        "send=lambda server, recipient, more: server",
        r"send must be a function of \(server, recipient\): missing a required argument: 'more'$",
    ),
    "a client function that is no function": (
        "client_update={}",
        r"client_update must be a function of \(step\), not dict$",
    ),
}


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_said_in_one_sentence(mistake: str, engine: str, author: Author) -> None:
    fields, message = MISTAKES[mistake]
    with pytest.raises(FedProtoError, match=message) as caught:
        author.run(fields, engine)
    assert "\n" not in str(caught.value)
