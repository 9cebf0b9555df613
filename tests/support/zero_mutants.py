"""The mutants of ZeRO, for ``tests/support/mutants.py --suite zero``: each reduction, view, pad and order of ranges, gradients and fetches."""

from __future__ import annotations

TESTS = ["tests/unit/optim/test_residency.py", "tests/unit/optim/test_flat.py", "tests/dist/test_zero.py", "tests/dist/test_memory_form.py"]

FLAT, GRADIENTS, WEIGHTS, RESIDENCY = "optim/flat.py", "optim/gradients.py", "optim/weights.py", "optim/residency.py"
CONTEXT = "parallel/forward_context.py"
OPTIMIZER, GPT, MODEL, EMBEDDING = "optim/optimizer.py", "models/language_model.py", "models/transformer.py", "parallel/embedding.py"

# (name, file, old, new)
MUTANTS: list[tuple[str, str, str, str]] = [
    # ranges and views
    ("unit: not padded for the ranks", FLAT, "round_up(end, align * zero.parts)", "round_up(end, align)"),
    ("unit: every rank keeps the first range", FLAT, "range(zero.part * each, (zero.part + 1) * each)", "range(each)"),
    ("unit: a parameter's view starts late", FLAT, "flat[self.start : self.stop].view(self.shape)", "flat[self.start + 1 : self.stop + 1].view(self.shape)"),
    ("unit: stage 3 keeps the beginning", FLAT, "mine = whole[layout.shard.start : layout.shard.stop].clone()", "mine = whole[: len(layout.shard)].clone()"),
    ("unit: stage 3 keeps the whole", FLAT, "            layout.unbind()\n            return None, mine", "            return None, mine"),
    ("unit: stages 1 and 2 keep the beginning", FLAT, "return whole, whole[layout.shard.start : layout.shard.stop]", "return whole, whole[: len(layout.shard)]"),
    ("unit: padding between gradients is not cleared", FLAT, "for part in self._padding:", "for part in self._padding[-1:]:"),
    ("unit: padding after gradients is not cleared", FLAT, "for part in self._padding:", "for part in self._padding[:-1]:"),
    ("unit: frozen parameters stay outside at stage 3", FLAT, "if zero.stage == 3 and len(trainable) < len(held):", "if False:"),
    ("unit: the second micro-batch overwrites the range", FLAT, "self._grad_shard.add_(reduced)", "self._grad_shard = reduced"),
    ("unit: whole gradients stay after their reduction", FLAT, "        self._free_grads()\n        if self._grad_shard is None:", "        if self._grad_shard is None:"),
    ("unit: ranges are counted from the start of the unit", FLAT, "range(start - shard.start, max(start, stop) - shard.start)", "range(start, max(start, stop))"),
    ("unit: master weights are not rounded into the range", FLAT, "            self.local_params.copy_(self.master)\n", "            pass\n"),
    ("unit: 16-byte alignment", FLAT, "_ALIGN_BYTES = 64", "_ALIGN_BYTES = 16"),
    # gradients
    ("gradients: used before they are reduced", GRADIENTS, "self._handles.pop(index).wait()", "self._handles.pop(index)._result"),
    ("gradients: tp sums dropped", GRADIENTS, "        self._sum_over_tp(unit)\n", ""),
    ("gradients: reduced twice", GRADIENTS, "self._handles[index] = reduce_scatter_async(travels, group)", "self._handles[index] = reduce_scatter_async(travels + travels, group)"),
    ("gradients: all_reduce dropped", GRADIENTS, "self._handles[index] = all_reduce_async(travels, group)", "self._handles[index] = all_reduce_async(travels, self.tp)"),
    ("gradients: stage 1 reduces in every micro-batch", GRADIENTS, "if self.overlap and (index in self._completing or self._stage(index) >= 2):", "if self.overlap:"),
    ("gradients: stages 2 and 3 reduce the last micro-batch alone", GRADIENTS, "index in self._completing or self._stage(index) >= 2", "index in self._completing"),
    ("gradients: what is left of a micro-batch is not reduced", GRADIENTS, "                continue\n            if index not in self._reduced:\n                self._reduce(index)\n", "                continue\n"),
    ("gradients: a micro-batch adds to the one before", GRADIENTS, "            self._written.difference_update(id(slot.param) for slot in self.units[index].slots)\n", ""),
    ("gradients: a buffer under way is written to", GRADIENTS, "            self._wait(index)  # the micro-batch before is still on its way\n", ""),
    ("gradients: what got no gradient is not cleared", GRADIENTS, "            view.zero_()\n", "            pass\n"),
    ("gradients: travel in bf16 unasked", GRADIENTS, "self.reduce_dtype = reduce_dtype\n", "self.reduce_dtype = torch.bfloat16\n"),
    ("gradients: the range is not widened again", GRADIENTS, "unit.add_to_shard(result.to(unit.grad_dtype))", "unit.add_to_shard(result)"),
    # weights
    ("weights: used before they are gathered", WEIGHTS, "        for handle in self._handles.pop(index, ()):\n            handle.wait()\n\n    def refresh(", "\n    def refresh("),
    ("weights: not gathered after the update", WEIGHTS, "self._handles[index] = [all_gather_async(unit.local_params, unit.zero.group, out=unit.params)]", "self._handles[index] = []"),
    ("weights: stage 3 keeps old weights after the update", WEIGHTS,
     "        for index in list(self._residency.place):\n            self._release(index)\n", ""),
    ("weights: units stay whole after the step", WEIGHTS, "        for index in list(self._residency.place):\n            self._release(index)\n", ""),
    ("weights: views of a buffer that is given back are kept", FLAT, "            if lasting:\n                self._views", "            if True:\n                self._views"),
    ("weights: a buffer that does not last is kept", WEIGHTS, "if not self._pools[buffer].lasting:", "if False:"),
    ("weights: an evicted unit keeps its views", WEIGHTS, "                handle.wait()\n            self._unbind(evicted)\n", "                handle.wait()\n"),
    ("weights: a fetch is not bound", WEIGHTS, "        layout.bind(whole, lasting=lasting)\n", ""),
    ("weights: alone, a fetch is not bound", WEIGHTS, "            layout.bind(local)\n", ""),
    ("weights: all_reduce into what lay there", WEIGHTS, "        whole.zero_()\n", ""),
    ("weights: all_reduce without one's own range", WEIGHTS, "        whole[layout.shard.start : layout.shard.stop].copy_(local)\n", ""),
    ("weights: frozen parameters are not fetched", WEIGHTS, "            self._handles[index].append(self._gather(unit, unit.frozen, unit.local_frozen, frozen, lasting))\n", "            pass\n"),
    ("weights: buffers of the smallest unit", WEIGHTS, "max(unit.numel for unit in units)", "min(unit.numel for unit in units)"),
    ("weights: nothing is fetched ahead", WEIGHTS, "if free is not None:", "if False:"),
    ("weights: the unit at work may be evicted", WEIGHTS, "admit(upcoming[0], upcoming, (index,))", "admit(upcoming[0], upcoming, ())"),
    # which unit where
    ("residency: the nearest use goes", RESIDENCY, "best = max(free, key=", "best = min(free, key="),
    ("residency: busy units go too", RESIDENCY, "if self.holds[b] not in in_use or self.holds[b] is None", "if True"),
    ("residency: the evicted unit is still listed", RESIDENCY, "            del self.place[held]\n", "            pass\n"),
    ("residency: one needed before goes", RESIDENCY, "if unit in upcoming and self._next_use(best, upcoming) < upcoming.index(unit):", "if False:"),
    ("residency: the nearest use goes for a unit in need", RESIDENCY, "self._give(unit, max(buffers, key=", "self._give(unit, min(buffers, key="),
    # the update
    ("update: the boundary of weight decay is the unit's", OPTIMIZER, "part = within(run.elements, unit.shard)", "part = run.elements"),
    ("update: the norm of one's own ranges", OPTIMIZER, "return all_reduce(mine, self.holders).sqrt()", "return all_reduce(mine, self.tp).sqrt()"),
    ("update: nobody is told", OPTIMIZER, "            updated(index)\n", "            pass\n"),
    # the model tells
    ("model: a block does not say that it is used", GPT, "            for unit in units[layer]:\n                events.before_use(unit)\n", "            pass\n"),
    ("model: the embedding does not say that it is used", GPT, "            self.use(events, \"embedding\")\n", ""),
    ("model: the head does not say that it is used", GPT, "        self.use(events, \"head\")\n        return x if", "        return x if"),
    ("model: backward does not say what comes next", CONTEXT, "    for unit in below:\n        events.before_use(unit)\n", ""),
    ("model: a unit is complete too early", GPT, "x = unit_boundary(x, events, units[layer][:1], units[layer - 1])", "x = unit_boundary(x, events, units[layer + 1][:1], units[layer - 1])"),
    ("pools: the head takes a block's buffer", RESIDENCY, "enumerate(alike) if kind == one) for one in kinds]", "enumerate(alike) if kind == one or unit == len(alike) - 1) for one in kinds]"),
    ("pools: a tied table and the head share a buffer", RESIDENCY, "if tied or keep_all else", "if keep_all else"),
    ("embedding: backward asks the table that is away", EMBEDDING, "_local_rows(ids, view.shape[0], ctx.tp)", "_local_rows(ids, weight.shape[0], ctx.tp)"),
]  # fmt: skip
