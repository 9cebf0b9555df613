"""tools/summarize_run.py on logs of uninterrupted, resumed and diverged runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_sp.commands.cli import main


def step(number: int, loss: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "kind": "train", "step": number, "consumed_tokens": 128 * number, "tokens_per_s": 100.0 + number, "loss": loss,
        "loss_hex": loss.hex(), "grad_norm_hex": "0x1p0", "samples_sha": f"s{number}", **more,
    }  # fmt: skip


def start(number: int) -> dict[str, Any]:
    return {"kind": "start", "step": number}


def write(folder: Path, *records: dict[str, Any], end: str = "") -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + end)
    return folder


def test_an_uninterrupted_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    valid = [{"kind": "valid", "step": s, "loss": v, "perplexity": 0.0} for s, v in ((1, 9.0), (3, 2.0))]
    write(tmp_path, start(0), step(1), step(2), step(3), *valid)
    assert main(["summarize", str(tmp_path), "--extra", "picture=a=b.png"]) == 0
    text = capsys.readouterr().out
    assert "3, 384 tokens" in text and "102 tokens/s (median)" in text and "2.0000 (perplexity 7.4)" in text and "a=b.png" in text
    assert "interruptions" not in text and "twice" not in text


def test_a_call_after_the_end_interrupts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does a run that is made longer; one that a call found short of its end was interrupted."""
    done, longer = {"train_iters": 2}, {"train_iters": 4}
    write(tmp_path, start(0) | done, step(1), step(2), start(2) | done, start(2) | done, start(2) | longer, step(3))
    assert main(["summarize", str(tmp_path)]) == 0 and "interruptions" not in capsys.readouterr().out
    write(tmp_path, start(0) | done, step(1), step(2), start(2) | longer, step(3), start(3) | longer, step(4), start(4) | longer)
    assert main(["summarize", str(tmp_path)]) == 0 and "1, resumed at step 3" in capsys.readouterr().out


def test_a_loss_is_told_beside_that_of_knowing_nothing_and_in_bits_per_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = start(0) | {"config": {"model": {"vocab_size": 8000}}}
    write(tmp_path, first, step(1), {"kind": "valid", "step": 1, "loss": 2.772588722239781, "perplexity": 16.0})
    assert main(["summarize", str(tmp_path), "--bytes-per-token", "3.2"]) == 0
    text = capsys.readouterr().out
    assert "valid bits per byte                 1.25, at 3.20 bytes for each token" in text  # 4 bits for 3.2 bytes
    assert "loss of a model that knows nothing  8.9872, ln 8,000: all tokens are as likely" in text
    assert main(["summarize", str(tmp_path)]) == 0 and "bits per byte" not in capsys.readouterr().out
    for wrong in ("0", "nan", "-1", "inf"):
        assert main(["summarize", str(tmp_path), f"--bytes-per-token={wrong}"]) == 2
        assert "must be a number above 0" in capsys.readouterr().err


def test_what_was_right_is_said_in_percent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    valid = {"kind": "valid", "step": 2, "loss": 5.0, "perplexity": 148.4, "order_loss": 0.7, "lm_accuracy": 0.3126, "order_accuracy": 0.5}
    last = {"kind": "classification", "step": 2, "examples": 400, "accuracy": 0.8725, "f1": 0.87, "exact_match": 0.8725, "matthews": 0.85}
    write(tmp_path, start(0), step(1), {**valid, "step": 1, "lm_accuracy": 0.1}, step(2), valid, {**last, "accuracy": 0.5}, last)
    assert main(["summarize", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "valid lm accuracy     31.3 %" in text and "valid order accuracy  50.0 %" in text and "order loss" not in text
    assert "400 classified        87.2 % right, F1 0.870" in text


def test_a_resumed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, start(0), step(1), step(2), step(3), start(1), step(2), step(3), step(4), end='{"kind": "tr')
    assert main(["summarize", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "1, resumed at step 1" in text and "2: loss, gradient norm and samples all equal to the last bit" in text


@pytest.mark.parametrize("change", [{"loss_hex": "0x1.0000001p0"}, {"grad_norm_hex": "0x1.1p0"}, {"samples_sha": "other"}])
def test_a_run_that_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str]) -> None:
    write(tmp_path, start(0), step(1), step(2), start(0), step(1), {**step(2), **change})
    assert main(["summarize", str(tmp_path)]) == 0
    assert "2: loss, gradient norm and samples 1 of them equal to the last bit" in capsys.readouterr().out


def test_a_loss_that_is_not_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, step(1), {"kind": "valid", "step": 1, "loss": "nan"}, {"kind": "test", "step": 1, "loss": "inf"})
    assert main(["summarize", str(tmp_path)]) == 0
    assert "nan" in capsys.readouterr().out


def test_nothing_to_summarise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summarize", str(tmp_path / "absent")]) == 4
    write(tmp_path, start(0))
    assert main(["summarize", str(tmp_path)]) == 4
    text = capsys.readouterr().err
    assert "cannot be read" in text and "no training step yet" in text


@pytest.mark.parametrize(
    "record", [{"kind": "train", "step": 1}, {**step(1), "tokens_per_s": "fast"}, {**step(1), "consumed_tokens": None}]
)
def test_a_damaged_record_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str], record: dict[str, Any]) -> None:
    write(tmp_path, step(2), record, end="[" * 100_000 + "\n")
    assert main(["summarize", str(tmp_path)]) == 4
    assert "holds a record that cannot be used" in capsys.readouterr().err
