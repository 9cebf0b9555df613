"""LM head and cross entropy fused into one op that never materializes the logits of a whole sequence."""

# Tokens are processed in chunks: the logits of a chunk are turned into the loss and immediately into the gradients of x
# and W, then freed. That is three GEMMs, as many as without chunks. The gradients are those of the summed loss;
# backward multiplies them by its incoming gradient (1/tokens, a loss scale). Compare Liger's fused linear cross entropy
# (arXiv:2410.10989).
#
# The cost: the weight's gradient is alive from the head's forward on. It is written directly to the main_grad if that
# is free (in the first micro-batch of a step), else to a buffer of its own.
#
# With the vocabulary split over tp ranks each chunk needs two small all-reduces, of the row maxima and of the row sums
# and label logits; the gradient of x, a partial sum on each rank, is reduced once, between forward and backward.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.comm.collectives import all_gather_async
from megatron_sp.ops.allocator import empty
from megatron_sp.ops.kernels.launch import is_fused
from megatron_sp.ops.main_grad import MainGrad, put_grad, put_product
from megatron_sp.parallel.linear import rows_of
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel

_CHUNK_BYTES = {"cpu": 52 * 2**20, "cuda": 2**29}
_MOST_TOKENS = {"cpu": 512, "cuda": 2**20}


