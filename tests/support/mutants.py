"""Break the parallel layers on purpose, one line at a time, and see that some test turns red: ``make mutants``.

Each mutant drops, doubles or misplaces one wait, permutation, reduction, scale or sum in a temporary copy of the
repository, and the tests of the exchanges and layouts run there until the first failure, once without a mutant before.
A mutant that survives means that a test is missing. One whose text no longer occurs exactly once in the source is an
error: the list has to follow the code. The outcome is written to docs/explanation/mutants.md.

    python tests/support/mutants.py [--suite layers|zero|bert|kernels|context|cut|pipelines|experts|schedules] [--only WORD] [--write]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import (
    bert_mutants,
    context_cut_mutants,
    context_mutants,
    expert_mutants,
    kernel_mutants,
    pipeline_mutants,
    schedule_context_mutants,
    zero_mutants,
)
from support.paths import ROOT

TESTS = [
    "tests/dist/test_collectives.py", "tests/dist/test_mlp_pieces.py", "tests/dist/test_exchange.py", "tests/dist/test_history.py", "tests/dist/test_step_parity.py",
    "tests/unit/parallel/test_heads.py", "tests/unit/comm/test_shard_spec.py",
]  # fmt: skip
LIMIT_S = 600


class Mutant(NamedTuple):
    """One edit: ``old`` occurs exactly once in ``file`` (within the package)."""

    name: str
    file: str
    old: str
    new: str


ULYSSES, LINEAR, HEAD, TABLE = "parallel/ulysses.py", "parallel/linear.py", "parallel/lm_head.py", "parallel/embedding.py"
HEADS, CUT, COLLECTIVES, GRADIENTS = "parallel/heads.py", "parallel/parallel_context.py", "comm/collectives.py", "optim/gradients.py"
PIECES, SPLIT, BLOCK = "parallel/chunked_mlp.py", "parallel/split_projection.py", "parallel/attention_block.py"
TP, MODEL, GPT = "parallel/tensor_parallel.py", "models/transformer.py", "models/language_model.py"
LAYERS = "parallel/layers.py"

MUTANTS = [
    # waits
    Mutant("handle: the work is not waited for", COLLECTIVES, "            self._work.wait() if self._flight is None else self._flight.wait(self._work)\n", "            pass\n"),
    Mutant("handle: may be waited for twice", COLLECTIVES, "        self._waited = True\n", "        self._waited = False\n"),
    Mutant("reduce-scatter: parts are added up before they are there", COLLECTIVES,
           'return Handle(work, x if out is None else out, "reduce_scatter", add_up, operand=x)', 'return Handle(work, add_up(), "reduce_scatter", operand=x)'),
    Mutant("column: x used before it is gathered, forward", LINEAR, "a = tp.enter_async(normed).wait()", "a = tp.enter_async(normed)._result"),
    Mutant("column: x used before it is gathered, dW", LINEAR, "grad2, rows_of(gathered.wait()))\n    del normed", "grad2, rows_of(gathered._result))\n    del normed"),
    Mutant("column: gradient used before it is reduced", LINEAR, "norm, reduced.wait(), x, stats", "norm, reduced._result, x, stats"),
    Mutant("column: gradient used before it is reduced, no norm", LINEAR, "grad_x = reduced.wait() if passed is None", "grad_x = reduced._result if passed is None"),
    Mutant("column: gradient waited for twice", LINEAR, "grad_x = reduced.wait() if passed is None", "grad_x = (reduced.wait(), reduced.wait())[1] if passed is None"),
    Mutant("row: result used before it is reduced", LINEAR, "y = tp.leave_async(y).wait()", "y = tp.leave_async(y)._result"),
    Mutant("row: gradient used before it is gathered", LINEAR, "        grad = gathered.wait()\n", "        grad = gathered._result\n"),
    Mutant("embedding: result used before it is reduced", TABLE, "return tp.leave_async(out).wait()", "return tp.leave_async(out)._result"),
    Mutant("embedding: gradient used before it is gathered", TABLE, "whole = gathered.wait()", "whole = gathered._result"),
    Mutant("head: x used before it is gathered", HEAD, "rows_of(tp.enter_async(x).wait())", "rows_of(tp.enter_async(x)._result)"),
    Mutant("head: gradient used before it is reduced", HEAD, "ctx.grad_x, ctx.reduced = ctx.reduced.wait(), None", "ctx.grad_x, ctx.reduced = ctx.reduced._result, None"),
    Mutant("attention: heads used before they arrive", ULYSSES, "recv_buffers = [handle.wait() for handle in coming[index]]", "recv_buffers = [handle._result for handle in coming[index]]"),
    Mutant("attention: context used before it arrives", ULYSSES, "chunk, 0, next(waiting).wait()", "chunk, 0, next(waiting)._result"),
    Mutant("attention: gradient of the context used before it arrives", ULYSSES, "d_out = coming.pop(index).wait()", "d_out = coming.pop(index)._result"),
    Mutant("attention: gradients of the heads used before they arrive", BLOCK, "run.by_rows(handle.wait(), message)", "run.by_rows(handle._result, message)"),
    Mutant("attention: x used before it is gathered, forward", BLOCK, "a = plan.tp.enter_async(normed).wait()", "a = plan.tp.enter_async(normed)._result"),
    Mutant("attention: x used before it is gathered, dW", BLOCK, "a2 = rows_of(a.wait()) if a2 is None else a2", "a2 = rows_of(a._result) if a2 is None else a2"),
    Mutant("attention: gradient used before it is gathered", BLOCK, "grad2 = rows_of(gathered.wait())", "grad2 = rows_of(gathered._result)"),
    Mutant("attention: gradient used before it is reduced", BLOCK, "norm_gradients(self.norm, reduced.wait(), ", "norm_gradients(self.norm, reduced._result, "),
    Mutant("gradients: the unit's sum is not waited for", GRADIENTS, "self._handles.pop(index).wait()", "self._handles.pop(index)._result"),
    Mutant("MLP in pieces: input used before it is gathered, forward", PIECES, "a = entered.wait()", "a = entered._result"),
    Mutant("MLP in pieces: input used before it is gathered, backward", PIECES, "self._products(entered.normed.wait(), ", "self._products(entered.normed._result, "),
    Mutant("MLP in pieces: gradient used before it is gathered", PIECES, "entered.grad.wait())", "entered.grad._result)"),
    Mutant("MLP in pieces: result used before it is reduced", PIECES, "left[0], left[1].wait()", "left[0], left[1]._result"),
    Mutant("MLP in pieces: gradient used before it is reduced", PIECES, "norm_backward(reduced.wait(), ", "norm_backward(reduced._result, "),
    Mutant("MLP in pieces: every piece overwrites the weight's gradient", PIECES, "        self._fresh = False\n", ""),
    Mutant("MLP in pieces: the bias is added on every rank", PIECES, "b2 if plan.tp.size == 1 else None", "b2"),
    Mutant("MLP in pieces: the last piece is not joined", PIECES, "        if under_way is not None:\n            _join(under_way, stream, y, late_bias, row_keys, plan.rate)\n        return y",
           "        return y"),
    Mutant("MLP in pieces: the first piece's mask for all", PIECES, "dropped(branch, rate, row_keys[piece], ", "dropped(branch, rate, row_keys[: piece.stop - piece.start], "),
    Mutant("MLP in pieces: no residual gradient", PIECES, "norm.spec, need, passed)", "norm.spec, need)"),
    # reductions
    Mutant("tp: leave without a sum", TP, "            return all_reduce_async(x, self.group).recorded(flight)\n", "            return done(x)\n"),
    Mutant("tp: leave sums twice", TP, "return all_reduce_async(x, self.group).recorded(flight)\n", "return all_reduce_async(all_reduce_async(x, self.group).wait(), self.group)\n"),
    Mutant("tp_seq: the gather takes a copy of what is here", TP, "        return all_gather_async(x, self.group, out).recorded(flight)\n",
           "        return done(x.repeat(self.size, *[1] * (x.ndim - 1)))\n"),
    Mutant("reduce-scatter: a part is missing", COLLECTIVES, "for part in by_rank[2:]:", "for part in by_rank[3:]:"),
    Mutant("reduce-scatter: a part is added twice", COLLECTIVES, "torch.add(by_rank[0], by_rank[1], out=result)", "torch.add(by_rank[0], by_rank[1], out=result).add_(by_rank[0])"),
    Mutant("head: maxima are not shared", HEAD, 'tp.all_reduce(logits.amax(1, keepdim=True), "max")', "logits.amax(1, keepdim=True)"),
    Mutant("head: sums are not shared", HEAD, "sums, at_label = tp.all_reduce(torch.stack([sums, at_label]))", "sums, at_label = torch.stack([sums, at_label])"),
    Mutant("head: gradient of x is not reduced", HEAD, "tp.leave_async(grads.x.view(x.shape[0] * tp.parts, *x.shape[1:]))",
           "TensorParallel().leave_async(grads.x.view(x.shape[0] * tp.parts, *x.shape[1:])[: x.shape[0]])"),
    Mutant("head: labels of other ranks count here", HEAD, "            at_label.masked_fill_(self._elsewhere, 0.0)\n", "            pass\n"),
    Mutant("embedding: rows of other ranks are not zeroed", TABLE, "        if elsewhere is not None:\n            out.view", "        if False:\n            out.view"),
    Mutant("embedding: gradients of other ranks' rows land here", TABLE, "            grad2 = fill(elsewhere[:, None], 0.0)", "            pass"),
    Mutant("gradients: not summed over dp and sp", GRADIENTS, "self._handles[index] = all_reduce_async(travels, group)", "self._handles[index] = Handle(None, travels, 'nothing')"),
    Mutant("gradients: summed twice over dp and sp", GRADIENTS, "self._handles[index] = all_reduce_async(travels, group)",
           "self._handles[index] = all_reduce_async(all_reduce(unit.grads, self.group), self.group)"),
    Mutant("gradients: replicas are not summed over tp", GRADIENTS, "        all_reduce(packed, self.tp)\n", "        pass\n"),
    Mutant("gradients: replicas are summed twice over tp", GRADIENTS, "        all_reduce(packed, self.tp)\n", "        all_reduce(all_reduce(packed, self.tp), self.tp)\n"),
    Mutant("norm weights are not summed under tp_seq", LAYERS, 'summed=layout.tp.seq or sees == "heads")', 'summed=sees == "heads")'),
    Mutant("QK norms are not summed over heads", LAYERS, 'summed=layout.tp.seq or sees == "heads")', "summed=layout.tp.seq)"),
    Mutant("row biases are not summed under tp_seq", LAYERS, "ShardSpec.whole((out_features,), tp.rank, tp.size, summed=tp.seq)", "ShardSpec.whole((out_features,), tp.rank, tp.size)"),
    Mutant("row biases are summed without tp_seq", LAYERS, "ShardSpec.whole((out_features,), tp.rank, tp.size, summed=tp.seq)", "ShardSpec.whole((out_features,), tp.rank, tp.size, summed=True)"),
    Mutant("position table is not summed under tp_seq", LAYERS, "layout.tp.rank, layout.tp.size, summed=layout.tp.seq)", "layout.tp.rank, layout.tp.size)"),
    Mutant("replicated keys are not summed", MODEL, "sums = (Sum(heads * d, 2 * d, group, g),)", "sums = ()"),
    Mutant("replicated keys are counted by every rank", MODEL, "(heads + 2 if at == 0 else heads) * d", "(heads + 2) * d"),
    # permutations
    Mutant("attention: gradients of heads are not put in order", ULYSSES, "copy_(arrived.view(self.sp.size, self.tokens, -1).transpose(0, 1))",
           "copy_(arrived.view(self.tokens, self.sp.size, -1))"),
    Mutant("attention: context columns in order of arrival", ULYSSES, "yield columns, arrived[at : at + self.tokens * width].view(self.tokens, width)",
           "yield columns, arrived[at : at + self.tokens * width].view(width, self.tokens).t()"),
    Mutant("recomputation: attention's results in the wrong order", "ops/lse_kernels.py", "self._entries.popleft() if", "self._entries.pop() if"),
    Mutant("recomputation: what has come back is kept in the wrong order", BLOCK, "*(piece for _, piece in pieces))",
           "*(piece for _, piece in reversed(pieces)))"),
    Mutant("heads made again: those of the last chunk for each", ULYSSES, "again[following] = self._project_and_send(chunks[following].again",
           "again[following] = self._project_and_send(chunks[last].again"),
    Mutant("heads made again: used before they arrive", ULYSSES, "[handle.wait() for handle in again.pop(index)]", "[handle._result for handle in again.pop(index)]"),
    Mutant("heads made again: with every chunk's keys", HEADS, "return range(0) if any(uses == later.uses for later in shares[index + 1 :]) else uses",
           "return uses"),
    Mutant("heads made again: gradients of keys from the first chunk alone", ULYSSES, "        if group in d_shared:\n", "        if group in d_shared and not sources:\n"),
    Mutant("recomputation: the output is kept before its last row", BLOCK, 'plan.kept.keep("received", *(piece for',
           'plan.kept.keep("received", *(piece.roll(1, 0) for'),
    Mutant("attention: uneven gradients transposed", ULYSSES, "whole[:, column : column + block.shape[1]] = block",
           "whole[:, column : column + block.shape[1]] = block.flip(1)"),
    Mutant("attention: only the last piece of the context is projected", SPLIT,
           "        torch.addmm(rows_of(y), out, weight[:, columns].t(), out=rows_of(y))\n", "        torch.mm(out, weight[:, columns].t(), out=rows_of(y))\n"),
    Mutant("attention: weight gradient of the last piece only", SPLIT, "torch.addmm(view[:, columns], grad.t(), piece, beta=0.0 if fresh else 1.0",
           "torch.addmm(view[:, columns], grad.t(), piece, beta=0.0"),
    Mutant("attention: pieces of the context in each other's place", ULYSSES, "            whole[:, columns] = piece\n", "            whole[:, : piece.shape[1]] = piece\n"),
    Mutant("attention: send blocks by token", SPLIT, "blocks, by_rank = out.view(ranks, tokens, widths[0]),", "blocks, by_rank = out.view(tokens, ranks, widths[0]).transpose(0, 1),"),
    Mutant("attention: rows of weight gradients shifted", SPLIT, "at += run.stop - run.start\n\n    def result", "at += 0\n\n    def result"),
    Mutant("attention: the way back goes to the wrong ranks", ULYSSES, "columns = w_proj[:, share.queries.start * d : share.queries.stop * d]",
           "columns = w_proj[:, : len(share.queries) * d]"),
    Mutant("heads: queries before keys in uniform groups", HEADS, "if not share.keys or not is_uniform(share, r):", "if True:"),
    Mutant("heads: key and value change places", HEADS, "*queries[i * each : (i + 1) * each], k, v]", "*queries[i * each : (i + 1) * each], v, k]"),
    Mutant("heads: each part of a group brings its keys", HEADS, "mine if index == 0 else range(0), mine", "mine, mine"),
    Mutant("heads: the last ranks get more", HEADS, "i * least + min(i, longer)", "i * least + max(0, i - parts + longer)"),
    Mutant("attention: q and k messages change places", HEADS, '("q", "k", "v") if mode', '("k", "q", "v") if mode'),
    Mutant("cut: sp ranks in reverse", CUT, "return slice(self.sp.rank * each, (self.sp.rank + 1) * each)", "return slice((self.sp.size - 1 - self.sp.rank) * each, (self.sp.size - self.sp.rank) * each)"),
    Mutant("cut: tp ranks in reverse under tp_seq", CUT, "self.tp.rank * each if", "(self.tp.parts - 1 - self.tp.rank) * each if"),
    Mutant("vocabulary: rows of the wrong rank", HEAD, "first_row = tp.rank * weight.shape[0]", "first_row = (tp.size - 1 - tp.rank) * weight.shape[0]"),
    # scales and sums
    Mutant("row: bias is added on every rank before the sum", LINEAR, "    torch.mm(rows_of(a), weight.t(), out=rows_of(y))\n    y = tp", "    multiply(rows_of(a), weight, bias, out=rows_of(y))\n    y = tp"),
    Mutant("row: residual is added twice", LINEAR, "        y.add_(residual)\n", "        y.add_(residual).add_(residual)\n"),
    Mutant("row: residual is dropped", LINEAR, "        y.add_(residual)\n", "        pass\n"),
    Mutant("column: the residual's gradient is dropped", LINEAR, "reduced.wait() if passed is None else reduced.wait().add_(passed)", "reduced.wait()"),
    Mutant("attention: the residual's gradient is dropped", BLOCK, "passed, late = (grad, None) if passed is None else (passed, grad)", "late = None"),
    Mutant("attention: the residual's gradient is doubled", BLOCK, "passed, late = (grad, None) if passed is None else (passed, grad)", "passed, late = (add(grad, grad), None) if passed is None else (passed, grad)"),
    Mutant("attention: one of the input's two gradients from outside is dropped", BLOCK, "            grad_x.add_(late)\n", "            pass\n"),
    Mutant("parallel residual: the MLP reads what attention made", MODEL, "return self._mlp(x, norm, ctx, onto=y) if self.parallel", "return self._mlp(y, norm, ctx, onto=y) if self.parallel"),
    Mutant("parallel residual: attention's branch is left out", MODEL, "stream = x if onto is None else onto", "stream = x"),
    Mutant("MLP in pieces: the other stream gets no gradient", PIECES, "self.grad if self.need.onto else None", "None"),
    Mutant("window: lost after the exchange", MODEL, "mask = self.layer.mask(ctx, len(share.queries) // q.shape[2])", "mask = fold_mask(ctx.mask, len(share.queries) // q.shape[2])"),
    Mutant("attention: gradient of x from the last message only", BLOCK, "take(w_qkv, rows), beta=0.0 if first else 1.0", "take(w_qkv, rows), beta=0.0"),
    Mutant("attention: followers' key gradients are dropped", ULYSSES, "d_kv = [a + b for a, b in zip(d_kv, d_shared.pop(group), strict=True)]", "d_shared.pop(group)"),
    Mutant("attention: only the last follower's key gradients", ULYSSES, "        if group in d_shared:\n", "        if group in d_shared and share.keys:\n"),
    Mutant("attention: replicas of a key overwrite each other", SPLIT, "self._overwrite = fresh and rows_differ", "self._overwrite = fresh"),
    Mutant("attention by hand: gradients of queries are not rotated back", MODEL, "if rotary is not None and part != \"v\":", "if False:"),
    Mutant("attention by hand: those of values are rotated, too", MODEL, "if rotary is not None and part != \"v\":", "if rotary is not None:"),
    Mutant("attention by hand: keys are not rotated", MODEL, "                rotate_heads(recv_buffers[\"k\"], *rotary, d)\n", "                pass\n"),
    Mutant("attention by hand: tensors of the chunk before", ULYSSES, "self.tensors = tuple(islice(saved, self._count))", "self.tensors = tuple(saved)[-self._count :]"),
    Mutant("biases: the second gradient overwrites the first", "ops/main_grad.py", "    elif fresh and view.dtype == (wide or grad_out.dtype):", "    elif view.dtype == (wide or grad_out.dtype):"),
    Mutant("attention: core gradients of the last chunk only", ULYSSES, "of_core = [add(total, g) for total", "of_core = [g for total"),
    Mutant("attention: padding of the context is what was in memory", ULYSSES, "        whole[self.plan.seq_length :].zero_()\n", ""),
    Mutant("attention: padding is attended to", ULYSSES, "buffer.view(self.padded_length, self.batch, -1)[:s]", "buffer.view(self.padded_length, self.batch, -1)[-s:]"),
    Mutant("attention: bias of the projection to ranks is dropped", SPLIT, "            blocks.add_(bias.view(ranks, 1, -1))\n", "            pass\n"),
    Mutant("head: a later scale does not reach x", HEAD, "return torch.mul(grad, grad_sum, out=", "return torch.mul(grad, 1.0, out="),
    Mutant("head: a later scale does not reach W, ahead", HEAD, "ctx.ahead.mul_(grad_sum)", "ctx.ahead.mul_(1.0)"),
    Mutant("head: a later scale does not reach W", HEAD, "(grad * grad_sum).to(weight.dtype)", "grad.to(weight.dtype)"),
    Mutant("head: chunks overwrite dW", HEAD, "x * row_weight, fresh=part.start == 0)", "x * row_weight, fresh=True)"),
    Mutant("head: token weights are dropped in dx", HEAD, "                grads.add_chunk(part, grad_logits, row_weight, x2[part], weight)\n",
           "                grads.add_chunk(part, grad_logits, row_weight, x2[part], weight)\n                torch.mm(grad_logits, weight, out=grads.x[part]).div_(sums)\n"),
]  # fmt: skip


class Suite(NamedTuple):
    """Mutants that the same tests have to find, and the page that says so."""

    title: str
    page: str
    tests: list[str]
    mutants: list[Mutant]


SUITES = {
    "layers": Suite("the parallel layers", "docs/explanation/mutants.md", TESTS, MUTANTS),
    "bert": Suite("BERT", "docs/explanation/mutants_bert.md", bert_mutants.TESTS, [Mutant(*m) for m in bert_mutants.MUTANTS]),
    "kernels": Suite(
        "Triton's kernels", "docs/explanation/mutants_kernels.md", kernel_mutants.TESTS, [Mutant(*m) for m in kernel_mutants.MUTANTS]
    ),
    "zero": Suite("ZeRO", "docs/explanation/mutants_zero.md", zero_mutants.TESTS, [Mutant(*m) for m in zero_mutants.MUTANTS]),
    "context": Suite(
        "context parallelism", "docs/explanation/mutants_context.md", context_mutants.TESTS, [Mutant(*m) for m in context_mutants.MUTANTS]
    ),
    "cut": Suite(
        "the cut for context parallelism",
        "docs/explanation/mutants_context_cut.md",
        context_cut_mutants.TESTS,
        [Mutant(*m) for m in context_cut_mutants.MUTANTS],
    ),
    "pipelines": Suite(
        "pipelines", "docs/explanation/mutants_pipelines.md", pipeline_mutants.TESTS, [Mutant(*m) for m in pipeline_mutants.MUTANTS]
    ),
    "experts": Suite("experts", "docs/explanation/mutants_experts.md", expert_mutants.TESTS, [Mutant(*m) for m in expert_mutants.MUTANTS]),
    "schedules": Suite(
        "context parallelism in schedules",
        "docs/explanation/mutants_schedule_context.md",
        schedule_context_mutants.TESTS,
        [Mutant(*m) for m in schedule_context_mutants.MUTANTS],
    ),
}


def apply(mutant: Mutant, root: Path) -> None:
    """Edit the copy under ``root``.

    Raises:
        SystemExit: the text is not there exactly once.
    """
    path = root / "megatron_sp" / mutant.file
    source = path.read_text()
    if (count := source.count(mutant.old)) != 1:
        raise SystemExit(
            f"mutant {mutant.name!r}: its text occurs {count} times in {mutant.file}, not once: adapt tests/support/mutants.py"
        )
    path.write_text(source.replace(mutant.old, mutant.new))


def copy_repository(to: Path) -> None:
    for name in ("megatron_sp", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*.toml"):
        shutil.copy(path, to)


def run_tests(root: Path, tests: list[str]) -> tuple[str, str, float]:
    """("killed" or "survived", the first test that failed, seconds) of the tests in the copy."""
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "killed", f"(over {LIMIT_S} s)", time.monotonic() - start
    took = time.monotonic() - start
    if done.returncode == 0:
        return "survived", "", took
    if done.returncode != 1:  # nothing was tested: the mutant is not valid Python, or the tests are not
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    first = re.search(r"^(?:FAILED|ERROR) (\S+?::[\w]+)", done.stdout, re.MULTILINE)
    return "killed", first.group(1) if first else "?", took


def table(title: str, outcomes: list[tuple[Mutant, str, str]]) -> str:
    killed = sum(outcome == "killed" for _, outcome, _ in outcomes)
    lines = [
        f"# Mutants of {title}", "",
        "Written by `make mutants` (`tests/support/mutants.py`): each line breaks one wait, reduction, permutation, scale or sum; the last column is",
        "the first test that turned red. A mutant that survives is a missing test.", "",
        f"{killed} of {len(outcomes)} killed.", "",
        "| mutant | file | outcome | first red test |", "|---|---|---|---|",
    ]  # fmt: skip
    lines += [f"| {m.name} | `{m.file}` | {outcome} | `{test.removeprefix('tests/')}` |" for m, outcome, test in outcomes]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Break the parallel layers on purpose and see that tests notice.")
    parser.add_argument("--suite", choices=sorted(SUITES), default="layers", help="what is broken (default: layers)")
    parser.add_argument("--only", default="", help="mutants whose name or file contains this")
    parser.add_argument("--write", action="store_true", help="write the suite's page in docs/")
    parser.add_argument("--check", action="store_true", help="only see that every mutant still fits the source")
    args = parser.parse_args()
    suite = SUITES[args.suite]
    chosen = [m for m in suite.mutants if args.only in m.name or args.only in m.file]
    outcomes = []
    with tempfile.TemporaryDirectory() as scratch:
        clean = Path(scratch) / "clean"
        copy_repository(clean)
        for mutant in chosen:  # before minutes of tests
            source = (clean / "megatron_sp" / mutant.file).read_text()
            if (count := source.count(mutant.old)) != 1:
                raise SystemExit(
                    f"mutant {mutant.name!r}: its text occurs {count} times in {mutant.file}, not once: adapt tests/support/mutants.py"
                )
        if args.check:
            return 0
        outcome, test, took = run_tests(clean, suite.tests)
        if outcome != "survived":  # a test that is red without a mutant would kill them all
            raise SystemExit(f"without a mutant {test} is red: nothing can be said about the mutants")
        print(f"green    {took:5.0f} s  (no mutant)", flush=True)
        for number, mutant in enumerate(chosen):
            broken = Path(scratch) / f"mutant{number}"
            shutil.copytree(clean, broken)
            apply(mutant, broken)
            outcome, test, took = run_tests(broken, suite.tests)
            shutil.rmtree(broken)
            outcomes.append((mutant, outcome, test))
            print(f"{outcome:8} {took:5.0f} s  {mutant.name}  {test}", flush=True)
    if args.write:
        (ROOT / suite.page).write_text(table(suite.title, outcomes))
    survived = [m.name for m, outcome, _ in outcomes if outcome == "survived"]
    print(f"{len(outcomes) - len(survived)} of {len(outcomes)} killed" + (f"; survived: {survived}" if survived else ""))
    return 1 if survived else 0


if __name__ == "__main__":
    raise SystemExit(main())
