"""Model and tokenizer of a checkpoint, for tools that use a model without training it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.manifest import stored_configuration
from megatron_sp.checkpoint.pieces import GlobalTensor
from megatron_sp.config.schema import Config, DataConfig
from megatron_sp.config.schema_data import SENTENCEPIECE, WORDPIECE
from megatron_sp.data.tokenizers import Tokenizer, build_tokenizer, kept
from megatron_sp.data.tokenizers.kept import name_path
from megatron_sp.models.experts import expert_biases
from megatron_sp.models.language_model import LanguageModel
from megatron_sp.parallel.layers import shard_specs
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.utils.errors import CheckpointError, DataError

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"  # their rows are the vocabulary
_OF_A_CLASSIFIER = "classification_head.weight"
_HAS_OWN_VOCABULARY = (
    *SENTENCEPIECE,
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "ByteTokenizer",
    *WORDPIECE,
)  # numbers-as-text take theirs from the model


class Stored(NamedTuple):
    """A stored model: its step folder, configuration, tokenizer and step, and the checkpointer that reads it."""

    folder: Path
    config: Config
    tokenizer: Tokenizer
    step: object
    checkpointer: Checkpointer

    def load(
        self, cls: type[LanguageModel], device: torch.device, dtype: torch.dtype, layout: ParallelContext | None = None
    ) -> LanguageModel:  # fmt: skip
        """Load the model with its weights, for inference; no other tensor is read. Collective, if the checkpointer is.

        Args:
            cls: class of the model; all its parameters must be in the checkpoint.
            layout: the part of the model for this rank; None: all of it.
        """
        with torch.device("meta"):  # initial weights need not be drawn
            model = cls(self.config.model, self.config.kernels, seed=0, dtype=dtype, layout=layout)
        model.to_empty(device=device)
        specs, wanted = shard_specs(model), {}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(False)
            if parameter.shape != specs[name].shape:
                parameter.zero_()  # rows that pad the vocabulary are not on the disk
            wanted[name] = GlobalTensor.of_shard(specs[name], parameter.detach())
        wanted |= {name: GlobalTensor.whole(bias) for name, bias in expert_biases(model).items()}
        self.checkpointer.load(self.folder, wanted, partial=True, cast=True)
        return model.eval()


def find_stored(
    run: str | Path, step: int | None, what: str, instead: dict[str, str], warn: Callable[[str], None], tokenizer_file: str | None = None,
    checkpointer: Checkpointer | None = None,
) -> Stored:  # fmt: skip
    """Find a run's checkpoint, check that it is of the right kind, and read its configuration and tokenizer.

    Args:
        run: a run, its checkpoints folder, or one step folder.
        step: use this step instead of the newest.
        what: the expected kind, "GPT" or "BERT".
        instead: what to use for other kinds: "GPT", "BERT" and "classifier" -> the end of a sentence.
        warn: called with a warning for each configuration entry unknown to this version.
        tokenizer_file: SentencePiece model, tokenizer.json, vocab.txt, or a folder with one of them, instead of the
            run's own.
        checkpointer: one that has already found ``run``, a step folder; None: a new one is used to find it.
    Raises:
        CheckpointError: there is no checkpoint, or it is of another kind.
        ConfigError, DataError: the tokenizer is missing, damaged or does not fit the model.
    """
    if checkpointer is None:
        checkpointer = Checkpointer(None)
        run = checkpointer.find(run, step)
    folder = Path(run)
    state = checkpointer.read_state(folder)
    config, warnings = stored_configuration(state, normalize=True)
    for warning in warnings:
        warn(warning)
    shapes = checkpointer.tensor_shapes(folder)
    if isinstance(foreign := state.get("foreign_model"), dict):
        raise CheckpointError(
            f"{folder} holds a {foreign.get('class')} of transformers, which runs and evaluates it; megatron-sp convert --to hf --input"
            f" {folder} --output FOLDER writes its folder, megatron-sp schedule train --skip-train evaluates it by its validation data"
        )
    if WORD_EMBEDDINGS not in shapes:
        raise CheckpointError(f"{folder} holds no {what}: it has no tensor {WORD_EMBEDDINGS}")
    kind = "classifier" if _OF_A_CLASSIFIER in shapes else "BERT" if config.model.is_bert else "GPT"
    if kind != what:
        raise CheckpointError(f"{folder} holds a {kind}, {instead[kind]}")
    vocab_size = config.model.vocab_size = shapes[WORD_EMBEDDINGS][0][0]
    if tokenizer_file is not None:
        _take_tokenizer(config.data, Path(tokenizer_file))
    else:
        kept.take(config.data, kept.Record.from_json(state.get("tokenizer")), folder)
    has_own = config.data.tokenizer_type in _HAS_OWN_VOCABULARY or bool(
        config.data.tokenizer_model or config.data.vocab_file
    )
    tokenizer = build_tokenizer(config.data, None if has_own else vocab_size)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary only {vocab_size}: it is not the model's own;"
            " give that with --tokenizer-model"
        )
    return Stored(folder, config, tokenizer, state.get("step"), checkpointer)


def _take_tokenizer(data: DataConfig, path: Path) -> None:
    if data.tokenizer_type in WORDPIECE and not path.is_dir() and path.suffix != ".json":
        data.vocab_file = str(path)  # case is as in training
    elif data.tokenizer_type in SENTENCEPIECE and not path.is_dir() and path.suffix != ".json":
        data.tokenizer_model = str(path)  # and so is BOS
    else:
        name_path(data, path)
