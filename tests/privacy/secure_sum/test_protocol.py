"""The protocol: sums, every pattern of dropouts, uniform masks, and hostile messages."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedproto.errors import ConfigError, Refused, TrainingError
from fedproto.privacy.secure_sum import messages
from fedproto.privacy.secure_sum.graph import choose_neighbours
from fedproto.privacy.secure_sum.local import add_securely, count_bytes
from fedproto.privacy.secure_sum.member import start_member
from fedproto.privacy.secure_sum.server import STAGES, SumServer
from fedproto.privacy.secure_sum.terms import SumTerms, check_threshold, count_threshold
from tests.helpers.secure_sums import SeededDraw, make_terms


def draw_values(members, length, seed=0):
    rows = np.random.default_rng(seed).normal(size=(members, length))
    return dict(enumerate(rows))


@given(
    members=st.integers(3, 7),
    length=st.integers(1, 9),
    seed=st.integers(0, 10**6),
    largest=st.sampled_from([10.0, 1e6]),
)
@settings(max_examples=40, deadline=None)
def test_a_secure_sum_is_the_plain_sum_within_the_stated_error(members, length, seed, largest):
    terms = make_terms(members, count_threshold(members, 2 / 3), length, largest)
    values = draw_values(members, length, seed)
    outcome = add_securely(terms, values, members)
    error = terms.fixed_point.rounding_error(members)
    plain = sum(values.values())
    assert np.abs(outcome.total - plain).max() <= error + 1e-12
    assert outcome.arrived == list(range(members))


@pytest.mark.parametrize(("members", "threshold"), [(3, 2), (4, 3), (5, 3)])
def test_every_pattern_of_dropouts_is_recovered_or_refused(members, threshold):
    """Each member is silent from one of the stages on, or from none: 5^n patterns, all of them.

    A pattern is fine if, and only if, a threshold of members reaches the end.
    """
    terms = make_terms(members, threshold, length=2)
    values = draw_values(members, 2)
    found = Counter()
    for pattern in product((*STAGES, None), repeat=members):
        if members == 5 and sorted(pattern, key=str) != list(pattern):
            continue  # one order of each combination: 126 of 3125
        silent = {stage: set() for stage in STAGES}
        for number, stage in enumerate(pattern):
            if stage is not None:
                silent[stage].add(number)
        left = members - sum(len(numbers) for numbers in silent.values())
        if left < threshold:
            with pytest.raises(TrainingError, match=f"a secure sum needs {threshold}"):
                add_securely(terms, values, members, silent)
            found["refused"] += 1
            continue
        outcome = add_securely(terms, values, members, silent)
        in_sum = [n for n, stage in enumerate(pattern) if stage in (None, "unmasking")]
        assert outcome.arrived == in_sum
        plain = sum(values[number] for number in in_sum)
        assert outcome.total == pytest.approx(plain, abs=terms.fixed_point.rounding_error(members))
        found["recovered"] += 1
    assert found["recovered"] > 10
    assert found["refused"] > 10


def test_the_sum_stays_right_whatever_the_masks_are():
    """Masks cancel exactly: other keys give bit for bit the same sum."""
    terms = make_terms(length=50)
    values = draw_values(5, 50)
    first = add_securely(terms, values, 5, {"masked": {1}}, draw=SeededDraw(1))
    second = add_securely(terms, values, 5, {"masked": {1}}, draw=SeededDraw(2))
    assert first.total.tobytes() == second.total.tobytes()


@pytest.mark.parametrize("largest", [100.0, 1e9])  # numbers of 32 and of 64 bits
def test_a_masked_upload_is_uniform(largest):
    """Of equal values that are far from uniform; every byte of the numbers is."""
    terms = make_terms(members=3, threshold=2, length=20_000, largest=largest, error=1e-6)
    server = SumServer(terms, 3, draw=SeededDraw(7))
    stages = {}
    draw = SeededDraw(11)
    for number in range(3):
        stages[number], message = start_member(terms, number, draw)
        server.receive(number, message)
    for number, reply in server.close().items():
        stages[number], message = stages[number].share(reply, draw)
        server.receive(number, message)
    _, masked = stages[1].mask(np.full(20_000, 1.5), server.close()[1])
    width = terms.fixed_point.dtype.itemsize
    columns = np.frombuffer(masked, np.uint8).reshape(-1, width)
    plain = terms.fixed_point.encode(np.full(20_000, 1.5)).view(np.uint8).reshape(-1, width)
    for column in range(width):
        counts = np.bincount(columns[:, column], minlength=256)
        chi_square = float(((counts - 20_000 / 256) ** 2 / (20_000 / 256)).sum())
        assert 180 < chi_square < 350  # 255 degrees of freedom; 1e-4 on either side
        assert len(np.unique(plain[:, column])) == 1
    bits = np.unpackbits(columns.reshape(-1))
    assert abs(bits.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(bits))


def test_members_on_a_sparse_graph_add_the_same_with_fewer_bytes():
    members = 30
    terms = make_terms(members, 6, length=4)
    values = draw_values(members, 4)
    silent = {"masked": {3}, "unmasking": {9}}
    outcome = add_securely(terms, values, members, silent, neighbours=8, draw=SeededDraw(1))
    plain = sum(row for number, row in values.items() if number != 3)
    assert outcome.total == pytest.approx(plain, abs=terms.fixed_point.rounding_error(members))
    sent, _ = count_bytes(make_terms(members, 20, length=4), members)
    assert outcome.sent.sum(1).max() < sent.min() / 2


def test_the_neighbours_are_mutual_and_as_many_as_wanted():
    graph = choose_neighbours(list(range(0, 40, 2)), 6, SeededDraw(1))
    assert all(len(neighbours) == 6 for neighbours in graph.values())
    for member, neighbours in graph.items():
        assert member not in neighbours
        assert all(member in graph[other] for other in neighbours)
    everybody = choose_neighbours([1, 2, 5], 0, SeededDraw(1))
    assert everybody == {1: {2, 5}, 2: {1, 5}, 5: {1, 2}}
    assert choose_neighbours([1, 2, 5], 2, SeededDraw(1)) == everybody


def test_the_bytes_of_all_stages_are_those_that_are_counted_without_running_them():
    terms = make_terms(members=6, threshold=4, length=11)
    lost = {1, 4}
    outcome = add_securely(terms, draw_values(6, 11), 6, {"masked": lost})
    sent, received = count_bytes(terms, 6, lost)
    masked = 11 * 4
    really_sent = outcome.sent.sum(1)
    really_sent[list(lost)] += masked  # they had sent it, and it was lost
    assert really_sent.tolist() == sent.tolist()
    assert outcome.received.sum(1).tolist() == received.tolist()
    # By hand: 64 keys, 32 commitment, 5 times (2 + 34 + 16) shares, 44 values, 6 times (2 + 17).
    assert sent[0] == 64 + 32 + 5 * 52 + 44 + 6 * 19
    assert received[0] == 6 * (2 + 64) + 5 * 52 + 4 * 2


# --- terms that do not hold


@pytest.mark.parametrize(
    ("members", "threshold", "sentence"),
    [
        (2, 2, "needs from 3 to 65535 members, not 2"),
        (70_000, 60_000, "needs from 3 to 65535 members"),
        (10, 5, "must be a majority, from 6 to 10, not 5"),
        (10, 11, "must be a majority, from 6 to 10, not 11"),
    ],
)
def test_a_threshold_without_a_majority_is_refused(members, threshold, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_threshold(members, threshold)


def test_terms_without_values_or_with_another_session_are_refused():
    good = make_terms()
    with pytest.raises(ConfigError, match="has 16 bytes"):
        SumTerms(b"short", 3, 4, good.fixed_point)
    with pytest.raises(ConfigError, match="and values to add"):
        SumTerms(good.session, 3, 0, good.fixed_point)
    with pytest.raises(ConfigError, match="a threshold of at least 2"):
        SumTerms(good.session, 1, 4, good.fixed_point)


# --- hostile servers


def open_sum(members=4, threshold=3, length=2, upto="keys"):
    """Return a server and members at the beginning of a stage, and what the server sent them."""
    terms = make_terms(members, threshold, length)
    server = SumServer(terms, members, draw=SeededDraw(1))
    draw = SeededDraw(2)
    stages = {}
    replies = {}
    for number in range(members):
        stages[number], message = start_member(terms, number, draw)
        server.receive(number, message)
    replies = server.close()
    if upto == "shares":
        return server, stages, replies
    for number in range(members):
        stages[number], message = stages[number].share(replies[number], draw)
        server.receive(number, message)
    replies = server.close()
    if upto == "masked":
        return server, stages, replies
    for number in range(members):
        stages[number], message = stages[number].mask(np.ones(length), replies[number])
        server.receive(number, message)
    return server, stages, server.close()


def change_keys(reply, change):
    entries = messages.unpack_entries(reply, messages.KEYS_BYTES)
    return messages.pack_entries(change(entries))


def test_a_member_refuses_a_list_of_keys_that_is_not_honest():
    _, stages, replies = open_sum(upto="shares")
    member = stages[1]
    reply = replies[1]
    other_keys = start_member(member.terms, 1, SeededDraw(99))[1]

    def without_own(entries):
        return {number: keys for number, keys in entries.items() if number != 1}

    def with_other_own(entries):
        return entries | {1: other_keys}

    def with_repeated(entries):
        return entries | {2: entries[0]}

    def too_few(entries):
        return {number: entries[number] for number in (0, 1)}

    def too_many(entries):
        fresh = {}
        for number in range(4, 7):
            fresh[number] = start_member(member.terms, number, SeededDraw(number))[1]
        return entries | fresh

    def of_low_order(entries):
        return entries | {2: bytes(32) + entries[2][32:]}

    for change, sentence in [
        (without_own, "other keys of this member"),
        (with_other_own, "other keys of this member"),
        (with_repeated, "the same public key"),
        (too_few, "the keys of 2 members, of which a threshold of 3 is not a majority"),
        (too_many, "the keys of 7 members, of which a threshold of 3 is not a majority"),
        (of_low_order, "not a usable X25519 key"),
    ]:
        with pytest.raises(Refused, match=sentence):
            member.share(change_keys(reply, change))
    for bad in (reply[:-1], reply + reply, b"\1"):
        with pytest.raises(Refused, match="list of a secure sum"):
            member.share(bad)


def test_a_member_refuses_shares_that_were_changed_or_are_of_another_sum():
    _, stages, replies = open_sum(upto="masked")
    member = stages[1]
    values = np.ones(2)
    changed = bytearray(replies[1])
    changed[10] ^= 1
    with pytest.raises(Refused, match="changed on its way"):
        member.mask(values, bytes(changed))
    with pytest.raises(Refused, match="changed on its way"):
        member.mask(values, replies[0].replace(b"\1\0", b"\0\0", 1))  # shares for member 0
    with pytest.raises(Refused, match="not a neighbour"):
        member.mask(values, messages.pack_entries({9: bytes(messages.SEALED_BYTES)}))
    one = messages.unpack_entries(replies[1], messages.SEALED_BYTES)
    only_one = messages.pack_entries({0: one[0]})
    with pytest.raises(Refused, match="only 2 members have given shares, but 3 are needed"):
        member.mask(values, only_one)


def test_a_member_sends_nothing_if_a_value_overflows():
    _, stages, replies = open_sum(upto="masked")
    with pytest.raises(TrainingError, match="nothing was sent"):
        stages[1].mask(np.array([1.0, 101.0]), replies[1])
    with pytest.raises(Refused, match="not the 2 that are added"):
        stages[1].mask(np.ones(3), replies[1])


def test_a_member_gives_one_share_of_each_and_none_below_the_threshold():
    _, stages, replies = open_sum(upto="unmasking")
    member = stages[1]
    given = messages.unpack_entries(member.unmask(replies[1]), 17)
    assert given == {number: shares.own for number, shares in member.shares.items()}
    without_3 = messages.unpack_entries(member.unmask(messages.pack_numbers([0, 1, 2])), 17)
    assert without_3[3] == member.shares[3].masking
    assert without_3[0] == member.shares[0].own
    for numbers, sentence in [
        ([0, 1], "the sum of 2 members, but at least 3"),
        ([0, 2, 3], "and this member among them"),
        ([0, 1, 2, 7], "gave no shares"),
    ]:
        with pytest.raises(Refused, match=sentence):
            member.unmask(messages.pack_numbers(numbers))


def test_a_member_that_has_masked_keeps_no_secret_of_its_own():
    _, stages, _ = open_sum(upto="unmasking")
    assert set(vars(stages[0])) == {"terms", "number", "shares"}
    assert "shares" not in repr(stages[0])


def test_secrets_do_not_show_when_a_stage_is_printed():
    _, stages, _ = open_sum(upto="masked")
    assert "private" not in repr(stages[0])
    assert "seed" not in repr(stages[0])


# --- hostile members


def test_the_server_refuses_what_is_not_a_members_turn():
    server, stages, replies = open_sum(upto="shares")
    _, shares = stages[0].share(replies[0])
    server.receive(0, shares)
    for number, message, sentence in [
        (0, shares, "sent its shares of this secure sum before"),
        (7, shares, "sent no keys"),
        (1, shares, "not for its neighbours, one for each"),
        (1, shares[:-1], "list of a secure sum"),
        (1, b"", "not for its neighbours"),
    ]:
        with pytest.raises(Refused, match=sentence):
            server.receive(number, message)
    with pytest.raises(TrainingError, match="only 1 of 4 members sent shares"):
        server.close()
    with pytest.raises(Refused, match="is over"):
        server.receive(1, shares)
    with pytest.raises(Refused, match="is over"):
        server.close()


def test_the_server_refuses_keys_that_nobody_should_have():
    terms = make_terms()
    server = SumServer(terms, 5)
    _, keys = start_member(terms, 0)
    server.receive(0, keys)
    for number, message, sentence in [
        (0, keys, "sent its keys of this secure sum before"),
        (1, keys, "the same public key"),
        (1, keys[:63], "63 bytes, where 64 are wanted"),
        (1, keys[:32] * 2, "two public keys are the same"),
        (1, bytes(32) + b"\1" * 32, "not a usable X25519 key"),
        (5, keys, "no member 5"),
        (-1, keys, "no member -1"),
    ]:
        with pytest.raises(Refused, match=sentence):
            server.receive(number, message)


def test_the_server_refuses_values_and_shares_of_wrong_sizes():
    server, stages, replies = open_sum(upto="masked")
    for message in (b"", bytes(7), bytes(9)):
        with pytest.raises(Refused, match="bytes, where 8 are wanted"):
            server.receive(0, message)
    for number in range(3):
        stages[number], message = stages[number].mask(np.ones(2), replies[number])
        server.receive(number, message)
    with pytest.raises(Refused, match="sent its masked of this secure sum before"):
        server.receive(0, bytes(8))
    replies = server.close()
    with pytest.raises(Refused, match="not in the sum"):
        server.receive(3, b"")
    with pytest.raises(Refused, match="not those it was given"):
        server.receive(0, stages[0].unmask(replies[0])[19:])


@pytest.mark.parametrize("whose", [0, 3])
def test_a_wrong_share_spoils_the_sum_and_is_noticed(whose):
    """Whether it is of a member in the sum (0) or of one that is gone (3)."""
    server, stages, replies = open_sum(upto="masked")
    for number in range(3):
        stages[number], message = stages[number].mask(np.ones(2), replies[number])
        server.receive(number, message)
    replies = server.close()
    for number in range(3):
        given = messages.unpack_entries(stages[number].unmask(replies[number]), 17)
        if number == 1:
            given[whose] = bytes(16) + b"\7"
        server.receive(number, messages.pack_entries(given))
    with pytest.raises(TrainingError, match=f"shares of member {whose}'s secret do not give"):
        server.close()
    assert server.total is None
