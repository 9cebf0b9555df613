"""Table of all placement rules, by the name of the function, with which a dry run follows shares and partial sums through a model.

A function of whole tensors alone needs no rule: it does the same on every rank. If one that gets a share, or a partial
sum, is missing from the table, an error asks for a rule (``teach``); nothing is guessed.
"""

from __future__ import annotations

from megatron_sp.schedule.check.rules import channels, elementwise, indexing, losses, moves, parts, products, reductions
from megatron_sp.schedule.check.rules.common import Rule

FAMILIES = (elementwise, moves, parts, indexing, reductions, products, channels, losses)
RULES: dict[str, Rule] = {name: rule for family in FAMILIES for name, rule in family.RULES.items()}


def teach(name: str, rule: Rule) -> None:
    """Register the placement rule of a function, by its name without the underscores of in-place and operator spellings.

    Args:
        rule: takes the step, whose operands are its tensors; returns the placement of the result, or one for each, or
            calls ``step.fail``.
    """
    RULES[name] = rule
