"""Model of a local folder with transformers' config.json and, optionally, weights; none of its code is run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_sp.config.schema import Config, raise_all
from megatron_sp.ops import availability
from megatron_sp.tasks.external_shape import shape_in, shape_of
from megatron_sp.tasks.external_task import ATTENTION
from megatron_sp.training.setup import dtype_of
from megatron_sp.utils.errors import ConfigError

_DROPOUT = {
    "attention_dropout": (
        "attention_dropout", "attention_probs_dropout_prob", "attention_dropout_prob", "attn_pdrop", "attn_dropout",
    ),
    "hidden_dropout": (
        "hidden_dropout", "hidden_dropout_prob", "dropout", "dropout_prob", "dropout_rate", "resid_pdrop",
        "resid_dropout",
        "residual_dropout", "embd_pdrop", "emb_pdrop", "embed_dropout", "embedding_dropout",
    ),
}  # fmt: skip
"""Flag -> its names in transformers' configurations: on attention's weights; on embeddings and what a block adds."""
# inside of the MLP: off with --hidden-dropout 0, else the model's own
_INNER_DROPOUT = ("activation_dropout", "mlp_dropout", "ffn_dropout", "ff_dropout")
_OTHER_HEADS = ("classif", "summary", "pooler", "qa_")  # in names of what only heads for other tasks have
_OTHER_WEIGHTS = (
    "pytorch_model*.bin", "model*.bin", "consolidated*.pt*", "*.gguf", "tf_model*.h5", "flax_model*.msgpack",
)  # fmt: skip


class ModelFolder:
    """Builder of a folder's model, with its weights (safetensors) or random ones, and dropout as flags or it say."""

    def __init__(self, folder: str, auto_class: str) -> None:
        self.folder, self.auto_class = folder, auto_class
        self._rates: dict[str, float] | None = None

    def prepare(self, config: Config) -> None:
        """Set shape, dropout rates and the kind of attention in ``config``.

        Raises:
            ConfigError: config.json cannot be read, or a flag does not fit it; or no weights are safetensors.
        """
        others = sorted(path.name for pattern in _OTHER_WEIGHTS for path in Path(self.folder).glob(pattern))
        if others and not any(Path(self.folder).glob("*.safetensors")):
            raise ConfigError(
                f"--model {self.folder}: its weights ({', '.join(others[:3])}) are not safetensors, and no other file"
                " is opened, for it may run code: write the model anew with transformers' save_pretrained, or take the"
                " file away to begin with random weights"
            )
        shape = configuration_of(self.folder)
        cls = getattr(load_transformers(), self.auto_class)._model_mapping.get(type(shape), None)
        backend = config.kernels.attention_backend
        if ATTENTION[backend] == "sdpa" and not getattr(cls, "_supports_sdpa", True):
            if backend != "auto":
                raise ConfigError(
                    f"--attention-backend {backend}: transformers' {cls.__name__} has no such attention (scores with a"
                    " soft cap, sinks, ...): leave the flag out, or give unfused"
                )
            config.kernels.attention_backend = "unfused"
        raise_all(list(_problems(shape, config, self.folder)))
        for flag in _DROPOUT:
            if not config.says("model", flag):
                setattr(config.model, flag, _rate(shape, flag))
        self._rates = {flag: getattr(config.model, flag) for flag in _DROPOUT if config.says("model", flag)}

    def __call__(self, config: Config) -> nn.Module:
        """Build the model in the run's dtype, like ``from_pretrained``: buffers and some parameters stay fp32."""
        if self._rates is None:
            self.prepare(config)
        shape = configuration_of(self.folder)
        for flag in _DROPOUT:
            rate = getattr(config.model, flag)
            if flag not in (self._rates or ()) and rate == _rate(shape, flag):  # a verification sets it to 0
                continue
            for holder, name, value in list(_dropout_rates(shape)):
                is_inner = flag == "hidden_dropout" and not rate and name in _INNER_DROPOUT
                if value == rate or not (name in _DROPOUT[flag] or is_inner):
                    continue
                try:
                    setattr(holder, name, rate)
                except Exception as error:  # of transformers' own, for a class that declares a whole number, say
                    what = f"--{flag.replace('_', '-')} ({rate:g})"
                    raise ConfigError(f"{what}: {type(holder).__name__} rejects it: {_in_a_line(error)}") from None
        library, attention = load_transformers(), ATTENTION[config.kernels.attention_backend]
        library.utils.logging.disable_progress_bar()  # of each rank
        cls = getattr(library, self.auto_class)
        try:
            if any(Path(self.folder).glob("*.safetensors")):
                loaded: nn.Module = cls.from_pretrained(
                    self.folder, config=shape, local_files_only=True, attn_implementation=attention,
                    dtype=dtype_of(config),
                )  # fmt: skip
                return loaded
            random: nn.Module = cls.from_config(shape, attn_implementation=attention, dtype=torch.float32)
            return random
        except Exception as error:  # transformers raises exception classes of its own for what it rejects
            raise ConfigError(f"--model {self.folder}: transformers refuses it: {_in_a_line(error)}") from None


