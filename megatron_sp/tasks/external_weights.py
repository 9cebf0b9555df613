"""Model from a local folder with transformers' config.json and, optionally, weights. Nothing is downloaded, none of its code is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from megatron_sp.config.schema import Config
from megatron_sp.ops import availability
from megatron_sp.tasks.external_task import ATTENTION
from megatron_sp.utils.errors import ConfigError

_DROPOUT = {
    "attention_dropout": ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"),
    "hidden_dropout": ("hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "embd_pdrop"),
}


def load_transformers() -> Any:
    """Import transformers. Raises ConfigError, with instructions, if it is not installed."""
    try:
        return availability.load("transformers")
    except RuntimeError as error:
        raise ConfigError(f"a model of transformers was asked for, and {error}: pip install -e '.[hf]'") from None


def from_folder(folder: str, auto_class: str) -> Callable[[Config], nn.Module]:
    """Return a function that builds the model, with the folder's weights (safetensors) if it has any, else with random ones.

    Dropout rates are those of the flags.

    Args:
        folder: local folder.
        auto_class: AutoModelForCausalLM or AutoModelForMaskedLM.
    """

    def build(config: Config) -> nn.Module:
        library = load_transformers()
        shape = library.AutoConfig.from_pretrained(folder, local_files_only=True)
        for flag, names in _DROPOUT.items():
            for name in names:
                if hasattr(shape, name):
                    setattr(shape, name, getattr(config.model, flag))
        cls, attention = getattr(library, auto_class), ATTENTION[config.kernels.attention_backend]
        if any(Path(folder).glob("*.safetensors")):
            loaded: nn.Module = cls.from_pretrained(folder, config=shape, local_files_only=True, attn_implementation=attention)
            return loaded
        made: nn.Module = cls.from_config(shape, attn_implementation=attention)
        return made

    return build
