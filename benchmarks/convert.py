"""How fast a conversion is, against copying the same files and hashing them, and how much memory it takes.

    python benchmarks/convert.py [--gb 2] [--rounds 3] [--folder DIR] [--json docs/benchmarks/convert.json]

A Llama of random weights in bf16 (h 2048, f 5632, 16 heads, 4 key/value heads, 32000 words; as many layers as make up
the size) goes hf -> megatron_sp -> hf. Beside each conversion, in turns, stands what no converter can do without: the
source's files copied with shutil, put on the disk, and read again for their SHA-256. Before each of the two a file
of the source's size is written and deleted, and what waits for the disk is put on it, so that both find as many free
pages: memory that a virtual machine has never touched is several times slower to write to. Rates are bytes of tensors
per second, medians over the rounds. Each conversion is a process of its own, its start and imports included; its memory
is the peak resident size above that of a process which has only imported torch and safetensors, and the limit is twice
the largest tensor plus 200 MB.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import print_table, write_json

LIMIT_MB = 200
SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "ffn_hidden_size": 5632, "num_attention_heads": 16, "num_query_groups": 4, "seq_length": 2048, "vocab_size": 32000,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True, "norm_epsilon": 1e-6, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
_PEAK = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"  # getrusage knows the parent's too
PROBE = f"import torch, safetensors.torch; {_PEAK}"


def make_source(folder: Path, num_bytes: int) -> tuple[int, int]:
    """A model of about this size as Hugging Face's folder.

    Returns:
        (bytes of all tensors, of the largest).
    """
    import torch

    from megatron_sp.config.schema import ModelConfig
    from megatron_sp.convert.copies import TensorInfo
    from megatron_sp.convert.formats.hugging_face import HuggingFace
    from megatron_sp.convert.model import Model, Options, parameter_shapes

    def total(layers: int) -> dict[str, TensorInfo]:
        config = ModelConfig(num_layers=layers, **SHAPE)
        return {name: TensorInfo(shape, torch.bfloat16) for name, shape in parameter_shapes(config).items()}

    def size(layers: int) -> int:
        return sum(info.num_bytes for info in total(layers).values())

    layers = max(1, round((num_bytes - size(1)) / (size(2) - size(1))) + 1)
    infos = total(layers)

    class Random:
        def tensors(self) -> dict[str, TensorInfo]:
            return infos

        def read(self, name: str) -> torch.Tensor:
            return torch.randint(-(2**14), 2**14, infos[name].shape, dtype=torch.int16).view(torch.bfloat16)

    model = Model(ModelConfig(num_layers=layers, **SHAPE), Random())
    HuggingFace().write(model, folder, Options(max_shard_bytes=1 << 30), lambda count: None)
    return size(layers), max(info.num_bytes for info in infos.values())


def level(folder: Path, num_bytes: int) -> None:
    """Leave the same state, whatever ran before: free pages for a file of this size, and nothing that waits for the disk."""
    block = os.urandom(1 << 20) * 8
    with open(folder / "level", "wb") as file:
        for _ in range(num_bytes // len(block) + 1):
            file.write(block)
    (folder / "level").unlink()
    os.sync()


def copy_and_hash(source: Path, target: Path) -> float:
    """Seconds for what it says, fsync included."""
    began = time.perf_counter()
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        to = target / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
        with open(to, "rb") as file:
            os.fsync(file.fileno())
            hashlib.file_digest(file, "sha256") if sys.version_info >= (3, 11) else hashlib.sha256(file.read())
    return time.perf_counter() - began


def convert(source: Path, target: str, output: Path) -> tuple[float, int]:
    """(seconds within the process after its imports are not told apart from them: all of it; peak resident KiB)."""
    began = time.perf_counter()
    words = [sys.executable, "-c", _CHILD, "convert", "--input", str(source), "--to", target, "--output", str(output)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(_ROOT)}
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return time.perf_counter() - began, int(done.stdout.split()[-1])


_ROOT = Path(__file__).resolve().parent.parent
_CHILD = f"import sys; from megatron_sp.commands.cli import main; code = main(sys.argv[1:]); {_PEAK}; sys.exit(code)"


def measure(folder: Path, gb: float, rounds: int) -> dict[str, Any]:
    """All rounds of both directions."""
    num_bytes, largest = make_source(folder / "hf", int(gb * 1e9))
    imports = int(subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout)
    rows: dict[str, dict[str, list[float]]] = {
        d: {"convert": [], "copy": [], "memory": []} for d in ("hf -> native", "native -> hf")
    }
    for number in range(rounds):
        native, back = folder / f"native-{number}", folder / f"back-{number}"
        for direction, source, target, output in (
            ("hf -> native", folder / "hf", "megatron_sp", native),
            ("native -> hf", native, "hf", back),
        ):
            level(folder, num_bytes)
            rows[direction]["copy"].append(copy_and_hash(source, folder / "copy"))
            shutil.rmtree(folder / "copy")
            level(folder, num_bytes)
            seconds, peak = convert(source, target, output)
            rows[direction]["convert"].append(seconds)
            rows[direction]["memory"].append((peak - imports) * 1024 / 1e6)
        shutil.rmtree(native)
        shutil.rmtree(back)
    return {
        "bytes": num_bytes, "largest_tensor": largest, "limit_mb": 2 * largest / 1e6 + LIMIT_MB, "imports_mb": imports * 1024 / 1e6,
        "directions": {name: {key: statistics.median(values) for key, values in row.items()} for name, row in rows.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="of tensors (default: 2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where files are written (default: the system's folder for such)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(Path(folder), args.gb, args.rounds)
    rows = []
    for name, row in found["directions"].items():
        rate, plain = (found["bytes"] / row[key] / 1e6 for key in ("convert", "copy"))
        rows.append(
            [
                name,
                f"{rate:.0f}",
                f"{plain:.0f}",
                f"{rate / plain:.2f}",
                f"{row['memory']:.0f}",
                f"{found['limit_mb']:.0f}",
            ]
        )
    headings = ["direction", "MB/s", "copy + SHA-256, MB/s", "ratio", "memory above imports, MB", "limit, MB"]
    print_table(f"{found['bytes'] / 1e9:.2f} GB, largest tensor {found['largest_tensor'] / 1e6:.0f} MB", headings, rows)
    if args.json:
        write_json(str(args.json), "convert", found, {"torch": version("torch"), "safetensors": version("safetensors")})


if __name__ == "__main__":
    main()
