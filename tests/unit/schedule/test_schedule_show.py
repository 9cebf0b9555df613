"""What people see of a schedule: the tree, one module, differences, costs, and files; on a small model, without a job."""

from __future__ import annotations

import copy
import html
import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.schedule import Mesh, PathError, Schedule, load, schedule
from megatron_sp.schedule.report.show import as_record, page
from megatron_sp.schedule.report.survey import survey
from megatron_sp.utils.errors import ConfigError

H, FF, V = 6, 8, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(H), nn.Linear(H, FF), nn.Linear(FF, H)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks, self.last = nn.Embedding(V, H), nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(H)
        self.head = nn.Linear(H, V, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def toy(*, seq: bool = False, tp: int = 2, model: nn.Module | None = None) -> Schedule:
    s = schedule(model or Toy(), Mesh.sizes(tp=tp))
    s["blocks.*.up"].sync("fwd_pre", "all_gather").column(input="prepared") if seq else s["blocks.*.up"].column()
    s["blocks.*.down"].row("reduce_scatter" if seq else "all_reduce")
    s["{words,head}"].vocab_parallel()
    if seq:
        s.sequence("blocks.0", "last")
    return s


def test_the_tree_shows_shares_and_talk() -> None:
    s = toy()
    before = {name: t.clone() for name, t in s.model.state_dict().items()}
    words = [re.sub(r"\s+", " ", line).strip() for line in s.show().splitlines()]
    assert words[0] == "Toy over tp 2, sp 1, dp 1: 3 lines, 252 of 438 parameters on a rank (58 %)"
    for line in (
        "words Embedding words weight [10 -> 5, 6]",
        "0-2 x 3 Block",
        "up Linear column in: backward all_reduce",
        "weight [8 -> 4, 6]",
        "bias [8 -> 4]",
        "down Linear row weight [6, 8 -> 4]",
        "out: all_reduce",
        "weight [10 -> 5, 6], tied to words.weight",
        "out: all_gather dim -1, backward slice",
    ):
        assert line in words, f"{line} is not in\n" + "\n".join(words)
    assert all(torch.equal(t, before[name]) for name, t in s.model.state_dict().items()) and s.applied is None
    model = Toy()
    model.dropout = nn.Dropout()
    assert "Dropout" not in toy(model=model).show() and "Dropout" in toy(model=model).show(every=True)


def test_a_region_along_the_sequence_is_shown() -> None:
    words = [re.sub(r"\s+", " ", line).strip() for line in toy(seq=True).show().splitlines()]
    assert "0 Block in hidden: slice dim 1, backward all_gather" in words and "1-2 x 2 Block" in words
    assert "norm LayerNorm weight [6], gradient summed over tp" in words
    assert "out: all_gather dim 1, backward slice" in words


def test_explain_says_why_and_who_asked() -> None:
    said = toy(seq=True).explain("blocks.1.down")
    assert "blocks.1.down, a Linear: row\n" in said and "rank 0 of 2 has 0 to 4 along dim 1" in said
    assert "out: reduce_scatter dim 1, backward all_gather, over tp" in said and "a part of a sum, of which each rank goes on" in said
    assert re.search(r"asked for by blocks\.\*\.down: row\(reduce='reduce_scatter'\) at test_schedule_show.py:\d+", said)
    assert toy().explain("blocks").endswith("every rank has all of it and does the same")
    assert toy(seq=True).explain("blocks.*.norm").count("uses it on a share: the sum of their gradients") == 6
    with pytest.raises(PathError, match="did you mean down"):
        toy().explain("blocks.0.dwn")


def test_what_is_applied_is_shown_as_well() -> None:
    s = toy()
    expected = s.show()
    s.apply()
    assert s.show() == expected


def test_differences_are_lines_and_their_effects() -> None:
    one, other = toy(), toy()
    assert not one.diff(other) and str(one.diff(other)) == "no difference"
    other.directives.pop(1)
    other["blocks.0.down"].row()
    text = str(one.diff(other))
    assert "- blocks.*.down: row(reduce='all_reduce')\n+ blocks.0.down: row(reduce='all_reduce')" in text
    assert "  blocks.2.down.weight: [6, 8 -> 4] -> [6, 8]" in text and "  blocks.1.down, out: all_reduce over tp -> nothing" in text
    assert "blocks.0.down" not in text.split("\n", 2)[2]
    renamed = toy()
    renamed.directives.pop(1)
    renamed["blocks.?.down"].row()
    assert "to the same effect" in str(one.diff(renamed)) and one.diff(renamed)
    assert "mesh: tp 2, sp 1, dp 1 -> tp 1" in str(one.diff(toy(tp=1)))


def test_costs_are_the_bytes_of_rings() -> None:
    rows, tokens, tp = 3, 4, 2
    whole = rows * tokens * H * 4  # bytes of [b, s, h]
    price = toy().cost(rows, tokens)
    half = (tp - 1) / tp
    found = {(p.path, p.words): (p.calls, p.forward, p.backward) for p in price.places}
    assert found["blocks.*.up", "gradients summed over tp"] == (3, 0.0, 3 * 2 * half * whole)
    assert found["blocks.*.down", "parts summed over tp"] == (3, 3 * 2 * half * whole, 0.0)
    assert found["head", "gathered over tp"] == (1, half * rows * tokens * V * 4, 0.0)
    assert price.gradients == 0 and price.parameters == 252 * 4 and price.whole_parameters == 438 * 4
    region = toy(seq=True).cost(rows, tokens)
    found = {(p.path, p.words): (p.calls, p.forward, p.backward) for p in region.places}
    each = (3, 3 * half * whole, 3 * half * whole)
    assert found["blocks.*.up", "gathered over tp"] == found["blocks.*.down", "parts summed, and cut over tp"] == each
    assert region.gradients == 2 * half * 4 * (3 * (2 * H + H) + 2 * H), "norms and row biases"
    assert toy().cost({"input_ids": torch.zeros(rows, tokens, dtype=torch.long)}).sent == price.sent
    assert price.activations > 3 * whole and "sent by a rank in a step" in str(price)
    with pytest.raises(ConfigError, match="cost\\(4, 2048\\)"):
        toy().cost(3)
    s = toy()
    s["last"].sync("fwd_post", lambda x, group: all_reduce(x.clone(), group))
    s["blocks.*"].checkpoint()
    found = {(p.path, p.words): (p.calls, p.forward, p.backward) for p in s.cost(rows, tokens).places}
    assert found["last", "a function of the schedule's writer over tp"] == (1, 2 * half * whole, 0.0)
    assert found["blocks.*.down", "computed again, and sent again"] == (3, 0.0, 3 * 2 * half * whole)


def test_a_picture_escapes_everything() -> None:
    s = toy(seq=True)
    text = page(survey(s))
    assert "default-src 'none'" in html.unescape(text) and "<script" not in text and text.count('class="part"') > 10
    evil = type("<img src=x onerror=alert(1)>", (nn.Linear,), {})
    s = schedule(nn.Sequential(evil(4, 4)), Mesh.sizes(tp=2))
    s["0"].column()
    assert "<img" not in page(survey(s)) and "&lt;img" in page(survey(s))


def test_a_record_is_json() -> None:
    record = json.loads(json.dumps(as_record(survey(toy()))))
    assert record["tp"] == 2 and record["model"]["modules"][0]["parameters"][0]["local"] == [5, 6]
    assert record["lines"][0]["line"] == "blocks.*.up: column(input='copy')"


# files


def test_a_file_comes_back_as_it_went(tmp_path: Path) -> None:
    s = toy(seq=True)
    s["blocks.*.down"].checkpoint()
    s.save(tmp_path / "plan.yaml")
    again = load(tmp_path / "plan.yaml", s.model, s.mesh)
    assert not s.diff(again) and again.seq_dim == 1
    assert [str(d) for d in again.directives] == [str(d) for d in s.directives]
    assert again.directives[1].where == "plan.yaml:5"
    text = (tmp_path / "plan.yaml").read_text()
    assert "  - {on: blocks.*.up, do: sync, mode: fwd_pre, op: all_gather}\n" in text
    again.save(tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text() == text


def test_what_needs_code_is_refused_by_name(tmp_path: Path) -> None:
    s = toy()
    s["last"].replace(nn.Identity())
    s["blocks.0"].sync("fwd_pre", lambda x, group: x)
    with pytest.raises(ConfigError, match=r"last: replace\(new=Identity\).*blocks.0: sync\(mode='fwd_pre', op=<lambda>\)"):
        s.save(tmp_path / "plan.yaml")
    assert not (tmp_path / "plan.yaml").exists()


LINE = "schema: 1\nlines:\n  - {%s}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema: 2\nlines: []", "schema is 2"),
        ("schema: 1", "lines is None"),
        ("schema: 1\nlines: []\nlins: []", "does not know 'lins' (did you mean lines?)"),
        ("schema: 1\nlines: []\nseq_dim: x", "seq_dim is 'x'"),
        ("schema: 1\nlines: []\nlines: []", "line 3: lines is written twice"),
        ("schema: 1\nmodel_type: bert\nlines: []", "for models of type 'bert'"),
        ("schema: 1\ntransformers: newest\nlines: []", "must be a range of versions"),
        ("schema: 1\ntransformers: '<5'\nlines: []", "for transformers <5"),
        ("schema: 1\nlines: &x [*x]", "nor references"),
        ("schema: 1\nlines: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("lines: [", "line 1: not a schedule in YAML"),
        ("- 1", "a schedule is written as `key: value`"),
        (LINE % "on: blocks.*.up", "p.yaml:3: a line says `on`"),
        (LINE % "on: blocks.*.up, do: columns", "'columns' is not known (did you mean column?)"),
        (LINE % "on: blocks.*.up, do: replace", "'replace' is not known"),
        (LINE % "on: blocks.*.uq, do: column", "did you mean up"),
        (LINE % "on: blocks.*.up, do: column, block: 3", "does not know 'block' (did you mean blocks?)"),
        (LINE % "on: blocks.*.up, do: column, blocks: yes", "blocks of column is True, and must be a whole number or a list"),
        (LINE % "on: blocks.*.up, do: column, blocks: [4, x]", "must be a list of sizes"),
        (LINE % "on: blocks.*.up, do: shard, tensor: weight", "shard needs axis"),
        (LINE % "on: blocks.*.up, do: sync, mode: fwd, op: copy", "mode 'fwd' is not known (did you mean fwd_pre?)"),
        (LINE % "on: blocks.0, do: sequence, leave: lats", "did you mean last"),
        (LINE % "on: '', do: ulysses, axis: sp, overlap_kqv: true", "does not know 'overlap_kqv' (did you mean overlap_qkv?)"),
        (LINE % "on: '', do: zero, stage: one", "stage of zero is 'one', and must be a whole number"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "p.yaml", Toy(), Mesh.sizes(tp=2))
    assert words in str(error.value), str(error.value)


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    for make, words in (
        (lambda path: None, "No such file"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "not UTF-8"),
        (lambda path: path.write_bytes(b" " * (1 << 20) + b"x"), "larger than"),
    ):  # type: tuple[Callable[[Path], Any], str]
        make(tmp_path / "p.yaml")
        with pytest.raises(ConfigError, match=words):
            load(tmp_path / "p.yaml", Toy())


def test_verifying_or_showing_does_not_split_a_module_that_is_put_somewhere() -> None:
    model, new = Toy(), nn.Linear(H, FF)
    s = schedule(model, Mesh.sizes(tp=2))
    s["blocks.0.up"].replace(new).column()
    before = copy.deepcopy(new.weight)
    s.show()
    assert new.weight.shape == before.shape and "weight [8 -> 4, 6]" in s.explain("blocks.0.up")
