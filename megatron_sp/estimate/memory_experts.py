"""Sizes of a layer with experts (``parallel/experts.py``), in closed form: what it keeps for backward, and what it needs meanwhile.

kept        logits, chosen experts, the inputs of all activations, the rows that came from other ranks, who has chosen whom
meanwhile   rows on their way, sums of results and of gradients, and what one expert at a time takes
"""

from __future__ import annotations

from functools import cached_property
from math import ceil

from megatron_sp.estimate.expert_rows import RoutedRows, RowBytes
from megatron_sp.estimate.memory_plan import Line
from megatron_sp.estimate.workload import Workload, rows_of_experts

WHO = "who has chosen whom"
_GROUPED_ALIGN = 16  # as in ops/expert_mlp.py


class ExpertShape:
    """Sizes of a rank's layers with experts; tensors in bytes.

    Attributes:
        rows: rows that a layer sends and gets in a pass.
        row_bytes: what travels for each of them.
        tokens: of the rank, between the tensor-parallel parts of layers.
        num_experts, top_k: of the model.
        ffn, ffn_in: width of an expert after and before the activation.
        shared, shared_in: width of the shared expert on this tp rank; 0: there is none.
        weight: bytes of a logit, and of a choice's weight.
        wide: bytes of an element of sums of results.
        moves: rows go to other ranks.
        parts: chunks of a rank's tokens.
        grouped: the products of all experts are one (``ops/expert_mlp.py :: is_grouped``).
    """

    def __init__(self, workload: Workload, tokens: int, sp_tokens: int, element: int) -> None:
        model, parallel = workload.model, workload.parallel
        assert model.hidden_size and model.num_experts
        self.tokens, self.sp_tokens, self.e, self.h = tokens, sp_tokens, element, model.hidden_size
        self.num_experts, self.top_k = model.num_experts, model.moe_router_topk
        gate = 2 if model.is_gated else 1
        self.ffn, self.shared = model.expert_ffn_size, model.shared_expert_size // parallel.tensor_model_parallel_size
        self.ffn_in, self.shared_in = gate * self.ffn, gate * self.shared
        self.wide = 4 if element == 2 else element
        self.weight = 8 if model.moe_router_dtype == "fp64" else self.wide
        self.rows: RoutedRows = rows_of_experts(workload, tokens)
        self.row_bytes = RowBytes.of(self.h, self.top_k, element, self.weight)
        self.moves = parallel.expert_model_parallel_size > 1
        self.parts = parallel.moe_chunks if self.moves else 1
        self.bias = model.mlp_bias
        aligned = all(size * element % _GROUPED_ALIGN == 0 for size in (self.h, self.ffn, self.ffn_in))
        self.grouped = workload.device == "cuda" and workload.precision.bf16 and aligned

    # kept for backward

    @property
    def choice(self) -> int:
        """Bytes of the chosen experts."""
        return self.tokens * self.top_k * 8

    @cached_property
    def indices(self) -> int:
        """Bytes of who has chosen whom, with what weight, and of where rows go."""
        rows, places = self.rows, self.rows.received * self.top_k if self.moves else self.rows.choices
        return ceil(rows.choices * (8 + self.weight) + places * 8 + (rows.sent * 16 if self.moves else 0))

    def keeps(self, stream: int) -> list[Line]:
        """Return what the layer saves beside the parameters; ``stream``: bytes of its input."""
        arrived = ceil(self.rows.received) * self.row_bytes.there if self.moves else 0
        return [
            Line("residual stream", stream), Line("router", self.tokens * self.num_experts * self.weight + self.choice),
            Line("experts, before the activation", ceil(self.rows.choices) * self.ffn_in * self.e),
            Line("shared expert, before the activation", self.sp_tokens * self.shared_in * self.e),
            Line("experts' rows", arrived), Line(WHO, self.indices),
        ]  # fmt: skip

    def operands(self, whole_stream: int, gathered: int) -> int:
        """Return the bytes of the operands of the weights' gradients, where these are put off (``memory_put_off.py``)."""
        of_choice = self.h * (1 + self.bias) + self.ffn + self.ffn_in
        arrived = ceil(self.rows.received) * self.row_bytes.there if self.moves else 0
        shared = (
            self.sp_tokens * (self.shared + self.shared_in) * self.e + gathered + whole_stream if self.shared else 0
        )
        of_router = self.tokens * (self.num_experts * self.weight + self.h * self.e)
        return ceil(self.rows.choices) * (of_choice * self.e + 8) + arrived + of_router + shared
