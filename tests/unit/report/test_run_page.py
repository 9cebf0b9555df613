"""The run report without a browser: what is read, what is worked out, what is drawn, and that nothing a run says becomes markup."""

from __future__ import annotations

import html.parser
import json
import math
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from support.run_logs import EVIL, LogWriter, evil_run

from megatron_sp.commands.cli import main
from megatron_sp.config.schema import Config
from megatron_sp.report.charts import charts, curve, figure
from megatron_sp.report.page import figures, name_apart, page, state_of
from megatron_sp.report.reading import read_run
from megatron_sp.report.time_use import Span, attempts, merged, slow_steps, time_line, totals
from megatron_sp.utils.errors import DataError
from megatron_sp.utils.format import show
from megatron_sp.utils.markup import Html, join, script_json, tag

NAN = math.nan


class Reader(html.parser.HTMLParser):
    """Elements, attributes and texts of a page; complains where elements do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in ("meta", "input", "br", "hr"):
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data + "\n"

    def count(self, name: str) -> int:
        return sum(element == name for element, _ in self.elements)


def made(*folders: Path, now: float = 1_700_001_000.0) -> tuple[str, Reader]:
    runs = [read_run(folder) for folder in folders]
    name_apart(runs)
    text = page(runs, now)
    return text, Reader(text)


def words_of(text: str) -> str:
    """What a person reads, of everything below the head."""
    text = re.sub(r"<(style|script|title)\b.*?</\1>", "", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", text)))


def data_of(text: str) -> Any:
    """What the page's script draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """Steps 1 to 6, killed; 20 s of nothing; resumed from 4, to 8, with validations and saves; 0.5 s that no record accounts for."""
    log = LogWriter(tmp_path / "resumed")
    log.start(0, took=2.0, config=Config().to_dict())
    log.steps(1, 4)
    log.write("save", 4, after=0.2505, seconds=0.25, saved=True)
    log.steps(5, 6)
    log.time += 20
    log.start(4, took=3.0, config={**Config().to_dict(), "optimizer": {**Config().to_dict()["optimizer"], "lr": 0.5}})
    log.time += 0.5
    log.steps(5, 8)
    log.write("valid", 8, after=0.75, seconds=0.75, loss=1.5, perplexity=4.5)
    log.status("done", train_iters=8)
    return log.folder


# --------------------------------------------------------------------------------------------------------- markup


@pytest.mark.parametrize("name", ["metrics.jsonl", "run_status.json", "LOCK", "overlap-trace.json", "nonfinite-step-1.json"])
def test_a_file_that_is_a_fifo_is_not_waited_for(name: str, tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "run")
    log.start(0)
    log.steps(1, 3)
    (log.folder / name).unlink(missing_ok=True)
    os.mkfifo(log.folder / name)
    if name == "metrics.jsonl":  # without it there is no page
        with pytest.raises(DataError, match=r"metrics.jsonl cannot be read: it is a FIFO"):
            read_run(log.folder)
        return
    assert len([note for note in read_run(log.folder).notes if name in note]) == 1


def test_text_is_escaped_and_markup_is_not() -> None:
    bad = '</p><img onerror="alert(1)">&'
    escaped = "&lt;/p&gt;&lt;img onerror={0}alert(1){0}&gt;&amp;"
    assert tag("p", bad, title=bad) == f'<p title="{escaped.format("&quot;")}">{escaped.format(chr(34))}</p>'
    assert join("<", [None, False, tag("b", "<")], 3) == "&lt;<b>&lt;</b>3"
    assert tag("input", hidden=True, id=None) == "<input hidden>" and isinstance(join(), Html)
    text = script_json({bad: [bad, "<!--", "]]>"]})
    assert not set("<>&") & set(text) and json.loads(text) == {bad: [bad, "<!--", "]]>"]}


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (5.43219, "loss", "5.4322"), (1234567.0, "si", "1.23 M"), (0.1234, "percent", "12.3 %"), (NAN, "plain", "–"),
        (math.inf, "loss", "∞"),
        (3 * 2**30, "bytes", "3.0 GiB"), (0.0123, "seconds", "12.3 ms"), (7.25, "seconds", "7.25 s"), (4000.0, "seconds", "1 h 06 min"),
    ],
)  # fmt: skip
def test_numbers_as_people_read_them(value: float, kind: str, text: str) -> None:
    assert show(value, kind) == text


