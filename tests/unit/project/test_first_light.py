"""The first light of a GPU: its budget, its limits, what it leaves behind, how it goes on, and what it writes.

The parts here are those of support/first_light_parts.py, in real processes; time is the test's own wherever it decides.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.waiting import wait_until

sys.path[:0] = [str(ROOT / "benchmarks")]

from first_light import command, markdown, processes, tables  # noqa: E402
from first_light.page import page  # noqa: E402
from first_light.plan import PARTS, Part  # noqa: E402
from first_light.records import Record  # noqa: E402
from first_light.report import FORMAT, PartResult, Report, open_report, read_report  # noqa: E402
from first_light.runner import Machine, Runner  # noqa: E402
from support.first_light_parts import part  # noqa: E402

from megatron_sp.utils.errors import ConfigError, LockError  # noqa: E402
from megatron_sp.utils.host import is_running  # noqa: E402

MACHINE = {"device": "cpu", "torch": "2.13.0"}


class TestClock:
    """Time that passes when a process is waited for, and not otherwise.

    Args:
        seconds: that a part takes which ends by itself.
        before: called before time passes for one that does not; a hang is first let begin.
    """

    __test__ = False

    def __init__(self, seconds: float = 1.0, before: Callable[[], None] | None = None) -> None:
        self.time, self.seconds, self.before = 1000.0, seconds, before

    def now(self) -> float:
        return self.time

    def wait(self, process: subprocess.Popen[bytes]) -> int | None:
        if self.before is None:
            code = process.wait()
            self.time += self.seconds
            return code
        self.before()
        self.time += self.seconds
        return process.poll()


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the parts tell what they do; their processes find them."""
    folder = tmp_path / "told"
    folder.mkdir()
    monkeypatch.setenv("FIRST_LIGHT_TEST", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]))
    return folder


def run(
    parts: Sequence[Part], report: Report | None = None, minutes: float = 60, clock: Any = None, **more: Any
) -> tuple[Report, list[str], list[str]]:
    """The report, the parts that are left, and what was said."""
    report, said = report or Report(dict(MACHINE)), []
    runner = Runner(
        report, Machine("cpu", 0, "abc"), lambda: None, 60 * minutes, clock=clock or TestClock(), say=said.append, grace_s=0.1, **more
    )
    return report, runner.run(parts), said


def calls(told: Path) -> list[str]:
    path = told / "calls"
    return path.read_text().split() if path.exists() else []


def all_are_gone(told: Path) -> None:
    """What ``hangs`` has started has ended, and its folder is gone."""
    pids, scratch = (told / "hangs").read_text().split("\n")
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids.split()))
    wait_until(lambda: not os.path.exists(scratch))


# ---------------------------------------------------------------------------------------------------------- the runner


def test_parts_run_in_order_and_their_records_are_kept(told: Path) -> None:
    report, left, said = run([part("good"), part("also_good")])
    assert left == [] and calls(told) == ["good", "also_good"] and list(report.parts) == ["good", "also_good"]
    result = report.parts["good"]
    assert (result.status, result.message, result.revision, result.seconds) == ("done", "", "abc", 1.0)
    assert result.records == [
        Record("a table", "first", {"error": 1e-6}, "ok"), Record("a table", "second", {"time_ms": 1.5, "on": "cpu"}),
    ]  # fmt: skip
    assert said[0].startswith("good: the part good (at most 100 s)") and said[1] == "  done in 1 s, 2 records"


def test_a_part_that_fails_says_why_and_the_others_go_on(told: Path) -> None:
    report, left, _ = run([part("raises"), part("dies"), part("leaves"), part("wrong"), part("good")])
    assert left == [] and calls(told) == ["good"]
    words = {name: (result.status, result.message) for name, result in report.parts.items()}
    assert words == {
        "raises": ("failed", "ValueError: the kernel was not amused"),
        "dies": ("failed", "ended by SIGSEGV; last words"),
        "leaves": ("failed", "ended with code 3"),
        "wrong": ("done", ""),
        "good": ("done", ""),
    }
    assert (
        [record.row for record in report.parts["raises"].records] == ["before"] == [record.row for record in report.parts["dies"].records]
    )
    assert [result.is_bad for result in report.parts.values()] == [True, True, True, True, False] and report.is_bad


