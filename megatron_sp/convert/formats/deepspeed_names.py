"""Translation of parameter names in pipelines, whose layers are numbered consecutively, to Megatron's names without a pipeline.

    file, or parameter of the optimizer       here
    1.word_embeddings.weight                  language_model.embedding.word_embeddings.weight
    tied_modules.embed.word_embeddings.weight    the same (first stage); word_embeddings_for_head.weight (last stage)
    2.input_layernorm.weight                  language_model.encoder.layers.0.input_layernorm.weight
    26.weight                                 language_model.encoder.final_layernorm.weight
    27.lm_head.weight                         language_model.output_layer.weight

The numbers differ between versions (some have a layer before the first block that only transposes dims), so the kind of
a layer is determined by its parameters. Source: Megatron-DeepSpeed, gpt_model.py :: GPTModelPipe; deepspeed 0.19.8,
runtime/pipe/module.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_sp.utils.errors import CheckpointError

EMBEDDING, BLOCKS = "language_model.embedding.", "language_model.encoder.layers."
FINAL_NORM, HEAD = "language_model.encoder.final_layernorm.", "language_model.output_layer."
TIED_COPY = "word_embeddings_for_head.weight"
_TIED = "tied_modules.embed."
_NUMBERED = re.compile(r"([0-9]{1,4})\.(.+)")
_IN_BLOCK = re.compile(r"(self_attention|attention|mlp|input_layernorm)\..+")
_IN_EMBEDDING = re.compile(r"(word_embeddings|position_embeddings|tokentype_embeddings)\..+")


def is_pipeline(names: Iterable[str]) -> bool:
    """Return whether the names are those of a pipeline with numbered layers."""
    return any(name.startswith(_TIED) or _NUMBERED.fullmatch(name) for name in names)


class PipelineNames:
    """Translator of the parameter names of one model.

    Args:
        names: all names of all stages.
        where: the checkpoint, for error messages.
    Raises:
        CheckpointError: the blocks are not numbered consecutively.
    """

    def __init__(self, names: Iterable[str], where: str) -> None:
        self._where = where
        numbered = [(int(m[1]), m[2]) for name in names if (m := _NUMBERED.fullmatch(name))]
        self._blocks = sorted({number for number, rest in numbered if _IN_BLOCK.fullmatch(rest)})
        if not self._blocks or self._blocks != list(range(self._blocks[0], self._blocks[-1] + 1)):
            raise CheckpointError(
                f"{where} has the layers {self._blocks[:20]} with attention: they must follow each other; files are missing"
            )

    def translate(self, name: str, *, first_stage: bool = True) -> str | None:
        """Return the name without a pipeline; None for a copy that the model never uses.

        Args:
            first_stage: the parameter is on the first stage; each stage that has a tied module keeps a copy of it.
        Raises:
            CheckpointError: it belongs to no known kind of layer.
        """
        if name.startswith(_TIED):
            return self._tied(name.removeprefix(_TIED), first_stage)
        match = _NUMBERED.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{self._where}: {name[:200]} is in no numbered layer, as all parameters of a pipeline are")
        number, rest = int(match[1]), match[2]
        if number in self._blocks:
            return f"{BLOCKS}{number - self._blocks[0]}.{rest}"
        if _IN_EMBEDDING.fullmatch(rest):
            return self._tied(rest, number < self._blocks[0])
        if number > self._blocks[-1] and rest in ("weight", "bias"):
            return FINAL_NORM + rest
        if number > self._blocks[-1] and rest.startswith("lm_head."):
            return HEAD + rest.removeprefix("lm_head.")
        raise CheckpointError(f"{self._where}: layer {number} has {rest[:200]}; layers of this pipeline are an embedding, blocks"
                              f" ({self._blocks[0]} to {self._blocks[-1]}), a norm and a head")  # fmt: skip

    def _tied(self, rest: str, first_stage: bool) -> str | None:
        """Return the name in the embedding, or in the head's copy of it, of which only the word embeddings are used."""
        if first_stage:
            return EMBEDDING + rest
        return TIED_COPY if rest == "word_embeddings.weight" else None
