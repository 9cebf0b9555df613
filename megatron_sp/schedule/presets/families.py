"""Presets of model families, which transformers names in ``config.model_type``: a function for each."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from megatron_sp.schedule.core.directives import Mesh
from megatron_sp.schedule.schedule import Schedule, schedule
from megatron_sp.utils.errors import ConfigError


class Blocks(NamedTuple):
    """Paths of a model's blocks, as a preset returns them."""

    glob: str
    first: str  # the block before which activations are split along the sequence, if they are
    last: str  # the module after which they are whole again: the norm after the blocks, or the last block


Writer = Callable[[Schedule, bool], Blocks]
Ends = tuple[str, str]  # collectives at the input of layers split by columns, and at the output of those split by rows
_WRITERS: dict[str, Writer] = {}


def register_preset(*model_types: str) -> Callable[[Writer], Writer]:
    """Decorate a function (schedule, seq) -> ``Blocks`` that writes the lines of a family.

    ``auto`` adds those of word embeddings, output layer, ``sequence()`` and recomputation.
    """

    def register(writer: Writer) -> Writer:
        _WRITERS.update(dict.fromkeys(model_types, writer))
        return writer

    return register


def families() -> list[str]:
    """Return the known families."""
    return sorted(_WRITERS)


def auto(
    model: nn.Module, mesh: Mesh | None = None, *, tp: int | None = None, sp: int | None = None, cp: int | None = None,
    seq: bool = False, ulysses: bool | None = None, context: bool | None = None, vocab: bool = True,
    recompute: str | bool = False,
) -> Schedule:  # fmt: skip
    """Make the schedule of a model of a known family; it is not yet applied, and lines may be added.

    Args:
        mesh: mesh of the job. Without one, ``tp``, ``sp`` and ``cp`` give the sizes of a schedule to look at.
        seq: split activations between the layers along the sequence over tp (arXiv:2205.05198).
        ulysses, context: split sequences over sp, deal them to the ranks of cp (default: if these are above 1).
        vocab: split the word embeddings and the output layer along the vocabulary.
        recompute: recompute blocks in backward; True, or the policy of ``.checkpoint()``.
    """
    for axis, size in (("tp", tp), ("sp", sp), ("cp", cp)) if mesh is not None else ():
        if size is not None and size != mesh.group(axis).size():  # type: ignore[union-attr]
            raise ConfigError(f"{axis} ({size}) is not that of the mesh ({mesh}): leave it out, or make another mesh")
    config: Any = getattr(model, "config", None)
    name, cls = getattr(config, "model_type", None), type(model).__name__
    if name is None:
        by = "by which presets are found: write its lines with schedule(model, mesh)"
        raise ConfigError(f"{cls} has no config.model_type, {by}")
    if name not in _WRITERS:
        is_known = type(config).__module__.startswith("transformers.models.")  # so its name is no misspelling
        near = [] if is_known else difflib.get_close_matches(str(name), families(), 2)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        has_plan = getattr(config, "base_model_tp_plan", None)
        plan = ", or take transformers' own plan with from_hf_plan(model)" if has_plan else ""
        way = f"write its lines with schedule(model, mesh){plan}"
        raise ConfigError(f"there is no preset for {name!r}, only for {', '.join(families())}{hint}: {way}")
    s = schedule(model, mesh or Mesh.sizes(tp=tp or 1, sp=sp or 1, cp=cp or 1))
    blocks = _WRITERS[name](s, seq)
    if vocab:
        weights = {id(m.weight) for m in _vocabularies(model) if isinstance(m, (nn.Embedding, nn.Linear))}
        for path, module in model.named_modules():  # tied ones are split together
            if isinstance(module, (nn.Embedding, nn.Linear)) and id(module.weight) in weights:
                s[path].vocab_parallel()
    if seq:
        s.sequence(blocks.first, blocks.last)
    if recompute:
        s[blocks.glob].checkpoint(None if recompute is True else recompute)
    ulysses = ulysses if ulysses is not None else s.mesh.sp.size() > 1
    context = context if context is not None else s.mesh.cp.size() > 1
    # sequences are cut from inputs to labels if there is an output layer, else in the blocks only: other heads may use
    # whole sequences
    cuts_inputs = (ulysses or context) and model.get_output_embeddings() is not None  # type: ignore[operator]
    region = {} if cuts_inputs else {"enter": blocks.first, "leave": blocks.last}
    if ulysses:
        s.ulysses(**region)
    if context:
        s.context(**({} if ulysses else region))
    if (ulysses or context) and drops(config):
        # after the lines of tp, so around them: what is alike for the ranks of tp still differs over sp. Not around the
        # whole model: layerdrop must skip the same blocks on all ranks
        s[blocks.glob].rng("sp")
        inside = tuple(f"{path}." for path in s[blocks.glob])
        for path, module in model.named_modules() if cuts_inputs else ():
            if isinstance(module, nn.Dropout) and not path.startswith(inside):
                s[path].rng("sp")
    return s