def test_a_part_that_hangs_ends_at_its_limit_with_everything_that_it_has_started(told: Path) -> None:
    clock = TestClock(30, before=lambda: wait_until((told / "hangs").exists))
    report, left, _ = run([part("hangs", limit_s=100)], clock=clock)
    all_are_gone(told)
    result = report.parts["hangs"]
    assert (result.status, result.message) == ("failed", "took longer than its limit of 100 s") and left == []
    assert [record.row for record in result.records] == ["before"] and result.seconds >= 100


def test_what_a_part_leaves_behind_is_ended_too(told: Path) -> None:
    report, _, _ = run([part("leaves_a_child")])
    assert report.parts["leaves_a_child"].status == "done"
    wait_until(lambda: not is_running(int((told / "child").read_text())))


def test_the_budget_ends_the_part_that_runs_and_the_next_call_repeats_it_alone(told: Path) -> None:
    parts = [part("good"), part("hangs_once", limit_s=10000), part("also_good")]
    report, _, _ = run(parts[:1])
    clock = TestClock(90, before=lambda: wait_until((told / "hangs").exists))
    report, left, said = run(parts, report, minutes=10, clock=clock)
    all_are_gone(told)
    result = report.parts["hangs_once"]
    assert (result.status, result.message) == ("stopped", "stopped: the time is up") and not result.is_bad
    assert left == ["hangs_once", "also_good"] and calls(told) == ["good", "hangs"]
    assert "at most 600 s" in said[0]
    _, left, _ = run(parts, report)
    assert left == [] and calls(told) == ["good", "hangs", "hangs_once", "also_good"]
    assert report.parts["hangs_once"].status == "done"


def test_a_part_that_the_rest_of_the_time_is_too_short_for_is_not_begun(told: Path) -> None:
    _, left, said = run([part("good", least_s=60), part("also_good", least_s=60)], minutes=1.5, clock=TestClock(31))
    assert left == ["also_good"] and calls(told) == ["good"]
    assert said[-1] == "also_good is left for the next call: 59 s are left, and it takes 60 or more"


def test_what_has_failed_is_repeated_when_asked_for_alone(told: Path) -> None:
    report, _, _ = run([part("raises"), part("good")])
    parts = [part("raises", "also_good"), part("good")]
    run(parts, report)
    assert calls(told) == ["good"] and report.parts["raises"].is_bad
    run(parts, report, again=True)
    assert calls(told) == ["good", "also_good"] and not report.is_bad


def test_a_log_is_kept_of_what_did_not_go_well(told: Path, tmp_path: Path) -> None:
    report, _, _ = run([part("dies"), part("good")], logs=tmp_path / "logs")
    assert os.listdir(tmp_path / "logs") == ["dies.log"] and "last words" in (tmp_path / "logs/dies.log").read_text()
    run([part("dies", "good")], report, again=True, logs=tmp_path / "logs")
    assert os.listdir(tmp_path / "logs") == []


