"""Mutants of context parallelism in schedules (masks, shares of positions, losses and gradients) and of folders of transformers' models.

mutants.py --suite schedules
"""

from __future__ import annotations

TESTS = ["tests/unit/schedule/test_context_masks.py", "tests/dist/test_schedule_context.py", "tests/dist/test_train_folders.py"]

CONTEXT, CUT, ULYSSES, APPLY = (
    "schedule/apply/context.py", "schedule/core/sequences.py", "schedule/apply/ulysses.py", "schedule/apply/apply.py",
)  # fmt: skip
TASK, WEIGHTS, MODEL_OF = "tasks/external_task.py", "tasks/external_weights.py", "tasks/external_model.py"

MUTANTS = [
    ("scores are scaled as the kernel does it", CONTEXT, "            q = q * (scaling * d**0.5)  # the kernels divide by sqrt(d)\n", "            pass\n"),
    ("a rank has one chunk", CONTEXT, "_CHUNKS, _CHUNKS_OF_DOCUMENTS = 2, 8", "_CHUNKS, _CHUNKS_OF_DOCUMENTS = 1, 8"),
    ("lengths are padded for the ranks alone", CONTEXT, "return self.cp.size * self._num_chunks(packed)", "return self.cp.size"),
    ("key and value change places", CONTEXT, "torch.cat((keys, values), 2)", "torch.cat((values, keys), 2)"),
    ("sequences and heads change places", CONTEXT, "found.out.view(length, b, n, d)", "found.out.view(length, n, b, d).transpose(1, 2)"),
    ("the window is one long", CONTEXT, "window = length - first if", "window = length - first + 1 if"),
    ("windows are not recognised", CONTEXT, "window = length - first if causal and first > 0 else None", "window = None"),
    ("every mask is causal", CONTEXT, "        causal = not bool((seen & (keys > some)).any())\n", "        causal = True\n"),
    ("a mask of another form is taken", CONTEXT, "        if not bool((seen == expected(some, keys)).all()) or not bool((of_all == expected(every, looked_at)).all()):\n", "        if False:\n"),
    ("only some rows of a mask are looked at", CONTEXT, " or not bool((of_all == expected(every, looked_at)).all()):", ":"),
    ("only the first sequence's mask is looked at", CONTEXT, "of_all = self._looked_at(function, torch.arange(batch)[:, None, None]", "of_all = self._looked_at(function, torch.zeros(batch, 1, 1, dtype=torch.long)"),
    ("a dense mask of another form is taken", CONTEXT, "        real = keys < torch.tensor(lengths)[:, None, None]\n", "        lengths = (cut.length,) * len(lengths)\n        real = seen\n"),
    ("packed documents see each other", CONTEXT, "            self._documents = _ends_of(packed, cut.padded)\n", "            pass\n"),
    ("ends of documents are one late", CONTEXT, "(row.diff().nonzero().flatten() + 1)", "(row.diff().nonzero().flatten() + 2)"),
    ("padding of a batch is attended to", CONTEXT, "            self._lengths = self._real_tokens(mask)\n", "            pass\n"),
    ("padding up to the ranks is attended to", CONTEXT, "self._documents, self._lengths = None, (cut.length,)", "self._documents, self._lengths = None, (cut.padded,)"),
    ("padding in front is taken", CONTEXT, "        if wrong:\n", "        if False:\n"),
    ("attention dropout is taken", CONTEXT, 'if module.training and more.get("dropout"):', "if False:"),
    ("capped scores are taken", CONTEXT, 'if more.get("softcap") is not None:', "if False:"),
    ("shares are put together in the order of the ranks", CUT, "for _, part in sorted(parts, key=lambda each: each[0])]", "for _, part in parts]"),
    ("every rank takes the first one's positions", CUT, "in cut.shares[cut.cp_rank]], dim)", "in cut.shares[0]], dim)"),
    ("the whole sequence is only that of sp", CUT, "            x = in_order(gather_from(x, cp, dim, grad), self, dim)\n", "            x = torch.cat([x] * len(self.shares), dim)\n"),
    ("the loss is a rank's own part", ULYSSES, 'result["loss"] = loss if self.context is None else reduce_from(loss, self.cp)', 'result["loss"] = loss'),
    ("behind a region gradients are not shared", ULYSSES, "return mine if self.context is None else share_of_gradient(mine, self.cp)", "return mine"),
    ("gradients of a region's end are one rank's", ULYSSES, 'return cut.whole(x, dim, self.group, self.cp, "reduce_scatter")', 'return cut.whole(x, dim, self.group, self.cp, "slice")'),
    ("jumps in positions are documents", ULYSSES, "        if cut.padded != cut.length or said or self.context is not None:\n", "        if cut.padded != cut.length or said:\n"),
    ("dropout is alike over cp", APPLY, 'for each in ("cp", "sp") if axis == "sp" else (axis,):', "for each in (axis,):"),
    ("options of both lines are taken", APPLY, "    if inner is not None and twice:\n", "    if False:\n"),
    # folders of transformers' models
    ("folders: buffers are cast with the parameters", TASK, "    if dtype == torch.float64:\n        one_expert_at_a_time(model)\n    return model", "    for buffer in model.buffers():\n        buffer.data = buffer.data.to(dtype)\n    return model"),
    ("folders: what a class keeps in fp32 is cast", TASK, "torch.float32 if wide else dtype", "dtype"),
    ("folders: experts at once in fp64", TASK, "        one_expert_at_a_time(model)\n", "        pass\n"),
    ("folders: no plan is read", TASK, "    write(s, layout.tp.seq)\n", "    if layout.tp.size > 1:\n        write(s, layout.tp.seq)\n"),
    ("folders: a balance loss is left out", TASK, "        if balances:\n", "        if False:\n"),
    ("folders: rates are not set", WEIGHTS, "                setattr(holder, name, rate)\n", "                pass\n"),
    ("folders: unknown rates are taken", WEIGHTS, "        if value and name not in known:\n", "        if False:\n"),
    ("folders: another model is taken", MODEL_OF, "        if rows:\n", "        if False:\n"),
    ("folders: saved buffers are left out", MODEL_OF, "if id(t) in own}", "if False}"),
]  # fmt: skip
