"""What ``megatron-sp plan`` says and draws of context parallelism: rows, bytes of a layer, documents, and what it refuses."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from support.paths import ROOT

from megatron_sp.commands import cli
from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.ops import availability
from megatron_sp.parallel.context_plan import ContextPlan, cut_row, plan_context
from megatron_sp.parallel.row_mask import RowMask
from megatron_sp.planner.context_rows import ContextRows, below, context_matrix, context_svg, mask_of_row

SVG = "{http://www.w3.org/2000/svg}"
MODEL = (
    "--attention-dropout 0 --num-layers 2 --hidden-size 256 --num-attention-heads 4"
    " --seq-length 1024 --vocab-size 1000 --micro-batch-size 1 --zero-stage 1"
)
PLAN = f"--gpus 8 --gpu h100-80g {MODEL} --tp-size 1 --sp-size 1"


pytestmark = pytest.mark.usefixtures("rough_runs")


def says(capsys: pytest.CaptureFixture[str], flags: str, code: int = 0) -> str:
    assert cli.main(["plan", *flags.split()]) == code
    out = capsys.readouterr()
    return out.out if code == 0 else out.err


def rows_of(flags: str, world_size: int, mask: RowMask | None = None) -> ContextRows:
    words = f"{MODEL} {flags} --mock-data --lr 1 --train-iters 1".split()
    config = config_from_args(words, world_size=world_size, family="gpt")
    return ContextRows.of(config, mask or mask_of_row(config, None))


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    found = availability.find
    missing = replace(found("matplotlib"), available=False)
    monkeypatch.setattr(availability, "find", lambda name: missing if name == "matplotlib" else found(name))


@pytest.mark.parametrize(("flags", "ranks", "num_bytes"), [
    ("--cp-size 2", 2, 4 * 2 * 64 * 4),  # keys and values of 4 heads, 64 wide, 4 bytes an element
    ("--cp-size 2 --bf16", 2, 4 * 2 * 64 * 2),
    ("--cp-size 2 --fp64", 2, 4 * 2 * 64 * 8),
    ("--cp-size 2 --sp-size 2", 4, 2 * 2 * 64 * 4),
    ("--cp-size 2 --tp-size 2", 4, 2 * 2 * 64 * 4),
    ("--cp-size 2 --sp-size 3", 6, 2 * 2 * 64 * 4),  # the first rank has one head more
    ("--cp-size 2 --num-query-groups 2", 2, 2 * 2 * 64 * 4),
    ("--cp-size 2 --sp-size 4 --num-query-groups 2", 8, 1 * 2 * 64 * 4),  # two ranks have the same key head each
    ("--cp-size 2 --tp-size 4 --num-query-groups 2", 8, 1 * 2 * 64 * 4),
    ("--cp-size 2 --sp-size 2 --num-query-groups 1 --sp-overlap-mode chunked", 4, 2 * 2 * 64 * 4),  # of two chunks, which use the same
    ("--cp-size 2 --sp-size 2 --num-query-groups 1 --sp-overlap-mode split-qkv", 4, 1 * 2 * 64 * 4),
    ("--cp-size 2 --kv-channels 80", 2, 4 * 2 * 80 * 4),
])  # fmt: skip
def test_bytes_of_a_row(flags: str, ranks: int, num_bytes: int) -> None:
    """Rank 0 of a zigzag receives all of rank 1's rows, and rank 1 half of rank 0's."""
    rows = rows_of(flags, ranks)
    assert rows.row_bytes == num_bytes and rows.received() == [512 * num_bytes, 256 * num_bytes]


def test_bytes_of_backward() -> None:
    """Keys and values once more, and gradients come from who received the rows; with --cp-keep-kv gradients alone."""
    row = 4 * 2 * 64 * 4
    assert rows_of("--cp-size 2", 2).as_dict()["layer_bytes_backward"] == [(512 + 256) * row, (256 + 512) * row]
    kept = rows_of("--cp-size 2 --cp-keep-kv", 2)
    assert kept.as_dict()["layer_bytes_backward"] == [256 * row, 512 * row]
    assert "768.0 KiB (1.0 MiB), 75.0% of what a ring that brings every row to every rank sends" in kept.text()
    assert kept.text().endswith("  backward 768.0 KiB (1.0 MiB): gradients of its own")


def test_sequences_of_a_micro_batch_and_chunks() -> None:
    two = rows_of("--cp-size 2 --micro-batch-size 2", 2)
    assert two.received() == [2 * size for size in rows_of("--cp-size 2", 2).received()]
    assert [len(share) for share in rows_of("--cp-size 2 --cp-chunks 1", 2).plan.runs] == [1, 1]


def test_text_and_json_are_of_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_context(RowMask(1024, documents=((300, 800, 1024),)), cut_row(RowMask(1024, documents=((300, 800, 1024),)), 4))
    text = says(capsys, f"{PLAN} --cp-size 4 --documents 300,500,224")
    assert "context parallelism of layout 1, rows of keys and values that travel, 1 sequence of 1,024 positions" in text
    assert f"largest share of pairs / mean: {plan.balance:.3f}" in text and f"{plan.ring_share:.1%} of what a ring" in text
    found = json.loads(says(capsys, f"{PLAN} --cp-size 4 --documents 300,500,224 --json"))["context"]
    assert found["rows"] == [[plan.num_rows(i, j, 1) for j in range(4)] for i in range(4)] and found["balance"] == plan.balance
    assert found["layer_bytes_forward"] == [plan.num_received(i, 1) * 4 * 2 * 64 * 2 for i in range(4)]
    whole = json.loads(says(capsys, f"{PLAN} --cp-size 4 --json"))["context"]
    assert whole["ring_share"] == 0.75 > found["ring_share"] and whole["runs"][0] == [[0, 128], [896, 1024]]


def test_windows_and_bert(capsys: pytest.CaptureFixture[str]) -> None:
    window = json.loads(says(capsys, f"{PLAN} --cp-size 4 --window-size 65 --json"))["context"]
    assert window["rows"][1] == [64, 0, 0, 0]
    config = config_from_args(
        f"{MODEL} --cp-size 2 --mock-data --lr 1 --train-iters 1".split(), world_size=2, family="bert",
    )  # fmt: skip
    assert mask_of_row(config, None) == RowMask(1024, False)
    assert mask_of_row(config, [600]) == RowMask(1024, False, lengths=(600,))
    assert ContextRows.of(config, mask_of_row(config, [600])).as_dict()["rows"] == [[0, 88], [512, 0]]


def test_without_context_parallelism_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "context parallelism" not in says(capsys, f"{PLAN} --cp-size 1")
    text = says(capsys, f"{PLAN} --cp-size 1 --documents 1000,24")
    assert text.rstrip().endswith("--documents: layout 1 has no context parallelism, for which they are; add --context-parallel-size N")
    assert "context" not in json.loads(says(capsys, f"{PLAN} --cp-size 1 --json"))


def test_the_picture_has_both(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if not availability.find("matplotlib").available:
        pytest.skip("matplotlib is not installed")
    says(capsys, f"{PLAN} --cp-size 4 --documents 300,500,224 --picture {tmp_path}/both.svg")
    both = ET.parse(tmp_path / "both.svg").getroot()
    bars, lanes = both.findall(f"{SVG}svg")
    assert float(lanes.get("y", "")) == pytest.approx(float(bars.get("height", "")))
    assert any("3 documents" in (part.text or "") for part in lanes.iter(f"{SVG}text")) and any(True for _ in bars.iter(f"{SVG}path"))
    says(capsys, f"{PLAN} --cp-size 1 --picture {tmp_path}/bars.svg")
    assert not ET.parse(tmp_path / "bars.svg").getroot().findall(f"{SVG}svg")
    says(capsys, f"{PLAN} --cp-size 4 --picture {tmp_path}/bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_without_matplotlib(capsys: pytest.CaptureFixture[str], tmp_path: Path, without_matplotlib: None) -> None:
    says(capsys, f"{PLAN} --cp-size 2 --picture {tmp_path}/lanes.svg")
    root = ET.parse(tmp_path / "lanes.svg").getroot()
    assert "2 ranks: causal" in root.get("aria-label", "")
    for flags in (f"--cp-size 2 --picture {tmp_path}/x.png", f"--cp-size 1 --picture {tmp_path}/x.svg"):
        assert "--picture needs matplotlib" in says(capsys, f"{PLAN} {flags}", code=2)


def test_two_pictures_one_below_the_other() -> None:
    upper, lower = '<?xml?><svg viewBox="0 0 200 50" width="9pt"><g/></svg>', '<svg viewBox="0 0 100 30" role="img"><path d="M0 0"/></svg>'
    root = ET.fromstring(below(upper.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"'), lower))
    assert root.get("viewBox") == "0 0 200 110"
    places = [[part.get(name) for name in ("x", "y", "width", "height")] for part in root]
    assert places == [["0", "0", "200", "50"], ["0", "50", "200", "60"]]


@pytest.mark.parametrize(("flags", "message"), [
    ("--documents 300,500", "add up to 800 tokens, and a row has seq_length (1024): add one of 224, or give --seq-length 800"),
    ("--documents 300,500,900", "add up to 1700 tokens, and a row has seq_length (1024): leave 676 tokens out"),
    ("--documents 1,1,1,1,1,1,1,2", "--documents 1,1,1,...,2 add up to 9 tokens"),
    ("--model-family bert --documents 300,200", "a row of BERT has one text, and padding up to seq_length (1024) behind it"),
    ("--model-family bert --documents 1025", "give one number of at most 1024"),
    ("--document 300", "--document is unknown: did you mean --documents?"),
    ("--picture nowhere/x.svg", "there is no folder nowhere"),
    ("--picture x.txt", "--picture x.txt: the name must end in .png, .svg or .pdf"),
])  # fmt: skip
def test_what_is_wrong_is_said(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = says(capsys, f"{PLAN} --cp-size 2 {flags}", code=2)
    assert message in text and text.startswith("error: ") and "Traceback" not in text


@pytest.mark.parametrize("words", ["300,x", "300,,5", "", "-3", "0", "999999999999", "3.5"])
def test_words_that_are_no_lengths(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", *PLAN.split(), f"--documents={words}"])
    assert caught.value.code == 2 and "is not a length: give numbers of tokens such as 300,500,224" in capsys.readouterr().err


PAGE = (ROOT / "docs/explanation/context_parallelism.md").read_text(encoding="utf-8")
COMMANDS = [line.split() for line in PAGE.splitlines() if line.startswith("megatron-sp plan ")]


@pytest.mark.parametrize(
    "command, image", list(zip(COMMANDS, ["context_causal", "context_documents"], strict=True)), ids=["causal", "documents"]
)
def test_the_pictures_and_figures_of_the_page_are_the_commands(
    command: list[str], image: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, without_matplotlib: None
) -> None:  # fmt: skip
    """The lower part of the picture alone, as without matplotlib."""
    assert command[-2:] == ["--picture", "plan.svg"]
    text = says(capsys, " ".join([*command[2:-1], str(tmp_path / "plan.svg")]))
    assert (tmp_path / "plan.svg").read_text() == (ROOT / f"docs/images/{image}.svg").read_text(), f"make docs/images/{image}.svg again"
    if image == "context_documents":
        (table,) = re.findall(r"```text\n(.*?)```", PAGE.split("context_documents.svg")[1], re.DOTALL)
        assert table in text


def test_the_tables_of_the_page() -> None:
    rows = {
        "causal": RowMask(131072), "window of 4,096": RowMask(131072, window=4096), "BERT, no padding": RowMask(131072, False),
        "16 documents of 8,192": RowMask(131072, documents=(tuple(range(8192, 131073, 8192)),)),
        "documents of 30,000, 50,000, 51,072": RowMask(131072, documents=((30000, 80000, 131072),)),
        "BERT, three quarters real": RowMask(131072, False, lengths=(98304,)),
    }  # fmt: skip
    for name, mask in rows.items():
        plan = plan_context(mask, cut_row(mask, 4))
        (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {name} | ")]
        runs, share, balance = line.strip("| ").split(" | ")[1:]
        assert int(runs.split()[0]) == max(map(len, plan.runs)) and balance == f"{plan.balance:.2f}"
        assert share == (f"{plan.ring_share:.2f} ({plan.worst_ring_share:.2f})" if plan.ring_share else "0")
    for heads, groups, f, line in (
        (32, 32, 0.75, "8 ranks, 32 heads, 32 kv heads, causal"), (32, 8, 0.75, "8 ranks, 32 heads, 8 kv heads, causal"),
        (64, 8, 0.75, "8 ranks, 64 heads, 8 kv heads, causal"), (64, 8, 1 / 32, "the same, window of 4,096 in 131,072"),
    ):  # fmt: skip
        ulysses, context = 2 * (2 * heads + 2 * groups) * 7 / 8, 3 * 2 * groups * 7 * f
        assert f"| {line} | {ulysses:g} | {context:,g} |" in PAGE
    window = plan_context(rows["window of 4,096"], cut_row(rows["window of 4,096"], 8))
    assert window.ring_share == pytest.approx(1 / 32, rel=1e-3)
    for bandwidth, c, first in ((42e9, 2, "| 29 K tokens | 7 K |"), (42e9, 8, "| 200 K | 50 K |"), (340e9, 8, "| 25 K | 6 K |")):
        exact = [2 * (c - 1) * 600e12 / (r * bandwidth) / 1000 for r in (1, 4)]
        said = [float(cell.split()[0]) for cell in first.strip("| ").split(" | ")]
        assert said == [pytest.approx(number, rel=0.05) for number in exact] and first in PAGE


# ---- table and picture of a plan, read back as numbers and as shapes


def plan_of(mask: RowMask, c: int, k: int | None = None) -> ContextPlan:
    return plan_context(mask, cut_row(mask, c, k))


def test_the_matrix_of_a_zigzag() -> None:
    assert context_matrix(plan_of(RowMask(4800), 2), 3).splitlines() == [
        "rows of keys and values that travel, 3 sequences of 4,800 positions",
        " rank    has  from 0  from 1  receives  of a ring  pairs/mean  pieces",
        "    0  2,400       .   7,200     7,200       100%       1.000       2",
        "    1  2,400   3,600       .     3,600        50%       1.000       2",
        "sends          3,600   7,200    10,800        75%",
        "largest share of pairs / mean: 1.000",
    ]


def test_the_matrix_of_one_rank_and_of_a_row_that_nobody_sees() -> None:
    alone = context_matrix(plan_of(RowMask(7), 1), 1)
    assert "1 sequence of 7 positions" in alone and alone.splitlines()[2].split() == ["0", "7", ".", "0", "-", "1.000", "1"]
    nothing = context_matrix(plan_of(RowMask(8, causal=False, lengths=(0,)), 2), 1)
    assert nothing.splitlines()[2].split() == ["0", "4", ".", "0", "0", "0%", "-", "0"]


def test_sums_of_the_matrix_are_those_of_the_plan() -> None:
    mask = RowMask(100, documents=((30, 64, 100), (8, 100)))
    plan = plan_of(mask, 4, 3)
    lines = [line.split() for line in context_matrix(plan, 2).splitlines()[2:7]]
    for i in range(4):
        assert [0 if cell == "." else int(cell) for cell in lines[i][2:6]] == [plan.num_rows(i, j, 2) for j in range(4)]
        assert int(lines[i][6]) == sum(plan.rows_received(i, 2)) and int(lines[i][9]) == sum(len(plan.pieces(i, j)) for j in range(4))
    assert [int(cell) for cell in lines[4][1:5]] == [sum(plan.rows_sent(j, 2)) for j in range(4)]
    with pytest.raises(ValueError, match="the mask describes 2 sequences, and 1 are asked for"):
        context_matrix(plan, 1)


def bars(svg: str) -> list[tuple[int, int, int, int, str]]:
    """Lane, height, start and stop in positions (1,000 in a row) and colour of every bar."""
    found = []
    for bar in ET.fromstring(svg).iter(f"{SVG}rect"):
        if bar.get("fill"):
            x, y, width, height = (float(bar.get(name, "nan")) for name in ("x", "y", "width", "height"))
            start, stop = ((at - 74) / 840 * 1000 for at in (x, x + width))
            found.append((int(y - 92) // 34, int(height), round(start), round(stop), bar.get("fill", "")))
    return found


@pytest.mark.parametrize("c", [1, 3, 10])
def test_bars_are_the_runs_and_rows_of_the_plan(c: int) -> None:
    mask = RowMask(1000, documents=((300, 640, 1000), (80, 1000)))
    plan = plan_of(mask, c, 3)
    for sequence in range(2):
        found = bars(context_svg(plan, sequence))
        colours = {lane: colour for lane, height, *_, colour in found if height == 26}
        assert len(set(colours.values())) == c
        owned = sorted((lane, start, stop) for lane, height, start, stop, _ in found if height == 26)
        assert owned == sorted((i, *run) for i in range(c) for run in plan.runs[i])
        received = sorted((lane, start, stop, colour) for lane, height, start, stop, colour in found if height == 10)
        assert received == sorted((i, *run, colours[j]) for i in range(c) for j in range(c) if i != j for run in plan.rows(i, j)[sequence])


def test_the_words_of_the_picture() -> None:
    svg = context_svg(plan_of(RowMask(1000, documents=((300, 640, 1000), (80, 1000)), window=50), 2, 1), 1)
    texts = [text.text for text in ET.fromstring(svg).iter(f"{SVG}text")]
    assert texts[0] == "1,000 positions on 2 ranks: causal, window 50, 2 documents, sequence 1 of 2"
    assert texts[2] == "rank 0" and re.fullmatch(r"receives 0 rows; 0\.\d\d of the mean's pairs", texts[3] or "")
    assert (texts[5] or "").startswith("receives 49 rows; 1.0")
    (ticks,) = ET.fromstring(svg).iter(f"{SVG}path")
    assert ticks.get("d") == f"M{74 + 67.2} 76v10 M914 76v10"
    padded = context_svg(plan_of(RowMask(8, causal=False, lengths=(4,)), 1))
    assert "8 positions on 1 rank: bidirectional, 4 real keys" in padded and "M494 76v10" in padded
    assert "no pairs" in context_svg(plan_of(RowMask(8, causal=False, lengths=(0,)), 2)) and "<path" not in context_svg(
        plan_of(RowMask(8), 2)
    )
    with pytest.raises(ValueError, match="describes 1 sequences: there is no sequence 1"):
        context_svg(plan_of(RowMask(8), 2), 1)