def test_the_handlers_of_signals_are_put_back(told: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run([part("good")])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# ------------------------------------------------------------------------------------------------- the whole program


def start(told: Path, parts: str, *flags: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "support.first_light_driver", parts, "--out", str(told.parent / "out"), "--device", "cpu", *flags]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(program: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = program.communicate()
    return program.returncode, said


def test_after_a_kill_in_the_middle_it_goes_on_there(told: Path) -> None:
    parts = "good,hangs_once,also_good"
    program = start(told, parts)
    wait_until((told / "hangs").exists)
    program.kill()
    finish(program)
    all_are_gone(told)
    report = read_report(told.parent / "out/report.json")
    assert list(report.parts) == ["good"] and (told.parent / "out/report.html").exists()
    code, said = finish(start(told, parts))
    assert code == 0, said
    assert calls(told) == ["good", "hangs", "hangs_once", "also_good"]
    report = read_report(told.parent / "out/report.json")
    assert {name: result.status for name, result in report.parts.items()} == {"good": "done", "hangs_once": "done", "also_good": "done"}
    assert len(report.calls) == 2 and sorted(os.listdir(told.parent / "out")) == ["report.html", "report.json"]


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_ends_everything_and_keeps_what_is_done(told: Path, number: int, expected: int) -> None:
    program = start(told, "good,hangs,also_good")
    wait_until((told / "hangs").exists)
    part_pid = int((told / "hangs").read_text().split()[0])
    assert os.getpgid(part_pid) == part_pid != os.getpgid(program.pid), "a terminal's Ctrl-C reaches the program alone"
    program.send_signal(number)
    code, said = finish(program)
    assert code == expected, said
    all_are_gone(told)
    assert calls(told) == ["good", "hangs"] and "to be done: hangs, also_good" in said
    report = read_report(told.parent / "out/report.json")
    assert report.parts["hangs"].message == f"stopped by {signal.Signals(number).name}"


def test_the_exit_code_says_whether_all_was_well(told: Path) -> None:
    code, said = finish(start(told, "good,wrong,raises"))
    assert code == 1 and "NOT WELL: wrong: 1 of 1 records" in said and "NOT WELL: raises: ValueError" in said
    code, said = finish(start(told, "good,wrong,raises"))
    assert sorted(os.listdir(told.parent / "out/logs")) == ["raises.log", "wrong.log"]
    assert "was not amused" in (told.parent / "out/logs/raises.log").read_text()
    assert code == 1 and calls(told) == ["good"], "a second call repeats nothing, and says the same"


# ---------------------------------------------------------------------------------------------------------- bad input


def test_parts_are_well_named() -> None:
    assert len({each.name for each in PARTS}) == len(PARTS)
    for each in PARTS:
        assert callable(each.load()) and each.least_s < each.limit_s <= 900
    assert sum(each.least_s for each in PARTS) < 600, "ten minutes must be enough for a little of each"


@pytest.mark.parametrize(("words", "says"), [
    (["--minutes", "5"], "--minutes: '5' is unknown: choose from 10, 30, 60"),
    (["--device", "gpu"], "--device: 'gpu' is unknown: did you mean cpu?"),
    (["--minuets", "10"], "--minuets is unknown: did you mean --minutes?"),
    (["ten"], "'ten' is one word too many"),
])  # fmt: skip
def test_unknown_words_are_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2 and says in capsys.readouterr().err


def refusal(words: list[str], gpus: str = "0") -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "probe", lambda: {"gpus": gpus, "gpu": "", "torch": "2.13.0", "python": "3", "megatron_sp": "0"})
        with pytest.raises((ConfigError, LockError)) as refused:
            command.main(words)
    text = str(refused.value)
    assert "\n" not in text
    return text


def test_no_gpu_and_unknown_parts_are_said() -> None:
    assert refusal(["--device", "cuda"]).startswith("--device cuda, but torch sees no GPU here")
    assert refusal(["--parts", "doctor", "speed-large"]).startswith("--parts speed-large is for GPUs alone")
    assert refusal(["--parts", "kernel"]).startswith("--parts kernel is unknown: use some of doctor, steps, kernels")


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    assert f"--out {tmp_path} is a folder of something else (thesis.tex is in it)" in refusal(["--out", str(tmp_path), "--device", "cpu"])
    assert os.listdir(tmp_path) == ["thesis.tex"]
    assert "cannot be used: File exists" in refusal(["--out", str(tmp_path / "thesis.tex"), "--device", "cpu"])


def report_text(**changes: Any) -> str:
    return json.dumps({"first_light": FORMAT, "machine": {}, "calls": [], "parts": {}} | changes)


PART: dict[str, Any] = {"status": "done", "message": "", "seconds": 1, "revision": "", "records": []}
RECORD: dict[str, Any] = {"table": "", "row": "", "values": {}, "verdict": "ok", "message": "", "spans": []}


@pytest.mark.parametrize(("text", "says"), [
    ("{", "is no report of first light, or damaged"), ("[]", "is no report of first light"), ("[" * 100000, "is no report"),
    ('{"benchmark": 1}', "is no report of first light"),
    (report_text(first_light=99), f"by another version of first light (its format is 99, this one's {FORMAT})"),
    (report_text(machine=3), "is damaged"), (report_text(calls=[{"date": 1}]), "is damaged"), (report_text(parts={"a": {}}), "is damaged"),
    (report_text(parts={"a": PART | {"status": "good"}}), "is damaged"),
    (report_text(parts={"a": PART | {"records": [{"table": 1}]}}), "is damaged"),
    (report_text(parts={"a": PART | {"records": [RECORD | {"verdict": "fine"}]}}), "is damaged"),
    (report_text(parts={"a": PART | {"records": [RECORD | {"values": {"a": []}}]}}), "is damaged"),
    (report_text(parts={"a": PART | {"records": [RECORD | {"spans": [["a", "b", 1, None]]}]}}), "is damaged"),
    (report_text(machine={"device": "cuda"}), "about another machine (device cuda, here cpu)"),
])  # fmt: skip
def test_other_reports_are_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    assert says in refusal(["--out", str(tmp_path), "--device", "cpu"])
    assert (tmp_path / "report.json").read_text() == text


def test_a_report_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "mine").write_text("{}")
    (tmp_path / "out/report.json").symlink_to(tmp_path / "mine")
    assert "cannot be read: it is a link" in refusal(["--out", str(tmp_path / "out"), "--device", "cpu"])


