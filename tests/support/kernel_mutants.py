"""Mutants of Triton's kernels, of where they are used, and of the update on the device (``mutants.py --suite kernels``)."""

from __future__ import annotations

TESTS = [
    "tests/kernels/test_interpreted.py", "tests/kernels/test_direct.py", "tests/unit/training/test_step.py", "tests/unit/ops/test_norm.py", "tests/unit/ops/test_dropout.py",
    "tests/unit/ops/test_fused_kernels.py", "tests/unit/optim",
]  # fmt: skip

NORMS, DROPOUT, ACTIVATIONS = "ops/kernels/norms.py", "ops/kernels/dropout.py", "ops/kernels/activations.py"
ROTARY, CROSS, LAUNCH, DIRECT = "ops/kernels/rotary.py", "ops/kernels/cross_entropy.py", "ops/kernels/launch.py", "ops/kernels/direct.py"
NORM, OPTIMIZER, STEP = "ops/norm.py", "optim/optimizer.py", "training/step.py"
BIASES, MAIN_GRAD = "ops/kernels/biases.py", "ops/main_grad.py"
GROUPED, EXPERTS = "ops/kernels/grouped.py", "ops/expert_mlp.py"
HEAD, LINEAR, PIECES = "parallel/lm_head.py", "parallel/linear.py", "parallel/chunked_mlp.py"

