"""Captured steps on the fake device: sound in every layout; and what a capture must not do is found, with its place."""

from __future__ import annotations

import re

import pytest

from fake_gpu.grid import CAPTURED, PROGRAMS
from fake_gpu.jobs import Job, require_agreement, require_sound, run_rank, waits
from fake_gpu.snippets import SNIPPETS
from fake_gpu.test_waits import is_noticed

BETWEEN = {"--eval-interval ": "tolist at training/loop.py", "--save ": "item at training/nan_checks.py"}  # by flag
OF_A_TRIAL = ("synchronize at ops/cuda_graphs.py", "synchronize at training/graphs.py", "tolist at training/graphs.py")
# first step eager, then replays of first, last, norm and update; where these differ
REPLAYS = {
    "an only micro-batch": [0, 3, 3, 3], "four micro-batches": [0, 6, 6, 6], "stage 1": [0, 5, 5, 5], "stage 2": [0, 5, 5, 5],
    "stage 3": [0, 5, 5, 5], "overlap report": [0, 0, 0, 4, 4], "profile": [0, 4, 0, 0, 0, 4],
}  # fmt: skip
# first, last and norm: as a replay to be compared, one more, and four, of which three are timed, behind an update; then the step
REPLAYS |= {"auto": [0, 2 * 4 + 4 * 5 + 5, 5, 5], "auto, stage 3, fp16": [0, 2 * 3 + 4 * 4 + 4, 4, 4]}


@pytest.mark.often("saves and validations")
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_steps(name: str) -> None:
    """The host waits once in a step, for losses and norm, as in an eager one; and for the device before each capture."""
    job = CAPTURED[name]
    rank = job.world_size - 1 if "uneven" in name else 0
    outcome = run_rank(job, rank)
    require_sound(outcome)
    replays = [step["launches"].get("a graph", 0) for step in outcome["steps"]]
    assert replays == REPLAYS.get(name, [0, 4, 4, 4]), outcome["output"]
    assert rank > 0 or "captured steps: used from step " in outcome["output"]  # rank 0 says it
    for number, step in enumerate(outcome["steps"]):
        begins = replays[number] and not replays[number - 1]
        places = ("synchronize at comm/recorder.py", *OF_A_TRIAL * bool(begins))
        between = {place: 1 for flag, place in BETWEEN.items() if flag in job.flags and number > 0}
        found = {place: count for place, count in waits(step).items() if place not in places}
        assert found == {"event.synchronize at training/step.py": 1, **between}, step["host_waits"]


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, job in CAPTURED.items() if job.world_size > 1])
def test_all_ranks_replay_the_same(name: str) -> None:
    job = CAPTURED[name]
    outcomes = [run_rank(job, rank) for rank in range(job.world_size)]
    for outcome in outcomes:
        require_sound(outcome)
    require_agreement(outcomes)


# tokens


TOKENS = {  # replays: one to be compared for each shape, then one for each further step
    "generate": (Job("--prompt abc --max-new-tokens 4 --greedy", program="generate"), 1 + 3),
    "together": (Job("--prompt ab --prompt abc --batch-generation --max-new-tokens 4 --greedy", program="generate"), 1 + 1 + 2),
    "serve": (PROGRAMS["serve"], 1 + 1 + 1 + 1), "serve, tp, sp": (PROGRAMS["serve, tp, sp"], 1 + 1 + 1 + 1),
    "generate, tp, sp": (PROGRAMS["generate, tp, sp"], 1 + 2 + 2),
    "off": (Job("--prompt abc --max-new-tokens 4 --greedy --cuda-graphs off", program="generate"), 0),
}  # fmt: skip


@pytest.mark.often("together")
@pytest.mark.parametrize("name", TOKENS)
def test_captured_tokens(name: str) -> None:
    job, replays = TOKENS[name]
    outcome = run_rank(job, rank=job.world_size - 1)
    require_sound(outcome)
    assert outcome["launches"].get("a graph", 0) == replays, outcome["output"]
    said = "captured steps: used (the bits of an eager step)" in run_rank(job)["output"]
    assert said == (replays > 0)


def test_a_step_of_a_token_that_the_host_takes_part_in() -> None:
    flags = "read --prompt abc --max-new-tokens 4 --greedy --cuda-graphs"
    outcome = run_rank(Job(f"{flags} auto", program="generate wrongly"))
    require_sound(outcome)
    reason = r"not permitted when stream is capturing: a wait of the host \(item\) at models/language_model\.py:\d+"
    assert re.search(f"captured steps: not used, the capture failed: .*{reason}", outcome["output"]), outcome["output"]
    assert outcome["launches"].get("a graph", 0) == 0 and "4 tokens in" in outcome["output"]
    outcome = run_rank(Job(f"{flags} on", program="generate wrongly"))
    assert outcome["error"] == "exit code 2" and re.search(f"--cuda-graphs on cannot be: .*{reason}", outcome["output"]), outcome["output"]


def test_a_step_of_a_token_whose_input_is_not_static() -> None:
    outcome = run_rank(Job("input --prompt abc --max-new-tokens 4 --greedy", program="generate wrongly"))
    assert any(problem.startswith("freed: a replay of ") for problem in outcome["problems"]), outcome["problems"]


