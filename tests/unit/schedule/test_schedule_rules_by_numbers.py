"""Every rule of the dry run is held against numbers: what it says of a result is so, or it refuses (``support/schedule_rule_oracle.py``).

MEGATRON_SP_RULES_SEED=7 draws other calls, sizes and draws; the long test draws many.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks
from support.schedule_rule_cases import CASES, spellings
from support.schedule_rule_exchanges import trials
from support.schedule_rule_oracle import Draw, Sizes, Trial
from support.schedule_rule_table import cases_by_rule, row, rows_of_page, tried
from torch.overrides import TorchFunctionMode, resolve_name

from megatron_sp.comm.groups import world_group
from megatron_sp.schedule.check import exchange_rules

SEED = int(os.environ.get("MEGATRON_SP_RULES_SEED", "0"))
NEVER: dict[str, str] = {  # what they say of shares and sums is always a question or a refusal
    "ctc_loss": "needs all times and classes of a row",
    "group_norm": "how many groups a rank has to have is known of a layer alone: tests/unit/schedule/test_schedule_layers_by_numbers.py",
}
UNSEEN = {"torch.Tensor.__complex__": "makes a number of Python", "torch.Tensor.__long__": "likewise"}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """torch warns of what some functions are like, such as numbers that lose their imaginary part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.long
@pytest.mark.parametrize("rule", cases_by_rule())
def test_what_a_rule_says_is_so(rule: str) -> None:
    assert cases_by_rule()[rule], f"no case in tests/support/schedule_rule_cases.py calls {rule}"
    count, wrong = tried(rule, SEED)
    assert not wrong, "\n".join(wrong)
    assert count.calls, "no case of it runs"
    assert SEED or rule in NEVER or count.some, "refuses every share and every partial sum"
    known = rows_of_page() if SEED == 0 else {}
    if known:
        assert row(rule, count) == known.get(rule), "accepts more or less than before: python tests/support/schedule_rule_table.py"


def test_the_page_has_no_other_rules() -> None:
    known = rows_of_page()
    assert not known or list(known) == list(cases_by_rule())


@pytest.mark.long
@pytest.mark.parametrize("rule", cases_by_rule())
def test_what_a_rule_says_is_so_of_many(rule: str) -> None:
    wrong = [words for seed in range(1 + SEED, 4 + SEED) for words in tried(rule, seed, 10)[1]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("rule", "seed"), [("cat", 1), ("conv1d", 1), ("conv_transpose1d", 1), ("linear", 2), ("getitem", 103), ("setitem", 309)]
)
def test_draws_that_were_wrong_once(rule: str, seed: int) -> None:
    """Shares cut as needed beside others that are cut; partial sums of a weight over a rank's own rows; a weight of one row; an index that
    is a partial sum, or names a row twice."""
    assert not (wrong := tried(rule, seed, 10)[1]), "\n".join(wrong)


def _prove_exchanges() -> None:
    group, proven = world_group(), set()
    for trial in trials(group.size()):
        if trial.run_together(group).what == "proven":
            proven.add(trial.case.rule)
    assert proven == set(exchange_rules.RULES)


def test_what_is_said_of_exchanges_is_so(tmp_path: Path) -> None:
    """On real ranks, with their real adjoints; of each some claim must be proven."""
    run_ranks(_prove_exchanges, 2, tmp_path)


class _Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(resolve_name(func) or func.__name__)
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def test_every_spelling_is_called() -> None:
    """Of the functions that the follower sees under a rule's name."""
    calls = _Calls()
    for case in CASES:
        for seed in range(3):
            trial = Trial(case, tuple(Draw("N") for _ in case.inputs), seed=seed)
            tensors = trial.wholes
            try:
                with calls:
                    case.call(Sizes(trial.sizes), *[t.clone() for t in tensors])
                calls.names.add(case.label.partition(" ")[0])
                break
            except Exception:
                continue
    every = {name for rule in cases_by_rule() for name, f in spellings().get(rule, {}).items()}
    unseen = {name for name in every if name not in calls.names and name not in UNSEEN}
    assert not unseen, sorted(unseen)
