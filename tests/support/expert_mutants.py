"""Mutants of experts: choice, weights, terms, exchanges, groups, gradients, biases (``--suite experts``).

Beside slips of our own those that other projects have shipped: router gradients lost on the way, an auxiliary loss over what a rank
has, experts without tokens that keep an old gradient, a gradient scaled by dp, gradients of experts summed over all ranks.
"""

from __future__ import annotations

TESTS = [
    "tests/unit/ops/test_routing.py", "tests/unit/parallel/test_experts.py", "tests/unit/models/test_model_experts.py",
    "tests/unit/ops/test_expert_mlp.py", "tests/unit/inference/test_generation.py",
    "tests/dist/test_expert_layouts.py", "tests/dist/test_train_experts.py",
]  # fmt: skip

ROUTING, MLP, EXCHANGE, OP = "ops/routing.py", "ops/expert_mlp.py", "parallel/expert_exchange.py", "parallel/experts.py"
ACTIVATION = "ops/activation.py"
PASS, GROUP, GROUPS, MODEL = "parallel/router_pass.py", "parallel/expert_parallel.py", "comm/groups.py", "models/experts.py"
STEP, SHARDING, FLAT, STATE, STACK = (
    "training/step.py", "training/sharding.py", "optim/flat.py", "training/state.py", "models/language_model.py",
)  # fmt: skip
GRADIENTS, BLOCK, PLACES, VERIFY = "optim/gradients.py", "models/transformer.py", "parallel/parallel_context.py", "training/verify.py"