def _vocabularies(model: Any) -> list[Any]:
    # the word embeddings and the output layer; for a model of several models (CLIP), those of each
    try:
        return [model.get_input_embeddings(), model.get_output_embeddings()]
    except NotImplementedError:
        return [m for child in model.children() if hasattr(child, "get_input_embeddings") for m in _vocabularies(child)]


# what writers of lines share


def base_of(s: Schedule) -> str:
    """Return the prefix of the base model's modules: "model." in a model with a head, else empty."""
    prefix = getattr(s.model, "base_model_prefix", "")
    return f"{prefix}." if prefix and isinstance(getattr(s.model, prefix, None), nn.Module) else ""


def share_key_values(s: Schedule, attention: str, queries: int, key_values: int) -> None:
    """Let each rank's queries use one key/value head, if there are fewer such heads than ranks."""
    size = s.mesh.tp.size()
    if key_values < size and size % key_values == 0:
        s[attention].set("num_key_value_groups", queries // size)


def drops(config: Any) -> bool:
    """Return whether there is any dropout in the blocks."""
    rates = {name: value for name, value in config.to_dict().items() if "drop" in name and isinstance(value, float)}
    return any(rate > 0 and not name.startswith(("summary_", "classifier_")) for name, rate in rates.items())


def _begin(s: Schedule, seq: bool) -> tuple[Any, str, Ends]:
    # (configuration, base_of, collectives before layers split by columns and after those split by rows)
    config: Any = s.model.config
    if getattr(config, "add_cross_attention", False):
        what = f"has cross attention (add_cross_attention), which the preset of {config.model_type} does not cover"
        raise ConfigError(f"{type(s.model).__name__} {what}: write its lines with schedule(model, mesh)")
    return config, base_of(s), ("all_gather", "reduce_scatter") if seq else ("copy", "all_reduce")


def _has(s: Schedule, path: str) -> bool:
    return any(name == path for name, _ in s.model.named_modules())


def _attention(s: Schedule, path: str, qkv: str, out: str, ends: Ends, **column: Any) -> None:
    s[path].sync("fwd_pre", ends[0], arg="hidden_states")
    s[f"{path}.{qkv}"].column(input="prepared", **column)
    s[f"{path}.{out}"].row(ends[1])


def _mlp(s: Schedule, path: str, up: str, down: str, ends: Ends, **column: Any) -> None:
    s[path].sync("fwd_pre", ends[0])
    s[f"{path}.{up}"].column(input="prepared", **column)
    s[f"{path}.{down}"].row(ends[1])


def _differ(s: Schedule, blocks: str, *split: str, seq: bool, same: str = "") -> None:
    # dropout differs between tp ranks: in whole blocks if the sequence is split, else in the split modules, but not
    # after the sum inside of them (``same``)
    if drops(s.model.config):
        for glob in [blocks] if seq else split:
            s[glob].rng("tp")
        if same and not seq:
            s[same].rng("same")


def _refuse_sp(s: Schedule, why: str, instead: str = "give these ranks to tp or dp") -> None:
    if (sp := s.mesh.sp.size()) > 1:
        raise ConfigError(f"{why.format(sp=sp)}: {instead}")


@register_preset("bert", "roberta")
def bert(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of BERT and RoBERTa, with any head."""
    config, base, ends = _begin(s, seq)
    layers = f"{base}encoder.layer"
    blocks = f"{layers}.*"
    s[f"{blocks}.attention.self"].sync("fwd_pre", ends[0], arg="hidden_states")
    s[f"{blocks}.attention.self.{{query,key,value}}"].column(input="prepared", heads=config.num_attention_heads)
    s[f"{blocks}.attention.output.dense"].row(ends[1])
    s[f"{blocks}.intermediate"].sync("fwd_pre", ends[0])
    s[f"{blocks}.intermediate.dense"].column(input="prepared")
    s[f"{blocks}.output.dense"].row(ends[1])
    _differ(s, blocks, f"{blocks}.attention.self", seq=seq)
    # there is no norm after the last layer: it is the layer's own
    return Blocks(blocks, f"{layers}.0", f"{layers}.{config.num_hidden_layers - 1}")


@register_preset("gpt2")
def gpt2(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of GPT-2, whose weights are transposed (``Conv1D``)."""
    config, base, ends = _begin(s, seq)
    blocks = f"{base}h.*"
    _attention(s, f"{blocks}.attn", "c_attn", "c_proj", ends, blocks=3, heads=config.n_head)
    _mlp(s, f"{blocks}.mlp", "c_fc", "c_proj", ends)
    _differ(s, blocks, f"{blocks}.attn", seq=seq, same=f"{blocks}.attn.resid_dropout")
    return Blocks(blocks, f"{base}h.0", f"{base}ln_f")


@register_preset("gpt_neox")
def gpt_neox(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of GPT-NeoX (Pythia), with q, k and v adjacent within each head."""
    config, base, ends = _begin(s, seq)
    blocks, heads = f"{base}layers.*", config.num_attention_heads
    _attention(s, f"{blocks}.attention", "query_key_value", "dense", ends, blocks=1, heads=heads)  # cut between heads
    _mlp(s, f"{blocks}.mlp", "dense_h_to_4h", "dense_4h_to_h", ends)
    _differ(s, blocks, f"{blocks}.attention", seq=seq)
    return Blocks(blocks, f"{base}layers.0", f"{base}final_layer_norm")


@register_preset("llama", "mistral", "qwen2", "qwen3")
def llama(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of Llama, Mistral, Qwen2 (biases) and Qwen3 (a norm within each head)."""
    config, base, ends = _begin(s, seq)
    blocks, heads, key_values = f"{base}layers.*", config.num_attention_heads, config.num_key_value_heads
    s[f"{blocks}.self_attn"].sync("fwd_pre", ends[0], arg="hidden_states")
    s[f"{blocks}.self_attn.q_proj"].column(input="prepared", heads=heads)
    s[f"{blocks}.self_attn.{{k,v}}_proj"].column(input="prepared", heads=key_values, replicas=True)
    s[f"{blocks}.self_attn.o_proj"].row(ends[1])
    share_key_values(s, f"{blocks}.self_attn", heads, key_values)
    if _has(s, f"{base}layers.0.self_attn.q_norm"):
        s[f"{blocks}.self_attn.{{q,k}}_norm"].sum_gradients()  # whole on every rank, and used on its heads
    _mlp(s, f"{blocks}.mlp", "{gate,up}_proj", "down_proj", ends)
    _differ(s, blocks, f"{blocks}.self_attn", seq=seq)
    return Blocks(blocks, f"{base}layers.0", f"{base}norm")


@register_preset("opt")
def opt(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of OPT, whose MLP flattens batch and positions."""
    config, base, ends = _begin(s, seq)
    layers, norm, rows = f"{base}decoder.layers", f"{base}decoder.final_layer_norm", 0
    blocks = f"{layers}.*"
    _attention(s, f"{blocks}.self_attn", "{q,k,v}_proj", "out_proj", ends, heads=config.num_attention_heads)
    # with the sequence split, ranks gather along the first dim there: this changes the order of the rows, which an MLP
    # does not mind, and the reduce_scatter after it splits along the same dim again
    s[f"{blocks}.fc1"].sync("fwd_pre", ends[0], axis=rows).column(input="prepared")
    s[f"{blocks}.fc2"].row(ends[1], axis=rows)
    _differ(s, blocks, f"{blocks}.self_attn", seq=seq)
    # where norms stand after their layers, none stands after the last
    return Blocks(blocks, f"{layers}.0", norm if _has(s, norm) else f"{layers}.{config.num_hidden_layers - 1}")


@register_preset("t5")
def t5(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of T5, or of its encoder."""
    config, base, ends = _begin(s, seq)
    _refuse_sp(s, "T5's attention has a bias of positions for each head, which Ulysses (sp {sp}) does not trade")
    has_decoder = _has(s, f"{base}decoder")
    blocks = f"{base}{'{encoder,decoder}' if has_decoder else 'encoder'}.block.*"
    attention = f"{blocks}.layer.*.{'{SelfAttention,EncDecAttention}' if has_decoder else 'SelfAttention'}"
    mlp, last = f"{blocks}.layer.*.DenseReluDense", f"{base}{'decoder' if has_decoder else 'encoder'}"
    s[attention].sync("fwd_pre", ends[0], arg="hidden_states")
    s[f"{attention}.{{q,k,v}}"].column(input="prepared", heads=config.num_heads)
    s[f"{attention}.relative_attention_bias"].column(heads=config.num_heads)
    s[f"{attention}.o"].row(ends[1])
    if has_decoder:
        s[f"{blocks}.layer.1.EncDecAttention"].sync("fwd_pre", "copy", arg="key_value_states")
    _mlp(s, mlp, f"wi{'_*' if config.is_gated_act else ''}", "wo", ends)
    _differ(s, blocks, attention, mlp, seq=seq)
    if has_decoder and seq:
        s.sequence(f"{base}encoder.block.0", f"{base}encoder.final_layer_norm")
    return Blocks(blocks, f"{last}.block.0", f"{last}.final_layer_norm")


@register_preset("falcon")
def falcon(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of Falcon; with multi_query, attention stays whole."""
    config, base, ends = _begin(s, seq)
    _refuse_sp(s, "Falcon computes its attention itself, so Ulysses (sp {sp}) has no place to trade heads")
    if config.alibi:
        raise ConfigError(
            "Falcon with slopes (alibi) adds a number for each head to its mask, which the preset does not cover:"
            " write its lines with schedule(model, mesh), as docs/reference/schedule_presets.md does for Bloom"
        )
    one_key = config.multi_query and not config.new_decoder_architecture
    if seq and one_key:
        raise ConfigError(
            "Falcon with multi_query has one key and value for all heads, so its attention stays whole on every rank,"
            " and wants all positions there: leave seq out"
        )
    blocks, queries = f"{base}h.*", config.num_attention_heads
    if not one_key:
        groups = config.num_kv_heads if config.new_decoder_architecture else queries
        s[f"{blocks}.self_attention"].sync("fwd_pre", ends[0], arg="hidden_states")
        s[f"{blocks}.self_attention.query_key_value"].column(input="prepared", blocks=1, heads=groups)
        if groups != queries:
            s[f"{blocks}.self_attention"].set("num_heads", divide="tp")  # those of the groups follow
        s[f"{blocks}.self_attention.dense"].row(ends[1])
    _mlp(s, f"{blocks}.mlp", "dense_h_to_4h", "dense_4h_to_h", ends)
    _differ(s, blocks, seq=seq)  # dropout comes only after the sums
    return Blocks(blocks, f"{base}h.0", f"{base}ln_f")


@register_preset("modernbert")
def modernbert(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of ModernBERT: fused q, k, v, fused gate and up."""
    config, base, ends = _begin(s, seq)
    blocks = f"{base}layers.*"
    _attention(s, f"{blocks}.attn", "Wqkv", "Wo", ends, blocks=3, heads=config.num_attention_heads)
    _mlp(s, f"{blocks}.mlp", "Wi", "Wo", ends, blocks=2)
    _differ(s, blocks, f"{blocks}.attn", f"{blocks}.mlp", seq=seq, same=f"{blocks}.attn.out_drop")
    return Blocks(blocks, f"{base}layers.0", f"{base}final_norm")


_TWO_SEQUENCES = "two sequences of which each has its own length, and Ulysses (sp {sp}) cuts one"


@register_preset("whisper")
def whisper(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of Whisper's encoder, decoder or both."""
    config, base, ends = _begin(s, seq)
    tp, stacks = s.mesh.tp.size(), [name for name in ("encoder", "decoder") if _has(s, f"{base}{name}")]
    _refuse_sp(s, f"Whisper has sound and text, {_TWO_SEQUENCES}")
    if seq and "encoder" in stacks and config.max_source_positions % tp:
        rule = f"must be a multiple of tp ({tp}) to be cut along the sequence: leave seq out"
        raise ConfigError(f"max_source_positions ({config.max_source_positions}) {rule} (E12)")
    if tp > 1 and not seq and config.activation_dropout > 0:
        raise ConfigError(
            f"activation_dropout ({config.activation_dropout}) of Whisper's layers works on what is split, in the same"
            " module as dropout on what is whole, and random numbers are told apart by module: set it to 0, or take"
            " seq=True"
        )
    attentions = []
    for name in stacks:
        blocks, heads = f"{base}{name}.layers.*", getattr(config, f"{name}_attention_heads")
        for kind in ("self_attn", "encoder_attn") if name == "decoder" else ("self_attn",):
            attentions.append(f"{blocks}.{kind}")
            _attention(s, attentions[-1], "{q,k,v}_proj", "out_proj", ends, heads=heads)
        if name == "decoder":
            s[f"{blocks}.encoder_attn"].sync("fwd_pre", "copy", arg="key_value_states")
        s[f"{blocks}.fc1"].sync("fwd_pre", ends[0]).column(input="prepared")
        s[f"{blocks}.fc2"].row(ends[1])
    if len(stacks) == 2 and seq:
        s.sequence(f"{base}encoder.layers.0", f"{base}encoder.layer_norm")
    layers = f"{base}{'{encoder,decoder}' if len(stacks) == 2 else stacks[0]}.layers.*"
    _differ(s, layers, *attentions, seq=seq)
    return Blocks(layers, f"{base}{stacks[-1]}.layers.0", f"{base}{stacks[-1]}.layer_norm")


@register_preset("vit")
def vit(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of ViT."""
    config, base, ends = _begin(s, seq)
    blocks = f"{base}layers.*"
    _attention(s, f"{blocks}.attention", "{q,k,v}_proj", "o_proj", ends, heads=config.num_attention_heads)
    _mlp(s, f"{blocks}.mlp", "fc1", "fc2", ends)
    _differ(s, blocks, f"{blocks}.attention", seq=seq)
    if seq:
        _require_even(config, s.mesh.tp.size())
    return Blocks(blocks, f"{base}layers.0", f"{base}layernorm")


def _require_even(config: Any, tp: int) -> None:
    sizes = (config.image_size, config.patch_size)
    image, patch = (tuple(n) if isinstance(n, (tuple, list)) else (n, n) for n in sizes)
    patches = (image[0] // patch[0]) * (image[1] // patch[1])
    if (patches + 1) % tp:
        raise ConfigError(
            f"{patches} patches and the class token are {patches + 1} tokens, which must be a multiple of tp ({tp}) to"
            " be cut along the sequence: leave seq out, or choose another image_size or patch_size (E12)"
        )


@register_preset("clip", "clip_text_model", "clip_vision_model")
def clip(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of CLIP, or of one of its towers."""
    config, _, ends = _begin(s, seq)
    towers = {"text_model": "text_config", "vision_model": "vision_config"}
    towers = {name: of for name, of in towers.items() if _has(s, name)}
    if len(towers) == 2:
        train_one = "give these ranks to tp or dp, or train one of its towers"
        _refuse_sp(s, f"CLIP has text and images, {_TWO_SEQUENCES}", train_one)
    written = []
    for name in towers or ("",):  # "": a tower by itself
        base, of_tower = f"{name}." if name else "", getattr(config, towers.get(name, ""), config)
        blocks = f"{base}encoder.layers.*"
        _attention(s, f"{blocks}.self_attn", "{q,k,v}_proj", "out_proj", ends, heads=of_tower.num_attention_heads)
        _mlp(s, f"{blocks}.mlp", "fc1", "fc2", ends)
        if drops(of_tower):
            s[blocks if seq else f"{blocks}.self_attn"].rng("tp")
        is_text = _has(s, f"{base}final_layer_norm")
        if seq and not is_text:
            _require_even(of_tower, s.mesh.tp.size())
        # the norm after the image blocks sees the class token only, so the sequence is whole again before it
        last = "final_layer_norm" if is_text else f"encoder.layers.{of_tower.num_hidden_layers - 1}"
        written.append(Blocks(blocks, f"{base}encoder.layers.0", f"{base}{last}"))
    for other in written[:-1] if seq else ():
        s.sequence(other.first, other.last)
    both = f"{{{','.join(towers)}}}.encoder.layers.*"
    return written[-1]._replace(glob=both) if len(towers) == 2 else written[-1]
