"""Three are asked about a schedule: check(), verify() and apply(). Their answers, over presets, plans, lines, heads and ranks.

python tests/support/schedule_agreement.py [--ranks 2] [--only llama] [--left-out]
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.schedule.core.placements import NotFollowed
from megatron_sp.schedule.presets import auto, from_hf_plan
from support.preset_models import BERT, LLAMA, MODELS, batch_of, make, transformers
from support.ranks import run_ranks

#: families with a plan of their own, without a preset
PLANS = [
    "Gemma", "Gemma2", "Cohere", "Phi3", "Starcoder2", "Olmo2", "Granite", "Glm", "Glm4", "Helium", "Qwen3", "Mixtral", "Apertus", "Arcee",
]  # fmt: skip
#: families by hand: how their attention is called, and lines that divide what they have written down
HAND = {"StableLm": "ForCausalLM", "VisualBert": "Model", "Electra": "Model", "Persimmon": "ForCausalLM", "Phi": "ForCausalLM"}


class Case(NamedTuple):
    """How a schedule is made: by preset (auto), plan or hand; of a model with so many heads; with all lines but one (``without``)."""

    how: str
    name: str
    heads: tuple[int, int] = (4, 2)
    seq: bool = False
    sets: bool = False
    without: int | None = None

    def __str__(self) -> str:
        more = "".join([", seq" * self.seq, ", set" * self.sets, "" if self.without is None else f", without line {self.without}"])
        return f"{self.how} {self.name}, {self.heads[0]}/{self.heads[1]} heads{more}"


def sizes_of(case: Case) -> dict[str, Any]:
    """What differs from the usual configuration."""
    heads, key_values = case.heads
    if case.how == "auto" and case.name.startswith(("t5", "whisper", "gpt2", "clip")):
        return {"gpt2": {"n_head": heads, "n_embd": 6 * heads}, "t5": {"num_heads": heads}}.get(case.name.partition("-")[0], {})
    sizes = {"num_attention_heads": heads, "hidden_size": 6 * heads}
    has_groups = case.how != "auto" or case.name.startswith(("llama", "mistral", "qwen"))
    falcon = {"num_kv_heads": key_values} if case.name == "falcon" else {}
    opt = {"word_embed_proj_dim": 6 * heads} if case.name.startswith("opt") else {}
    return {**sizes, **({"num_key_value_heads": key_values, "head_dim": 6} if has_groups else {}), **falcon, **opt}


def schedule_of(case: Case, mesh: Mesh) -> Schedule:
    s = all_lines_of(case, mesh)
    if case.without is not None:
        del s.directives[case.without]
    return s


def all_lines_of(case: Case, mesh: Mesh) -> Schedule:
    if case.how == "auto":
        return auto(make(case.name, **sizes_of(case)), mesh, seq=case.seq)
    torch.manual_seed(0)
    is_bert = case.name in ("VisualBert", "Electra")
    sizes = {**(BERT if is_bert else LLAMA), **sizes_of(case)}
    head = HAND.get(case.name, "ForCausalLM")
    sizes = {k: v for k, v in sizes.items() if not is_bert or k not in ("num_key_value_heads", "head_dim")}
    model = getattr(transformers, f"{case.name}{head}")(getattr(transformers, f"{case.name}Config")(**sizes))
    return from_hf_plan(model, mesh) if case.how == "plan" else by_hand(schedule(model, mesh), case)


def by_hand(s: Schedule, case: Case) -> Schedule:
    """Attention alone, by columns and by rows, with the numbers of heads divided by lines or left to follow."""
    heads, key_values = case.heads
    if case.name in ("VisualBert", "Electra"):
        attention = s["encoder.layer.*.attention.self"]
        if case.sets:
            attention.set("num_attention_heads", divide="tp").set("all_head_size", divide="tp")
        attention["{query,key,value}"].column(heads=heads)
        s["encoder.layer.*.attention.output.dense"].row()
        return s
    attention = s["model.layers.*.self_attn"]
    module = s.model.get_submodule(attention.paths[0])
    for name in ("num_heads", "num_key_value_heads"):
        if case.sets and hasattr(module, name):
            attention.set(name, divide="tp")
    if hasattr(module, "query_key_value"):
        attention["query_key_value"].column(heads=heads, blocks=1)
    else:
        attention["q_proj"].column(heads=heads)
        attention["{k,v}_proj"].column(heads=key_values)
    attention[next(n for n in ("o_proj", "dense") if hasattr(module, n))].row()
    return s


def batch_for(case: Case) -> dict[str, Any]:
    if case.how == "auto":
        return batch_of(case.name)
    return {k: v for k, v in batch_of("llama").items() if k != "labels" or case.name not in ("VisualBert", "Electra")}


def said(ask: Callable[[], object]) -> str:
    """yes; unknown; or the codes of the mistake ("no" where it has none), the first one first."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ask()
    except NotFollowed:
        return "unknown"
    except Exception as error:  # the same on every rank
        codes = re.findall(r"\b(E\d+)\)", str(error))
        return " ".join(dict.fromkeys(codes)) or f"no: {type(error).__name__}: {str(error)[:200]}"
    return "yes"


