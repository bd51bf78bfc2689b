"""The journal: what it gives back after any crash is true, and what it loses is work only."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.files import OutputFiles
from batchgen.data.journal import Journal, decode_lines, encode_line
from batchgen.data.rows import FinishedRow, RowKey
from batchgen.errors import OutputUnavailable
from batchgen.records import PartialSample, TokenLogprob
from tests.data.shards import row, sample
from tests.data.simulated_files import PowerCut, SimulatedBackend

HEADER = {"fingerprint": "f", "scope": "run"}
HOME = Path("/journal")


def simulated() -> SimulatedBackend:
    backend = SimulatedBackend()
    backend.make_directory(HOME)
    backend.sync_directory(HOME.parent)
    return backend


def journal(backend: SimulatedBackend, attempt: str = "a", segment_bytes: int = 1 << 20) -> Journal:
    return Journal(OutputFiles(backend), HOME, attempt, HEADER, segment_bytes)


def finished(number: int) -> FinishedRow:
    return row(number, sample(f"text {number}"))


def partial(number: int, tokens: list[int]) -> PartialSample:
    return PartialSample(number, list(tokens), -0.1 * len(tokens))


def tokens_of(entries: Journal, key: RowKey) -> dict[int, list[int]]:
    return {index: each.token_ids for index, each in entries.entries.partials.get(key, {}).items()}


def test_finished_rows_come_back_in_the_next_run() -> None:
    backend = simulated()
    first = journal(backend)
    for number in range(3):
        first.add_finished(finished(number))
    first.sync()
    assert journal(backend, "b").entries.finished == {(0, number): finished(number) for number in range(3)}


def test_what_was_not_synced_is_not_there() -> None:
    backend = simulated()
    first = journal(backend)
    first.add_finished(finished(0))
    first.close()
    assert journal(backend, "b").entries.finished == {}


def test_tokens_so_far_are_noted_by_what_they_gained() -> None:
    backend = simulated()
    first = journal(backend)
    for tokens in ([1], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4]):
        first.add_partial((0, 5), [partial(0, tokens), partial(1, tokens[:1])])
        first.sync()
    assert backend.log.count("write /journal/a-000001.log") == 3
    second = journal(backend, "b")
    assert second.entries.partials[0, 5] == {0: partial(0, [1, 2, 3, 4]), 1: partial(1, [1])}


def test_log_probabilities_of_partial_samples_come_back() -> None:
    backend = simulated()
    first = journal(backend)
    positions = [[TokenLogprob(4, -0.25, 1)], [TokenLogprob(5, -1.5, 2), TokenLogprob(6, -1.0, 1)]]
    for count in (1, 2):
        first.add_partial((0, 0), [PartialSample(0, [4, 5][:count], -1.0, positions[:count])])
    first.sync()
    assert journal(backend, "b").entries.partials[0, 0][0].logprobs == positions


def test_a_finished_row_has_no_partial_samples() -> None:
    backend = simulated()
    first = journal(backend)
    first.add_partial((0, 0), [partial(0, [1])])
    first.add_finished(finished(0))
    first.sync()
    entries = journal(backend, "b").entries
    assert (list(entries.finished), entries.partials) == ([(0, 0)], {})


def test_the_longer_of_two_runs_tokens_is_kept_whatever_the_names_of_their_segments() -> None:
    for names in (("a", "b"), ("b", "a")):
        backend = simulated()
        for attempt, tokens in zip(names, ([1, 2, 3], [1, 2]), strict=True):
            each = journal(backend, attempt)
            each.add_partial((0, 0), [partial(0, tokens)])
            each.sync()
        assert tokens_of(journal(backend, "c"), (0, 0)) == {0: [1, 2, 3]}


def test_a_damaged_line_costs_that_line_alone() -> None:
    lines = [encode_line({"n": number}) for number in range(4)]
    broken = lines[1].replace(b"1", b"7")
    assert [line["n"] for line in decode_lines(lines[0] + broken + lines[2] + lines[3][:-4])] == [0, 2]


def test_tokens_after_a_lost_line_are_not_joined_to_those_before_it() -> None:
    backend = simulated()
    first = journal(backend)
    for tokens in ([1], [1, 2], [1, 2, 3]):
        first.add_partial((0, 0), [partial(0, tokens)])
        first.sync()
    path = HOME / "a-000001.log"
    content = OutputFiles(backend).read(path).split(b"\n")
    backend.unlink(path)
    OutputFiles(backend).write_new(path, b"\n".join(content[:2] + content[3:]))
    assert tokens_of(journal(backend, "b"), (0, 0)) == {0: [1]}


@given(st.binary(max_size=200), st.integers(0, 400))
def test_no_bytes_can_break_the_reader(garbage: bytes, cut: int) -> None:
    backend = simulated()
    first = journal(backend)
    for number in range(3):
        first.add_finished(finished(number))
        first.add_partial((0, 7), [partial(0, [1] * (number + 1))])
    first.sync()
    path = HOME / "a-000001.log"
    content = OutputFiles(backend).read(path)
    backend.unlink(path)
    OutputFiles(backend).write_new(path, content[:cut] + garbage)
    entries = journal(backend, "b").entries
    assert all(entries.finished[key] == finished(key[1]) for key in entries.finished)


def test_segments_of_another_scope_are_left_alone() -> None:
    backend = simulated()
    other = Journal(OutputFiles(backend), HOME, "a", {"fingerprint": "other"})
    other.add_finished(finished(0))
    other.sync()
    mine = journal(backend, "b")
    assert mine.entries.finished == {}
    mine.forget([(0, 0)])
    assert backend.list_directory(HOME) == ["a-000001.log"]


def test_segments_go_when_all_their_rows_are_committed() -> None:
    backend = simulated()
    first = journal(backend, segment_bytes=1)
    for number in range(3):
        first.add_finished(finished(number))
        first.sync()
    assert len(backend.list_directory(HOME)) == 3
    first.forget([(0, 0), (0, 2)])
    assert backend.list_directory(HOME) == ["a-000002.log"]
    second = journal(backend, "b")
    second.forget([(0, 1)])
    assert backend.list_directory(HOME) == []


def test_a_segment_needs_no_other_to_be_read() -> None:
    backend = simulated()
    first = journal(backend, segment_bytes=1)
    first.add_partial((0, 0), [partial(0, [1, 2])])
    first.add_finished(finished(1))
    first.sync()
    first.add_partial((0, 0), [partial(0, [1, 2, 3])])
    first.sync()
    backend.unlink(HOME / "a-000001.log")
    assert tokens_of(journal(backend, "b"), (0, 0)) == {0: [1, 2, 3]}


def test_after_an_error_the_segment_is_not_written_again() -> None:
    backend = simulated()
    first = journal(backend)
    first.add_finished(finished(0))

    def fail(kind: str, path: Path) -> None:
        if kind == "sync":
            raise OSError(5, "I/O error")

    backend.before = fail
    with pytest.raises(OutputUnavailable):
        first.sync()
    backend.before = None
    first.add_finished(finished(1))
    with pytest.raises(OutputUnavailable):
        first.sync()
    assert backend.log.count("write /journal/a-000001.log") == 1


def test_synced_rows_survive_a_loss_of_power_and_torn_ones_are_cut() -> None:
    for seed in range(50):
        backend = simulated()
        first = journal(backend)
        first.add_finished(finished(0))
        first.sync()
        first.add_finished(finished(1))
        backend.cut_at = backend.num_operations + 1
        with pytest.raises(PowerCut):
            first.sync()
        backend.lose_power("mixed", seed)
        entries = journal(backend, "b").entries.finished
        assert entries.pop((0, 0)) == finished(0)
        assert entries in ({}, {(0, 1): finished(1)})


def test_segments_are_read_for_wanted_rows_alone(tmp_path: Path) -> None:
    written = Journal(OutputFiles(), tmp_path, "one", {"fingerprint": "f"})
    for number in range(4):
        written.add_finished(FinishedRow(0, number))
    written.add_partial((0, 9), [PartialSample(0, [1, 2])])
    written.sync()
    other = Journal(OutputFiles(), tmp_path, "two", {"fingerprint": "f"}, read=False)
    assert not other.entries.finished
    (name,) = other.segment_names()
    assert other.read_keys(name) == {(0, 0), (0, 1), (0, 2), (0, 3), (0, 9)}
    found = other.read_segments([name, "gone.log"], {(0, 2), (0, 9)}.__contains__)
    assert (list(found.finished), list(found.partials)) == ([(0, 2)], [(0, 9)])
    stranger = Journal(OutputFiles(), tmp_path, "three", {"fingerprint": "g"}, read=False)
    assert stranger.read_keys(name) is None
    assert not stranger.read_segments([name], lambda key: True).finished
    assert written.segments_with({(0, 3)}) == [name]
    assert written.segments_with({(1, 3)}) == []
