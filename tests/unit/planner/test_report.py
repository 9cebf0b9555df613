"""Why positions are split over sp and cp as they are: the length from which keys and values hide, and what the planner says."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from support.paths import ROOT

from megatron_sp.commands import cli
from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.estimate.layout import context_plan
from megatron_sp.planner.command import read_model
from megatron_sp.planner.fake_run import step_time
from megatron_sp.planner.hardware import GPUS, LINKS
from megatron_sp.planner.machine import Machine
from megatron_sp.planner.report import share_of_attention, text
from megatron_sp.planner.search import search
from megatron_sp.planner.timeline import StepTime

H100, FAR = GPUS["h100-80g"], LINKS["ib-400g"]
SHAPE = (
    "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 65536 --vocab-size 32000 --bf16 --attention-dropout 0"
    " --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 8"
)


def nodes(gpus: int = 8) -> Machine:
    return Machine(H100, gpus, gpus, LINKS["nvlink4"], FAR, 1, H100.memory_bytes)


def config_of(flags: str) -> Any:
    return config_from_args(f"{SHAPE} --mock-data --lr 1e-4 --train-iters 1 {flags}".split(), world_size=8)


def stepped(flags: str) -> StepTime:
    return step_time(config_of(flags), nodes())


@pytest.mark.parametrize(("c", "groups"), [(2, 16), (8, 16), (8, 4)])
def test_the_length_from_which_keys_and_values_hide(c: int, groups: int) -> None:
    """e (c - 1) f F / (r B), and f is 1: the rank with the middle of a causal row sends all that it has to all others."""
    config = config_of(f"--cp-size {c} --group-query-attention --num-query-groups {groups}")
    plan = context_plan(config.model, config.parallel)
    f = max(sum(plan.rows_sent(rank, 1)) for rank in range(c)) / ((c - 1) * 65536 / c)
    expected = 2 * (c - 1) * f * H100.attention_forward_tflops * 1e12 / (16 / groups * FAR.gbs * 1e9) / plan.balance
    assert share_of_attention(config, nodes()) * 65536 == pytest.approx(expected, rel=1e-3) and f == pytest.approx(1, rel=1e-3)
    twice = config_of(f"--cp-size {c} --group-query-attention --num-query-groups {groups} --seq-length 131072")
    assert share_of_attention(twice, nodes()) == pytest.approx(share_of_attention(config, nodes()) / 2, rel=1e-3)


def test_rows_of_a_window_do_not_grow_with_the_length() -> None:
    short, long = (share_of_attention(config_of(f"--cp-size 8 --window-size 1024 --seq-length {s}"), nodes()) for s in (65536, 131072))
    assert long == pytest.approx(short / 2, rel=0.05), "a rank sends as many rows, and computes twice as many pairs"


@pytest.mark.long
def test_what_does_not_hide_under_attention_is_exposed() -> None:
    """Short sequences wait for keys and values, long ones do not."""
    for flags, hides in (("--seq-length 4096", False), ("--seq-length 524288", True)):
        over_cp = [e for e in stepped(f"--cp-size 8 {flags}").exchanges if e.flow.group == "cp"]
        assert over_cp and (sum(e.exposed for e in over_cp) < 0.1 * sum(e.seconds for e in over_cp)) is hides
        assert all(e.flow.under for e in over_cp if e.flow.can_hide)


def test_attention_takes_the_time_of_the_rank_with_most_pairs() -> None:
    """As with Ulysses, but for calls and merges; contiguous chunks nearly double it."""
    ulysses, zigzag, contiguous = (
        stepped(f"--num-layers 2 --global-batch-size 1 {flags}").attention
        for flags in ("--sp-size 8", "--cp-size 8", "--cp-size 8 --cp-chunks 1")
    )
    assert ulysses < zigzag < 1.2 * ulysses and 1.6 * zigzag < contiguous < 2 * zigzag


def said(flags: str, machine: Machine) -> str:
    base, given, extra = read_model(f"{SHAPE} {flags}".split(), machine.gpus, False)
    return text(search(base, given, machine, finalists=4), base, machine, extra, 3)


def test_the_plan_says_why(rough_runs: None) -> None:
    one = Machine(H100, 8, 1, LINKS["nvlink4"], None, 8, H100.memory_bytes)
    assert "sp and cp: Ulysses alone (sp 8), whose bytes" in said("--sp-size 8 --cp-size 1 --tp-size 1", one)
    alone = said("--sp-size 1 --cp-size 8 --tp-size 1", nodes())
    assert "sp and cp: cp alone (cp 8): over ib-400g keys and values of cp 8 hide under attention from " in alone
    assert " tokens on, and there are 65.5 k" in alone
    both = said("--sp-size 2 --cp-size 4 --tp-size 1 --window-size 1024", nodes())
    assert "both: Ulysses (sp 2) over ib-400g, where bytes are cheap, and cp 4 around it, since over ib-400g" in both
    assert "sp and cp: " not in said("--sp-size 1 --cp-size 1 --tp-size 1", one)
    splits = said("--tp-size 1", one)
    assert "other splits of " not in splits or " x cp " in splits


@pytest.mark.long
def test_the_page_shows_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/how-to/planner.md").read_text()
    command = next(b for b in re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL) if "1048576" in b)
    shown = next(b for b in re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL) if "sp and cp: " in b)
    assert cli.main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert not [line for line in shown.splitlines() if line not in printed]
