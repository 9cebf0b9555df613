"""Mutants of the cut for context parallelism: who has which positions, what goes with them, who counts what (``--suite cut``)."""

from __future__ import annotations

TESTS = [
    "tests/unit/parallel/test_context_cut.py", "tests/unit/config/test_context_rules.py", "tests/unit/training/test_overlap_report.py",
    "tests/dist/test_groups.py", "tests/dist/test_context_gather.py", "tests/dist/test_context_layouts.py",
    "tests/dist/test_context_training.py",
]  # fmt: skip

CUT, CONTEXT, GATHER, ULYSSES = "parallel/parallel_context.py", "parallel/forward_context.py", "parallel/gather.py", "parallel/ulysses.py"
LANGUAGE, TRANSFORMER = "models/language_model.py", "models/transformer.py"
GPT, BERT, CLASSIFIER = "models/gpt.py", "models/bert.py", "models/classifier.py"
GROUPS, SCHEMA, RULES = "comm/groups.py", "config/schema_parallel.py", "config/rules_context.py"

MUTANTS = [
    # what belongs to a position
    ("labels are cut unlike tokens", GPT, "cut.take(t.t())[cut.sp_slice] for t in (labels, loss_mask)", "cut.take(t.t().roll(cut.cp.rank, 0))[cut.sp_slice] for t in (labels, loss_mask)"),
    ("labels are the first of the sequence", GPT, "cut.take(t.t())[cut.sp_slice] for t in (labels, loss_mask)", "t.t().repeat(8, 1)[: cut.padded][cut.sp_slice] for t in (labels, loss_mask)"),
    ("BERT: labels are cut unlike tokens", BERT, "cut.take(t.t())[cut.sp_slice] for t in (labels, loss_mask)", "cut.take(t.t().roll(cut.cp.rank, 0))[cut.sp_slice] for t in (labels, loss_mask)"),
    ("tokens are cut unlike all else", LANGUAGE, "self.embedding(cut.take(tokens.t())[cut.sp_slice]", "self.embedding(cut.take(tokens.t().roll(cut.cp.rank, 0))[cut.sp_slice]"),
    ("segments are cut unlike tokens", LANGUAGE, "cut.take(types.t())[cut.tp_seq_slice]", "cut.take(types.t().roll(cut.cp.rank, 0))[cut.tp_seq_slice]"),
    ("learned positions are local", LANGUAGE, "cut.take(positions)[cut.tp_seq_slice], ctx", "cut.take(positions - (cut.runs[0][0] if cut.runs else 0)).clamp(min=0)[cut.tp_seq_slice], ctx"),
    ("rotary positions are local", LANGUAGE, "rotary_of(self.config, cut.share(positions), self.params_dtype)", "rotary_of(self.config, positions[: cut.length], self.params_dtype)"),
    ("hidden dropout by local position", LANGUAGE, "local_dropout=DropoutKeys(cut.take(keys)[cut.tp_seq_slice])", "local_dropout=DropoutKeys(keys.repeat(8, 1)[: cut.padded][cut.tp_seq_slice])"),
    ("attention dropout by local position", LANGUAGE, "dropout=DropoutKeys(cut.share(keys)), local", "dropout=DropoutKeys(keys[: cut.length]), local"),
    ("padding counts as a position", LANGUAGE, "length=cut.length, whole_length", "length=cut.padded, whole_length"),
    ("the sequence is as long as the share", LANGUAGE, "whole_length=cut.whole, num_tokens", "whole_length=cut.length, num_tokens"),
    # the mask
    ("the plan has no window", LANGUAGE, "row_mask(ctx.mask, cut.whole, self.config.window_size)", "row_mask(ctx.mask, cut.whole)"),
    ("documents are ignored", CONTEXT, "window, mask.documents, lengths)", "window, None, lengths)"),
    ("lengths are ignored", CONTEXT, "window, mask.documents, lengths)", "window, mask.documents, None)"),
    ("all masks are causal", CONTEXT, "RowMask(length, mask.causal, window", "RowMask(length, True, window"),
    ("lengths on the device alone are no padding", CONTEXT, "    if lengths is None and mask.key_lengths is not None:\n", "    if False:\n"),
    # the cut
    ("chunks are out of order", CUT, "for start, stop in self.runs]", "for start, stop in reversed(self.runs)]"),
    ("every rank has the first one's share", CUT, "return self.shares[self.cp.rank]", "return self.shares[0]"),
    ("chunks of the flag are ignored", CUT, "cut_row(mask, self.cp.size, self.cp_chunks, part)", "cut_row(mask, self.cp.size, None, part)"),
    ("padding is in front", CUT, "(0, 0) * (x.ndim - 1) + (0, missing)", "(0, 0) * (x.ndim - 1) + (missing, 0)"),
    ("an empty share has no row", CUT, "max(1, self.length_of(cp_rank))", "self.length_of(cp_rank)"),
    ("a place is looked for in this rank's padding", CUT, "self._padded(cp_rank) // self.sp.size)", "self.padded // self.sp.size)"),
    ("a place forgets the runs before", CUT, "                row += stop - start\n        raise", "                row += 0\n        raise"),
    ("a position is on every cp rank", CUT, "(cp_rank, sp_rank) == (self.cp.rank, self.sp.rank)", "sp_rank == self.sp.rank"),
    ("exchanges of cp are recorded as tp's", CUT, 'self.recorder.at("cp", layer)', 'self.recorder.at("tp", layer)'),
    # putting together
    ("shares are put together by rank", CUT, "sorted(parts, key=lambda each: each[0])", "parts"),
    ("a share's runs all begin at its first row", CUT, "                row += stop - start\n        return torch.cat", "                row += 0\n        return torch.cat"),
    ("shares are as long as this rank's", GATHER, "longest = max(map(cut.length_of, range(cut.cp.size)))", "longest = cut.length"),
    ("the last position is rank 0's", GATHER, "cut.cp.group, cp_owner)", "cut.cp.group)"),
    ("cp ranks may choose different tokens", GATHER, "(layout.tp.group, layout.sp.group, layout.cp.group)", "(layout.tp.group, layout.sp.group)"),
    # no rows at all
    ("heads of no rows", TRANSFORMER, "q.reshape(q.shape[0], q.shape[1] * len(share.queries) // each, each, self.d)", "q.reshape(q.shape[0], -1, each, self.d)"),
    ("padding of no rows", ULYSSES, "x.shape[1:].numel()", "x[0].numel()"),
    ("rotation of no rows", "ops/rotary.py", "x.shape[1:].numel()", "x[0].numel()"),
    # who counts
    ("counts are added up for each cp rank", GROUPS, "self.sp.rank() == 0 and self.cp.rank() == 0", "self.sp.rank() == 0"),
    ("gradients are not summed over cp", GROUPS, 'mesh["dp", "cp", "sp"]._flatten', 'mesh["dp", "sp"]._flatten'),
    ("cp and sp change places", GROUPS, '"cp": cp_size, "sp": sp_size, "tp"', '"sp": sp_size, "cp": cp_size, "tp"'),
    ("BERT: cp ranks do not add up what evaluation finds", "inference/evaluation/bert.py", "all_reduce(all_reduce(sums, layout.sp.group), layout.cp.group)", "all_reduce(sums, layout.sp.group)"),
    ("BERT: each cp rank has a [CLS]", BERT, "cut.row_of(0), order)", "0 if cut.sp.rank == 0 else None, order)"),
    ("classifier: each cp rank has a [CLS]", CLASSIFIER, "row = self.cut(tokens, ctx).row_of(0)", "row = 0 if self.layout.sp.rank == 0 else None"),
    ("cp ranks are replicas", SCHEMA, "self.tensor_model_parallel_size * self.sequence_parallel_size * self.context_parallel_size", "self.tensor_model_parallel_size * self.sequence_parallel_size"),
    # flags
    ("a2a is cp", RULES, "parallel.sequence_parallel_size, parallel.context_parallel_size = parallel.context_parallel_size, 1", "pass"),
    ("a2a+p2p: the sizes change places", RULES, "parallel.sequence_parallel_size, parallel.context_parallel_size = sizes", "parallel.context_parallel_size, parallel.sequence_parallel_size = sizes"),
    ("all_gather is p2p", RULES, 'parallel.cp_stages_ahead = "all"', "pass"),
    ("dropout inside a kernel is let through", RULES, "if model.attention_dropout > 0 and backend not in DROPOUT_IN_PIECES:", "if False:"),
]  # fmt: skip
