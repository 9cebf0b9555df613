"""Mutants of pipelines: orders, pairing of messages, stages, the tied table, gradients that are put off (``--suite pipelines``)."""

from __future__ import annotations

TESTS = [
    "tests/unit/training/test_step.py", "tests/unit/parallel/test_context_plan.py", "tests/unit/parallel/test_row_slices.py", "tests/dist/test_context_gather.py",
    "tests/unit/parallel/test_pipeline_plan.py", "tests/unit/parallel/test_pipeline_stages.py", "tests/dist/test_groups.py",
    "tests/dist/test_delayed_weights.py", "tests/dist/test_put_off_weights.py", "tests/dist/test_pipeline_layouts.py", "tests/dist/test_pipeline_random_orders.py",
    "tests/dist/test_train_pipeline.py",
]  # fmt: skip

ORDERS, CHECK, REPLAY, PLAN, RUN = (f"parallel/pipeline{name}.py" for name in ("_orders", "_check", "_replay", "_plan", ""))
STAGES, PASSES, GRADIENTS, MODEL = "parallel/pipeline_stages.py", "training/pipelined.py", "optim/gradients.py", "models/language_model.py"
SHARDING, OPTIMIZER, GROUPS, STEP = "training/sharding.py", "optim/optimizer.py", "comm/groups.py", "training/step.py"
CP, SLICES, BLOCK, CUT, SAME = (
    "parallel/context_parallel.py",
    "parallel/row_slices.py",
    "models/transformer.py",
    "parallel/parallel_context.py",
    "training/same_sequences.py",
)
SPLIT, PIECES, MAIN, BLOCK_OP = "parallel/split_projection.py", "parallel/chunked_mlp.py", "ops/main_grad.py", "parallel/attention_block.py"

