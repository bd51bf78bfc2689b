from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from batchgen.engine.sequence import SequenceGroup, Status
from batchgen.engine.waiting import WaitingQueue
from batchgen.records import PartialSample, Prompt
from tests.engine.fakes import Fake, expected_ids, make_fake, params, prompt_ids, steps


def add(fake: Fake, row: int, length: int, max_tokens: int, n: int = 1) -> SequenceGroup:
    index = fake.engine.add(Prompt(token_ids=prompt_ids(length, row), row=row), params(max_tokens, n))
    return fake.engine._groups[index]


def is_waiting(group: SequenceGroup) -> bool:
    return group.age < 0


def is_in_prompt(group: SequenceGroup) -> bool:
    computed = group.sequences[0].num_computed_tokens
    return 0 < computed < group.num_prompt_tokens and group.sequences[0].num_generated == 0


def is_generating(group: SequenceGroup) -> bool:
    return group.sequences[0].num_generated > 2 and group.sequences[0].status is Status.RUNNING


def is_preempted(group: SequenceGroup) -> bool:
    return group.age >= 0 and all(sequence.status is Status.WAITING for sequence in group.sequences)


def is_partly_finished(group: SequenceGroup) -> bool:
    return 0 < group.num_unfinished < len(group.sequences)


@pytest.mark.case(39)
@pytest.mark.parametrize(
    ("state", "n"),
    [
        (is_waiting, 1),
        (is_waiting, 3),
        (is_in_prompt, 1),
        (is_in_prompt, 3),
        (is_generating, 1),
        (is_generating, 3),
        (is_preempted, 1),
        (is_preempted, 3),
        (is_partly_finished, 3),
    ],
)
def test_an_abort_in_any_state_leaves_every_block_free_and_the_others_right(
    state: Callable[[SequenceGroup], bool], n: int
) -> None:
    # Row 0 holds most of the pool, so that the victim is seen in every state.
    fake = make_fake(num_blocks=16, max_batch_tokens=16, eos_every=0 if n == 1 else 12)
    first = add(fake, 0, 20, 30)
    if state is not is_waiting:
        fake.engine.step()
    for sequence in first.sequences:
        sequence.group.params = sequence.group.params.model_copy(update={"ignore_eos": True})
    victim_index = fake.engine._next_index
    victim = add(fake, 1, 24, 12, n)
    if state is is_partly_finished:
        victim.stop_token_ids = frozenset({96})
    bystander = add(fake, 2, 5, 10)
    finished = {}
    for _ in range(300):
        if state(victim):
            break
        finished.update({completion.prompt_index: completion for completion in fake.engine.step()})
    assert state(victim), "the state was never seen"
    fake.engine.abort(victim_index)
    fake.engine.check_integrity()
    for step in steps(fake):
        finished.update({completion.prompt_index: completion for completion in step})
    fake.assert_all_free()
    assert victim_index not in finished
    for group, length, max_tokens in ((first, 20, 30), (bystander, 5, 10)):
        ids = expected_ids(prompt_ids(length, group.row), params(max_tokens), group.row, eos_every=0 if n == 1 else 12)
        assert finished[group.prompt_index].samples[0].token_ids == ids


def test_an_abort_before_the_first_step_is_forgotten() -> None:
    fake = make_fake()
    prompt = Prompt(token_ids=prompt_ids(4))
    ended = [
        fake.engine.add(prompt, params(0)),
        fake.engine.add(prompt, params(10_000)),
        fake.engine.add(Prompt(token_ids=[]), params(3)),
        fake.engine.add(prompt, params(5)),
    ]
    refused = fake.engine.add(Prompt(token_ids=prompt_ids(300)), params(200))
    for index in (*ended, refused):
        fake.engine.abort(index)
    assert fake.engine.step() == []
    assert fake.engine.num_unfinished == 0
    fake.assert_all_free()


def test_an_abort_of_an_unknown_or_finished_prompt_changes_nothing() -> None:
    fake = make_fake()
    index = fake.engine.add(Prompt(token_ids=prompt_ids(4)), params(1))
    (completion,) = fake.engine.step()
    fake.engine.abort(index)
    fake.engine.abort(index + 7)
    assert completion.samples[0].finish_reason == "length"
    fake.assert_all_free()


def test_close_drops_everything_and_the_engine_can_go_on() -> None:
    fake = make_fake(num_blocks=12)
    for row in range(8):
        fake.engine.add(Prompt(token_ids=prompt_ids(7, row)), params(20, n=2))
    for _ in range(9):
        fake.engine.step()
    fake.engine.close()
    fake.assert_all_free()
    assert fake.engine.num_unfinished == 0
    (completion,) = fake.engine.generate([prompt_ids(7, 3)], params(6))
    assert completion.samples[0].token_ids == expected_ids(prompt_ids(7, 3), params(6), 0)


def test_closing_goes_over_the_queue_once_however_much_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    discard = WaitingQueue.discard

    def counted(queue: WaitingQueue, groups: Collection[SequenceGroup]) -> None:
        passes.append(len(groups))
        discard(queue, groups)

    monkeypatch.setattr(WaitingQueue, "discard", counted)
    fake = make_fake()
    completions = fake.engine.generate([prompt_ids(5, row) for row in range(2000)], params(4))
    next(completions)
    completions.close()
    fake.assert_all_free()
    assert len(passes) == 1
    for row in range(50):
        add(fake, row, 5, 4)
    fake.engine.close()
    fake.assert_all_free()
    assert passes[1:] == [50]


def test_an_abort_of_a_resumed_prompt_frees_its_samples_too() -> None:
    fake = make_fake()
    partial = [PartialSample(sample, [3, 1, 4]) for sample in range(2)]
    index = fake.engine.add(Prompt(token_ids=prompt_ids(6), partial=partial), params(9, n=3))
    fake.engine.step()
    assert len(fake.scheduler.running) == 3
    fake.engine.abort(index)
    fake.assert_all_free()


def test_an_abort_keeps_the_shared_prefix_for_the_others() -> None:
    fake = make_fake()
    prefix = prompt_ids(16, 9)
    doomed = fake.engine.add(Prompt(token_ids=[*prefix, 1]), params(20))
    kept = fake.engine.add(Prompt(token_ids=[*prefix, 2], row=7), params(8))
    fake.engine.step()
    fake.engine.abort(doomed)
    done = {completion.prompt_index: completion for step in steps(fake) for completion in step}
    assert done[kept].samples[0].token_ids == expected_ids([*prefix, 2], params(8), 7)
    fake.assert_all_free()
