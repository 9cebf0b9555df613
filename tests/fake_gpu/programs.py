"""The programs that are run on the fake device, beside pretraining: each from its command line, with the files that it reads.

Files are made on the CPU, before the device is there, in the current folder: ``gpt`` and ``bert`` (runs with a
checkpoint of a tiny model), ``text.jsonl``, ``choices.jsonl`` and ``words.jsonl`` to evaluate on, ``train.jsonl`` and
``vocab.txt`` to fine-tune with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fake_gpu import snippets

if TYPE_CHECKING:
    import torch

    from megatron_sp.models.gpt import GPTModel
    from megatron_sp.ops.cuda_graphs import GraphMaker
    from megatron_sp.utils.launch import Launch

_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(20))]


def generate(flags: list[str]) -> int:
    """Run ``megatron-sp generate``."""
    from megatron_sp.commands import generate

    return generate.main([*flags, "--load", "gpt", "--device", "cuda"])


def generate_wrongly(flags: list[str]) -> int:
    """Run ``megatron-sp generate`` with a step that breaks a rule of captures; the first flag says which."""
    from megatron_sp.inference import decoder

    class Read(decoder.StepPass):
        """The host reads a length."""

        def positions(self, num_new: int, device: torch.device) -> torch.Tensor:
            return super().positions(num_new, device).clamp(max=int(self._lengths[0]))

    def replay(self: decoder._CapturedStep, given: torch.Tensor) -> torch.Tensor:
        self._given = given.to(self._given.device)  # instead of a copy into the static input
        self._graph.replay()
        return self._logits

    class Other(decoder._CapturedStep):
        """The input is not that of the capture."""

        def __init__(self, maker: GraphMaker, run: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> None:
            super().__init__(maker, lambda _: run(self._given), given.clone())

    Other.replay = replay  # type: ignore[method-assign]
    if flags[0] == "read":
        decoder.StepPass = Read  # type: ignore[misc]
    else:
        decoder._CapturedStep = Other  # type: ignore[misc]
    return generate(flags[1:])


def evaluate(flags: list[str]) -> int:
    """Run ``megatron-sp evaluate``; the flags name the checkpoint, gpt or bert."""
    from megatron_sp.commands import evaluate

    return evaluate.main([*flags, "--device", "cuda"])


def finetune(flags: list[str]) -> int:
    """Run ``megatron-sp finetune``; it ends here instead of ending the process."""
    from megatron_sp.commands import finetune
    from megatron_sp.tasks import classification
    from megatron_sp.training import loop

    classification.all_reduce = lambda predicted, _: predicted  # the sum of alike ranks would be no class

    codes: list[int] = []
    loop.pretrain = lambda config, task: codes.append(_pretrained(config, task))  # type: ignore[assignment]
    data = ["--task", "jsonl", "--train-data", "train.jsonl", "--valid-data", "train.jsonl", "--second-text", "other"]
    finetune.main([*data, "--device", "cuda", *flags])
    return codes[0]


def _pretrained(config: object, task: object) -> int:
    from megatron_sp.training.loop import _pretrain
    from megatron_sp.training.setup import RunStatus
    from megatron_sp.utils.launch import Launch

    launch = Launch.from_env()
    return _pretrain(config, task, launch, RunStatus(launch.rank))  # type: ignore[arg-type]


def serve(flags: list[str]) -> int:
    """Serve four requests as the engine does, which is on a thread of its own there: prompts, steps in a batch, a row that is left."""
    import argparse

    from megatron_sp.config.flags.inference_flags import add_graph_flag, add_model_flags
    from megatron_sp.inference import team as inference

    parser = argparse.ArgumentParser()
    add_graph_flag(add_model_flags(parser))
    options = parser.parse_args([*flags, "--load", "gpt", "--device", "cuda"])
    return inference.run_tool(lambda launch: _serve(options, launch))


def _serve(options: object, launch: Launch) -> None:
    from megatron_sp.inference import team as inference
    from megatron_sp.inference.decoder import Decoder
    from megatron_sp.inference.serving.engine import Engine, follow
    from megatron_sp.models.gpt import GPTModel

    team = inference.join(options, launch)  # type: ignore[arg-type]
    loaded = inference.load(options, team, GPTModel, "GPT", {})  # type: ignore[arg-type]
    model, size = cast("GPTModel", loaded.model), loaded.stored.tokenizer.vocab_size
    decoder = Decoder(model, 4, size, capture=inference.capture(options, team, model.config))  # type: ignore[arg-type]
    decoder.reserve(32)
    if team.rank > 0:
        follow(decoder, lambda: cast("list[object]", team.broadcast(None)))
        return
    engine = Engine(decoder, loaded.stored.tokenizer, 0, 1.0, team.broadcast if team.size > 1 else None)
    call = engine._call
    call("read", [1, 2, 3], True, False)
    call("again")
    call("read", [4, 5, 6, 7, 8], True, True)
    call("step", [9, 10, 11])
    call("drop", 0)
    call("read", [12], False, False)
    for _ in range(2):
        call("step", [13, 14])
    assert len(decoder.lengths) == 2
    engine._tell(["stop"])


PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "generate": generate, "generate wrongly": generate_wrongly, "evaluate": evaluate, "finetune": finetune, "serve": serve,
    "snippet": snippets.run,
}  # fmt: skip


def prepare() -> None:
    """Make the files that programs read, and let a tool fail without ending the process; to be called before the device is there."""
    import torch
    from support import stored_models

    from megatron_sp.checkpoint.checkpointer import Checkpointer
    from megatron_sp.config.schema import Config, ModelConfig
    from megatron_sp.inference import team as inference
    from megatron_sp.models.bert import BertModel
    from megatron_sp.models.gpt import GPTModel

    # each rank reads the whole checkpoint: the shares of the others, of which nothing is known here, would be missing
    inference.Team.checkpointer = lambda _: Checkpointer(None)  # type: ignore[method-assign]
    inference.leave = lambda code, **_: sys.exit(code)  # type: ignore[assignment]
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 32}
    gpt, bert = Config(), Config()
    gpt.model = ModelConfig(**sizes, num_query_groups=2, position_embedding_type="rope", swiglu=True, vocab_size=259)  # type: ignore[arg-type]
    gpt.data.tokenizer_type = "ByteTokenizer"
    bert.model = ModelConfig(**sizes, model_family="bert", vocab_size=len(_WORDS))  # type: ignore[arg-type]
    bert.data.tokenizer_type, bert.data.vocab_file = "BertWordPieceCase", str(Path("vocab.txt").resolve())
    gpt.precision.bf16 = bert.precision.bf16 = True
    Path("vocab.txt").write_text("\n".join(_WORDS) + "\n")
    for name, config, model in (("gpt", gpt, GPTModel), ("bert", bert, BertModel)):
        stored_models.save(Path(name), config, {1: model(config.model, config.kernels, seed=1, dtype=torch.bfloat16)})
    texts = ["w1 w2 w3 w4 w5 w6 w7", "w8 w9 w10"]
    _write("text.jsonl", [{"text": text} for text in texts])
    _write("choices.jsonl", [{"context": "w1", "choices": ["w2", "w3 w4"], "answer": i} for i in range(2)])
    _write("train.jsonl", [{"text": texts[i % 2], "other": "w5", "label": "ab"[i % 2]} for i in range(8)])


def _write(name: str, lines: list[dict[str, object]]) -> None:
    Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