MUTANTS = [
    # norms
    ("norm: columns beyond the row count", NORMS, "x = tl.where(mask, x - mean, 0.0)\n        square", "x = x - mean\n        square"),
    ("wide norm: columns beyond the row count", NORMS, "x = tl.where(mask, x - mean, 0.0)\n            total += x * x", "x = x - mean\n            total += x * x"),
    ("norm: eps left out", NORMS, "tl.sqrt(square + eps)", "tl.sqrt(square)"),
    ("norm: no bias", NORMS, "    if HAS_BIAS:\n", "    if False:\n"),
    ("norm: 1 + weight is the weight", NORMS, "        scale += 1.0\n", "        scale += 0.0\n"),
    ("norm: only the first tile of a program", NORMS, "in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=AHEAD):", "in range(program, tl.minimum(tl.cdiv(rows, ROWS), programs), programs):"),
    ("norm backward: the residual's gradient is dropped", NORMS, "                back += tl.load(ADD + start + column, mask=mask, other=0.0).to(tl.float32)\n", "                back += 0.0\n"),
    ("wide norm backward: the residual's gradient is dropped", NORMS, "                    back += tl.load(ADD + start + here, mask=mask, other=0.0).to(tl.float32)\n", "                    back += 0.0\n"),
    ("norm backward: the mean's share is dropped", NORMS, "                back -= tl.sum(grad, 1)[:, None] / width\n", "                back -= 0.0\n"),
    ("wide norm backward: the mean's share is dropped", NORMS, "                    back -= of_mean\n", "                    back -= 0.0\n"),
    ("norm backward: the square's share is dropped", NORMS, "back = grad - normed * (tl.sum(grad * normed, 1)[:, None] / width)", "back = grad"),
    ("norm backward: gradient of the weight after the weight", NORMS, "            of_scale += grad * normed\n", "            of_scale += grad * scale * normed\n"),
    ("norm backward: both sums in one place", NORMS, "tl.store(SUMS + (programs + program) * width + column,", "tl.store(SUMS + program * width + column,"),
    ("wide norm backward: sums of other rows are overwritten", NORMS, "tl.where(is_first, x, known + x)", "x"),
    ("wide norm backward: the first row adds to memory without contents", NORMS, "tl.where(is_first, x, known + x)", "known + x"),
    ("wide norm backward: only the first rows of a program", NORMS, "for tile in range(program, tl.cdiv(rows, ROWS), programs):\n        row = tile * ROWS + tl.arange(0, ROWS)[:, None]\n        inside = row < rows\n        start = row *", "for tile in range(program, tl.minimum(tl.cdiv(rows, ROWS), programs), programs):\n        row = tile * ROWS + tl.arange(0, ROWS)[:, None]\n        inside = row < rows\n        start = row *"),
    ("norm backward: one program's sums are left out", NORMS, "finish(sums[wanted[0] :], targets)", "finish(sums[wanted[0] :, 1:], targets)"),
    ("norm backward: the bias has the weight's sum", NORMS, "finish(sums[wanted[0] :], targets)", "finish(sums, targets)"),
    ("norm backward: strided gradients are read as they lie", NORMS, "grad, x, add = grad.contiguous(), x.contiguous(), ", "grad, x, add = grad, x.contiguous(), "),
    ("norm: strided input is read as it lies", NORMS, "    x = x.contiguous()\n    width", "    width"),
    # dropout
    ("dropout: an arithmetic shift", DROPOUT, "h ^ ((h >> 15) & 0x1FFFF)", "h ^ (h >> 15)"),
    ("dropout: channels count from 0", DROPOUT, "mix64(first_channel + column.to(tl.int64) + 1)", "mix64(column.to(tl.int64) + 1)"),
    ("dropout: kept elements are not scaled", DROPOUT, "x * scale, 0.0)", "x, 0.0)"),
    ("dropout: the residual is dropped", DROPOUT, "        y += tl.load(RESIDUAL", "        y += 0.0 * tl.load(RESIDUAL"),
    ("dropout: kept and dropped change places", DROPOUT, "tl.where(h >= threshold,", "tl.where(h < threshold,"),
    ("dropout: the site does not count", DROPOUT, "other=0) + site)", "other=0))"),
    ("dropout: keys that broadcast are read as they lie", DROPOUT, "row_keys.expand(x.shape[:-1]).contiguous()", "row_keys.contiguous()"),
    # activations
    ("activation: gate and up change places", ACTIVATIONS, "tl.load(U + 2 * start + width + column, mask=mask, other=0.0).to(tl.float32)\n        out =", "tl.load(U + 2 * start + column, mask=mask, other=0.0).to(tl.float32)\n        out ="),
    ("activation backward: no slope", ACTIVATIONS, "grad * up * slope(gate, KIND)", "grad * up"),
    ("activation backward: the output lacks up", ACTIVATIONS, "(act * up).to(OUT", "(act).to(OUT"),
    ("activation: a narrow overflow of tanh", ACTIVATIONS, "e = tl.exp(-2.0 * tl.abs(x))", "e = tl.exp(-2.0 * x)"),
    ("MLP: the weight's gradient from the gradient's memory before it is the output", LINEAR, "grad_x, a = one_pass.backward_with_output_(grad_x, x)", "grad_x, a = one_pass.backward_with_output_(grad_x, x)[0], x[..., : grad_x.shape[-1]]"),
    ("MLP in pieces: no gradient of fc2 in one pass", PIECES, "            self.w2_grad.add_product(grad2, rows_of(inner))\n        else:", "            pass\n        else:"),
    # rotary
    ("rotary: the sine's sign", ROTARY, "(first * cos - second * sin)", "(first * cos + second * sin)"),
    ("rotary backward: forward again", ROTARY, "-1.0 if back else 1.0", "1.0"),
    ("rotary: every sequence has the first one's positions", ROTARY, "(position * batch + group // per_sequence) * half + channel\n    cos", "(position * batch) * half + channel\n    cos"),
    ("packing: values are rotated", ROTARY, "turns = mask & (head <= queries)", "turns = mask"),
    ("packing: keys are not rotated", ROTARY, "turns = mask & (head <= queries)", "turns = mask & (head < queries)"),
    ("packing: rotated forward", ROTARY, "(first * cos + second * sin).to(OUT", "(first * cos - second * sin).to(OUT"),
    ("packing: the channels that are not rotated", ROTARY, "            channel += 2 * half\n", "            channel += 0\n"),
    ("packing: strides of q for k", ROTARY, "from_k = K + position * k_s + group * k_m", "from_k = K + position * q_s + group * k_m"),
    # cross entropy
    ("loss: padding counts", CROSS, "        logits = tl.where(first + column < valid, logits, float(\"-inf\"))\n", ""),
    ("loss: no rescaling of the sum", CROSS, "total * tl.exp(largest - above) + ", "total + "),
    ("loss: lanes are joined without rescaling", CROSS, "tl.sum(total * shift, 0)", "tl.sum(total, 0)"),
    ("loss backward: no onehot", CROSS, "- tl.where(column == label, 1.0, 0.0)", "- 0.0"),
    ("loss backward: not divided by the sum", CROSS, "tl.exp(logits - maximum) / total", "tl.exp(logits - maximum)"),
    ("loss backward: padding has a gradient", CROSS, "tl.where(column < valid, tl.exp(logits - maximum) / total, 0.0)", "tl.exp(logits - maximum) / total"),
    ("head: hits need not be ties", HEAD, "above <= 0", "above < 0"),
    # torch's RMSNorm, and where kernels are used
    ("torch's RMSNorm: the residual's gradient is dropped", NORM, "            grad_x.add_(add)\n        return grad_x if need[0] else None, grad_weight if", "            pass\n        return grad_x if need[0] else None, grad_weight if"),
    ("torch's RMSNorm: rounds 1 + weight", NORM, "x.numel() > 0 and not rounds", "x.numel() > 0"),
    ("Triton for fp64, which it computes in fp32", LAUNCH, "DTYPES = (torch.float32,", "DTYPES = (torch.float64, torch.float32,"),
    # biases
    ("sums: parts overlap", BIASES, "first = part * per_part", "first = part * (per_part - 1)"),
    ("sums: only the first step of a part", BIASES, "for start in range(first, end, ROWS):", "for start in range(first, tl.minimum(first + ROWS, end), ROWS):"),
    ("sums: only the first parts", BIASES, "for start in range(0, parts, ROWS):", "for start in range(0, tl.minimum(parts, ROWS), ROWS):"),
    ("sums: both sums of the first parts", BIASES, "(which * parts + row).to(tl.int64)", "row.to(tl.int64)"),
    ("sums: what is there is overwritten", BIASES, "        found += tl.load(TO + column, mask=column < width, other=0.0).to(tl.float32)\n", "        found += 0.0\n"),
    ("sums: rows lie close together", BIASES, "(x, parts, rows, width, x.stride(0), per_part)", "(x, parts, rows, width, width, per_part)"),
    ("bias: no residual", BIASES, "y = tl.load(X + place, mask=mask, other=0.0).to(tl.float32) + bias", "y = 0.0 * tl.load(X + place, mask=mask, other=0.0).to(tl.float32) + bias"),
    ("bias gradient: always overwrites", MAIN_GRAD, "biases.put_column_sums(grad_out, (view, fresh))", "biases.put_column_sums(grad_out, (view, True))"),
    # weight gradients of experts
    ("experts: rows of the expert behind count", GROUPED, "real = (step < count - done)[:, None]", "real = (step < count + BLOCK)[:, None]"),
    ("experts: every expert begins with the first row", GROUPED, "mask=expert > 0, other=0).to(tl.int64)", "mask=expert < 0, other=0).to(tl.int64)"),
    ("experts: only the first rows of an expert", GROUPED, "for done in range(0, count, BLOCK):", "for done in range(0, tl.minimum(count, BLOCK), BLOCK):"),
    ("experts: x's rows do not move on", GROUPED, "            xs += BLOCK * x_stride\n", "            xs += 0\n"),
    ("experts: the gradient's rows do not move on", GROUPED, "        grads += BLOCK * grad_stride\n", "        grads += 0\n"),
    ("experts: rows are not gathered", GROUPED, "x = tl.load(X + row[:, None] * x_stride", "x = tl.load(xs + step[:, None] * x_stride"),
    ("experts: what is there is overwritten", GROUPED, "        total += tl.load(place, mask=inside, other=0.0)\n", "        total += 0.0\n"),
    ("experts: tiles of a swath in another's place", GROUPED, "height = tl.minimum(tiles_out - swath * SWATH, SWATH)", "height = SWATH"),
    ("experts: the right half of a tile in the left one's place", GROUPED, "_put(right, to, out, half + TILE_IN // 2,", "_put(right, to, out, half,"),
    ("experts: a second part overwrites the first", EXPERTS, "            self._fresh = [False] * len(self._fresh)\n            return\n", "            return\n"),
    # launches around the JIT
    ("launch: a kernel for aligned addresses gets others", DIRECT, "x.data_ptr() & 15 == 0)", "True)"),
    ("launch: a kernel for 1 gets other integers", DIRECT, "1 if x == 1 else 16 if", "16 if"),
    ("launch: a kernel for multiples of 16 gets other integers", DIRECT, "16 if x & 15 == 0 else 0", "0"),
    ("launch: a kernel for 32 bits gets 64", DIRECT, "if -(2**31) <= x < 2**31:", "if True:"),
    ("launch: a kernel for another type", DIRECT, "found += (x.dtype, ", "found += (0, "),
    ("launch: a kernel of another GPU", DIRECT, "key = (kernel, device, ", "key = (kernel, "),
    ("launch: a kernel of other compile-time arguments", DIRECT, "*constants.items(), ", ""),
    ("launch: a kernel of other warps", DIRECT, ", *options.items())", ")"),
    ("launch: hooks are not called", DIRECT, " or _is_watched(kernel, triton.hooks)", ""),
    # the update on the device
    ("update: a step that is not finite takes place", OPTIMIZER, "divisor, skip.float(), updated)", "divisor, None, updated)"),
    ("update: not clipped", OPTIMIZER, "scale * torch.where(grad_norm > clip, (grad_norm + 1e-6) / clip, 1.0)", "scale"),
    ("update: clipped by the scaled norm", STEP, "known[0], self.scaler.scale, skip,", "known[0] * self.scaler.scale, self.scaler.scale, skip,"),
    ("update: not unscaled", OPTIMIZER, "torch.full_like(grad_norm, grad_scale)", "torch.ones_like(grad_norm)"),
    ("update: a step left out counts", OPTIMIZER, "        self.num_updates -= 1\n", "        pass\n"),
    ("update: a loss that is not finite is no reason", STEP, "return norm.isfinite().all() & losses.isfinite().all()", "return norm.isfinite().all()"),
    ("update: a norm that is not finite is no reason", STEP, "return norm.isfinite().all() & losses.isfinite().all()", "return losses.isfinite().all()"),
    ("update: terms without tokens are looked at", STEP, "losses = torch.where(counts > 0, sums / counts, 0.0)", "losses = sums / counts"),
    ("update: fp64 by a divisor in fp32", OPTIMIZER, 'self.kernel == "torch" and master.dtype == torch.float32', 'self.kernel == "torch"'),
]  # fmt: skip
