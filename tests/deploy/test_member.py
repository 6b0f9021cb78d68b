"""What leaves a member: error codes, restrictions, private state, one writer at a time."""

import errno
import json
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.deployment import ROWS, SUMS, WEIGHT
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedproto.core import files
from fedproto.data.shared.feature_encoding import ENCODING
from fedproto.deploy import member, member_checkpoint
from fedproto.deploy.error_codes import SENTENCES, choose_code, describe_code
from fedproto.deploy.member import evaluate_member, train_round
from fedproto.deploy.member_checkpoint import STATE_FILE, STATE_FORMAT, MemberCheckpoint
from fedproto.deploy.messages import Message
from fedproto.deploy.round_protocol import serve
from fedproto.deploy.server_actions import Reply
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.settings import MemberSettings, ServerSettings, TrainingTerms, read_member
from fedproto.errors import (
    ConfigError,
    DataError,
    FedProtoError,
    RefusedByMember,
    RunFolderError,
    TrainingError,
    WriteError,
)

DIM = 4


def write_data(folder: Path, classes: str = "xy") -> str:
    """A source of two images per class and split."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(len(classes)), 2)
    images = rng.integers(0, 255, (len(labels), 8, 8), np.uint8)
    path = folder / "data.npz"
    np.savez(path, x=images, y=labels, x_test=images, y_test=labels, classes=list(classes))
    return f"npz:{path}"


@pytest.fixture
def own(tmp_path: Path) -> MemberSettings:
    return MemberSettings("a", write_data(tmp_path), str(tmp_path / "state"), "mlp(hidden=3)")


def make_state(folder: Path, algorithm: str = "fedproto", **options: Any) -> ServerState:
    given: dict[str, Any] = {
        "state": str(folder / "server"),
        "classes": "x,y",
        "quorum": 1,
    } | options
    return ServerState(ServerSettings(**given), TrainingTerms(algorithm=algorithm, dim=DIM))


def make_weights_state(folder: Path) -> ServerState:
    return make_state(folder, "fedavg", model="mlp(hidden=3)", shape="1,8,8")


def state_file(own: MemberSettings) -> Path:
    return Path(own.state) / STATE_FILE


def same_reply(one: Message, other: Message) -> bool:
    if one.header != other.header or one.arrays.keys() != other.arrays.keys():
        return False
    return all(np.array_equal(one.arrays[name], other.arrays[name]) for name in one.arrays)


# --- what leaves a member, through the app that Flower calls


@pytest.fixture
def reply_to(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[bytes, Message]]:
    """Call the ClientApp; return all bytes of its reply, and the message."""
    pytest.importorskip("flwr")
    from flwr.app import Context, RecordDict
    from flwr.app import Message as FlowerMessage
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    from fedproto.deploy import client_app
    from fedproto.deploy.flower_transport import from_record, to_record

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(f"flwr.supercore.task_identity.TaskIdentity.{name}", 1)

    def call(kind: str, asked: Message, node_config: dict[str, Any]) -> tuple[bytes, Message]:
        message = FlowerMessage(to_record(asked), 7, kind, ttl=60.0)
        message.metadata.__dict__["_message_id"] = "m"
        context = Context(1, 7, node_config, RecordDict(), {})
        reply = getattr(client_app, kind)(message, context)
        objects = get_all_nested_objects(reply).values()
        return b"".join(each.deflate() for each in objects), from_record(reply.content)

    return call


def write_own_file(folder: Path, data: str, **more: str) -> Path:
    values = {
        "name": "a",
        "state": str(folder / "state"),
        "model": "mlp(hidden=3)",
        "data": data,
    } | more
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in values.items()]
    path = folder / "a.toml"
    path.write_text("".join(lines))
    return path


PATIENTS = [
    "SMITH-John-1970-01-01-HIV",
    "Ödön von Horváth",
    "O'Neil; DROP",
    "{patient}%s",
    "résumé\u202egnp",
]


def folder_with_a_damaged_image(root: Path, patient: str) -> str:
    for name in ("x", "y"):
        (root / "scans" / name).mkdir(parents=True)
        for number in range(6):
            Image.new("L", (8, 8), number).save(root / "scans" / name / f"{number}.png")
    whole = (root / "scans" / "x" / "0.png").read_bytes()
    (root / "scans" / "x" / f"{patient}.png").write_bytes(whole[:40])
    return f"folder:{root / 'scans'}"


def table_with_a_bad_cell(root: Path, patient: str) -> str:
    rows = [f"{number},{number * 2},{'xy'[number % 2]}" for number in range(12)]
    rows[7] = f'5,"{patient}",x,and,more'
    (root / "ages.csv").write_text("\n".join(["age,weight,label", *rows]))
    return f"csv:{root / 'ages.csv'}"


def missing_file(root: Path, patient: str) -> str:
    return f"npz:{root / patient}.npz"


def foreign_class(root: Path, patient: str) -> str:
    """A folder that is called what nobody may know."""
    data = folder_with_a_damaged_image(root, patient)
    (root / "scans" / "x" / f"{patient}.png").unlink()
    (root / "scans" / "y").rename(root / "scans" / patient)
    return data


SOURCES = [folder_with_a_damaged_image, table_with_a_bad_cell, missing_file, foreign_class]


@pytest.mark.parametrize("patient", PATIENTS)
@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_errors_carry_nothing_of_the_data(
    make: Callable[[Path, str], str],
    patient: str,
    reply_to: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_own_file(tmp_path, make(tmp_path, patient))
    asked = make_state(tmp_path).make_request("a")
    with caplog.at_level(logging.ERROR, logger="flwr"):
        sent, reply = reply_to("train", asked, {"member": str(path)})
    assert set(reply.header) == {"error", "nonce"} and not reply.arrays
    assert reply.header["error"] in ("data-unusable", "refused-by-member")
    names = [
        word for word in patient.split("-") if word.isalpha()
    ]  # digits stand in Flower's checksums
    for secret in (patient, *names, tmp_path.name, "scans", "ages", "weight", ".png", ".csv"):
        assert secret.encode() not in sent
        assert json.dumps(secret)[1:-1].encode() not in sent
    assert "This member cannot reply" in caplog.text


@pytest.mark.parametrize("patient", PATIENTS)
def test_a_value_added_to_the_table_later_does_not_leave(
    patient: str, reply_to: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The sentence is "column 'size' holds 'SMITH John', but the training rows hold numbers"."""
    rows = [f"{number},{number * 2},{'xy'[number % 2]}" for number in range(20)]
    table = tmp_path / "ages.csv"
    table.write_text("\n".join(["length,size,label", *rows]))
    path = write_own_file(tmp_path, f"csv:{table}")
    state = make_state(tmp_path)
    _, reply = reply_to("train", state.make_request("a"), {"member": str(path)})
    assert reply.header["spoken"] == ["x", "y"]
    table.write_text("\n".join(["length,size,label", *rows, *[f'3,"{patient}",x'] * 20]))
    with caplog.at_level(logging.ERROR, logger="flwr"):
        sent, reply = reply_to("evaluate", state.make_request("a"), {"member": str(path)})
    assert reply.header == {"error": "data-unusable", "nonce": None}
    assert "column 'size' holds" in caplog.text
    for secret in (patient, "size", "length", "ages"):
        assert secret.encode() not in sent


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("row 7 is 'SMITH John'"),
        KeyError("SMITH John"),
        UnicodeDecodeError("utf-8", b"SMITH John", 0, 1, "SMITH John"),
        MemoryError("SMITH John"),
        RecursionError("SMITH John"),
        OSError(errno.EIO, "SMITH John", "/data/SMITH John.png"),
        DataError("column 'age' holds 'SMITH John'"),
        FedProtoError("SMITH John"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_of_any_exception_only_a_code_leaves(
    error: Exception, kind: str, reply_to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower itself sends `str(type(error))` and `str(error)` to the server."""
    for name in ("fedproto.deploy.member.train_round", "fedproto.deploy.member.evaluate_member"):
        monkeypatch.setattr(name, lambda asked, own: (_ for _ in ()).throw(error))
    if kind == "query":
        monkeypatch.setattr(
            "fedproto.deploy.settings.read_member",
            lambda path, operated: (_ for _ in ()).throw(error),
        )
    path = write_own_file(tmp_path, "digits")
    sent, reply = reply_to(kind, Message({"nonce": "n"}, {}), {"member": str(path)})
    expected = "data-unusable" if isinstance(error, DataError) else "internal-error"
    assert reply.header == {"error": expected, "nonce": "n"}
    for secret in ("SMITH", "John", "'age'", type(error).__name__):
        assert secret.encode() not in sent


def test_a_supernode_without_a_file_says_so_in_its_log(
    reply_to: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="flwr"):
        _, reply = reply_to("query", Message({}, {}), {})
    assert reply.header["error"] == "config-unusable" and "--node-config" in caplog.text


def test_a_reply_holds_what_the_documentation_lists(
    reply_to: Any, own: MemberSettings, tmp_path: Path
) -> None:
    path = write_own_file(tmp_path, own.data, tell_accuracy="false")
    state = make_state(tmp_path)
    sent, reply = reply_to("train", state.make_request("a"), {"member": str(path)})
    assert set(reply.header) == {"member", "round", "federation", "spoken", "nonce"}
    assert set(reply.arrays) == {SUMS, WEIGHT, ROWS}
    assert b"data.npz" not in sent and str(tmp_path).encode() not in sent
    _, reply = reply_to("query", Message({}, {}), {"member": str(path)})
    assert reply.header == {"member": "a", "nonce": None}


def test_every_error_class_has_a_code() -> None:
    def subclasses(kind: type[Exception]) -> list[type[Exception]]:
        return [kind, *(each for child in kind.__subclasses__() for each in subclasses(child))]

    for kind in subclasses(FedProtoError):
        error = kind.__new__(kind, Exception("secret"))  # some take more than a sentence
        assert choose_code(error) in SENTENCES, kind
    assert choose_code(ValueError("secret")) == "internal-error"
    assert choose_code(TrainingError("x")) == "training-failed"
    assert choose_code(ConfigError("x")) == "config-unusable"
    assert choose_code(RunFolderError("x")) == "state-unusable"


@given(
    st.one_of(
        st.text(),
        st.integers(),
        st.none(),
        st.lists(st.text()),
        st.dictionaries(st.text(), st.text()),
    )
)
def test_the_server_never_repeats_an_unknown_code(code: Any) -> None:
    if isinstance(code, str) and code in SENTENCES:
        return
    assert describe_code(code) == "it reported an error with an unknown code"


def test_the_server_shows_a_known_code_with_its_sentence(tmp_path: Path) -> None:
    assert describe_code("disk-full") == "disk-full: its disk is full"
    state = make_state(tmp_path, rounds=1, patience=0.01)
    told = {"a": "disk-full", "b": "<script>alert('Smith')</script>", "c": None}
    said: list[str] = []

    class Transport:
        def find_members(self) -> list[str]:
            return ["a", "b", "c", "d"]

        def take_lateness(self) -> dict[str, float]:
            return {}

        def sent_bytes(self) -> dict[str, int]:
            return {}

        def exchange(self, kind: str, requests: dict[str, Message], timeout: float) -> Any:
            for name, request in requests.items():
                rows = {
                    SUMS: np.ones((2, DIM), np.float32),
                    WEIGHT: np.ones(2, np.float32),
                    ROWS: np.arange(2, dtype=np.int32),
                }
                header = {"member": "d", "round": request.header["round"], "spoken": ["x", "y"]}
                reply = Message(header, rows)
                if name in told:
                    reply = Message({"error": told[name]}, {})
                yield Reply(name, reply, 1)

    serve(state, Transport(), said.append)
    assert state.members["a"].reason == "disk-full: its disk is full"
    assert (
        state.members["b"].reason
        == state.members["c"].reason
        == "it reported an error with an unknown code"
    )
    assert "round 1: a failed: disk-full: its disk is full" in said
    assert "script" not in "".join(said)


# --- a member's own restrictions


@pytest.mark.parametrize(
    ("algorithm", "allowed"),
    [
        ("fedproto", {"algorithms": "fedproto-mh"}),
        ("fedproto", {"sends": "weights,counts"}),
        ("fedproto", {"sends": "prototypes"}),
        ("fedproto(weighting=eq6)", {"sends": "prototypes"}),
        ("fedproto-mh", {"algorithms": "fedproto"}),
        ("fedavg", {}),
        ("fedprox", {"sends": "weights"}),
        ("fedper", {"algorithms": "fedper"}),
        ("fedrep", {"algorithms": "fedavg", "sends": "weights,counts"}),
    ],
)
def test_a_member_refuses_what_its_file_does_not_allow(
    algorithm: str, allowed: dict[str, str], own: MemberSettings, tmp_path: Path
) -> None:
    asked = make_state(tmp_path, algorithm, model="mlp(hidden=3)", shape="1,8,8").make_request("a")
    for act in (train_round, evaluate_member):
        with pytest.raises(RefusedByMember, match=r"this member's `(algorithms|sends)`") as refused:
            act(asked, replace(own, **allowed))
    assert choose_code(refused.value) == "refused-by-member"
    assert not state_file(own).exists()


@pytest.mark.parametrize(
    ("algorithm", "allowed"),
    [
        ("fedproto", {}),
        ("fedproto-mh", {"algorithms": "fedproto,fedproto-mh"}),
        ("fedproto(weighting=uniform)", {"sends": "prototypes"}),
        ("fedavg", {"sends": "weights,counts"}),
        ("fedavg", {"sends": "prototypes, weights, counts", "algorithms": "fedproto, fedavg"}),
    ],
)
def test_a_member_takes_part_in_what_its_file_allows(
    algorithm: str, allowed: dict[str, str], own: MemberSettings, tmp_path: Path
) -> None:
    asked = make_state(tmp_path, algorithm, model="mlp(hidden=3)", shape="1,8,8").make_request("a")
    reply = train_round(asked, replace(own, **allowed))
    assert reply.arrays
    if "counts" not in words_of(allowed.get("sends", "counts")):
        assert (reply.arrays[WEIGHT] == 1).all(), "no count leaves"


def words_of(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


@pytest.mark.parametrize(
    "line",
    ['algorithms = "fedprot"', 'sends = "images"', 'algorithms = "mine:method"', "sends = 3"],
)
def test_unknown_restrictions_are_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f'name = "a"\ndata = "digits"\nstate = "s"\n{line}\n')
    with pytest.raises(ConfigError, match=r"algorithm|sends"):
        read_member(path)


def test_a_class_name_that_nobody_listed_does_not_leave(
    own: MemberSettings, tmp_path: Path
) -> None:
    """The data has x and y; the federation has x. Listed, y may travel; unlisted, it stays."""
    asked = make_state(tmp_path, classes="x", new_classes=True).make_request("a")
    with pytest.raises(RefusedByMember, match=r"'y'.*`classes`"):
        train_round(asked, own)
    assert train_round(asked, replace(own, classes="x")).header["spoken"] == ["x"]
    elsewhere = replace(own, classes="x,y", state=str(tmp_path / "other"))
    assert train_round(asked, elsewhere).header["spoken"] == ["x", "y"]


# --- its state


def test_only_its_owner_can_read_a_members_files(tmp_path: Path) -> None:
    rows = [
        f"{number / 2},{'red' if number % 3 else 'blue'},{'xy'[number % 2]}" for number in range(30)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["size,colour,label", *rows]))
    table = MemberSettings(
        "a", f"csv:{tmp_path / 't.csv'}", str(tmp_path / "new" / "state"), "mlp(hidden=3)"
    )
    before = os.umask(0o022)
    try:
        train_round(make_state(tmp_path).make_request("a"), table)
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path(table.state).stat().st_mode) == 0o700
    for name in (STATE_FILE, ENCODING):
        assert stat.S_IMODE((Path(table.state) / name).stat().st_mode) == 0o600, name


def test_only_their_owner_can_read_keys(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    template = Path(member.__file__).parent / "template" / "keys.py"
    (tmp_path / "keys.py").write_bytes(template.read_bytes())
    make = f"umask 000; exec {sys.executable} keys.py localhost -- a b"
    subprocess.run(["bash", "-c", make], cwd=tmp_path, check=True)
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    for name in ("ca.key", "server.key", "a", "b"):
        assert stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode) == 0o600, name


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_flipped_bit_in_a_members_state_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "flipped"
    folder.mkdir(exist_ok=True)
    own = MemberSettings("a", "digits", str(folder))
    path = state_file(own)
    kept = MemberCheckpoint(
        3,
        ("x", "y"),
        {"w": torch.ones(3)},
        {},
        Message({"round": 3}, {"sums": np.ones(2, np.float32)}),
    )
    kept.save(own)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(content))
    with pytest.raises(RunFolderError, match=path.name):
        MemberCheckpoint.load(own)


@pytest.mark.parametrize("what", ["cut", "foreign", "older", "incomplete"])
def test_a_state_that_is_not_a_members_is_refused(
    what: str, own: MemberSettings, tmp_path: Path
) -> None:
    asked = make_state(tmp_path).make_request("a")
    train_round(asked, own)
    path = state_file(own)
    if what == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    if what == "foreign":
        files.write_tensors(
            path, {}, replace(STATE_FORMAT, name="server state"), {"member": own.fingerprint()}
        )
    if what == "older":
        files.write_tensors(
            path, {}, replace(STATE_FORMAT, version=0), {"member": own.fingerprint()}
        )
    if what == "incomplete":
        files.write_tensors(path, {}, STATE_FORMAT, {"member": own.fingerprint()})
    with pytest.raises(RunFolderError, match=STATE_FILE) as refused:
        train_round(asked, own)
    assert choose_code(refused.value) == "state-unusable"


# --- asked twice at once


def test_simultaneous_requests_are_trained_once(
    own: MemberSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state(tmp_path)
    trained: list[int] = []
    train = member.train
    at_once = threading.Barrier(24)

    def counted(*given: Any, **named: Any) -> Any:
        trained.append(1)
        return train(*given, **named)

    def ask(number: int) -> Message:
        at_once.wait()
        return train_round(state.make_request("a"), own)

    monkeypatch.setattr(member, "train", counted)
    with ThreadPoolExecutor(24) as pool:
        replies = list(pool.map(ask, range(24)))
    assert len(trained) == 1
    assert all(same_reply(replies[0], each) for each in replies)
    kept = MemberCheckpoint.load(own)
    assert kept is not None and kept.round == 1 and same_reply(kept.reply, replies[0])
    leftovers = {path.name for path in Path(own.state).iterdir()} - {STATE_FILE, files.LOCK_NAME}
    assert not leftovers


def test_evaluation_during_a_round_does_not_undo_it(
    own: MemberSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lock, evaluation would write the state of round 1 back after round 2 was saved."""
    state = make_state(tmp_path)
    state.accept_reply(
        "a", train_round(state.make_request("a"), own), state.expect_replies(frozenset("a"))
    )
    state.close_round()
    second = state.make_request("a")
    scoring = threading.Event()
    seated = member._prepare

    def slow(request: Message, settings: MemberSettings, terms: TrainingTerms, kept: Any) -> Any:
        found = seated(request, settings, terms, kept)
        if threading.current_thread().name == "scorer":
            scoring.set()
            asker.join(0.5)  # long enough for the round, were it not waiting
        return found

    monkeypatch.setattr(member, "_prepare", slow)
    asker = threading.Thread(target=lambda: scoring.wait() and train_round(second, own))
    scorer = threading.Thread(target=lambda: evaluate_member(second, own), name="scorer")
    asker.start()
    scorer.start()
    scorer.join()
    asker.join()
    kept = MemberCheckpoint.load(own)
    assert kept is not None and kept.round == 2


PROCESS = """
import sys
from pathlib import Path
import numpy as np
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.member import train_round
from fedproto.deploy.settings import MemberSettings, ServerSettings, TrainingTerms
data, folder, server, count = sys.argv[1:]
state = ServerState(ServerSettings(state=server, classes="x,y", quorum=1), TrainingTerms(dim=4))
state.load()
own = MemberSettings("a", data, folder, "mlp(hidden=3)")
for _ in range(int(count)):
    reply = train_round(state.make_request("a"), own)
    print(reply.arrays["prototypes/value.prototypes"].tobytes().hex())
"""


@pytest.mark.slow
def test_simultaneous_requests_of_processes_get_the_same_reply(
    own: MemberSettings, tmp_path: Path
) -> None:
    state = make_state(tmp_path)
    state.save()
    command = [sys.executable, "-c", PROCESS, own.data, own.state, str(tmp_path / "server"), "6"]
    asking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    lines = [line for process in asking for line in process.communicate()[0].split()]
    assert [process.returncode for process in asking] == [0] * 4
    assert len(lines) == 24 and len(set(lines)) == 1


# --- a disk that is full or read-only


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, "disk-full"), (errno.EDQUOT, "disk-full")]
)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_gives_one_sentence_and_loses_nothing(
    call: str,
    number: int,
    code: str,
    own: MemberSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_disk(call, number, code, own, tmp_path, monkeypatch)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_unwritable_disk_of_a_member_gives_one_sentence_and_loses_nothing(
    call: str, number: int, own: MemberSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_disk(call, number, "state-unwritable", own, tmp_path, monkeypatch)


def check_disk(
    call: str,
    number: int,
    code: str,
    own: MemberSettings,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first round is kept; in the second the disk fails; then it works again."""
    state = make_state(folder)
    state.accept_reply(
        "a", train_round(state.make_request("a"), own), state.expect_replies(frozenset("a"))
    )
    state.close_round()
    before = state_file(own).read_bytes()

    def fail(*given: Any) -> None:
        raise OSError(number, os.strerror(number))

    def fail_from_here_on(*given: Any, **more: Any) -> None:
        monkeypatch.setattr(os, call, fail)
        files.write_tensors(*given, **more)

    for only_the_state in (False, True):
        with monkeypatch.context() as patched:
            if only_the_state:  # the lock's own small file can still be written
                patched.setattr(os, call, getattr(os, call))  # so that it is restored
                patched.setattr(member_checkpoint, "write_tensors", fail_from_here_on)
            else:
                patched.setattr(os, call, fail)
            with pytest.raises(WriteError) as failed:
                train_round(state.make_request("a"), own)
        assert own.state in str(failed.value) and os.strerror(number) in str(failed.value)
        assert "\n" not in str(failed.value)
        assert choose_code(failed.value) == code
        assert state_file(own).read_bytes() == before
        assert not list(Path(own.state).glob(".*.new"))
    assert train_round(state.make_request("a"), own).header["round"] == 2


def test_a_state_folder_that_cannot_be_created_gives_one_sentence(
    own: MemberSettings, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    elsewhere = replace(own, state=str(tmp_path / "file" / "state"))
    with pytest.raises(WriteError, match="file/state cannot be written: Not a directory") as failed:
        train_round(make_state(tmp_path).make_request("a"), elsewhere)
    assert choose_code(failed.value) == "state-unwritable"


# --- the server's app


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_error_at_the_server_gives_one_sentence_without_a_traceback(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("flwr")
    from flwr.common.logger import log

    from fedproto.deploy import server_app

    def fail(*given: Any) -> None:
        raise OSError(number, os.strerror(number))

    context = SimpleNamespace(
        run_config={"state": str(tmp_path / "kept"), "classes": "x,y", "rounds": 1}
    )
    monkeypatch.setattr(os, "replace", fail)
    with caplog.at_level(logging.ERROR, logger="flwr"):
        try:
            server_app.main(None, context)  # type: ignore[arg-type]
        except FedProtoError as error:
            log(logging.ERROR, "ServerApp raised an exception", exc_info=error)  # as Flower does
    assert str(tmp_path / "kept") in caplog.text and os.strerror(number) in caplog.text
    assert "Traceback" not in caplog.text