# in an eager step the host waits for the losses before it queues what these order; a graph has no host in it
_NEEDED = (
    ("sp, chunked", "Work.wait in comm/collectives.py:wait < parallel/ulysses.py:_pieces"),
    ("sp, chunked", "event.synchronize in training/step.py:run < training/loop.py:_take_steps"),
    ("stage 3", "Work.wait in comm/collectives.py:wait < optim/gradients.py:_wait"),
    ("stage 3", "Work.wait in comm/collectives.py:wait < optim/weights.py:need"),
    ("tp_seq, sp, dp, stage 1", "Work.wait in comm/collectives.py:wait < optim/weights.py:settle"),
    ("saves and validations", "wait_event in checkpoint/background.py:join < checkpoint/background.py:join"),
    ("saves and validations", "pin_memory in ops/allocator.py:host_empty < training/graphs.py:_set_numbers"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "site"), [pytest.param(*each, marks=[] if i < 1 else pytest.mark.long) for i, each in enumerate(_NEEDED)])
def test_without_a_wait(name: str, site: str) -> None:
    assert site in run_rank(CAPTURED[name])["sites"], sorted(run_rank(CAPTURED[name])["sites"])
    assert is_noticed(CAPTURED[name], site)


# the rules, one by one

SOUND = ("sound", "a_stream_that_joins", "a_collective", "an_evaluation_that_waits")
REFUSED = {
    "a_host_that_reads": "a wait of the host (item)", "a_host_that_lists": "a wait of the host (tolist)",
    "a_host_that_waits": "a wait of the host (synchronize)", "a_stream_that_is_waited_for": "a wait of the host (stream.synchronize)",
    "an_event_that_is_waited_for": "a wait of the host (event.synchronize)", "an_event_that_is_asked": "a question to an event",
    "pinned_memory": "an allocation of pinned memory", "a_copy_from_the_host": "a wait of the host (copy from the host)",
    "a_copy_from_pinned_memory": "aten::copy_ of the host's memory, which every replay would read at this address",
    "a_mask_as_an_index": "a wait of the host (aten::index)", "a_seed": "a new seed of a generator",
    "a_state_of_the_generator": "a look at the state of a generator", "a_new_communicator": "a new communicator, of ranks [0, 1]",
    "work_from_outside": "a wait for work that is not captured",
    "a_stream_that_has_not_joined": "aten::mul_ on the stream of snippets.py:{line}, which has not joined",
}  # fmt: skip
FOUND = {  # @: a line of theirs
    "a_race_inside": "race: aten::add_ on the stream of @ at @ writes what; aten::mul_ on the stream of @ at @ may still",
    "memory_freed_inside_too_early": "freed: memory of stream the stream of @, allocated at @; aten::mul_ on the stream of @",
    "an_input_that_is_freed": "freed: a replay of aten::add at @ uses memory allocated at @; it was freed at @",
    "an_input_that_is_freed_inside": "freed: memory allocated at @; it is freed at @ in a capture that uses it (@)",
    "a_capture_without_a_replay": "stale: tolist on the compute stream at @ reads what; was allocated by a capture",
    "a_result_that_is_read_after_the_next_replay": "stale: tolist on the compute stream at @ reads what; may have been overwritten by",
    "a_replay_on_another_stream": "race: aten::sum on the stream of @ at @ reads what; aten::mul_ on the compute stream at @",
    "a_copy_into_inputs_that_does_not_wait": "race: aten::copy_ on the stream of @ at @ writes what; aten::add on the compute stream",
    "a_save_that_is_not_waited_for": "race: aten::mul_ on the compute stream at @ writes what; copy to the host on the stream of @",
    "a_host_that_does_not_wait_for_a_replay": "race: tolist of the host on the host at @ reads what; copy to the host on the compute",
}  # fmt: skip


def program(name: str) -> Job:
    return Job(name, program="snippet")


@pytest.mark.parametrize("name", SOUND)
def test_what_a_capture_may_do(name: str) -> None:
    require_sound(run_rank(program(name)))


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_capture_refuses(name: str) -> None:
    outcome = run_rank(program(name))
    found = re.sub(r"snippets\.py:\d+", "snippets.py:{line}", outcome["error"])
    assert f"CaptureError: operation not permitted when stream is capturing: {REFUSED[name]}" in found, outcome["error"][-1500:]
    assert re.search(r"at snippets\.py:\d+", outcome["error"].splitlines()[-1]) and not outcome["problems"]


def test_a_capture_that_ends_with_work_under_way() -> None:
    error = run_rank(program("a_collective_under_way"))["error"].splitlines()[-1]
    assert re.search(r"the capture at snippets\.py:\d+ ends with work of NCCL's stream of ranks \[0, 1\] that was not waited for", error), (
        error
    )


def test_a_mode_that_other_threads_break() -> None:
    assert "a capture that is global fails by what other threads do" in run_rank(program("a_mode_that_other_threads_break"))["error"]


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name: str) -> None:
    outcome = run_rank(program(name))
    assert not outcome["error"], outcome["error"]
    found = [re.sub(r"snippets\.py:\d+( < snippets\.py:\d+)*", "@", problem) for problem in outcome["problems"]]
    assert any(problem.startswith(FOUND[name]) for problem in found), found


def test_every_rule_is_tried() -> None:
    others = {"a_collective_under_way", "a_mode_that_other_threads_break"}
    assert {*SOUND, *REFUSED, *FOUND, *others} == SNIPPETS.keys()