def load_transformers() -> Any:
    try:
        return availability.load("transformers")
    except RuntimeError as error:
        raise ConfigError(f"a model of transformers was asked for, and {error}: pip install -e '.[hf]'") from None


def configuration_of(folder: str) -> Any:
    """Return transformers' configuration of a folder. Raises ConfigError: it does not know it, or rejects an entry."""
    library = load_transformers()
    try:
        return library.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises exception classes of its own for what it rejects
        why = f"config.json is none of transformers' models: {_in_a_line(error)}"
        raise ConfigError(f"--model {folder}: {why}") from None


def whole_shape_of(folder: str) -> dict[str, int]:
    """Return the shape of a folder's model, also where its file has unusual names."""
    shape = shape_in(configuration_of(folder)) | shape_of(folder)
    # without attention: a head for each channel, so that no rule speaks of heads before the model itself is looked at
    return {"num_attention_heads": shape["hidden_size"]} | shape if "hidden_size" in shape else shape


def _in_a_line(error: Exception) -> str:
    # of an error that names a wrong entry, the lines below say what is wrong with it
    text = " ".join(str(error).split())
    return f"{type(error).__name__} {text}" if isinstance(error, KeyError) else text[:500] or type(error).__name__


def _dropout_rates(shape: Any) -> Iterator[tuple[Any, str, float]]:
    # (holder, name, value) in a configuration and its parts
    for holder in (shape, *(part for name in shape.sub_configs if (part := getattr(shape, name, None)) is not None)):
        for name, value in vars(holder).items():
            is_rate = isinstance(value, (int, float)) and not isinstance(value, bool)
            if "drop" in name and is_rate and not any(word in name for word in _OTHER_HEADS):
                yield holder, name, float(value)


def _rate(shape: Any, flag: str) -> float:
    return max((value for _, name, value in _dropout_rates(shape) if name in _DROPOUT[flag]), default=0.0)


def _problems(shape: Any, config: Config, folder: str) -> Iterator[str]:
    """Take transformers' shape of a config.json; yield a message for each flag that does not fit it."""
    # flags beside entries of the file have been compared already, and a class may count otherwise than its file: one
    # entry for pairs of layers
    stored, model = shape_of(folder), config.model
    for field, value in shape_in(shape).items():
        given = getattr(model, field)
        if field not in stored and config.says("model", field) and given != value:
            flag = f"--{field.replace('_', '-')}"
            yield f"{flag} ({given}): {type(shape).__name__} of {folder} has {value}: leave the flag out"
        setattr(model, field, value)
    names = {name for _, name, _ in _dropout_rates(shape)}
    for flag, own in _DROPOUT.items():
        rate = getattr(model, flag)
        if config.says("model", flag) and rate and names.isdisjoint(own):
            whose = f"{type(shape).__name__} ({folder})"
            yield f"--{flag.replace('_', '-')} ({rate:g}): {whose} has no such dropout: leave the flag out"
    known = {*_INNER_DROPOUT, *(name for own in _DROPOUT.values() for name in own)}
    for _, name, rate in _dropout_rates(shape):
        if rate and name not in known:
            what = f"{folder}/config.json: {name} ({rate:g})"
            yield f"{what} is a dropout that no flag here means: set it to 0 there to train without it"
