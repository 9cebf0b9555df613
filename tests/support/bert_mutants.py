"""What tests/support/mutants.py breaks in BERT: its head, its second task, post-norm blocks."""

from __future__ import annotations

TESTS = [
    "tests/unit/models/test_bert.py", "tests/integration/test_hugging_face.py", "tests/dist/test_step_parity_bert.py", "tests/unit/models/test_step_bert.py",
]  # fmt: skip

BERT, GATHER, HEAD, LANGUAGE = "models/bert.py", "parallel/gather.py", "parallel/lm_head.py", "models/language_model.py"
CONTEXT = "parallel/forward_context.py"
MODEL, BLOCK, STEP = "models/transformer.py", "parallel/attention_block.py", "training/step.py"

# (name, file, old, new)
MUTANTS: list[tuple[str, str, str, str]] = [
    # order
    ("order: every sp rank counts it", BERT, "cut.row_of(0), order)", "0, order)"),
    ("order: the last sp rank counts it", BERT, "cut.row_of(0), order)", "0 if self.layout.sp.rank == self.layout.sp.size - 1 else None, order)"),
    ("order: the last position is pooled", BERT, "first = x[row].clone()", "first = x[-1].clone()"),
    ("order: averaged over sequences", BERT, 'reduction="sum"', 'reduction="mean"'),
    ("order: hits are misses", BERT, "logits.detach().argmax(1) == order", "logits.detach().argmax(1) != order"),
    ("pooler: no tanh", BERT, "return torch.tanh(self.dense(x))", "return self.dense(x)"),
    # positions of the tp group
    ("gather: each rank takes the first positions of the gradient", GATHER, "ctx.tp.rank * each", "0"),
    ("gather: the gradient is doubled", GATHER, "each).contiguous(), None", "each).contiguous() * 2, None"),
    ("head: tp_seq inside", BERT, "tp=replace(self.layout.tp, seq=False), bias", "tp=self.layout.tp, bias"),
    ("head: its norm is summed over tp", BERT, "alike = replace(layout, tp=replace(layout.tp, seq=False))", "alike = layout"),
    # masked tokens
    ("head: labels are not cut", BERT, "[cut.sp_slice] for t in (labels, loss_mask)", "[: cut.sp_slice.stop - cut.sp_slice.start] for t in (labels, loss_mask)"),
    ("head: activation dropped", BERT, 'F.gelu(wide, approximate="tanh" if self.activation == "gelu_tanh" else "none")', "wide"),
    ("head: hits without weights", BERT, "(made.hits * loss_mask).sum()", "made.hits.sum()"),
    ("head: hits of other tokens", HEAD, "at_label[:, 0] >= 0", "at_label[:, 0] < 0"),
    ("bias: not added", HEAD, "        logits.add_(bias)\n", "        pass\n"),
    ("bias: gradient not scaled", HEAD, "grad_bias * grad_sum", "grad_bias"),
    ("bias: gradient without the tokens' weights", HEAD, "torch.mv(grad_logits.t(), row_weight[:, 0])", "grad_logits.sum(0)"),
    ("bias: the last chunk's gradient alone", HEAD, "self.bias += torch.mv", "self.bias = torch.mv"),
    ("bias: rows of the first rank", BERT, "first = min(config.vocab_size, layout.tp.rank * mine)", "first = 0"),
    # embedding
    ("types: not cut for the rank", LANGUAGE, "cut.take(types.t())[cut.tp_seq_slice]", "cut.take(types.t())[: cut.tp_seq_slice.stop - cut.tp_seq_slice.start]"),
    ("types: not added", LANGUAGE, "x = x + self.tokentype_embeddings(types)", "pass"),
    ("embedding: not normed", LANGUAGE, "x = x if self.layernorm is None else self.layernorm(x)", "pass"),
    ("embedding: normed before the types are added", LANGUAGE, "x = self.word_embeddings(tokens)", "x = self.word_embeddings(tokens) * 1.01"),
    # post-norm blocks
    ("post-norm: the residual branch gets no gradient", BLOCK, "return add(add(passed, reduced.wait()), late), None", "return reduced.wait(), None"),
    ("post-norm: no norm after attention", MODEL, "x = self.post_attention_layernorm(", "x = ("),
    ("post-norm: no norm after the MLP", MODEL, "return self.post_mlp_layernorm(", "return ("),
    ("post-norm: a norm after the last block", LANGUAGE, 'has_norm = has_head and config.norm_placement == "pre"', 'has_norm = True'),
    # the step
    ("context: causal", CONTEXT, "AttentionMask(causal, batch[", "AttentionMask(True, batch["),
    ("context: padding is seen", CONTEXT, 'if "length" in batch:', "if False:"),
]  # fmt: skip