def default_chunk_tokens(vocab_rows: int, device_type: str = "cpu") -> int:
    """Return how many tokens have fp32 logits of about 52 MiB (CPU) or 512 MiB (GPU)."""
    # each chunk reads and writes the whole weight gradient once: with few tokens that takes a GPU longer than the
    # product itself. On a CPU 512 tokens are enough for any vocabulary.
    kind = device_type if device_type in _CHUNK_BYTES else "cuda"
    return min(_MOST_TOKENS[kind], max(128, _CHUNK_BYTES[kind] // (4 * vocab_rows) // 64 * 64))


def lm_head_loss(
    x: Tensor, weight: Tensor, labels: Tensor, loss_mask: Tensor, *, vocab_size: int, bias: Tensor | None = None,
    chunk_tokens: int | None = None, tp: TensorParallel = NO_TP, main_grad: MainGrad | None = None,
) -> HeadLoss:  # fmt: skip
    """Compute the sum over tokens of loss_mask * cross_entropy(x @ weight.T + bias, labels).

    Args:
        x: [s/parts, b, h].
        weight: [rows/tp, h]; rows of the whole from vocab_size on are padding with zero probability.
        labels: int64 [s, b], in [0, vocab_size) wherever loss_mask [s, b] is not 0.
        main_grad: receives the gradients of weight and bias [rows/tp].
    """
    chunk = chunk_tokens or default_chunk_tokens(weight.shape[0], x.device.type)
    first_row = tp.rank * weight.shape[0]
    valid = min(max(vocab_size - first_row, 0), weight.shape[0])
    # inside forward autograd is always off, and needs_input_grad ignores torch.no_grad(): only here is it known whether
    # backward can come
    options = _Options(first_row, valid, vocab_size, chunk, tp, main_grad, torch.is_grad_enabled())
    return HeadLoss(*_LMHeadLoss.apply(options, x, weight, bias, labels, loss_mask))


class HeadLoss(NamedTuple):
    """Output of the LM head."""

    # weighted sum of the losses, a differentiable scalar in fp32 or wider, the same on every rank of the group
    sum: Tensor
    tokens: Tensor  # unweighted loss of every token [s, b], detached
    hits: Tensor  # bool [s, b], True where no other entry is likelier than the label (ties count as hits)


class _Options(NamedTuple):
    # arguments of the op that are not tensors
    first_row: int  # of this rank's rows of the table
    valid_rows: int  # number of this rank's that are not padding
    vocab_size: int  # rows of all ranks that are not padding
    chunk_tokens: int
    tp: TensorParallel
    main_grad: MainGrad | None
    train: bool  # backward may follow


class _ForwardGrads:
    # gradients of the summed loss, which forward computes chunk by chunk; None for one that is not needed

    def __init__(self, need: tuple[bool, bool, bool], x: Tensor, weight: Tensor, main_grad: MainGrad | None) -> None:
        (need_x, need_weight, need_bias), wide = need, _wide(x)
        # [s * b, h], on each tp rank a part of the sum
        self.x = empty(x.shape, dtype=x.dtype, device=x.device) if need_x else None
        # [rows/tp, h]: the main_grad's own view if that is free, else a buffer
        self.weight = main_grad.reserve_ahead(weight) if main_grad is not None and need_weight else None
        self.is_ahead = self.weight is not None
        if need_weight and self.weight is None:
            self.weight = empty(weight.shape, dtype=wide, device=x.device)
        if self.weight is not None and x.shape[0] == 0:
            self.weight.zero_()  # no chunk will write it
        self.bias = torch.zeros(weight.shape[0], dtype=wide, device=x.device) if need_bias else None
        self.any_needed = any(need)

    def add_chunk(self, part: slice, grad_logits: Tensor, row_weight: Tensor | None, x: Tensor, weight: Tensor) -> None:
        # from grad_logits [t, rows/tp], whose rows are yet to be multiplied by ``row_weight`` [t, 1] if it is given
        if self.x is not None:
            of_x = torch.mm(grad_logits, weight, out=self.x[part])
            if row_weight is not None:
                of_x.mul_(row_weight)
        if self.weight is not None:
            put_product(self.weight, grad_logits, x if row_weight is None else x * row_weight, fresh=part.start == 0)
        if self.bias is not None and row_weight is None:
            from megatron_sp.ops.kernels import biases

            biases.put_column_sums(grad_logits, (self.bias, False))
        elif self.bias is not None and row_weight is not None:
            self.bias += torch.mv(grad_logits.t(), row_weight[:, 0])


class _LMHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: _Options, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # those of losses and hits would be zeros
        _, valid_rows, _, chunk, tp, main_grad, train = options
        wide = _wide(x)
        tp.mark("head")
        x2, labels1, mask1 = rows_of(tp.enter_async(x).wait()), labels.reshape(-1), loss_mask.reshape(-1).to(wide)
        token_loss = torch.empty(x2.shape[0], dtype=wide, device=x.device)
        hits = torch.empty(x2.shape[0], dtype=torch.bool, device=x.device)
        need_x, need_weight, need_bias = (train and needed for needed in ctx.needs_input_grad[1:4])
        grads = _ForwardGrads((need_x, need_weight, need_bias), x2, weight, main_grad)
        logits: Tensor | None = None  # one buffer for all chunks: fresh pages would cost as much as a pass over them
        for start in range(0, x2.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = _logits(x2[part], weight, bias, valid_rows, wide, logits)
            chunk_of = _FusedChunk if is_fused(logits) else _Chunk
            loss = chunk_of(logits, labels1[part], options, (token_loss[part], hits[part]))
            if grads.any_needed:
                grad_logits, row_weight = loss.grad_of_logits_(mask1[part, None], x.dtype)
                grads.add_chunk(part, grad_logits, row_weight, x2[part], weight)
                del grad_logits  # not beside the next chunk's
        ctx.save_for_backward(None if grads.is_ahead else grads.weight, grads.bias)
        ctx.ahead = grads.weight if grads.is_ahead else None
        ctx.params, ctx.tp, ctx.main_grad = (weight, bias), tp, main_grad
        ctx.reduced = None if grads.x is None else tp.leave_async(grads.x.view(x.shape[0] * tp.parts, *x.shape[1:]))
        ctx.grad_x, ctx.shape = None, x.shape
        token_loss_sb, hits_sb = token_loss.view(labels.shape), hits.view(labels.shape)
        ctx.mark_non_differentiable(token_loss_sb, hits_sb)
        # where the mask is 0 the label may be anything, and 0 * inf must not become NaN
        return (token_loss * mask1).masked_fill_(mask1 == 0, 0.0).sum(), token_loss_sb, hits_sb

    @staticmethod
    def backward(ctx: Any, grad_sum: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.tp.mark("head")
        grad_weight, grad_bias = ctx.saved_tensors
        weight, bias = ctx.params
        if ctx.reduced is not None:
            ctx.grad_x, ctx.reduced = ctx.reduced.wait(), None
        x = of_weight = None
        if ctx.grad_x is not None:
            # in the width of the loss: rounded to 16 bits, 1/tokens would change the scale of the whole model's
            # gradient, and a loss scale would overflow
            scaled = empty(ctx.grad_x.shape, dtype=grad_sum.dtype, device=grad_sum.device)
            x = torch.mul(ctx.grad_x, grad_sum, out=scaled).to(ctx.grad_x.dtype).view(ctx.shape)
        if ctx.ahead is not None:
            ctx.ahead.mul_(grad_sum)
            ctx.ahead = None  # the graph lives on, and with ZeRO 2 and 3 the unit's whole gradients must not
            ctx.main_grad.finish(weight)
        of_bias = None if grad_bias is None else put_grad(ctx.main_grad, bias, grad_bias * grad_sum)
        if grad_weight is not None:
            reserved = ctx.main_grad.reserve(weight) if ctx.main_grad is not None else None
            if reserved is None:
                of_weight = (grad_weight * grad_sum).to(weight.dtype)
            elif reserved[1]:  # in one pass, as the first to write
                torch.mul(grad_weight, grad_sum, out=reserved[0])
            else:
                reserved[0].addcmul_(grad_weight, grad_sum)
        return None, x, of_weight, of_bias, None, None


def _wide(x: Tensor) -> torch.dtype:
    # the dtype of logits and losses: that of x, but at least fp32
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def lm_head_logits(
    x: Tensor, weight: Tensor, vocab_size: int, bias: Tensor | None = None, tp: TensorParallel = NO_TP
) -> Tensor:
    """Compute logits [..., h] -> [..., vocab_size], fp32 or wider, on every rank; for generation."""
    rows = vocab_size if tp.size == 1 else weight.shape[0]
    logits = x @ weight[:rows].t()
    wide = (logits if bias is None else logits + bias[:rows]).to(_wide(x))
    if tp.size == 1:
        return wide
    by_row = wide.reshape(-1, rows).t().contiguous()  # [rows/tp, t]: ranks' parts are joined along the first dim
    return all_gather_async(by_row, tp.group).wait()[:vocab_size].t().reshape(*x.shape[:-1], vocab_size)


def _local_labels(labels: Tensor, options: _Options) -> tuple[Tensor, Tensor | None]:
    # local row of each label [t, 1]; mask of labels on other ranks [t, 1], for which the row is arbitrary
    valid = labels.clamp(0, options.vocab_size - 1)[:, None]  # where the mask is 0 a label may be anything
    if options.tp.size == 1:
        return valid, None
    local = valid - options.first_row
    elsewhere = (local < 0) | (local >= options.valid_rows)
    return local.masked_fill(elsewhere, 0), elsewhere


def _logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, valid_rows: int, wide: torch.dtype, buffer: Tensor | None
) -> Tensor:
    # logits [t, rows] in dtype ``wide``, with -inf for padding rows; ``buffer`` is reused if it fits
    if x.dtype != wide and not x.is_cuda:
        logits = torch.mm(x, weight.t()).to(wide)
    else:
        fits = buffer is not None and buffer.shape[0] == x.shape[0]
        if fits and buffer is not None:
            logits = buffer
        else:
            logits = empty((x.shape[0], weight.shape[0]), dtype=wide, device=x.device)
        if x.dtype == wide:
            torch.mm(x, weight.t(), out=logits)
        else:
            torch.mm(x, weight.t(), out_dtype=wide, out=logits)
    if bias is not None:
        logits.add_(bias)
    if valid_rows < weight.shape[0] and not is_fused(logits):  # Triton's kernel leaves them out
        logits[:, valid_rows:].fill_(float("-inf"))
    return logits


Outputs = tuple[Tensor, Tensor]  # cross entropies [t], and whether the label has the row's maximum, bool [t]


class _Chunk:
    """Loss of one chunk of tokens, in plain torch: logits [t, rows/tp], which are overwritten."""

    def __init__(self, logits: Tensor, labels: Tensor, options: _Options, out: Outputs) -> None:
        tp = options.tp
        self._picked, self._elsewhere = _local_labels(labels, options)
        logits.sub_(tp.all_reduce(logits.amax(1, keepdim=True), "max"))
        at_label = logits.gather(1, self._picked)
        if self._elsewhere is not None:
            at_label.masked_fill_(self._elsewhere, 0.0)
        sums = logits.exp_().sum(1, keepdim=True)
        if tp.size > 1:
            sums, at_label = tp.all_reduce(torch.stack([sums, at_label]))
        self._exp, self._sums = logits, sums
        torch.sub(sums.log()[:, 0], at_label[:, 0], out=out[0])
        torch.ge(at_label[:, 0], 0, out=out[1])

    def grad_of_logits_(self, row_weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # d loss / d logits = exp / sums - onehot, and a factor for each row: the division by the row's sum, like the
        # token's weight, is left to the small operands of the two GEMMs. 16-bit operands are divided here, in the pass
        # that rounds them.
        onehot = -self._sums if self._elsewhere is None else (-self._sums).masked_fill_(self._elsewhere, 0.0)
        grad_logits = self._exp.scatter_add_(1, self._picked, onehot)
        if grad_logits.dtype == dtype:
            return grad_logits, row_weight / self._sums
        return torch.div(grad_logits, self._sums).to(dtype), row_weight.to(dtype)


class _FusedChunk:
    """The same in two of Triton's kernels, without the temporary [t, rows] that the division makes."""

    def __init__(self, logits: Tensor, labels: Tensor, options: _Options, out: Outputs) -> None:
        from megatron_sp.ops.kernels import cross_entropy

        tp, self._valid = options.tp, options.valid_rows
        self._logits, self._labels, self._is_whole = logits, labels.contiguous(), tp.size == 1
        if self._is_whole:
            self._stats = cross_entropy.statistics(logits, self._labels, self._valid, out)
            return
        picked, elsewhere = _local_labels(labels, options)
        self._labels = (picked if elsewhere is None else picked.masked_fill(elsewhere, -1))[:, 0]
        own_maximum, sums, at_label = cross_entropy.statistics(logits, self._labels, self._valid)
        maximum = tp.all_reduce(own_maximum.clone(), "max")
        sums, at_label = tp.all_reduce(torch.stack([sums * torch.exp(own_maximum - maximum), at_label]))
        self._stats = torch.stack([maximum, sums])
        above = maximum - at_label
        torch.add(sums.log(), above, out=out[0])
        torch.le(above, 0, out=out[1])

    def grad_of_logits_(self, row_weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, None]:
        # d loss / d logits [t, rows/tp] in ``dtype``, multiplied by the token's weights [t, 1]
        from megatron_sp.ops.kernels import cross_entropy

        args = self._logits, self._labels, self._stats, row_weight[:, 0].contiguous(), self._valid, dtype
        return cross_entropy.gradient(*args, whole=self._is_whole), None
