"""What the server keeps: round, classes, members, prototypes or weights, and the latest uploads.

All of it is one file, replaced atomically after every round, from which a killed server continues.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor

from fedproto.config.options import words
from fedproto.core.class_names import merge_names
from fedproto.core.files import (
    TensorFormat,
    explain_write_errors,
    hold_lock,
    read_tensors,
    write_tensors,
)
from fedproto.core.sampling import sample_present
from fedproto.core.server import ONCE, RoundUploads
from fedproto.core.staleness import age_uploads, apply_changes, take_changes, weigh_staleness
from fedproto.core.summation import spread_sum
from fedproto.core.tensors import (
    align_axes,
    flatten_groups,
    flatten_state,
    map_upload,
    order_like,
    split_group_name,
    split_groups,
    unflatten_state,
    unflatten_upload,
)
from fedproto.core.types import Recipient, State, Tree, Upload
from fedproto.core.uploads import LatestUploads
from fedproto.deploy.accepted_replies import AcceptedReplies, AcceptedReply, SentRequest
from fedproto.deploy.error_codes import SERVER_BEHIND, describe_code
from fedproto.deploy.history import Event, read_history
from fedproto.deploy.member_record import MemberRecord
from fedproto.deploy.member_uploads import MemberUploads, StoredUpload
from fedproto.deploy.messages import Header, Message, pack_download, place_rows, unpack_upload
from fedproto.deploy.outliers import Amounts, find_outliers
from fedproto.deploy.secure_settings import refuse_unfit_settings
from fedproto.deploy.server_privacy import describe_privacy
from fedproto.deploy.server_start import of_architecture, start_server
from fedproto.deploy.setting_changes import (
    describe_changes,
    find_changes,
    list_settings,
    refuse_fixed,
)
from fedproto.deploy.settings import ServerSettings, TrainingTerms
from fedproto.deploy.validation import (
    ExpectedReply,
    check_new_classes,
    check_reply,
    check_upload,
)
from fedproto.errors import ConfigError, Refused, RunFolderError
from fedproto.privacy.mechanism import bound_reply

STATE_FILE = "server.safetensors"
STATE_FORMAT = TensorFormat("server state", 3)


class ServerState:
    """The state of a deployed federation's server, and what one round does to it.

    In a round, `make_request` is called for each member, `accept_reply` for each reply, then
    `refuse_outliers`, `close_round` and `save`.
    """

    def __init__(self, settings: ServerSettings, terms: TrainingTerms) -> None:
        self.settings = settings
        self.terms = terms
        self.path = Path(settings.state) / STATE_FILE
        self.id = token_hex(8)  # distinguishes federations with the same members
        self.round = 0
        self.classes, _ = merge_names(words(settings.classes), "the server's settings name a class")
        self.members: dict[str, MemberRecord] = {}
        self.registered: set[str] = set()  # names of keys, which a member without a key cannot use
        self.once_uploads = LatestUploads(0)  # of the groups that are sent once
        self.requests: dict[str, SentRequest] = {}  # to train, the latest of each member
        self.replies = AcceptedReplies()  # of the round that is not closed yet
        #: How large the uploads are that are kept of members, with the uploads that were measured.
        self.amounts: dict[str, tuple[StoredUpload, Amounts]] = {}
        #: The last rounds of members that refused this one because they have trained it before.
        self.later_rounds: dict[str, int] = {}
        self.history: list[Event] = []  # restores, changes and the like; see history.py
        self.start = start_server(terms.build(), terms, settings, self.classes)
        self.privacy = self.start.privacy
        weighting = terms.part().options.get("weighting")
        self.counts_are_one = self.privacy is None and weighting == "uniform"
        self.algorithm = settings.combine(self.start.algorithm)
        self.layouts = self.start.declare(max(1, len(self.classes)))
        self.messages = self.start.describe_messages(len(self.classes))
        self.server = self.start.init(len(self.classes))
        #: The groups of an upload that have one weight per class.
        self.class_groups = {name for name, group in self.layouts.items() if group.per == "class"}
        self.uploads = self._make_uploads()
        self._refuse_growth()
        self._refuse_low_limit()
        if self.algorithm.summation is not None:
            refuse_unfit_settings(self.algorithm, self.layouts, settings, terms, self.classes)

    def _make_uploads(self) -> MemberUploads:
        """Return what keeps the latest uploads by the members' numbers; it adds them if it may.

        That is where nothing but their sum is divided by their weight.
        """
        is_plain_sum = self.algorithm is self.start.algorithm  # without another combiner
        divides = self.algorithm.remembers and self.algorithm.combinable
        adds = is_plain_sum and (self.algorithm.additive or divides)
        return MemberUploads(self.class_groups, len(self.classes), adds)

    def _refuse_growth(self) -> None:
        """Raise ConfigError if classes may be added, but the algorithm needs all of them."""
        may_grow = self.settings.new_classes or not self.classes
        if self.class_groups and may_grow and not self.start.can_grow:
            raise ConfigError(
                f"{self.algorithm.name} needs all classes from the start: list them as `classes`, "
                "without new-classes"
            )

    def _refuse_low_limit(self) -> None:
        """Raise ConfigError if no reply could be small enough for `max_bytes`."""
        sizes = []
        for architecture in self.start.architectures:
            groups = of_architecture(self.messages, architecture).values()
            sizes.append(sum(group.count_bytes() for group in groups))
        size = max(sizes)
        if size > self.settings.max_bytes:
            raise ConfigError(
                f"a reply of {self.algorithm.name} has at least {size} bytes, but max-bytes "
                f"is {self.settings.max_bytes}: raise it"
            )

    @property
    def classes(self) -> tuple[str, ...]:
        """The federation's classes, in the order of their rows; `place_of` has their places."""
        return self._classes

    @classes.setter
    def classes(self, names: tuple[str, ...]) -> None:
        self._classes = names
        self.place_of = {name: place for place, name in enumerate(names)}

    # --- a round

    def sample_cohort(self, present: list[str]) -> list[str]:
        """Return the members that are asked in the next round, of those that are present.

        Those whose reply is accepted are among them. A server that was killed in a round draws the
        same ones again, if the same members are present.
        """
        if self.settings.participation == 1:
            return present
        names = {self.find_record(name).number: name for name in present}
        cohort = sample_present(
            torch.tensor(list(names)),
            self.settings.participation,
            self.settings.quorum,
            self.terms.seed,
            self.round + 1,
        )
        drawn = {names[number] for number in cohort.tolist()}
        return sorted(drawn | self.replies.keys())

    def make_request(self, name: str, all_classes: bool = False) -> Message:
        """Return what a member is sent: how far the federation is, and how to train.

        To train, a member receives what the algorithm sends to a client with its classes. It
        receives everything if its classes are not known yet, or to be evaluated over `all_classes`.
        """
        member = self.find_record(name)
        heard = 0
        if not all_classes and not self.settings.buffer:
            heard = member.last_round
        own_classes = self._find_own_classes(member, all_classes)
        received = self._send(self.server, member.number, own_classes, member.architecture, heard)
        download = pack_download(received, self.classes)
        round = self.round + 1
        if not all_classes:
            self.requests[name] = SentRequest(round, self.server)
        terms = replace(self.terms, lr=self.terms.lr * self.settings.rate_factor(round))
        header = {
            "federation": self.id,
            "round": round,
            "number": member.number,
            "member": name,
            "classes": list(self.classes),
            **vars(terms),
            **download.header,
        }
        if self.start.models:
            header["models"] = list(self.start.models)
            header["architectures"] = list(self.start.models.values())
        if member.reason:
            header["refused"] = member.reason
        if self._has_sent_once(member):
            header["delivered"] = sorted(self.algorithm.once)
        return Message(header, download.arrays)

    def _find_own_classes(self, member: MemberRecord, all_classes: bool) -> Tensor:
        """Return 1 for each class that a member is sent, and 0 for the others."""
        if all_classes or not member.spoken:
            return torch.ones(len(self.classes))
        own_classes = torch.zeros(len(self.classes))
        own_classes[[self.place_of[name] for name in member.spoken if name in self.place_of]] = 1
        return own_classes

    def _send(
        self,
        server: State,
        number: int,
        classes: Tensor,
        architecture: str,
        heard: int = 0,
    ) -> State:
        """Return what a member of an architecture is sent of a state.

        If its architecture is not known yet, it is sent the weights of all of them.
        """
        received: State = {}
        for name in (architecture,) if architecture else self.start.architectures:
            recipient = Recipient(torch.tensor(number), classes, name, torch.tensor(heard))
            received |= self.algorithm.send(server, recipient)
        return received

    def lacks_once(self, name: str) -> bool:
        """Return whether the groups that a member sends only once have not arrived."""
        return name not in self.members or not self._has_sent_once(self.members[name])

    def _has_sent_once(self, member: MemberRecord) -> bool:
        """Return whether the groups that a member sends only once have arrived."""
        if not self.algorithm.once or member.number >= len(self.once_uploads.last_round):
            return False
        return bool(self.once_uploads.last_round[member.number])

    def expect_reply(self, name: str, pending: Collection[str]) -> ExpectedReply:
        """Return what a member's reply must look like; `pending` are who may still reply.

        In asynchronous rounds it may be of an earlier round, if that is when it was requested.
        """
        expected = self.expect_replies(pending)
        if self.settings.buffer and name in self.requests:
            return replace(expected, round=self.requests[name].round)
        return expected

    def expect_replies(self, pending: Collection[str]) -> ExpectedReply:
        """Return what a reply of this round must look like; `pending` are who may still reply."""
        return ExpectedReply(
            round=self.round + 1,
            members=pending,
            classes=self.place_of.keys(),
            layout=self.messages,
            limits=self.settings,
            uniform=self.counts_are_one,
        )

    def accept_reply(self, name: str, reply: Message, expected: ExpectedReply) -> None:
        """Keep a member's reply until the round is closed.

        Raises Refused if it fails a check; its member is told the reason with the next request.
        """
        try:
            expected = self._without_delivered(name, expected)
            architecture = self._find_architecture(name, reply)
            own_layout = of_architecture(expected.layout, architecture)
            expected = replace(expected, layout=own_layout)
            check_reply(name, reply, expected)
            self._refuse_old(expected.round)
            request = self._find_request(name, expected.round)
            upload = self._decode(name, unpack_upload(reply), request.server, architecture)
            check_upload(upload, expected)
            if self.privacy is not None:
                upload = bound_reply(upload, self.terms.clip)  # whatever the member did itself
            # A reply whose rows of classes have arrived before is of the classes they were of.
            stated = reply.header["spoken"] if expected.by_class else self.members[name].spoken
            spoken = list(stated)
            brought = check_new_classes(
                spoken,
                [self.place_of, self.replies.brought],
                self.members[name].brought,
                self.settings,
            )
        except Refused as error:
            if name in self.members:
                self.members[name].note_refusal(str(error))
            raise
        self.replies[name] = AcceptedReply(request, upload, spoken, brought)
        self.members[name].architecture = architecture
        self.members[name].reason = ""
        self.members[name].note_accuracy(reply)
        self.members[name].site = reply.header.get("site", "")

    def note_failure(self, name: str, header: Header) -> str:
        """Record that a member replied with an error, and return the reason.

        If it has trained a later round, that is noted, too, unless it is beyond the run's last.
        """
        member = self.members[name]
        member.note_failure(describe_code(header["error"]))
        trained = header.get("trained")
        if header["error"] != SERVER_BEHIND or type(trained) is not int:
            return member.reason
        if self.round < trained <= self.settings.rounds:
            self.later_rounds[name] = trained
        return member.reason

    def _find_architecture(self, name: str, reply: Message) -> str:
        """Return the architecture of a member, as its groups of weights are named; often empty.

        Raises Refused unless it is one of those that the settings name, and the same every time.
        """
        if not self.start.models:
            return ""
        found = {split_group_name(group)[1] for group in reply.groups()} - {""}
        accepted = self.start.architectures
        if len(found) != 1 or not found <= set(accepted):
            raise Refused(f"its weights are not of one of the architectures {', '.join(accepted)}")
        (architecture,) = found
        earlier = self.members[name].architecture if name in self.members else ""
        if earlier not in ("", architecture):
            raise Refused(f"it is of architecture {architecture}, but earlier ones were {earlier}")
        return architecture

    def _refuse_old(self, round: int) -> None:
        """Raise Refused if a reply was requested too many rounds ago."""
        staleness = self.round + 1 - round
        if staleness > self.settings.max_staleness:
            raise Refused(
                f"it was requested {staleness} rounds ago; at most {self.settings.max_staleness} "
                "are accepted"
            )

    def _find_request(self, name: str, round: int) -> SentRequest:
        """Return the request that a member's reply of a round answers."""
        request = self.requests.get(name)
        if request is not None and request.round == round:
            return request
        return SentRequest(round, self.server)

    def _without_delivered(self, name: str, expected: ExpectedReply) -> ExpectedReply:
        """Return what a member's reply must look like, without groups that have arrived before."""
        if self.lacks_once(name):
            return expected
        layout = dict(expected.layout)
        for group in self.algorithm.once:
            layout.pop(group, None)
        return replace(expected, layout=layout)

    def _decode(self, name: str, wire: Upload, server: State, architecture: str) -> Upload:
        """Return a member's upload out of what travelled; Refused if that cannot be decoded.

        server  the state that the member's request was made from
        """
        if self.algorithm.decode is None:
            return wire
        try:
            if self.algorithm.check is not None:
                self.algorithm.check(wire)
            number = self.members[name].number
            received = self._send_all_classes(server, number, architecture)
            return self.algorithm.decode(wire, received)
        except (ValueError, RuntimeError, IndexError) as error:
            raise Refused(f"it cannot be decoded: {str(error)[:200]}") from error

    def _send_all_classes(self, server: State, number: int, architecture: str) -> State:
        """Return what a member is sent of a state, over all classes that this state has rows of.

        They may be fewer than today's: classes come in the rounds between a request and its reply.
        """
        flat = flatten_state(server)
        rows = [len(flat[name]) for name in self.start.class_rows] or [len(self.classes)]
        classes = max(1, *rows)  # an algorithm expects at least one
        return self._send(server, number, torch.ones(classes), architecture)

    def refuse_outliers(self) -> dict[str, str]:
        """Refuse replies that are too large beside the others; return their senders and reasons.

        Where the server adds noise, all replies are bounded, and none is judged by the others: who
        counts would tell about them.
        """
        if self.privacy is not None:
            return {}
        amounts = {}
        for name, reply in self.replies.items():
            if reply.upload:  # not if all it would send has arrived before
                amounts[name] = Amounts.measure(reply.upload, reply.spoken)
        remembered = {}
        for name in self.members_with_upload():
            if name not in amounts and self.admits(name):
                remembered[name] = self._measure_remembered(name)
        reasons = find_outliers(amounts, remembered, self.settings)
        for name, reason in reasons.items():
            del self.replies[name]
            self.members[name].note_refusal(reason)
        return reasons

    def close_round(self) -> None:
        """Compute the server's new state from the accepted replies; `save` writes it."""
        self.round += 1
        self.later_rounds.clear()
        arriving = RoundUploads(
            self.algorithm, self.uploads, self.once_uploads, self.round, keeps_all=True
        )
        self._store_replies(arriving)
        self._remove_leavers()
        uploads = arriving.combine()
        if uploads or arriving.is_once_new:
            remembered = self.once_uploads.recall() or {}
            before = self._state_before(remembered | (uploads or {}))
            self.server = arriving.aggregate(before, uploads)

    def apply_sum(self, total: Upload, names: Collection[str]) -> None:
        """Compute the server's new state from the sum of some members' uploads in this round.

        total  with a leading axis of 1
        """
        for name in names:
            self.members[name].last_round = self.round
        self.once_uploads.add_clients(self.count_numbers())
        arriving = RoundUploads(self.algorithm, self.uploads, self.once_uploads, self.round)
        sent_once = {name: total[name] for name in self.algorithm.once if name in total}
        if sent_once:
            numbers = torch.tensor(sorted(self.members[name].number for name in names))
            kept = {name: spread_sum(group, len(numbers)) for name, group in sent_once.items()}
            self.once_uploads.store(numbers, kept, self.round)
        rest = {name: group for name, group in total.items() if name not in sent_once}
        self.server = arriving.aggregate(self._state_before(total), rest)

    def _store_replies(self, arriving: RoundUploads) -> None:
        """Make the accepted replies the latest uploads, in the order of the members' numbers."""
        self.uploads.add_clients(self.count_numbers())
        self.once_uploads.add_clients(self.count_numbers())
        for name in sorted(self.replies, key=lambda each: self.members[each].number):
            reply = self.replies[name]
            member = self.members[name]
            member.last_round = self.round
            member.spoken = reply.spoken
            member.brought += reply.brought
            if self.class_groups and not self.place_of.keys() >= set(reply.spoken):
                self.classes = tuple(dict.fromkeys((*self.classes, *reply.spoken)))
                self.uploads.widen(len(self.classes), self.class_groups)
                self.once_uploads.widen(len(self.classes), self.class_groups)
            upload = dict(self._make_current(member, reply))
            member.staleness = self.round - reply.request.round
            sent_once = {name: upload.pop(name) for name in self.algorithm.once if name in upload}
            if sent_once:
                placed = place_rows(sent_once, reply.spoken, self.classes, self.layouts)
                speaker = torch.tensor([member.number])
                arriving.receive(speaker, map_upload(placed, lambda value: value[None]))
            if upload:
                spoken = reply.spoken if self.class_groups & upload.keys() else []
                places = torch.tensor([self.place_of[each] for each in spoken], dtype=torch.long)
                self.uploads.put(member.number, upload, places, self.round)
        self.replies.clear()
        self._forget_requests()

    def _forget_requests(self) -> None:
        """Forget the states of requests that are too old to be answered.

        Otherwise each member would keep the state of the last round that it was asked in.
        """
        oldest = self.round + 1 - (self.settings.max_staleness if self.settings.buffer else 0)
        for name, request in self.requests.items():
            if request.round < oldest:
                self.requests[name] = request._replace(server={})

    def _make_current(self, member: MemberRecord, reply: AcceptedReply) -> Upload:
        """Return an upload as it counts now, if it was requested in an earlier round.

        Of a model, the change counts; everything that ages counts less. See core/staleness.py.
        """
        staleness = self.round - reply.request.round
        if not staleness:
            return reply.upload
        then_server = reply.request.server
        then = self._send_all_classes(then_server, member.number, member.architecture)
        now = self._send_all_classes(self.server, member.number, member.architecture)
        upload = take_changes(reply.upload, then, self.layouts)
        upload = apply_changes(upload, now, self.layouts)
        factor = weigh_staleness(torch.tensor(staleness), self.settings.staleness)
        return age_uploads(upload, factor, self.algorithm.once)

    def describe_late_replies(self) -> str:
        """Return which accepted replies are late, as the end of a sentence; "" if none is."""
        late = []
        for name, reply in self.replies.items():
            staleness = self.round + 1 - reply.request.round
            if staleness:
                late.append(f"{self.title(name)} by {staleness}")
        return f" (late: {', '.join(late)})" if late else ""

    def _remove_leavers(self) -> None:
        """Forget the uploads of former members, and the classes that only they had.

        Their records stay, so that nobody else gets their numbers. So do the settings' classes.
        """
        of_leavers: set[str] = set()
        kept = set(words(self.settings.classes))
        for name, member in self.members.items():
            if self.admits(name):
                kept.update(member.spoken)
                continue
            of_leavers.update(member.spoken, member.brought)
            member.spoken = []
            member.brought = []
            self.uploads.remove(member.number)
            self.once_uploads.remove(member.number)
        self._keep_classes([name not in of_leavers or name in kept for name in self.classes])

    def _keep_classes(self, stays: list[bool]) -> None:
        """Shorten the list of classes, and everything that has a row for each of them."""
        if all(stays):
            return
        names = [name for name, stay in zip(self.classes, stays, strict=True) if stay]
        self.classes = tuple(names)
        places = torch.tensor(stays).nonzero().flatten()
        self.uploads.keep_classes(places, self.class_groups)
        self.once_uploads.keep_classes(places, self.class_groups)
        flat = flatten_state(self.server)
        for name in self.start.class_rows:  # the server has no rows yet for classes of this round
            flat[name] = flat[name][places[places < len(flat[name])]]
        self.server = unflatten_state(flat)

    def _state_before(self, uploads: Upload) -> State:
        """Return the server's state over today's classes and members.

        Classes that came in this round start afresh. So do those that nobody speaks for any more,
        if the latest uploads of all members are aggregated: what a leaver sent is gone.
        """
        flat = flatten_state(self.server)
        fresh = flatten_state(self.start.init(len(self.classes)))
        spoken = torch.zeros(len(self.classes), dtype=torch.bool)
        for name in self.class_groups & uploads.keys():
            spoken |= uploads[name].weight.sum(0) > 0
        for name in self.start.class_rows:
            value = fresh[name].clone()
            before = flat[name]
            value[: len(before)] = before
            if self.algorithm.remembers and self.class_groups:
                value = torch.where(align_axes(spoken, value), value, fresh[name])
            flat[name] = value
        for name in self.start.client_counts:
            flat[name] = torch.full_like(flat[name], self.count_members())
        return unflatten_state(flat)

    # --- the noise of the server

    def affords_round(self, name: str) -> bool:
        """Return whether a member may take part in the next round, as far as its budget goes."""
        if self.privacy is None or name not in self.members:
            return True
        return self.privacy.affords(self.members[name], self.round + 1)

    def charge_round(self, names: Collection[str]) -> None:
        """Count the next round for members that will be asked; `save` must follow."""
        if self.privacy is None:
            return
        for name in names:
            self.privacy.charge(self.find_record(name), self.round + 1)

    # --- the members

    def find_record(self, name: str) -> MemberRecord:
        """Return what is known of a member; one that was never asked gets the next number."""
        member = self.members.get(name)
        if member is None:
            member = MemberRecord(self.count_numbers())
            self.members[name] = member
        return member

    def count_members(self) -> int:
        """Return how many members there are: those listed, or else all that were ever asked."""
        return len(words(self.settings.members)) or max(self.settings.quorum, len(self.members))

    def count_numbers(self) -> int:
        """Return how many numbers are taken: a number that a rebuilt server lacks is not reused.

        Members are in the order of their numbers.
        """
        return 1 + self.members[next(reversed(self.members))].number if self.members else 0

    def admits(self, name: str) -> bool:
        """Return whether somebody is a member; if none are listed, everybody Flower lets in is."""
        listed = _list_members(self.settings.members)
        return not listed or name in listed

    def title(self, name: str) -> str:
        """Return what people call a member: its site and its name, as in `Köln (koeln)`."""
        site = self.members[name].site if name in self.members else ""
        return title_member(name, site)

    def members_with_upload(self) -> list[str]:
        """Return the members whose latest upload is kept."""
        with_upload = set(self.uploads.clients())
        return [name for name, member in self.members.items() if member.number in with_upload]

    def upload_of(self, name: str) -> Upload:
        """Return a member's latest upload; where prototypes travel, with a row for each class."""
        return self.uploads.get(self.members[name].number)

    def recall_uploads(self) -> Upload | None:
        """Return the uploads that the algorithm aggregates now, or None if there are none."""
        return self.uploads.recall(None if self.algorithm.remembers else self.round)

    def _measure_remembered(self, name: str) -> Amounts:
        """Return how large a member's latest upload is, with the rows of its classes only.

        That is measured once: a member that is absent for long is compared with in every round.
        """
        member = self.members[name]
        stored = self.uploads.stored[member.number]
        measured = self.amounts.get(name)
        if measured is None or measured[0] is not stored:
            upload = of_architecture(unflatten_upload(stored.tensors), member.architecture)
            measured = (stored, Amounts.measure(upload, member.spoken))
            self.amounts[name] = measured
        return measured[1]

    # --- on disk

    @contextmanager
    def hold_folder(self) -> Iterator[None]:
        """Be the only process that uses this state; wait for another one up to `patience`.

        Flower may start a second run before the first one has ended.
        """
        folder = self.path.parent
        with explain_write_errors(folder):
            self._make_folder()
        with hold_lock(folder, wait_seconds=self.settings.patience):
            yield

    def _make_folder(self) -> None:
        """Create the folder for its owner only; an existing one keeps its permissions."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(self) -> None:
        """Replace the file, whose header `fedproto deploy status` reads.

        Raises WriteError if that fails; the earlier file is unchanged then.
        """
        tensors = flatten_groups({"server": flatten_state(self.server)})
        if self.privacy is not None:
            for member in self.members.values():  # not what members say, who see less
                member.epsilon = self.privacy.compute_spent(member)
        if self.algorithm.remembers:
            tensors |= self.uploads.export()
        if self.algorithm.once:
            tensors |= flatten_groups({ONCE: self.once_uploads.export()})
        header: dict[str, Any] = {
            "id": self.id,
            "round": self.round,
            "classes": list(self.classes),
            "algorithm": self._describe_algorithm(),
            "registered": sorted(self.registered),
            "history": self.history,
            "settings": list_settings(self.settings, self.terms),
            "members": {name: vars(member) for name, member in self.members.items()},
        }
        if self.privacy is not None:
            header["privacy"] = describe_privacy(self.privacy, list(self.members.values()))
        with explain_write_errors(self.path):
            self._make_folder()
            write_tensors(self.path, tensors, STATE_FORMAT, header, private=True)

    def _describe_algorithm(self) -> str:
        """Return the algorithm with its options, and with the transforms if there are some."""
        algorithm = str(self.terms.part())
        transforms = ",".join(str(part) for part in self.terms.transform_parts())
        if self.terms.teacher or self.terms.feature_map:
            algorithm += f" and teacher {self.terms.teacher} over {self.terms.feature_map}"
        return f"{algorithm} with {transforms}" if transforms else algorithm

    def load(self) -> None:
        """Continue from the file, if there is one.

        Raises RunFolderError if it is corrupted or belongs to other settings.
        """
        if not self.path.exists():
            return
        tensors, header = read_state(self.path)
        stored_algorithm = header["algorithm"]
        algorithm = self._describe_algorithm()
        if stored_algorithm != algorithm:
            raise RunFolderError(
                f"{self.path} belongs to {stored_algorithm}, not to {algorithm}: name another state"
            )
        self._refuse_other_noise(header)
        groups = split_groups(tensors)
        server = groups.get("server", {})
        try:
            self._read_header(header)
            self._note_changes(header)
            if self.algorithm.remembers:
                self.uploads.read(tensors)
                if self.uploads.classes != len(header["classes"]):
                    raise ValueError("its uploads are not those of its classes")
            self.uploads.widen(len(self.classes), self.class_groups)
            if self.algorithm.once:
                self.once_uploads = LatestUploads.restore(groups.get(ONCE, {}))
                self._fit_uploads(self.once_uploads, len(header["classes"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunFolderError(f"{self.path} is corrupted: {error}") from error
        self._refuse_other_layout(server)
        initial = self.start.init(len(self.classes))
        fresh = flatten_state(initial)
        for name in self.start.class_rows:
            rows = server[name]  # classes that the settings have named since start afresh
            server[name] = torch.cat([rows, fresh[name][len(rows) :]])
        self.server = order_like(unflatten_state(server), initial)

    def _refuse_other_noise(self, header: dict[str, Any]) -> None:
        """Refuse a state of rounds that had no noise of the server, or only they had."""
        was_noisy = "privacy" in header
        if was_noisy != (self.privacy is not None):
            had = "privacy=client" if was_noisy else "no noise of the server"
            raise RunFolderError(
                f"{self.path} is of rounds with {had}, not with privacy={self.terms.privacy}: name "
                "another state, since one claim cannot cover both"
            )

    def _fit_uploads(self, uploads: LatestUploads, stored_classes: int) -> None:
        """Widen restored uploads to classes that the settings have named since."""
        stored = uploads.uploads or {}
        for name in self.class_groups & stored.keys():
            if stored[name].weight.shape[1:] != (stored_classes,):
                raise ValueError("its uploads are not those of its classes")
        uploads.widen(len(self.classes), self.class_groups)

    def _read_header(self, header: dict[str, Any]) -> None:
        self.id = str(header["id"])
        self.round = int(header["round"])
        self.classes = tuple(dict.fromkeys((*header["classes"], *self.classes)))
        self.registered |= set(header["registered"])
        self.history = read_history(header)
        records = {name: MemberRecord(**record) for name, record in header["members"].items()}
        if not all(record.spent >= 0 for record in records.values()):
            raise ValueError("it does not say what members have spent")
        self.members = dict(sorted(records.items(), key=lambda member: member[1].number))

    def _note_changes(self, header: dict[str, Any]) -> None:
        """Enter in the history which settings have changed; RunFolderError if they must not.

        Before the first round is closed, nothing depends on them yet.
        """
        settings = list_settings(self.settings, self.terms)
        changes = find_changes(header.get("settings", settings), settings)
        if changes and self.round:
            refuse_fixed(changes, str(self.path))
            self.history.append(describe_changes(changes, self.round))

    def _refuse_other_layout(self, stored: Tree) -> None:
        """Refuse a state of other prototypes, or of another architecture than the settings'."""
        expected_shapes = self._row_shapes(flatten_state(self.server))
        stored_shapes = self._row_shapes(stored)
        for name in sorted(expected_shapes.keys() | stored_shapes.keys()):
            if expected_shapes.get(name) != stored_shapes.get(name):
                raise RunFolderError(
                    f"{self.path} holds a state of another dim, model, shape or number of classes "
                    f"({name})"
                )

    def _row_shapes(self, tensors: Tree) -> dict[str, torch.Size]:
        """Return the shapes of tensors; of those with a row per class, the shape of one row."""
        shapes = {}
        for name, value in tensors.items():
            has_rows = name in self.start.class_rows and value.dim() > 0
            shapes[name] = value.shape[1:] if has_rows else value.shape
        return shapes


@lru_cache(maxsize=8)
def _list_members(names: str) -> frozenset[str]:
    """Return the members that the settings list; every message of a round asks for them."""
    return frozenset(words(names))


def title_member(name: str, site: str) -> str:
    """Return what people call a member with this name, which may have a site.

    >>> title_member("koeln", "Köln"), title_member("ulm", "ulm"), title_member("ulm", "")
    ('Köln (koeln)', 'ulm', 'ulm')
    """
    return f"{site} ({name})" if site and site != name else name


def read_state(path: Path) -> tuple[Tree, dict[str, Any]]:
    """Return the checked tensors and header of a server's file."""
    tensors, header = read_tensors(path, STATE_FORMAT)
    missing = {"id", "round", "classes", "algorithm", "registered", "members"} - header.keys()
    if missing:
        raise RunFolderError(f"{path} is not a server's state: it lacks {min(missing)!r}")
    return tensors, header