# --------------------------------------------------------------------------------------------------------- curves


def test_thinning_keeps_spikes_gaps_and_the_end() -> None:
    y = [1.0 + 0.001 * (i % 7) for i in range(20_000)]
    y[777], y[12_345], y[15_000], y[16_000] = 99.0, -99.0, NAN, math.inf
    c = curve("x", 0, "line", list(range(20_000)), y, 500)
    points = dict(zip(c.x, c.y, strict=True))
    assert points[777] == 99.0 and points[12_345] == -99.0 and math.isnan(points[15_000]) and c.x[-1] == 19_999 and c.x[0] < 40
    assert c.bad == [(15_000, "nan"), (16_000, "inf")] and (c.low, c.high, c.count, c.last) == (-99.0, 99.0, 20_000, y[-1])
    assert len(c.x) < 1010 and c.x == sorted(c.x) and len(c.mean_y) == 500
    assert c.mean_y[0] == pytest.approx(sum(y[:40]) / 40)


@pytest.mark.long
def test_a_million_points_keep_every_extreme_and_gap() -> None:
    rng, count = random.Random(5), 1_000_000
    y = [1.0 + 0.001 * (i % 7) for i in range(count)]
    planted = {place: rng.choice([50.0, -50.0, NAN, math.inf]) for place in rng.sample(range(count), 300)}
    for place, value in planted.items():
        y[place] = value
    c = curve("x", 0, "line", range(count), y, 1000)
    assert len(c.x) < 3000 and len(json.dumps(c.to_json())) < 100_000 and c.x == sorted(set(c.x))
    drawn = dict(zip(c.x, c.y, strict=True))
    by_bucket: dict[int, list[float]] = {}
    for place, value in planted.items():
        by_bucket.setdefault(place // 1000, []).append(value)
    for bucket, values in by_bucket.items():
        shown = [drawn[x] for x in range(1000 * bucket, 1000 * (bucket + 1)) if x in drawn]
        finite = [v for v in values if math.isfinite(v)]
        assert {max(v, 1.0) for v in finite} | {min(v, 1.0) for v in finite} <= {1.0, *shown}
        assert any(math.isnan(v) for v in shown) == (len(finite) < len(values)), "one gap, however many there are"
    assert c.num_bad == sum(not math.isfinite(v) for v in planted.values()) == len(c.bad)


def test_few_points_are_all_drawn_and_too_many_bad_ones_are_counted() -> None:
    c = curve("x", 0, "line", [1, 2, 3], [1.0, NAN, 1e301], 100)
    assert (c.x, c.y[0], c.num_bad, c.mean_x) == ([1, 2, 3], 1.0, 2, []) and c.bad[1] == (3, "1e+301")
    assert c.to_json()["y"] == [1, None, None]
    c = curve("x", 0, "line", list(range(5000)), [NAN] * 5000, 100)
    assert c.num_bad == 5000 and 0 < len(c.bad) <= 200 and math.isnan(c.last)


def test_a_chart_and_what_is_there_without_scripts(resumed: Path) -> None:
    drawn = charts([read_run(resumed)])
    assert [c.key for c in drawn] == ["loss", "lr", "grad_norm", "tokens_per_s", "mfu", "step_s", "memory"]
    assert [(c.label, c.style, c.count) for c in drawn[0].curves] == [
        ("training", "line", 8), ("discarded by interruptions", "undone", 2), ("validation", "points", 1),
    ]  # fmt: skip
    text = figure(drawn[0], several=False)
    assert "Loss log training discarded" in words_of(text) and "training 8 1.2500 10.0000 1.2500 █" in words_of(text)
    assert "discarded by interruptions 2 1.6667 2.0000 1.6667 validation 1 1.5000" in words_of(text)
    single = words_of(figure(drawn[6], several=False))
    assert single.startswith(" Peak memory of rank 0 log values values lowest highest last 8 1.0 GiB 1.0 GiB 1.0 GiB")
    assert "nothing was logged" in words_of(figure(charts([read_run(resumed.parent)])[0], several=True))


def test_every_chart_has_titles_with_units(resumed: Path) -> None:
    log = LogWriter(resumed)
    log.write("valid", 9, loss=1.0, order_loss=0.5, lm_accuracy=0.5, x=1.0)
    more = {"params_norm": 1.0, "num_zeros_in_grad": 1.0}
    log.steps(9, 9, loss_scale=2.0, global_batch_size=8, **more)
    told = {c["key"]: (c["axis"], c["unit"] or c["kind"]) for c in data_of(made(resumed)[0])["charts"]}
    assert told == {
        "loss": ("loss", "nats"), "valid-0": ("order loss", "nats"), "valid-1": ("lm accuracy", "percent"), "valid-2": ("x", "loss"),
        "lr": ("learning rate", "plain"), "grad_norm": ("gradient norm", "L2"), "tokens_per_s": ("throughput", "tokens/s"),
        "mfu": ("share of the peak", "percent"), "step_s": ("time", "seconds"), "memory": ("memory", "bytes"),
        "loss_scale": ("loss scale", "si"),
        "global_batch_size": ("batch size", "sequences"), "params_norm": ("norm", "L2"), "num_zeros_in_grad": ("zeros", "elements"),
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- time


def test_where_the_time_went(resumed: Path) -> None:
    tries = attempts(read_run(resumed).records)
    spans = time_line(tries)
    assert totals(spans) == pytest.approx(
        {"steps": 4 + 4, "lost": 2, "valid": 0.75, "save": 0.2505, "start": 2 + 3, "other": 0.5, "down": 20}
    )
    assert sum(s.seconds for s in spans) == pytest.approx(spans[-1].end - spans[0].begin), "nothing is missing and nothing counts twice"
    assert [(t.first_step, t.last_step) for t in tries] == [(0, 6), (4, 8)]
    assert figures(read_run(resumed)).useful == pytest.approx(8 / 36.5005)


def test_a_call_after_the_end_takes_no_time_of_the_run() -> None:
    """Whoever calls a finished run once more, days later, finds it as useful as it was; a longer run goes on after a pause that is none."""
    start = {"kind": "start", "step": 0, "time": 100.0, "train_iters": 2, "launch_to_ready_s": 1.0}
    steps = [{"kind": "train", "step": n, "time": 100.0 + n, "step_s": 1.0} for n in (1, 2)]
    again = [start | {"step": 2, "time": 100.0 + days} for days in (2e5, 3e5)]
    assert len(attempts([start, *steps, *again])) == 1
    longer = start | {"step": 2, "time": 4e5, "train_iters": 3}
    tries = attempts([start, *steps, *again, longer, {"kind": "train", "step": 3, "time": 4e5 + 1, "step_s": 1.0}])
    assert [attempt.first_step for attempt in tries] == [0, 2]
    sums = totals(time_line(tries))
    assert (sums["steps"], sums["start"], sums["down"]) == (3.0, 2.0, 0.0)
    interrupted = attempts([start | {"train_iters": 9}, *steps, longer | {"train_iters": 9}])
    assert totals(time_line(interrupted))["down"] > 2e5


def test_a_save_in_the_background_is_where_training_stood_still() -> None:
    """Its record comes when it has ended, after the steps that were taken meanwhile; only the copy took time."""
    steps = [{"kind": "train", "step": n, "time": 100.0 + n + (n > 2), "step_s": 1.0} for n in (1, 2, 3, 4)]
    save = {"kind": "save", "step": 2, "time": 103.0, "seconds": 1.0, "background_s": 1.5}
    start = {"kind": "start", "step": 0, "time": 100.0}
    spans = attempts([start, *steps[:3], save, steps[3]])[0].spans
    assert [(s.kind, s.begin, s.end) for s in spans if s.kind == "save"] == [("save", 102.0, 103.0)]
    assert totals(spans)["steps"] == 4.0


def test_intervals_of_several_steps_and_records_without_sense(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.write("train", 5, after=0, step_s=1.0)  # a file that begins in the middle
    log.write("train", 15, after=20, step_s=2.0)
    log.write("train", 16, after=1, step_s="inf")
    log.write("valid", 16, after=-50, seconds=1e9)  # the clock was set back
    log.write("start", 16, after=1, launch_to_ready_s="inf")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 17}\n{"kind": "train", "step": 18, "time": "soon"}\n')
    log = LogWriter(tmp_path / "endless")
    log.start(0, took=0.0)
    (log.folder / "metrics.jsonl").write_text((log.folder / "metrics.jsonl").read_text().replace("0.0}", '"inf"}'))
    assert "inf" in (log.folder / "metrics.jsonl").read_text() and time_line(attempts(read_run(log.folder).records)) == []
    spans = time_line(attempts(read_run(tmp_path).records))
    assert all(math.isfinite(s.seconds) and s.seconds > 0 for s in spans) and ("steps", 20.0) in {(s.kind, s.seconds) for s in spans}


def test_slow_steps_are_found_beside_their_neighbours(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.start(0)
    log.steps(1, 1, step_s=9.0)
    log.steps(2, 200)
    log.steps(201, 201, step_s=2.5)
    log.steps(202, 300)
    log.steps(301, 400, step_s=3.0)  # slower from here on: after a while that is the usual
    slow = slow_steps(attempts(read_run(tmp_path).records))
    assert [(s.step, s.is_first) for s in slow][:2] == [(1, True), (201, False)] and slow[1].lost_s == pytest.approx(1.5)
    assert [s.step for s in slow][2:] == list(range(301, 326))


def test_a_long_time_line_is_merged_and_what_is_rare_stays() -> None:
    spans = [Span("steps" if i % 2 else "valid", float(i), i + 1.0, i) for i in range(50_000)]
    spans[30_000] = Span("save", 30_000.0, 30_001.0, 30_000)
    few = merged(spans, 500)
    assert len(few) <= 500 and sum(s.kind == "save" for s in few) == 1 and merged([]) == []
    assert sum(s.seconds for s in few) == pytest.approx(50_000)


# ------------------------------------------------------------------------------------------------------ the state


def test_the_state_of_a_run(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "a")
    assert state_of(read_run(log.folder), 0).word == "unknown"
    log.start(0)
    log.status("running")
    assert state_of(read_run(log.folder), log.time + 60).word == "running"
    gone = state_of(read_run(log.folder), log.time + 3600)
    assert gone.word == "lost" and "no sign of life for 1 h" in gone.why
    (log.folder / "LOCK").write_text("{}")
    assert state_of(read_run(log.folder), log.time + 3600).word == "lost", "an empty lock is nobody's"
    (log.folder / "LOCK").write_text('{"pid": 1}')
    heartbeat = (log.folder / "LOCK").stat().st_mtime
    assert state_of(read_run(log.folder), heartbeat + 5).word == "running"
    log.status("failed", exit_code=5, message="too many <bad> steps")
    assert state_of(read_run(log.folder), 0).why == "exit code 5: too many <bad> steps"
    assert "✕ failed" in words_of(made(log.folder)[0]) and "exit code 5: too many <bad> steps" in words_of(made(log.folder)[0])


# ------------------------------------------------------------------------------------------------------- the page


def test_a_resumed_run(resumed: Path) -> None:
    text, reader = made(resumed)
    words = words_of(text)
    assert "Interruptions 2" not in words and "Interruptions 1 2 logged steps repeated, all bit-identical" in words
    assert "✓ 2 logged steps were repeated" in words and "2 steps, 2 s" in words and "lr: – → 0.5" in words
    assert "Best validation loss 1.5000" in words and "Steps 8 100.0 % of 8" in words
    assert 'id="experts"' not in text and reader.count("figure") == 7 and reader.count("script") == 2
    nothing_fetched = [a for _, attributes in reader.elements for a in attributes if a in ("src", "href", "srcset", "action", "data")]
    assert set(nothing_fetched) == {"href"} and all((a.get("href") or "#").startswith("#") for _, a in reader.elements)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_a_repetition_that_differs_is_said_loudly(resumed: Path) -> None:
    lines = (resumed / "metrics.jsonl").read_text().replace('"samples_sha": "s6"', '"samples_sha": "t6"', 1)
    (resumed / "metrics.jsonl").write_text(lines)
    words = words_of(made(resumed)[0])
    assert "2 logged steps repeated, 1 bit-identical" in words and "✕ 1 of 2 repeated logged steps" in words and "✕ samples differ" in words


def test_skipped_steps_and_the_loss_scale(tmp_path: Path) -> None:
    config = Config()
    config.precision.fp16 = True
    log = LogWriter(tmp_path)
    log.start(0, config=config.to_dict())
    log.steps(1, 1, loss_scale=4.0)
    log.steps(2, 2, grad_norm="inf", skipped_steps=1, loss_scale=2.0)
    log.steps(5, 5, loss="nan", grad_norm="nan", skipped_steps=3, loss_scale=2.0)
    (tmp_path / "nonfinite-step-000004.json").write_text('{"step": 4}')
    words = words_of(made(tmp_path)[0])
    assert "2 1 5 inf 2 overflow" in words and "3 to 5 2 nan nan 2 not finite: nonfinite-step-000004.json" in words
    assert "Loss scale" in words and "1 value is not finite" in words and "Skipped steps 3" in words


def test_what_is_validated_beside_the_loss(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.steps(1, 2)
    log.write("valid", 2, loss=2.0, perplexity=7.4, seconds=1.0, order_loss=0.5, note="<b>", **{f"x{i}": 1.0 for i in range(20)})
    log.write("valid", 4, loss=2.0, perplexity=7.4, seconds=1.0, order_loss=0.25)
    drawn = [c for c in charts([read_run(tmp_path)]) if c.key.startswith("valid")]
    assert [c.title for c in drawn[:2]] == ["Validation: order loss", "Validation: x0"] and len(drawn) == 8
    assert (drawn[0].curves[0].x, drawn[0].curves[0].y) == ([2, 4], [0.5, 0.25])


def test_what_a_classifier_got_right(resumed: Path, tmp_path: Path) -> None:
    log = LogWriter(resumed)
    assert "perplexity 4.482, at step 8" in words_of(made(resumed)[0])
    log.write("valid", 9, loss=0.5, accuracy=0.75)
    log.write("classification", 6, examples=1, accuracy=0.0, f1=0.0)  # of an attempt before
    log.write("classification", 8, examples=1200, accuracy=0.75, exact_match=0.7, f1=0.8125, matthews=0.4375, labels=["no", "<b>"],
              confusion=[[600, 200], [100, 300]])  # fmt: skip
    other = LogWriter(tmp_path / "other")
    other.write("classification", 3, examples=5, accuracy=1.0, f1="nan", labels=["no"], confusion=[[EVIL]])
    words = words_of(made(resumed, tmp_path / "other")[0])
    assert "8 1,200 75.0 % 70.0 % 0.8125 0.4375 other 3 5 100.0 %" in words
    assert "Always predicting “no”, the most frequent class, would score 66.7 %." in words
    assert "no 800 75.0 % 85.7 % 0.8000" in words and "<b> 400 75.0 % 60.0 % 0.6667" in words
    assert "no <b> 200 <b> no 100" in words and "0.5000 at step 9" in words, "no perplexity"
    words = words_of(made(tmp_path / "other", resumed)[0])
    assert "other 3 5 100.0 %" in words and "75.0 %" in words and "Always predicting" not in words, "what does not fit together is left out"
    assert "Classification" not in words_of(made(evil_run(tmp_path / "none"))[0])


def test_prediction_and_exchanges(resumed: Path) -> None:
    log = LogWriter(resumed)
    log.time = 1_700_000_100.0
    log.write("prediction", 8, predicted_bytes=2**20, measured_bytes=7 * 2**20, before_model_bytes=3 * 2**20, step_s=0.5, sent_bytes=2**30,
              can_hide_bytes=2**29, collectives=17)  # fmt: skip
    names = ("axis", "layer", "direction", "number", "exchange", "exposed", "hidden")
    values = (("sp", 0, "forward", 4, 0.004, 0.001, 0.75), ("tp", None, "backward", 1, 0.002, 0.001, 0.5))
    rows = [dict(zip(names, row, strict=True)) for row in values]
    (resumed / "overlap-trace.json").write_text(json.dumps({"otherData": {"step_seconds": 0.02, "rows": rows}}))
    words = words_of(made(resumed)[0])
    assert "predicted 1.0 MiB" in words and "measured 4.0 MiB" in words and "2.0 GiB/s" in words and "50.0 %" in words
    assert "take 6 ms; rank 0 waited 2 ms for them in a step of 20 ms (10.0 %)" in words and "ulysses 0 forward 4 4 ms 1 ms 75.0 %" in words
    assert "tensor outside backward" in words and "It waited longer" not in words


def test_the_configuration_and_its_differences(tmp_path: Path) -> None:
    folders = []
    for name, layers in (("a", 3), ("b", 4)):
        config = Config()
        config.model.num_layers = layers
        config.optimizer.lr = 0.25
        log = LogWriter(tmp_path / name)
        log.start(
            0, config=config.to_dict(), environment={"versions": {"torch": f"2.1{layers}"}, "hosts": {"node<1>": 2}, "device": "A100"}
        )
        log.steps(1, 3)
        folders.append(log.folder)
    text, reader = made(*folders)
    words = words_of(text)
    assert "--num-layers 3 4 –" in words and "--lr 0.25 0.25" in words and "2 flags differ from their defaults; 1 between the runs" in words
    assert "torch 2.13 2.14" in words and "node<1> (2 processes)" in words and "loss at step 3" in words
    classes = [a.get("class") for e, a in reader.elements if e == "tr"]
    assert classes.count("changed other") == 1 and classes.count("changed") == 1
    assert "a: training" in words and "b: validation" not in words
    alone = words_of(made(folders[0])[0])
    assert "--num-layers 3 –" in alone and "between the runs" not in alone.split("Configuration")[-1]


def test_settings_are_in_the_groups_of_help_and_nothing_is_json(tmp_path: Path) -> None:
    from megatron_sp.config.schema import GROUPS

    log = LogWriter(tmp_path)
    odd = {"versions": {"torch": "2"}, "odd": [{"a": [1, None], "b": {}}, {"c": True}], "x": {"y": {"z": 1}}}
    log.start(0, config=Config().to_dict(), environment=odd)
    text, _ = made(tmp_path)
    words = words_of(text)
    places = [words.index(f"{group} options {cls.__doc__.split('.')[0]}") for group, cls in GROUPS.items()]
    assert places == sorted(places)
    assert "odd a: 1 –, b: – c: yes" in words and "x: y z: 1" in words
    assert not set('{}[]"') & set(words), "no braces, no quotes"


def test_a_checkpoint_tells_the_configuration_of_older_records(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.start(0)
    log.steps(1, 2)
    for step, layers in ((10, 7), (9, 6)):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"config": {"model": {"num_layers": layers}}, "versions": {"torch": "2.99"}}))
    words = words_of(made(tmp_path)[0])
    assert "--num-layers 7" in words and "torch 2.99" in words


# ------------------------------------------------------------------------------------------------------- hardship


def test_nothing_that_a_run_says_becomes_markup(tmp_path: Path) -> None:
    folder = evil_run(tmp_path / "<img src=x onerror=alert(2)>")
    text, reader = made(folder, folder)
    assert "<img" not in text and reader.count("img") == 0 and reader.count("script") == 2 and reader.count("b") == 0
    assert not [a for _, attributes in reader.elements for a in attributes if a.startswith("on")]
    assert EVIL in words_of(text) or "onerror=alert(1)" in words_of(text)
    names = [c["n"] for c in data_of(text)["charts"][0]["curves"] if c["s"] == "line"]
    assert names[0].endswith("<img src=x onerror=alert(2)>: training") and names[1].endswith(" (2): training")


def test_the_policy_names_the_script(resumed: Path) -> None:
    import base64
    import hashlib

    text, _ = made(resumed)
    script = text.rsplit("<script>", 1)[1].split("</script>")[0]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in text.split("</head>")[0]
    assert "default-src 'none'" in html.unescape(text) and "script-src 'unsafe" not in html.unescape(text)


@pytest.mark.parametrize(
    "lines",
    [
        [], ['{"kind": "train", "step": 1'], ['{"kind": "train", "step": 1}'], ['{"kind": "start", "step": 0}'],
        ['{"kind": "train", "step": 1, "time": 1.0, "loss": "nan", "grad_norm": "inf", "lr": 0}'],
        ['{"kind": "train", "step": 3, "time": 1.0, "loss": 1e308, "lr": -1e308}', '{"kind": "train", "step": 4, "loss": -1e308}'],
        ['{"kind": "train", "step": 9007199254740993, "loss": 1}', '{"kind": "train", "step": 1, "loss": [], "time": {}, "step_s": -1}'],
        ['{"kind": "valid", "step": 0, "time": 1e300, "loss": 0}', '{"kind": "save", "step": -4, "time": -1e300, "seconds": 1e300}'],
        ['{"kind": "prediction", "step": 1}'],
        ['{"kind": "classification", "step": 1, "labels": [1], "confusion": {"0": 1}}'],
        ['{"kind": "classification", "step": 1, "labels": [null], "confusion": [[0]], "accuracy": [1]}'],
        ['{"kind": "start", "step": 5, "time": 3, "config": [], "environment": 3, "launch_to_ready_s": -7}'],
    ],
)  # fmt: skip
def test_whatever_the_records_hold_there_is_a_page(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    text, reader = made(tmp_path, tmp_path)
    assert reader.count("figure") >= 1 and "NaN" not in text.split('id="data">')[1].split("</script>")[0]
    for _, attributes in reader.elements:
        assert not any(
            "nan" in (attributes.get(k) or "") or "inf" in (attributes.get(k) or "") for k in ("d", "x1", "y1", "cx", "cy", "width")
        )


def test_a_long_run_is_small(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, 2501):
            noise = (step * 7919 % 1000) / 1000
            record: dict[str, Any] = {"kind": "train", "step": step, "time": step, "consumed_tokens": step * 64, "skipped_steps": 0}
            for key in ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "step_s", "memory_bytes", "params_norm", "num_zeros_in_grad"):
                record[key] = 1.23456789 + noise
            file.write(json.dumps(record) + "\n")
    run = read_run(log.folder)
    assert len(page([run], 0.0)) < 900_000 and len(page([run] * 3, 0.0)) < 1_000_000


# ------------------------------------------------------------------------------------------------ the command line


def test_the_command_line(resumed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(resumed)]) == 0 and (resumed / "report.html").stat().st_size > 10_000
    assert f"{resumed / 'report.html'} (" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main(["report", str(resumed), "--compare", str(tmp_path / "empty"), "-o", str(tmp_path / "c.html")]) == 0
    assert "has no record yet" in capsys.readouterr().err and "compared with empty" in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["resumedd"], 4, "resumedd: no such folder: give the folder of a run (what --save named); {0} holds resumed"),
        (["resumed/metrics.jsonl"], 4, "metrics.jsonl is a file: give the folder of a run"),
        (["nowhere/x"], 4, "no such folder, nor {0}/nowhere"),
        (["resumed", "--compare", "gone"], 4, "gone: no such folder"),
        (["resumed", "--output", "no/such/x.html"], 6, "x.html cannot be written: No such file or directory; choose another --output"),
    ],
)
def test_mistakes(
    resumed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    monkeypatch.chdir(resumed.parent)
    assert main(["report", *arguments]) == code
    message = capsys.readouterr().err
    assert message.startswith("error: ") and text.format(resumed.parent) in message and message.count("\n") == 1


# --------------------------------------------------------------------------------------------------------- experts


def test_the_load_of_experts_is_a_picture_over_layers_and_steps(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "run")
    log.start(0)
    for step in range(1, 301):
        log.steps(step, step, expert_load_max=2.5, experts_idle=3, expert_entropy=0.9, expert_load_max_by_layer=[1.0, 2.5, step / 100])
    text, reader = made(log.folder)
    cells = [attributes for name, attributes in reader.elements if name == "rect" and attributes.get("fill") == "var(--c1)"]
    assert len(cells) == 3 * 120, "a cell for each layer and column"
    assert "the busiest expert had 2.5000 of the mean load" in words_of(text) and "3 experts had no token" in words_of(text)
    assert "300 logged steps in 120 columns" in words_of(text)
    assert {chart["key"] for chart in data_of(text)["charts"]} >= {"expert_load_max", "experts_idle", "expert_entropy"}
    opacity = [float(cell["fill_opacity" if "fill_opacity" in cell else "fill-opacity"] or 0) for cell in cells]
    assert min(opacity) == 0.0 and max(opacity) == 1.0


@pytest.mark.parametrize("given", ["x", None, [], {"a": 1}, [[1.0]], [EVIL, None], ["nan", "inf"], 7, [1e308, -5.0], [1.0] * 5000])
def test_what_is_no_load_is_no_picture_or_a_harmless_one(tmp_path: Path, given: Any) -> None:
    log = LogWriter(tmp_path / "run")
    log.start(0)
    log.steps(1, 3, expert_load_max_by_layer=given, expert_load_max=given, experts_idle=given)
    text, reader = made(log.folder)
    assert EVIL not in text and reader.count("rect") < 3 * 256 + 100