def answers(case: Case, mesh: Mesh) -> tuple[str, str, str]:
    """Of check(), verify() and apply(), each asked about a schedule of its own."""
    try:
        schedule_of(case, mesh)
    except Exception as error:  # refused before there is a schedule
        return (f"not made: {error}",) * 3
    batch = batch_for(case)
    asks = (partial(getattr(schedule_of(case, mesh), what), batch) for what in ("check", "verify", "apply"))
    check, verify, apply = (said(ask) for ask in asks)
    return check, verify, apply


def agree(found: tuple[str, str, str]) -> bool:
    """Whether it is one answer: yes, the same mistake, or unknown, where numbers alone decide."""
    return found[0] == "unknown" or len(set(found)) == 1


def everything() -> Iterator[Case]:
    counts = [(4, 2), (4, 4), (4, 1), (6, 2), (6, 6), (8, 4), (3, 3), (2, 1)]
    for heads in counts:
        yield from (Case("auto", name, heads, seq) for name in MODELS for seq in (False, True))
        yield from (Case("plan", name, heads) for name in PLANS)
        yield from (Case("hand", name, heads, sets=sets) for name in HAND for sets in (False, True))


def left_out(cases: Iterable[Case]) -> Iterator[Case]:
    """Of each that can be made, each line in turn."""
    for case in cases:
        with suppress(Exception):
            yield from (case._replace(without=place) for place in range(len(all_lines_of(case, Mesh.sizes(tp=2)).directives)))


def one_of_each() -> Iterator[Case]:
    """All families once, with heads that two ranks can share."""
    yield from (Case("auto", name, seq=seq) for name in MODELS for seq in (False, True))
    yield from (Case("plan", name) for name in PLANS)
    yield from (Case("hand", name, (4, 4), sets=sets) for name in HAND for sets in (False, True))


def compare(cases: list[Case], printed: bool = False) -> None:
    """On every rank, all of which are tp's. Raises AssertionError: with those that are answered in two ways."""
    mesh = Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=dist.get_world_size()))
    wrong, counts = [], {"yes": 0, "refused": 0, "unknown": 0, "not made": 0}
    for case in cases:
        found = answers(case, mesh)
        kind = found[0] if found[0] in counts else "not made" if found[0].startswith("not made") else "refused"
        counts[kind] += 1
        if not agree(found):
            wrong.append(f"{case}: check {found[0]}, verify {found[1]}, apply {found[2]}")
            if printed and dist.get_rank() == 0:
                print(wrong[-1], flush=True)
    if printed and dist.get_rank() == 0:
        print(f"{len(cases)} schedules on {dist.get_world_size()} ranks: {counts}, {len(wrong)} answered in two ways", flush=True)
    assert not wrong, "\n".join(wrong)


def run_cases(folder: Path, ranks: int, cases: list[Case], printed: bool = False) -> None:
    for case in cases:
        answers_import(case)
    run_ranks(compare, ranks, folder, cases, printed)


def answers_import(case: Case) -> None:
    """A family's module is imported once, before the fork."""
    family = MODELS[case.name][0] if case.how == "auto" else case.name
    getattr(transformers, f"{family}Model", None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the answers of check(), verify() and apply().")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--left-out", action="store_true", help="each line of each schedule in turn is missing")
    args = parser.parse_args()
    cases = left_out(one_of_each()) if args.left_out else everything()
    with tempfile.TemporaryDirectory() as folder:
        run_cases(Path(folder), args.ranks, [case for case in cases if args.only in str(case)], printed=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