def test_two_calls_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with command._alone(tmp_path):
        assert "another first_light.sh is writing into" in refusal(["--out", str(tmp_path), "--device", "cpu"])


# ------------------------------------------------------------------------------------------------ what is written


HOSTILE = "</style><script>alert(1)</script>\"'&<img src=https://e.vil/x.png onerror=alert(2)> | `[a](http://e.vil)` \n# head"


def sample(text: str = "plain") -> Report:
    values: dict[str, Any] = {f"{text}_ms": 1.25, "peak_bytes": 2**30, "error": 1e-6, "rate": float("nan"), "name": text, "empty": None}
    spans = [("forward: computes", text, 0.0, 2.0), ("forward: exchanges 1", "qkv", 0.5, 1.5)]
    records = [
        Record(text, text, values, "ok", text),
        Record(text, "absent", {}, "absent", text), Record("line", text, {"hidden_share": 0.5}, spans=spans),
    ]  # fmt: skip
    parts = {
        "doctor": PartResult("done", "", 3, text, records), "kernels": PartResult("failed", text, 2.0, "abc"),
        text: PartResult("stopped", text, 1.0),
    }  # fmt: skip
    return Report({"device": "cuda", "gpu": f"1 x {text}", "torch": text}, [{"date": text, "command": text, "minutes": 10.0}], parts)


class _Seen(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_has_no_scripts_loads_nothing_and_escapes_everything() -> None:
    seen = _Seen()
    text = page(sample(HOSTILE))
    seen.feed(text)
    assert not seen.tags & {"script", "img", "link", "iframe", "object", "form", "base"}
    assert all(value.startswith("#") for name, value in seen.attributes if name in ("href", "src", "action", "xlink:href"))
    assert not any(name.startswith("on") for name, _ in seen.attributes)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'") in seen.attributes
    assert any(HOSTILE in each for each in seen.texts), "and it is there, as text"
    assert "url(" not in text and "@import" not in text
    plain = _Seen()
    plain.feed(page(sample()))
    assert plain.tags == seen.tags


def test_the_page_says_what_is_well_what_is_not_and_what_is_to_be_done() -> None:
    text = page(sample())
    assert "something is NOT WELL" in text and "To be done: " in text and "speed-large" in text
    assert [table.has_results for table in tables.tables(sample().parts["doctor"].records)] == [True, False]
    assert "1.0 GiB" in text and "50.0 %" in text and "1.0e-06" in text and "<svg" in text
    assert "A trial on the CPU" in page(Report(dict(MACHINE)))
    done = Report(dict(MACHINE), [], {each.name: PartResult("done") for each in PARTS if not each.is_for_gpus})
    assert tables.undone(Report({"device": "cuda"}, [], done.parts)) == ["replay-7b-16k", "speed-large"]
    assert "all is well" in page(done) and "To be done" not in page(done)


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = sample(HOSTILE)
    report.write(tmp_path)
    again = read_report(tmp_path / "report.json")
    assert again.parts["doctor"].records[0].values["rate"] == "nan", "JSON knows no NaN"
    again.write(tmp_path)
    assert page(read_report(tmp_path / "report.json")) == page(again)
    json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert open_report(tmp_path, again.machine).parts.keys() == report.parts.keys()


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("a_ms", 1234.5, "1,234"), ("a_ms", 0.01234, "0.0123"), ("a_bytes", 3 * 2**20, "3.0 MiB"), ("a_share", 0.123, "12.3 %"), ("n", 7, "7"),
    ("n", 100000, "100,000"), ("loss error", 0.00012, "1.2e-04"), ("n", None, ""), ("n", "x", "x"), ("n", 1e6, "1,000,000"),
])  # fmt: skip
def test_values_are_shown_by_their_unit(name: str, value: Any, expected: str) -> None:
    assert tables.cell(name, value) == expected
    assert tables.heading("forward_ms") == "forward (ms)" and tables.heading("link_gbs") == "link (GB/s)"