MUTANTS = [
    # orders
    ("1f1b: one forward pass too few before the first gradient", ORDERS, "ahead = p - 1 - rank + n - 1 if v == 1", "ahead = max(0, p - 2 - rank) + n - 1 if v == 1"),
    ("interleaved: as few forward passes as with one stage", ORDERS, "else 2 * (p - 1 - rank) + (v - 1)", "else (p - 1 - rank) + 0 * (v - 1)"),
    ("groups: what is left is a group of its own", ORDERS, "ends = [m * i // count for i in range(count + 1)]", "ends = [min(m, p * i) for i in range(-(-m // p) + 1)]"),
    ("backward passes go through the stages forwards", ORDERS, "for chunk in reversed(range(v))", "for chunk in range(v)"),
    ("slices go backward from the first", ORDERS, "for i in group for j in reversed(range(n))", "for i in group for j in range(n)"),
    ("zb1p: W is never put off", ORDERS, "else (1,) if v == 1 else", "else (0,) if v == 1 else"),
    ("a V has no place for the way back", ORDERS, "leaves_room = is_v and part.stage < num_stages // 2", "leaves_room = False"),
    ("a V holds more than 1f1b", ORDERS, "2 * p if is_v else ahead", "4 * p if is_v else ahead"),
    ("W before F", ORDERS, '        return Action("W", *rank.weights[0]) if rank.weights else None', '        return Action("W", *rank.weights[-1]) if rank.weights else None'),
    # the check
    ("check: an action may be missing", CHECK, "        if counts[action] != 1:\n", "        if counts[action] > 1:\n"),
    ("check: any rank may have a stage", CHECK, "if plan.rank_of[action.stage] != rank:", "if False:"),
    ("check: W in any order", CHECK, "if last is not None and at[w] < at[last]:", "if False:"),
    ("check: B of the ends in any order", CHECK, "has_more = stage in (0, plan.num_stages - 1)", "has_more = False"),
    ("check: B of the first stage in any order", CHECK, "has_more = stage in (0, plan.num_stages - 1)", "has_more = stage == plan.num_stages - 1"),
    ("check: slices in any order", CHECK, "if j > 0 and at[f] < at[f._replace(slice=j - 1)]:", "if False:"),
    ("check: ranks may wait for each other", CHECK, "    if waits:\n", "    if False:\n"),
    ("replay: a fused gradient is there before W", REPLAY, 'if not plan.splits and action.kind != "F":', "if False:"),
    ("replay: messages take no time", REPLAY, "(message(source) if crosses else 0.0)", "0.0"),
    # messages
    ("a message is used before it is there", RUN, "            received = handle.wait()\n", "            received = handle._result\n"),
    ("receives in the order in which they are needed", PLAN, "            due = len(place)\n            for message in reversed([", "            for message in reversed(["),
    ("a V's stages send to themselves", RUN, "local.pop(source) if plan.rank_of[source.stage] == channels.me else mail.take(source)", "mail.take(source)"),
    ("gradients of the input are dropped", RUN, "return None if self.x is None else self.x.grad", "return None if self.x is None else torch.zeros_like(self.x)"),
    ("the gradient of the output is doubled", RUN, "        return None, grad\n", "        return None, None if grad is None else grad + grad\n"),
    ("messages are of another micro-batch", RUN, "shape, dtype, device = self._work.shape(message.action)", "shape, dtype, device = self._work.shape(message.action._replace(micro_batch=0))"),
    ("groups: two neighbours share one", GROUPS, "if set(other) & set(pair)}", "if other == pair}"),
    # stages
    ("the head counts nothing", STAGES, "extra = {0: embedding, num_stages - 1: head}", "extra = {0: embedding, num_stages - 1: 0.0}"),
    ("stages overlap", STAGES, "ends = [sum(counts[:i]) for i in range(len(counts) + 1)]", "ends = [max(0, sum(counts[:i]) - (i == 1)) for i in range(len(counts) + 1)]"),
    ("the last stage has no norm", MODEL, "        has_norm = has_head and config.norm_placement", "        has_norm = False and config.norm_placement"),
    ("layers are numbered from each stage's first", MODEL, "block = TransformerBlock(config, layer, name, seed, dtype, self.layout)", "block = TransformerBlock(config, layer - stage.start, name, seed, dtype, self.layout)"),
    ("initial weights by the number in the stage", MODEL, 'name = f"{self.stack_name}.layers.{layer}"\n                block', 'name = f"{self.stack_name}.layers.{layer - stage.start}"\n                block'),
    ("the head's backward does not say what comes next", MODEL, 'x = unit_boundary(x, events, (self._index["head"],), last)', 'x = unit_boundary(x, events, (self._index["head"],))'),
    ("a head's unit is complete with the last block's", MODEL, 'x = unit_boundary(x, events, (self._index["head"],), last)', 'x = unit_boundary(x, events, self._units_of_layer[stage.start], last)'),
    ("backward begins without the last layer's parameters", MODEL, "            for unit in self._units_of_layer[stage.stop - 1]:\n                events.before_use(unit)\n", "            pass\n"),
    ("all stages have the first one's parameters first", MODEL, 'layers = [self._units_of_layer[layer] for layer in range(stage.start, stage.stop)]\n        head =', 'layers = [self._units_of_layer[layer + self.stages[0].start - stage.start] for layer in range(stage.start, stage.stop)]\n        head ='),
    # the tied table
    ("table: each end has gradients of its own", SHARDING, "            own_groups[len(units)] = groups.ends\n", "            pass\n"),
    ("table: counted on both ends", SHARDING, "set(tables if groups.pp_rank else ())", "set()"),
    ("table: counted on neither end", SHARDING, "set(tables if groups.pp_rank else ())", "set(tables)"),
    ("table: the ends of all tp ranks share", GROUPS, "members = ranks[[0, -1]][..., tp_rank].flatten().tolist()", "members = ranks[[0, -1]].flatten().tolist()"),
    ("norm: of one's own stages", OPTIMIZER, "self.holders = everybody if is_sharded else whole or tp", "self.holders = everybody if is_sharded else tp"),
    # gradients that are put off
    ("put off: and forgotten", GRADIENTS, "            write()\n            del write", "            del write"),
    ("put off: written in reverse", GRADIENTS, "        kept.reverse()\n", ""),
    ("put off: the unit is complete at B", GRADIENTS, "            return  # ``catch_up`` completes it\n", "            pass\n"),
    ("put off: a unit is never completed", GRADIENTS, "            if not to_come[index]:\n                self.unit_done(index)\n", ""),
    ("put off: the head, too", PASSES, "self.gradients.put_off(put_off, blocks)", "self.gradients.put_off(put_off, [*blocks, *others])"),
    ("put off: what comes after, too", PASSES, "        self.gradients.put_off(None)\n", ""),
    ("put off: blocks count as complete at B", PASSES, "self.gradients.last_micro_batch(others if put_off is not None else [*blocks, *others])", "self.gradients.last_micro_batch([*blocks, *others])"),
    ("put off: blocks never count as complete", PASSES, "                self.gradients.last_micro_batch(blocks)\n", "                pass\n"),
    ("blocks are not reduced after a micro-batch", PASSES, "        self.gradients.finish_micro_batch(blocks)\n", "        pass\n"),
    ("embedding and head are not reduced after a micro-batch", PASSES, "        self.gradients.finish_micro_batch(others)\n", "        pass\n"),
    ("put off: rows of a message at once", SPLIT, "        self._calls.append(lambda grad: grad.put_product(grad_out, x, rows))\n", "        self._calls = [lambda grad: grad.put_product(grad_out, x, rows)]\n"),
    ("put off: the last piece of an MLP alone", PIECES, "        self._operands.append((grad_out, x))\n", "        self._operands = [(grad_out, x)]\n"),
    ("put off: biases and norms are not", MAIN, "    if main_grad is not None and main_grad.defers and main_grad.later(param, partial(_put_now, main_grad, param, grad)):\n        return None\n", ""),
    # gradients that are delayed
    ("delayed: and forgotten", GRADIENTS, "            self._delayed.popleft()()  # and its operands go\n", "            self._delayed.popleft()\n"),
    ("delayed: from one step to the next", GRADIENTS, "        self._delayed.clear()\n", ""),
    ("delayed: what a pipeline puts off, too", GRADIENTS, "        if key is not None and index in units:\n            self._kept", "        if key is not None and index in units and id(param) not in self._delays:\n            self._kept"),
    ("delayed: past the end of the unit", GRADIENTS, "        self.cover()\n        key, put_off = self._put_off\n", "        key, put_off = self._put_off\n"),
    ("delayed: past the end of the micro-batch", GRADIENTS, "        self.cover()\n        for index in sorted", "        for index in sorted"),
    ("delayed: all weights", GRADIENTS, "        if id(param) in self._delays:\n", "        if self._delays:\n"),
    ("delayed: nothing under the heads' exchange", BLOCK_OP, "            self.main_grad.cover()\n", "            pass\n"),
    ("delayed: nothing under the keys' exchange", CP, "        pass_.cover()\n", "        pass\n"),
    ("delayed: under the keys' exchange, though the heads' comes later", BLOCK, "if main_grad is not None and self.layer.layout.sp.size == 1:", "if main_grad is not None:"),
    ("delayed: fc1, which covers a reduction", BLOCK, "*((mlp.linear_fc1,) if tp.size == 1 else ())", "mlp.linear_fc1"),
    ("delayed: fc2 alone", BLOCK, "*((mlp.linear_fc1,) if tp.size == 1 else ())", ""),
    # slices
    ("slices: the keys of earlier ones are not seen", CP, "kv = pass_.slices.add(kv)", "pass_.slices.add(kv)"),
    ("slices: backward has its own keys alone", CP, "if slices is None else slices.so_far()", "if slices is None else slices.so_far()[-slices.layer._slices[slices.number].shape[0]:]"),
    ("slices: gradients of keys of earlier ones are forgotten", SLICES, "        if self._grad is None:\n", "        if True:\n"),
    ("slices: a slice takes the first one's gradient", SLICES, "mine = self._grad[rows : rows + own]", "mine = self._grad[:own]"),
    ("slices: gradients stay for the next micro-batch", SLICES, "        if index == 0:\n            self._grad = None\n", ""),
    ("slices: keys stay after their last use", SLICES, "own = self._slices.pop(index).shape[0]\n        rows = sum(kv.shape[0] for kv in self._slices.values())", "own = self._slices[index].shape[0]\n        rows = sum(self._slices[i].shape[0] for i in range(index))"),
    ("slices: all layers have the same keys", BLOCK, ".of((self.layer.layer, share.queries.start))", ".of((0, share.queries.start))"),
    ("slices: all chunks of heads have the same keys", BLOCK, ".of((self.layer.layer, share.queries.start))", ".of((self.layer.layer, 0))"),
    ("slices: micro-batches share keys", PASSES, "self._contexts[index] = self._context_of(index), KeysOfSlices()", "self._contexts[index] = self._context_of(index), next(iter(self._contexts.values()), (0, KeysOfSlices()))[1]"),
    ("slices: a unit is reduced after each", PASSES, "more_follows = action.slice > 0\n        self._model.before", "more_follows = False\n        self._model.before"),
    ("slices: a unit is reduced after each W", PASSES, "            self.gradients.more_follows = action.slice > 0\n            self.gradients.catch_up", "            self.gradients.catch_up"),
    ("slices: blocks are complete after the last one", PASSES, "        if action.slice == 0:  # the last of a micro-batch\n", "        if action.slice == self.plan.num_slices - 1:\n"),
    ("slices: head and embedding are complete after the last one", PASSES, "        if action.slice == 0:\n            _, others", "        if action.slice == self.plan.num_slices - 1:\n            _, others"),
    ("slices: dropout counts keys from the slice's beginning", CP, "own = (self.plan.keys[j],) *", "own = (self.plan.runs[j],) *"),
    ("slices: others' keys of this slice alone", CUT, "for part in row_slice.runs[: row_slice.number + 1]]", "for part in row_slice.runs[row_slice.number : row_slice.number + 1]]"),
    ("slices: each has as many positions", "parallel/slice_cut.py", "return area(position) + pairs_per_position", "return pairs_per_position"),
    ("slices: messages have the length of the first", RUN, "shape, dtype, device = self._work.shape(message.action)", "shape, dtype, device = self._work.shape(message.action._replace(slice=0))"),
    ("stages may read different sequences", SAME, "if groups.cp.size() == groups.pp.size() == 1:", "if groups.cp.size() == 1:"),
    # steps
    ("a micro-batch's context is another one's", PASSES, "self._contexts[index] = self._context_of(index), KeysOfSlices()", "self._contexts[index] = self._context_of(0), KeysOfSlices()"),
    ("ranks without the head do not wait for the totals", STEP, "        self._settle()  # a rank of a pipeline without the head has not\n", "        self._handle._waited, self._handle._work = True, None\n"),
    ("counts are added up for each stage", GROUPS, "self.cp.rank() == 0 and self.pp.rank() == 0", "self.cp.rank() == 0"),
]  # fmt: skip
