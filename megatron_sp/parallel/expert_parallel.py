"""The ranks that share the experts of a layer, and those that have the same ones."""

# Experts are dealt to ``ep`` neighbours on the axes dp, cp and sp taken together, with tp_seq on tp, too; the rest of
# these axes has replicas of the same experts. Without tp_seq the ranks of a tp group have the same tokens and compute
# alike.
#
#     ranks of a stage   d0c0s0  d0c0s1  d1c0s0  d1c0s1        (dp 2, sp 2)
#     ep 2               experts 0-3, 4-7, 0-3, 4-7             groups of neighbours; replicas: every second rank

from __future__ import annotations

from dataclasses import dataclass

from megatron_sp.comm.groups import SINGLE_RANK, Group, ParallelGroups
from megatron_sp.comm.groups import expert_groups as groups_of_experts
from megatron_sp.parallel.all_to_all import AllToAllGroup


@dataclass(frozen=True)
class ExpertParallel(AllToAllGroup):
    """The ep group, over which the experts of each layer are dealt, and how its exchanges are run."""

    replicas: Group = SINGLE_RANK  # the ranks that have the same experts as this one, and other tokens
    sequence: Group = SINGLE_RANK  # the ranks that have other positions of the same sequences
    tokens: Group = SINGLE_RANK  # the ranks that have other tokens, of these sequences or of others
    # this rank's tokens are its own, so that it counts them: with several tp ranks that have the same tokens only the
    # first
    counts: bool = True
    chunks: int = 1  # parts of a rank's tokens that are sent and computed in turn

    @classmethod
    def create(
        cls, groups: ParallelGroups, ep_size: int = 1, *, tp_seq: bool = False, chunks: int = 1, check: bool = False
    ) -> ExpertParallel:
        """Make the groups for ``ep_size`` ranks; ``tp_seq``: the tp ranks have different tokens. Collective."""
        made = groups_of_experts(groups, ep_size, over_tp=tp_seq, check=check)
        counts = tp_seq or groups.tp_rank == 0
        return cls(made.ep, True, None, made.replicas, made.sequence, made.tokens, counts, chunks)


NO_EP = ExpertParallel()