MUTANTS = [
    # the choice
    ("ties go to the higher number", ROUTING, "best = ranked.max(1, keepdim=True).indices", "best = spec.num_experts - 1 - ranked.flip(1).max(1, keepdim=True).indices"),
    ("the bias is part of the weights", ROUTING, "scores = torch.sigmoid(logits.gather(1, chosen))\n        weights", "scores = torch.sigmoid(logits.gather(1, chosen)) + (0 if bias is None else bias[chosen])\n        weights"),
    ("the bias decides nothing", ROUTING, "        scores = scores + bias.to(scores.dtype)\n", "        pass\n"),
    ("groups: by their best expert alone", ROUTING, "by_group.topk(max(1, spec.top_k // spec.group_top_k), 2)", "by_group.topk(1, 2)"),
    ("groups: all of them", ROUTING, "stable=True).indices[:, : spec.group_top_k]", "stable=True).indices"),
    ("weights are not scaled", ROUTING, "weights if spec.scaling == 1.0 else weights * spec.scaling", "weights"),
    ("one sigmoid is divided by itself", ROUTING, "+ _TINY) if spec.top_k > 1 else scores\n    elif", "+ _TINY)\n    elif"),
    ("the softmax is over all experts", ROUTING, "weights = torch.softmax(logits.gather(1, chosen), 1)", "weights = torch.softmax(logits, 1).gather(1, chosen)"),
    # its gradient
    ("weights: the softmax's other term is lost", ROUTING, "of_chosen = of_chosen - weights * (inner / spec.scaling)", "of_chosen = of_chosen"),
    ("weights: the scale is squared", ROUTING, "weights * (inner / spec.scaling)", "weights * inner"),
    ("weights: gradients of the experts that were not chosen are lost", ROUTING, "grad = (soft * -inner).scatter_add_(1, chosen, of_chosen)", "grad = torch.zeros_like(soft).scatter_add_(1, chosen, of_chosen)"),
    ("sigmoid: the sum has no gradient", ROUTING, "grad_chosen = (grad_chosen - (grad_chosen * scores).sum(1, keepdim=True) / total) / total", "grad_chosen = grad_chosen / total"),
    ("balance: its softmax's other term is lost", ROUTING, "soft * (grad_scores - (soft * grad_scores).sum(1, keepdim=True))", "soft * grad_scores"),
    ("z: half of it", ROUTING, "2.0 * z_weight", "z_weight"),
    ("the router gets nothing back", OP, "grad_a += (grad @ self.values.router.to(grad.dtype)).to(grad_a.dtype)\n", "pass\n"),
    ("the router's weight has no gradient", OP, "found = put_weight_grad_now(main_grad, weight, grad, a.to(grad.dtype))", "found = put_weight_grad_now(main_grad, weight, grad * 0, a.to(grad.dtype))"),
    # the experts
    ("experts: the output is not weighted", MLP, "torch.mm(activation.forward(u).mul_(weights), params.w2[expert]", "torch.mm(activation.forward(u), params.w2[expert]"),
    ("experts: the bias is not weighted", MLP, "y += weights.to(y.dtype) * params.b2[expert]", "y += params.b2[expert]"),
    ("experts: weights have no gradient from the bias", MLP, "            grad_weights[mine] += (g * params.b2[expert])", "            grad_weights[mine] += 0 * (g * params.b2[expert])"),
    ("experts: the gradient is not weighted", ACTIVATION, "self.backward_(grad.mul_(weights), u), out", "self.backward_(grad, u), out"),
    ("experts: the gradient of a gated activation is not weighted", ACTIVATION, "grad_up.mul_(grad[block].mul_(weights[block]))", "grad_up.mul_(grad[block])"),
    ("experts: fc2's gradient is not weighted", ACTIVATION, "        out.mul_(weights)\n", ""),
    ("experts: fc2's gradient of a gated activation is not weighted", ACTIVATION, "            out[block].mul_(weights[block])\n", ""),
    ("experts: one's rows are overwritten before what is put off reads them", MLP, "grad.index_select(0, rows) if grads.puts_off else of_g.take(grad, rows)", "of_g.take(grad, rows)"),
    ("experts: one's inputs are overwritten before what is put off reads them", MLP, "if memory is None or self.puts_off else", "if memory is None else"),
    ("experts: the bias's gradient is not weighted", MLP, "_Sum(grad * weights)", "_Sum(grad)"),
    ("experts: one without tokens keeps what was there", MLP, "                self._view[expert].zero_()\n", "                pass\n"),
    ("experts: each chunk overwrites the gradient", MLP, "        self._fresh[expert] = False\n", ""),
    ("experts: one expert is fresh if another was written", MLP, "self._fresh = [fresh] * len(param)", "self._fresh = [True] * len(param)"),
    ("put off: parts of the first chunk alone", MLP, "        for part in self.parts:\n", "        for part in self.parts[:1]:\n"),
    # the products of all experts as one
    ("as one: the output is not weighted", MLP, "_products(activation.forward(wide).mul_(weights), ", "_products(activation.forward(wide), "),
    ("as one: the bias of fc1 is lost", MLP, "        wide += _of_each(params.b1, counts)\n", "        pass\n"),
    ("as one: the bias is not weighted", MLP, "y.addcmul_(weights.to(y.dtype), _of_each(params.b2, counts))", "y.add_(_of_each(params.b2, counts))"),
    ("as one: weights have no gradient from the bias", MLP, "        grad_weights += (g * _of_each(params.b2, counts)).sum(1, dtype=dtype)\n", "        pass\n"),
    ("as one: fc2's gradient is not weighted", MLP, "    inner.mul_(weights)\n", ""),
    ("as one: the gradient is not weighted", MLP, "activation.backward_(grad_inner.mul_(weights), wide)", "activation.backward_(grad_inner, wide)"),
    ("as one: choices of other ranks' experts count", MLP, ".masked_fill_(of_choice[:, None] < 0, 0)", ""),
    ("as one: the first choice alone is added", MLP, "    for of_choice in place.view(len(total), k).unbind(1):", "    for of_choice in place.view(len(total), k).unbind(1)[:1]:"),
    ("as one: an expert's products begin where another's do", MLP, "list(accumulate(counts))", "list(accumulate(sorted(counts)))"),
    # exchanges
    ("rows: used before they arrive", OP, "arrived = coming.pop().wait()\n", "arrived = coming.pop()._result\n"),
    ("results: used before they arrive", OP, "        exchange.add_results(under_way[0].wait(), under_way[1], total)\n        if wide", "        exchange.add_results(under_way[0]._result, under_way[1], total)\n        if wide"),
    ("gradients of results: used before they arrive", OP, "exchange.received_grads(coming.pop().wait())", "exchange.received_grads(coming.pop()._result)"),
    ("gradients of rows: used before they arrive", OP, "        exchange.add_row_grads(under_way[0].wait(), under_way[1], grad_a, grad_weights)\n        router", "        exchange.add_row_grads(under_way[0]._result, under_way[1], grad_a, grad_weights)\n        router"),
    ("counts: used before they arrive", EXCHANGE, "received = self._coming.wait().view_as(self._send)", "received = self._coming._result.view_as(self._send)"),
    ("chunks: results of all but the last are lost", OP, "                exchange.add_results(under_way[0].wait(), under_way[1], total)\n            under_way", "                under_way[0].wait()\n            under_way"),
    ("chunks: gradients of all but the last are lost", OP, "                exchange.add_row_grads(under_way[0].wait(), under_way[1], grad_a, grad_weights)\n            under_way", "                under_way[0].wait()\n            under_way"),
    ("rows: an expert of another rank is taken for an own one", EXCHANGE, "torch.where((numbers >= 0) & (numbers < self._own), numbers, -1)", "numbers % self._own"),
    ("rows: results come back to the wrong ones", EXCHANGE, "mine.index_add_(0, journey.sent[part], ", "mine.index_add_(0, journey.sent[part].flip(0), "),
    ("rows: results of the last rank are lost", EXCHANGE, "for count in journey.send_counts:\n            part", "for count in journey.send_counts[:-1]:\n            part"),
    ("weights: their gradients stay away", EXCHANGE, "        self._add(form.weights(rows), journey, grad_weights)\n", ""),
    ("weights: their gradients are in another place", OP, "of_rows[choices.places] = found", "of_rows[choices.places.flip(0)] = found"),
    # around
    ("the residual's gradient is lost", OP, "passed = grad if passed is None else passed + grad", "passed = passed"),
    ("another consumer's gradient is lost", OP, "passed = grad if passed is None else passed + grad", "passed = grad"),
    ("padding chooses experts", PLACES, "return max(0, min(mine.stop, self.length) - mine.start)", "return mine.stop - mine.start"),
    ("shared expert: its input's gradient is not reduced", OP, "        reduced = tp.leave_async(part)\n        del part\n        if need.shared_b1", "        reduced = NO_TP.leave_async(part)\n        del part\n        if need.shared_b1"),
    ("shared expert: its output is not reduced", OP, "left = tp.leave_async(part).wait()", "left = NO_TP.leave_async(part).wait()[: x.shape[0]]"),
    ("shared expert: no gradient", OP, "        rows.add_(grad_a) if rows.dtype", "        rows.mul_(0).add_(grad_a) if rows.dtype"),
    ("dropout: experts are added without it", BLOCK, "onto=onto if dropout is None else None, add_input=dropout is None)", "onto=onto, add_input=True)"),
    # groups
    ("experts: gradients are summed over all ranks", SHARDING, "            own_groups[len(units)] = layout.ep.replicas\n", "            pass\n"),
    ("experts: with tp_seq tp ranks are no replicas", GROUP, "over_tp=tp_seq, check", "over_tp=False, check"),
    ("experts: every second rank has the same", GROUPS, '"ep": _mine(by_ep.flatten(0, 1).tolist()', '"ep": _mine(by_ep.transpose(1, 2).flatten(0, 1).tolist()'),
    ("norm: experts count on every replica", SHARDING, "own_groups.get(index, groups.dp_cp_sp).rank() > 0", "(index not in own_groups and groups.dp_cp_sp.rank() > 0)"),
    ("norm: a stage without experts sums over other ranks", SHARDING, "    if not has_experts:\n", "    if len(own_groups) == len(tables):\n"),
    ("norm: experts count once for each tp rank", MODEL, "self.weight_spec = spec if ep.counts else replace(spec, counted=())", "self.weight_spec = spec"),
    ("biases of experts have weight decay", FLAT, "return param.ndim - (0 if spec is None else spec.stacked) >= 2", "return param.ndim >= 2"),
    ("initial weights by the number on the rank", MODEL, 'replace(init, name=f"{init.name}.{expert}")', 'replace(init, name=f"{init.name}.{expert % own}")'),
    ("all ranks hold the first experts", MODEL, "runs = ((ep.rank * own, own),)", "runs = ((0, own),)"),
    ("put off: a block and its experts are completed early", GRADIENTS, "            if not to_come[index]:\n", "            if True:\n"),
    ("experts: reduced before their gradients are there", STACK, "partial(unit_boundary, events=events, units=experts)", "(lambda y, experts=experts: (unit_boundary(y, events, experts), events.backward_done(experts[0]))[0])"),
    ("experts: never reported", STACK, "if experts and events is not None else None", "if False else None"),
    ("the router's gradient is not summed under tp_seq", MODEL, "layout.tp.size, summed=layout.tp.seq)", "layout.tp.size)"),
    # terms
    ("balance: over what a rank has of a sequence", PASS, "counts = all_reduce(counts, step.ep.sequence)", "counts = counts"),
    ("balance: over what a rank has of the batch", PASS, "self.known = all_reduce(self.loads.clone(), self.ep.tokens)", "self.known = self.loads.clone()"),
    ("balance: over the micro-batches so far", PASS, "        self.settle()\n\n    def told", "        self.known = self.loads\n\n    def told"),
    ("balance: the weight is for a rank's sequences", PASS, "by = tokens.square() if self.spec.kind == \"global\" else sequences", "by = tokens.square() if self.spec.kind == \"global\" else sequences / self.ep.tokens.size()"),
    ("balance: without the loss scale", PASS, "self.spec.balance * scale / by", "self.spec.balance / by"),
    ("z: without the loss scale", PASS, "self.spec.z * scale / tokens", "self.spec.z / tokens"),
    ("balance: sequences of a batch are mixed up", PASS, "torch.arange(tokens, device=like.device) % self.batch", "torch.arange(tokens, device=like.device) // max(1, tokens // self.batch)"),
    ("slices: a sequence is its last slice", PASS, "self.counts[layer] = self.counts[layer] + counts if layer in self.counts else counts", "self.counts[layer] = counts"),
    ("recomputed layers count twice", OP, "if told is not None and first is None:", "if told is not None:"),
    ("loads are counted in both passes", PASS, "        if not counts_again:\n", "        if True:\n"),
    ("loads: tp ranks with the same tokens count each", PASS, "return told if self.ep.counts else torch.zeros_like(told)", "return told"),
    ("bias: towards the load", MODEL, "torch.sign(load.mean() - load)", "torch.sign(load - load.mean())"),
    ("bias: moved in a skipped step", MODEL, "step if skip is None else torch.where(skip, 0.0, step)", "step"),
    ("bias: by what this rank has counted", STEP, "self.model.update_expert_biases(self.routers.loads_in(told), skip)", "self.model.update_expert_biases(self.routers.loads.double(), skip)"),
    ("bias: not in the checkpoint", STATE, "return found | {name: GlobalTensor.whole(buffer) for name, buffer in self._buffers().items()}", "return found"),
    ("bias: not read for generation", "inference/stored_model.py", "        wanted |= {name: GlobalTensor.whole(bias) for name, bias in expert_biases(model).items()}\n", "        pass\n"),
    ("verification: loads are not compared", VERIFY, "0.0 if loads == got.loads else math.inf", "0.0"),
    ("verification: another micro-batch's choices are replayed", VERIFY, "None if replayed is None else replayed[index])", "None if replayed is None else replayed[-1 - index])"),
]  # fmt: skip
