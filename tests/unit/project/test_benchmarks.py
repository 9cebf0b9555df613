"""The benchmarks run, and their arithmetic is that of the model."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.forked import run_script
from support.paths import ROOT
from support.tape import Tapes

from megatron_sp.comm.groups import destroy_process_group
from megatron_sp.config.schema import KernelConfig, ModelConfig
from megatron_sp.estimate.flops import step_flops_per_token
from megatron_sp.models.gpt import GPTModel
from megatron_sp.parallel import layers

BENCHMARKS = ROOT / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "gpu")]

import attention_kernels  # noqa: E402
import balance_rows  # noqa: E402
import child  # noqa: E402
import common  # noqa: E402
import context_block  # noqa: E402
import context_plan  # noqa: E402
import flash_attn_cpu  # noqa: E402
import generated_tokens  # noqa: E402
import step_vs_hf  # noqa: E402
import ulysses_replay  # noqa: E402
import wire  # noqa: E402
import zero_fetch  # noqa: E402
import zero_step  # noqa: E402
from context_contenders import RING, packed_row  # noqa: E402
from families import FAMILIES  # noqa: E402
from gpu import device_weights  # noqa: E402
from gpu import step as gpu_step  # noqa: E402


def run(script: str, words: str = "") -> subprocess.CompletedProcess[str]:
    return run_script(BENCHMARKS / script, *words.split(), cwd=ROOT)


def kept(script: str, words: str, folder: Path) -> tuple[dict[str, Any], str]:
    """What a benchmark keeps, and what it prints."""
    done = run(script, f"{words} --json {folder / 'record.json'}")
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "record.json").read_text())["results"], done.stdout


def test_stats_and_ratios() -> None:
    stats = common.Stats.of([3.0, 1.0, 2.0, 10.0])
    assert (stats.median, stats.low, stats.high) == (2.5, 1.0, 10.0)
    assert stats.text("ms", 1e3, 0) == "2500 (1000-10000) ms"
    assert common.ratios([1.0, 4.0], [2.0, 2.0]).values == (0.5, 2.0)
    with pytest.raises(ValueError, match="no measurement"):
        common.Stats.of([])
    with pytest.raises(ValueError):
        common.ratios([1.0], [1.0, 2.0])


def test_every_contender_generates_as_many_tokens() -> None:
    pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    shape, cpu = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}, torch.device("cpu")
    for name, (rows, generate) in generated_tokens.build_ours(shape, cpu, torch.float32).items():
        assert [len(sample) for (sample,) in generate()] == [generated_tokens.NEW] * rows, name
    contenders = generated_tokens.build_peer(shape, cpu, torch.float32)
    for name, (rows, generate) in contenders.items():
        assert generate().shape == (rows, generated_tokens.PROMPT + generated_tokens.NEW), name
    found = generated_tokens.measure(contenders, cpu, 2)
    assert {name: len(times) for name, times in found.items()} == dict.fromkeys(contenders, 2)


def test_results_are_kept_as_medians_and_ranges_a_line_each() -> None:
    record = {"rounds": 3, "rows": [{"seconds": [3.0, 1.0, 2.123456789], "names": ["a", "b", "c"]}], "pair": [1.0, 2.0], "none": {}}
    text = common.compact_json(record, width=60)
    assert text.splitlines() == [
        "{",
        '  "rounds": 3,',
        '  "rows": [',
        "    {",
        '      "seconds": {"median": 2.1235, "min": 1.0, "max": 3.0},',
        '      "names": ["a", "b", "c"]',
        "    }",
        "  ],",
        '  "pair": [1.0, 2.0],',
        '  "none": {}',
        "}",
    ]
    assert json.loads(text)["rows"][0]["names"] == ["a", "b", "c"]


def test_memory_of_this_process() -> None:
    before = common.memory_bytes()
    held = torch.ones(16 * 2**20)  # 64 MiB, written
    assert common.memory_bytes() - before > 60 * 2**20
    assert common.peak_memory_bytes() >= common.memory_bytes() > 0
    del held


def test_child_environments() -> None:
    environment = common.child_environment(3, ["A=b=c"])
    assert environment["OMP_NUM_THREADS"] == "3" and environment["A"] == "b=c"
    assert environment["PYTHONPATH"].split(":")[0] == str(ROOT)
    with pytest.raises(ValueError, match="'A' is not KEY=VALUE"):
        common.child_environment(1, ["A"])


def test_tables_need_no_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    common.print_table("Title", ["a", "b"], [["row", "1"], ["longer", "22"]], ["note"])
    assert capsys.readouterr().out.splitlines() == ["Title", "  a        b", "  row      1", "  longer  22", "note"]


def test_flops_are_those_of_training() -> None:
    shape = FAMILIES["gpt2"].shape
    config = ModelConfig(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=512, vocab_size=50304)
    causal, full = step_flops_per_token(config)
    assert step_vs_hf.step_flops(shape, causal_halved=True) == causal * 2048
    assert step_vs_hf.step_flops(shape, causal_halved=False) == full * 2048


def test_the_listed_products_are_all_matrix_flops() -> None:
    shape = FAMILIES["gpt2"].shape
    products = step_vs_hf.step_products(shape)
    listed = sum(count * flops for (count, _), flops in zip(products, step_vs_hf.product_flops([d for _, d in products]), strict=True))
    both = [step_vs_hf.step_flops(shape, causal_halved=h) for h in (True, False)]
    assert listed == both[1] - 2 * (both[1] - both[0])  # without attention


CHILD = f"""
import sys; sys.path.insert(0, {str(BENCHMARKS)!r})
import child, os
def say(text): print('noise on stdout'); return {{'text': text}}
def fail(): raise ValueError('no such thing')
child.serve({{'say': say, 'fail': fail, 'die': lambda: os._exit(3)}})
"""


def test_a_child_answers_fails_and_dies_audibly() -> None:
    with child.Child("it", [sys.executable, "-c", CHILD], common.child_environment(1)) as process:
        assert process.ask("say", text="a\nb") == {"text": "a\nb"}
        with pytest.raises(child.ChildError, match="it: ValueError during 'fail': no such thing"):
            process.ask("fail")
        assert process.ask("say", text="still there") == {"text": "still there"}
        with pytest.raises(child.ChildError, match="ended with code 3 during 'die'"):
            process.ask("die")
    with pytest.raises(child.ChildError, match="cannot start"):
        child.Child("it", ["/nowhere/python"], {})


@pytest.mark.long
def test_step_benchmark_runs_without_the_peer(tmp_path: Path) -> None:
    found, said = kept("step_vs_hf.py", "--smoke --no-peer --rounds 2 --dropout 0.1", tmp_path)
    record = json.loads((tmp_path / "record.json").read_text())
    assert found["ours_seconds"]["median"] > 0 and found["ours_memory"]["peak_bytes"] > 2**20
    assert set(record) == {"benchmark", "date", "command", "revision", "hardware", "versions", "results"}
    assert "--smoke" in record["command"] and record["versions"]["torch"] == torch.__version__
    assert "of it, causal" in said


@pytest.mark.parametrize(("script", "words", "says"), [
    ("step_vs_hf.py", "--smoke --peer-python /nowhere/python", "setup_peers.sh"),
    ("context_block.py", "--peer-python /nowhere/python", "setup_peers.sh ring"),
    ("zero_step.py", "--peer-python /nowhere/python", "setup_peers.sh"),
    ("zero_step.py", "--no-peer --only nobody", "no such contender"),
    *(("zero_step.py", f"--cells {cell}", f"--cells {cell}: expected RANKS:LINK") for cell in ("3:loopback", "2", "2:fast", "1:loopback")),
    *([("memory.py", "--device cuda", "needs a GPU")] * (not torch.cuda.is_available())),
    ("zero_fetch.py", "--params 128 --sizes-kib 0", "--sizes-kib"),
    ("gpu/ulysses_replay.py", "--smoke --no-peer --only nobody", "nobody"),
    *((script, words, "torch sees no GPU") for script, words in (
        ("gpu/step.py", ""), ("gpu/attention_kernels.py", ""), ("gpu/fused_kernels.py", ""),
        ("gpu/ulysses_replay.py", ""),
    ) if not torch.cuda.is_available()),
])  # fmt: skip
def test_what_cannot_run_is_refused_and_says_what_it_needs(script: str, words: str, says: str) -> None:
    done = run(script, words)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_simulations_of_the_context_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert context_plan.main(["--smoke"]) == 0
    text = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert [len(row) for row in cells].count(7) == 2 + len(context_plan.CUTS) and "| **ours** | 1.0" in text
    one_document = {row[0]: row[5] for row in cells if len(row) == 7}
    assert one_document["contiguous"] == "1.87; 0.50 (1.00); 4" and one_document["**ours**"] == one_document["zigzag of the row"]
    of_best = [float(cell.split()[0]) for row in cells if row[1] in context_plan.RULES for cell in row[2:6]]
    assert len(of_best) == 4 * len(context_plan.RULES) * 7 and min(of_best) >= 0.99  # nothing beats the best number of chunks
    assert sum(row[0].endswith("K") for row in cells) == 8 and context_plan.picture(16).startswith("<svg")


def test_simulations_of_dealt_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert balance_rows.main(["--smoke"]) == 0
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    pairs = [(row[3:5], *map(float, row[5].split(" -> "))) for row in cells if " -> " in row[-1]]
    assert len(pairs) == 4 * len(balance_rows.LAYOUTS) and len(cells) == len(pairs) + 6 + 4
    assert all(1 <= after <= before and (after == before or layout != ["1", "1"]) for layout, before, after in pairs)
    assert any(after < before for _, before, after in pairs)
    areas = [30, 10, 20, 10]  # two ranks, two micro-batches of one row each
    by_index, dealt = (balance_rows.balance_of(areas, np.array(order), 1, 2, 1) for order in ([0, 1, 2, 3], [0, 1, 3, 2]))
    products = 2 * 6 * 4096
    assert by_index == (50 / 35, 50 / 35, (products + 50) / (products + 35)) and dealt[:2] == (40 / 35, 50 / 35)


@pytest.mark.long
def test_the_benchmark_of_saves_runs(tmp_path: Path) -> None:
    results = kept("save_stall.py", f"--smoke --dir {tmp_path / 'saves'}", tmp_path)[0]
    assert set(results) == {"bars", "smoke, 1 threads", "smoke, 2 ranks", "load_average"}
    beside = results["smoke, 1 threads"]
    assert all(beside[f"{name}_seconds"]["median"] > 0 for name in ("waited_stall", "stall", "written"))
    one = results["smoke, 2 ranks"]
    assert one["seconds"]["median"] > one["fsync_seconds"]["median"] > 0 and one["hash_seconds"]["median"] > 0
    assert list((tmp_path / "saves").iterdir()) == []


@pytest.mark.long
def test_the_benchmark_of_starts_runs(tmp_path: Path) -> None:
    assert kept("startup.py", "--smoke --only help", tmp_path)[0]["help"]["median"] > 0


@pytest.mark.long
def test_the_memory_benchmark_runs(tmp_path: Path) -> None:
    found, said = kept("memory.py", "--smoke --lines", tmp_path)
    assert [len(found["layouts"][name]["ranks"]) for name in ("sp 1", "sp 2")] == [1, 2]
    assert "at the peak: " in said


def test_the_gpu_benchmark_runs() -> None:
    done = run("gpu/step.py", "--smoke --no-peer --cuda-graphs on")
    assert done.returncode == 0, done.stderr
    assert "ours" in done.stdout and "last loss" in done.stdout and "our fused kernels: AdamW" in done.stdout
    assert torch.cuda.is_available() or "captured steps need a GPU: they are left out" in done.stderr


@pytest.mark.parametrize("name", ["smoke", "smoke-llama"])
def test_a_captured_gpu_step_is_the_other_one(name: str) -> None:
    """On a tape, in place of a graph: its losses are those of the step that a run takes, and about those of the plain loop."""
    device, shape = torch.device("cpu"), gpu_step.SHAPES[name]
    tokens = torch.randint(0, shape["vocab_size"], (3, shape["batch"], shape["seq_length"]), generator=torch.Generator().manual_seed(1))

    def losses(build: Callable[[], gpu_step.Step]) -> list[float]:
        torch.manual_seed(1)
        try:
            step = build()
            return [float(step(tokens[i], i)) for i in range(3)]
        finally:
            destroy_process_group()

    before = Tapes.num_captured
    found = losses(lambda: gpu_step.build_captured(shape, device, Tapes))
    assert Tapes.num_captured == before + 3, "one kind of micro-batch, norm, update"
    assert found == pytest.approx(losses(lambda: gpu_step.build_ours(shape, device)[0]), rel=1e-3) and found[2] != found[1]


@pytest.mark.long
@pytest.mark.parametrize("shape", ["1.3B", "llama-1B"])
def test_a_gpu_step_stands_beside_its_peer_plain_and_with_compiled_blocks(shape: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["--smoke", "--compile", "--shape", shape, "--json", str(tmp_path / "s.json")]
    # a process of its own: torch's compiler warns of itself
    done = subprocess.run([sys.executable, str(BENCHMARKS / "gpu/step.py"), *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "s.json").read_text())["results"]
    ratios = found["time_ratios"]
    assert set(ratios) == {"ours / hf", "ours / hf, blocks compiled"} and all(ratio > 0 for ratio in ratios.values())
    assert found["hf"]["last_loss"] == pytest.approx(found["ours"]["last_loss"], abs=0.5)
    assert "time ratio ours / hf, blocks compiled: " in done.stdout


@pytest.mark.parametrize("name", ["124M", "smoke-llama"])
def test_models_of_a_gpu_step_have_the_parameters_of_their_peers(name: str) -> None:
    pytest.importorskip("transformers")
    shape = {**gpu_step.SHAPES[name], "vocab_size": 128}
    with torch.device("meta"):
        peer, blocks = gpu_step._peer(shape)
        ours = GPTModel(gpu_step.model_config(shape), KernelConfig(), seed=1, dtype=torch.bfloat16)
    assert len(blocks) == shape["num_layers"]
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in peer.parameters())


def test_weights_are_drawn_on_a_device() -> None:
    with device_weights.drawn_on("meta"):
        assert layers.draw_normal((4, 3), 0.02, 1, "weight").device.type == "meta"
    assert layers.draw_normal((4, 3), 0.02, 1, "weight").dtype == torch.float32


def test_the_attention_kernels_run(tmp_path: Path) -> None:
    kernels = kept("gpu/attention_kernels.py", "--smoke --head-dims 64", tmp_path)[0]["kernels"]
    assert set(kernels) == {f"d64 {mask} {size}" for mask in ("causal", "full") for size in ("4x128", "2x256")}
    assert all(found["backward_tflops"] > 0 for shape in kernels.values() for found in shape.values())
    if not torch.cuda.is_available():
        assert set(kernels["d64 causal 4x128"]) == {"sdpa flash", "math"}


def test_the_fused_kernels_run(tmp_path: Path) -> None:
    found, said = kept("gpu/fused_kernels.py", "--smoke", tmp_path)
    norms = {f"{kind} {way}, 64 x 32" for kind in ("LayerNorm", "RMSNorm") for way in ("forward", "backward")}
    elementwise = {f"{op}, 64 x 32" for op in ("dropout and residual", "SwiGLU forward", "SwiGLU backward", "rotary")}
    assert set(found["kernels"]) == {"AdamW, 0.003906M elements", *norms, *elementwise}
    assert all(kernel["gb_per_s"] > 0 for kernels in found["kernels"].values() for kernel in kernels.values())
    if not torch.cuda.is_available():
        assert all("needs a GPU" in lack for lack in found["left_out"])
        assert all(f"left out: --fused-kernels {name} cannot be used" in said for name in ("apex", "triton"))


def test_attention_flops_are_those_of_the_model() -> None:
    shape = attention_kernels.Shape(b=3, s=64, n=4, d=16, causal=False)
    config = ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=128)
    causal, full = step_flops_per_token(config)  # three times the forward pass; what causal leaves out is half of the attention
    assert 3 * shape.forward_flops / (3 * 64) == 2 * (full - causal)


def test_a_wrong_or_missing_kernel_is_left_out_with_its_reason() -> None:
    class Wrong(attention_kernels.Math):
        def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return super().__call__(q, k, v) * 1.1

    class Missing(attention_kernels.Kernel):
        def __init__(self, shape: attention_kernels.Shape) -> None:
            raise ImportError("No module named 'flash_attn'")

    reasons: dict[str, str] = {}
    kinds = {"math": attention_kernels.Math, "wrong": Wrong, "missing": Missing}
    shape = attention_kernels.Shape(b=1, s=64, n=2, d=16, causal=True)
    found = attention_kernels.measure(shape, kinds, torch.device("cpu"), torch.float32, 1, reasons)
    assert set(found) == {"math"}
    assert "wrong by 0.1" in reasons["wrong"] and "No module named 'flash_attn'" in reasons["missing"]


def test_the_replay_runs(tmp_path: Path) -> None:
    results = kept("gpu/ulysses_replay.py", "--smoke --no-peer", tmp_path)[0]["smoke"]
    assert set(results) == {"shape", "none", "split-qkv", "chunked x2", "no exchange"}  # 16 heads on 8 ranks make no 4 chunks
    shape = ulysses_replay.SHAPES["smoke"]
    # of each layer q, k, v and out, forward and backward, in bf16: what rank 0 receives, its own share included
    received = 8 * shape["num_layers"] * shape["seq_length"] // ulysses_replay.SP * shape["hidden_size"] * 2
    assert {name: r["exchanges"] for name, r in results.items() if name != "shape"} == {
        "none": 8, "split-qkv": 16, "chunked x2": 16, "no exchange": 8
    }  # fmt: skip
    assert all(r["exchanged_bytes"] == received for name, r in results.items() if name != "shape")


def test_the_replay_puts_the_exchange_back() -> None:
    from megatron_sp.parallel import all_to_all

    real = all_to_all.all_to_all_async
    engine = ulysses_replay.CopyEngine(torch.device("cpu"))
    with pytest.raises(RuntimeError), ulysses_replay.exchanges_by(engine):
        assert all_to_all.all_to_all_async is not real
        raise RuntimeError
    assert all_to_all.all_to_all_async is real
    send, receive = torch.arange(4.0), torch.zeros(6)
    engine.all_to_all_async(send, [2, 2], receive, [3, 3], None).wait()
    assert receive.tolist() == [0.0, 1.0, 2.0, 3.0, 0.0, 0.0]


@pytest.mark.long
def test_the_zero_step_runs_without_deepspeed(tmp_path: Path) -> None:
    words = "--smoke --no-peer --rounds 1 --steps 1 --warmup 0 --references --cells 2:loopback"
    found, said = kept("zero_step.py", words, tmp_path)
    comparisons, raw = found["cells"]["2:loopback"]["comparisons"], found["cells"]["2:loopback"]["raw"]
    assert set(raw["seconds"]) == {name for name in zero_step.KINDS if not name.startswith("DeepSpeed")} and raw["left_out"] == {}
    assert set(raw["loss_difference"]) == set(raw["seconds"]) - {"alone"} and max(raw["loss_difference"].values()) < 1e-6
    assert all(len(losses) == 3 for losses in raw["losses"].values())
    sent = {name: of / raw["parameters"] for name, of in raw["bytes"].items()}
    assert sent["alone"] < 0.1 and sent["ours, stage 1"] == pytest.approx(4, rel=0.05)  # of N: scatter and gather, 4 bytes, of each a half
    assert sent["ours, stage 1"] < sent["DDP + ZeRO"] and sent["ours, stage 3"] < sent["FSDP2"]
    assert [c["peer"].partition(",")[0] for c in comparisons] == ["DDP + ZeRO", "FSDP2"]
    assert all(c["ratio"]["median"] > 0 and c["target"] == 0.95 for c in comparisons)
    assert "Ours, of the better variant" in said


def test_the_zero_step_chooses_contenders() -> None:
    names = zero_step.contender_names(zero_step.parse(["--no-peer"]))
    assert names == ["ours, stage 1", "DDP + ZeRO", "DDP + ZeRO, one bucket", "ours, stage 3", "FSDP2", "FSDP2, asynchronous"]
    names = zero_step.contender_names(zero_step.parse(["--only", "stage 3", "deepspeed 3"]))
    assert names == ["ours, stage 3", "DeepSpeed 3", "DeepSpeed 3, overlap_comm"]


def test_the_zero_step_leaves_out_who_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Broken(zero_step.Peer):
        def wrap(self, plain: Any) -> None:
            raise ImportError("no module named 'peer'\nmore")

    monkeypatch.setitem(zero_step.KINDS, "broken", Broken)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        contenders, memory, left_out = zero_step.build_all({"names": ["broken", "DDP"], "model": zero_step.SMOKE})
        model = sum(p.numel() * 4 for p in contenders["DDP"].model.parameters())
        assert left_out == {"broken": "ImportError: no module named 'peer'"} and list(contenders) == ["DDP"]
        assert memory["DDP"] > 4 * model  # parameters, gradients, two of state, activations
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.long
def test_delayed_weights_are_compared_and_timed(tmp_path: Path) -> None:
    cells = kept("delay_wgrad.py", "--smoke --links loopback --rounds 1 --warmup 0", tmp_path)[0]["links"]["loopback"]
    assert len(cells) == 5
    for cell in cells.values():
        plain, delayed, compute = (cell[f"{name}_seconds"]["median"] for name in ("plain", "delayed", "compute"))
        assert cell["ratio"]["median"] == pytest.approx(delayed / plain)
        assert cell["plain_exposed"]["median"] == pytest.approx(plain / compute - 1)


@pytest.mark.long
def test_the_zero_fetch_runs_and_draws(tmp_path: Path) -> None:
    plot = f" --plot {tmp_path / 'f.png'}" if importlib.util.find_spec("matplotlib") else ""
    results, _ = kept("zero_fetch.py", f"--smoke --rounds 1 --warmup 0 --ranks 2{plot}", tmp_path)
    assert {(c["bytes"], c["params"], c["ranks"]) for c in results["wall"]} == {(b, p, 2) for b in (16384, 65536) for p in (1, 3)}
    assert len(results["host"]) == 8 and all(set(c["seconds"]) == set(zero_fetch.WAYS) for c in results["wall"] + results["host"])
    largest = results["wall"][-1]
    of_unit = {way: sent / largest["bytes"] for way, sent in largest["sent"].items()}
    gathers = {"flat": 0.5, "coalesced": 0.5, "per parameter": 0.5, "flat all_reduce": 1.0, "all_reduce": 1.0}
    assert of_unit == {way: pytest.approx(sent, rel=0.1) for way, sent in gathers.items()}
    want = {way: pytest.approx(2.0 if way == "coalesced" else 1.0, rel=0.05) for way in zero_fetch.WAYS}
    assert results["memory"] == want
    assert not plot or (tmp_path / "f.png").stat().st_size > 1000


def test_ways_without_communication_leave_the_collectives_as_they_were() -> None:
    from megatron_sp.optim import weights

    gather, reduce = weights.all_gather_async, weights.all_reduce_async
    with pytest.raises(RuntimeError), zero_fetch.no_communication():
        assert weights.all_gather_async is not gather and weights.all_reduce_async is not reduce
        raise RuntimeError
    assert (weights.all_gather_async, weights.all_reduce_async) == (gather, reduce)


@pytest.mark.long
def test_longest_sequence_fits_as_predicted(tmp_path: Path) -> None:
    results = kept("longest_sequence.py", "--smoke", tmp_path)[0]
    found = results["settings"]
    tokens = [setting["tokens"] for setting in found.values()]
    assert tokens == sorted(tokens) and tokens[-1] >= 2 * tokens[0] > 0
    for name in ("nothing", "+ MLP in pieces"):
        counted = found[name]["measured"]["peak"]
        assert counted <= results["limit_bytes"] and counted == pytest.approx(found[name]["predicted_bytes"], rel=0.05)


def test_packed_attention_knows_its_work(tmp_path: Path) -> None:
    results = kept("packed_attention.py", "--smoke", tmp_path)[0]
    assert all(sum(mix["lengths"]) == 128 for mix in results.values()) and results["8 of 16"]["work"] == pytest.approx(1 / 8)
    assert all(seconds > 0 for mix in results.values() for seconds in mix["seconds"].values())


def test_recomputed_attention_is_timed_with_its_share(tmp_path: Path) -> None:
    results = kept("recompute_attention.py", "--smoke", tmp_path)[0]
    assert set(results["seconds"]) == {"kept", "repeated", "no recomputation"} and results["attention_share"] > 0
    assert results["not_kept"] == ""


@pytest.mark.long
def test_the_context_block_counts_what_the_plan_sends(tmp_path: Path) -> None:
    words = "--smoke --no-peer --ranks 2 --links loopback --masks causal window --rounds 1 --warmup 0"
    cells = kept("context_block.py", words, tmp_path)[0]["cells"]
    assert set(cells) == {"2:loopback, causal", "2:loopback, window"}
    for cell in cells.values():
        raw = cell["raw"]
        assert raw["wrong"] == {} and set(raw["bytes"]) == {"cp 2", "sp 2"} and set(raw["errors"]) == {"cp 2", "one call"}
        assert max(raw["errors"]["cp 2"]) < 0.01 and all(max(errors) < 0.01 for errors in raw["errors of blocks"].values())
        assert sum(raw["plan"]["cp 2"]) > 0
        assert all(got == pytest.approx(want, abs=1500) for got, want in zip(raw["bytes"]["cp 2"], raw["plan"]["cp 2"], strict=True))
        assert {"cp 2", "cp 2, compute", "cp 2, exchanges", "control", "control, products"} < set(cell["seconds"]["attention"])
        assert "attention, cp 2" in cell["hidden"] and "block, sp 2" in cell["hidden"] and "sp 2" not in cell["seconds"]["attention"]


def test_the_context_block_compares_with_those_who_are_right() -> None:
    seconds = {name: [value, 2 * value] for name, value in {"cp 2": 1.0, RING: 2.0, "USP 1 x 2": 1.5}.items()}
    seconds |= {"cp 2, compute": [0.9, 1.8], "cp 2, exchanges": [0.2, 0.4], "control": [0.5, 0.5], "control, products": [0.45, 0.45]}
    seconds |= {"control, exchanges": [0.2, 0.2]}
    raw = {"bytes": {"cp 2": [1, 3], RING: [8, 8]}, "wrong": {"USP 1 x 2": "wrong by 1"}, "seconds": {"attention": seconds}}
    found = context_block.summarise(2, "documents", raw)
    assert found["bytes"]["cp 2"] == {"mean": 2, "worst": 3}
    bars = found["bars"]
    assert bars["bytes of ring-flash-attention"] == {"found": 0.25, "bar": None}  # judged at four ranks
    assert bars["attention, time of ring-flash-attention"] == {"found": 0.5, "low": 0.5, "high": 0.5, "bar": 0.6}
    assert bars["hidden of the control"] == {"found": pytest.approx(0.5 / 0.75), "bar": None}
    bars = context_block.summarise(2, "causal", raw)["bars"]
    assert bars["hidden of the control"]["bar"] == 0.95 and bars["attention, time of ring-flash-attention"]["bar"] == 0.9


def test_documents_of_the_context_block_can_be_dealt_by_the_peers() -> None:
    for length in (64, 2048, 4096):
        ends = packed_row(length)
        assert ends[-1] == length and all(end % 8 == 0 for end in ends) and list(ends) == sorted(set(ends))


def test_skipped_exchanges_bring_zeros_and_are_put_back() -> None:
    dist = torch.distributed
    real, receive = (dist.all_to_all_single, dist.batch_isend_irecv), torch.ones(3)
    with pytest.raises(RuntimeError), context_block.exchanges_by(None):
        dist.all_to_all_single(receive, torch.ones(3), async_op=True).wait()
        raise RuntimeError
    assert (dist.all_to_all_single, dist.batch_isend_irecv) == real and receive.tolist() == [0, 0, 0]


def test_the_stand_in_for_flash_attn_computes_attention() -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 6, 2, 4, dtype=torch.float64) for _ in range(4))
    later = torch.arange(6)[:, None] + 4 - torch.arange(10)  # six queries of ten keys: the last belongs to the last
    k, v = (torch.cat((x, torch.randn(1, 4, 2, 4, dtype=torch.float64)), 1) for x in (k, v))
    seen = (later >= 0) & (later <= 2)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    scores = torch.einsum("bind,bjnd->bnij", q, k) / 2
    wanted = torch.einsum("bnij,bjnd->bind", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    with torch.no_grad():
        out, lse, _, _ = flash_attn_cpu._flash_attn_forward(q, k, v, 0.0, 0.5, True, 2, 0)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(lse, scores.masked_fill(~seen, -torch.inf).logsumexp(-1))
        found = [torch.empty_like(x) for x in (q, k, v)]
        flash_attn_cpu._flash_attn_backward(grad, q, k, v, out, lse, *found, 0.0, 0.5, True, 2, 0)
    torch.testing.assert_close(found, list(torch.autograd.grad(wanted, (q, k, v), grad)))
    out, lse, _, _ = flash_attn_cpu._flash_attn_forward(q.detach(), k.detach()[:, :2], v.detach()[:, :2], 0.0, 0.5, True, 1, -1)
    assert lse[0, 0].isfinite().tolist() == [False] * 4 + [True] * 2 and out[0, :4].abs().max() == 0
    ends = torch.tensor([0, 2, 6])
    packed = flash_attn_cpu._flash_attn_varlen_forward(q.detach()[0], q.detach()[0], q.detach()[0], ends, ends, 4, 4, 0.0, 0.5, True)
    for rows in (slice(0, 2), slice(2, 6)):
        alone = flash_attn_cpu._flash_attn_forward(*(q.detach()[:, rows],) * 3, 0.0, 0.5, True)
        torch.testing.assert_close((packed[0][rows], packed[1][:, rows]), (alone[0][0], alone[1][0].float()))


def test_bytes_on_the_wire() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        before = wire.bytes_sent()
        ours.sendall(b"x" * 12345)
        with theirs:
            got = 0
            while got < 12345:
                got += len(theirs.recv(65536))
            after = wire.bytes_sent()
    assert before is not None and after is not None and after - before == 12345


def test_setup_peers_refuses_unknown_arguments() -> None:
    done = subprocess.run(["bash", str(BENCHMARKS / "setup_peers.sh"), "apex"], capture_output=True, text=True)
    assert done.returncode == 2 and "unknown argument 'apex'" in done.stderr


@pytest.mark.long
def test_the_conversion_benchmark_runs(tmp_path: Path) -> None:
    """At its real sizes it would be the test of the memory limit; here of a model whose largest tensor is a tenth of it."""
    results = kept("convert.py", f"--gb 0.3 --rounds 1 --folder {tmp_path}", tmp_path)[0]
    assert set(results["directions"]) == {"hf -> native", "native -> hf"}
    for row in results["directions"].values():
        assert row["convert"] > 0 and row["copy"] > 0 and 0 < row["memory"] < results["limit_mb"]


@pytest.mark.long
def test_the_schedule_benchmark_runs(tmp_path: Path) -> None:
    loopback = kept("schedule.py", "--smoke --rounds 1 --warmup 0 --links loopback", tmp_path)[0]["links"]["loopback"]
    assert loopback["scheduled / ours"]["median"] > 0 and loopback["alone scheduled / alone"]["median"] > 0


@pytest.mark.long
def test_the_benchmark_of_experts_sends_what_the_routing_says(tmp_path: Path) -> None:
    cells = kept("moe_block.py", "--smoke --cells one 2:loopback --rounds 1 --warmup 0", tmp_path)[0]["cells"]
    assert {"ours", "transformers, eager"} <= set(cells["one"]["contenders"])
    ours, plain = (cells["2:loopback"]["contenders"][name] for name in ("ours", "plain"))
    assert 0 < ours["bytes"] == ours["expected"] < plain["bytes"]


@pytest.mark.long
def test_experts_and_a_dense_model_learn_from_the_same_text(tmp_path: Path) -> None:
    picture, record = tmp_path / "e.png", tmp_path / "e.json"
    done = run("experts_learn.py", f"--steps 20 --bytes 1000000 --out {picture} --json {record}")
    assert done.returncode in (0, 1), done.stderr  # twenty steps say nothing about which is ahead
    found = json.loads(record.read_text())["results"]
    assert set(found["dense"]["validation"]) == set(found["experts"]["validation"]) and picture.stat().st_size > 0
    assert found["experts"]["largest_load_first"] >= 1
    assert run("experts_learn.py", f"--bytes 1 --out {picture}").returncode == 2, "less text than make_corpus.py makes"