# ------------------------------------------------------------------------------------------- docs/benchmarks/gpu.md


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("make_gpu_page", ROOT / "tools/dev/make_gpu_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_figures_is_up_to_date() -> None:
    assert (ROOT / "docs/benchmarks/gpu.md").read_text(encoding="utf-8") == tool().page(), "run: make docs"


def test_the_readme_has_the_steps_of_the_report() -> None:
    """Ours and the peers', those that are better for us and those that are not."""
    report = json.loads((ROOT / "docs/benchmarks/gpu.json").read_text(encoding="utf-8"))
    steps = [r for r in report["parts"]["speed"]["records"] if r["table"].startswith("one step, bf16")]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("## How fast it is")[2]
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in readme.splitlines() if line.startswith("| ")}
    assert len(steps) == 3
    for step in steps:
        (row,) = [line for name, line in rows.items() if name.split(",")[0] == step["row"].split(",")[0]]
        shown = re.findall(r"([\d.]+) ms", row)
        columns = ("ours_ms", "ours captured by hand_ms", "transformers_ms", "transformers compiled_ms")
        assert shown == [tables.cell(name, step["values"][name]) for name in columns if name in step["values"]], row


def test_without_a_report_it_says_that_there_is_none(tmp_path: Path) -> None:
    assert "**No GPU run has been recorded.**" in tool().page(tmp_path / "gpu.json")


def test_of_a_report_it_says_device_versions_command_and_figures(tmp_path: Path) -> None:
    sample().write(tmp_path)
    text = tool().page(tmp_path / "report.json")
    assert "No GPU run" not in text and "**1 x plain**" in text and "- torch: plain" in text and "- plain: `plain`" in text
    assert "kernels: NOT WELL: plain, 2 s, revision abc." in text and "Not measured: steps" in text
    assert "| plain | ok | 1.25 | 1.0 GiB | 1.0e-06 | nan | plain |  | plain |" in text
    Report(dict(MACHINE)).write(tmp_path)
    with pytest.raises(ConfigError, match="only one of a GPU belongs on the page"):
        tool().page(tmp_path / "report.json")


def test_hostile_text_is_no_markup_in_markdown() -> None:
    text = markdown.gpu_page(sample(HOSTILE))
    outside = re.sub(r"`[^`\n]*`", "", text)
    assert "<script" not in outside and "<img" not in outside and not re.search("(https?|www)[:.]", outside)
    assert not [line for line in text.splitlines() if line.startswith("# head")]
    widths = {line.count(" | ") for line in text.splitlines() if line.startswith("| ") and "absent" in line}
    assert len(widths) == 1


def test_what_the_end_cut_short_is_not_bad_but_what_was_wrong_before_it_is() -> None:
    """A measurement that a signal ended has raised: that says nothing. A result that was compared and wrong does."""
    cut, wrong = (Record("steps", "BERT", verdict=verdict) for verdict in ("failed", "wrong"))
    assert not PartResult("stopped", "stopped by SIGTERM", 1.0, records=[cut]).is_bad
    assert PartResult("stopped", "stopped by SIGTERM", 1.0, records=[cut, wrong]).is_bad
    assert PartResult("done", "", 1.0, records=[cut]).is_bad


def test_a_process_that_does_not_end_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may hold a process that SIGKILL does not end: the hour goes on."""
    asked: list[int] = []
    now = iter(range(1000))
    monkeypatch.setattr(processes, "marked", lambda mark: [12345678])
    monkeypatch.setattr(processes.os, "kill", lambda pid, kind: asked.append(pid))
    monkeypatch.setattr(processes.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: None)
    processes.end_marked("mark", patience_s=5.0)
    assert 0 < len(asked) <= 6
