"""One measurement, and what a part is given to make some."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TextIO

from megatron_sp.utils.entry_point import is_out_of_memory

if TYPE_CHECKING:
    import torch

Verdict = Literal["ok", "wrong", "failed", "absent", "measured"]
VERDICTS: tuple[Verdict, ...] = ("ok", "wrong", "failed", "absent", "measured")
Value = float | int | str | bool | None


class NotThereError(Exception):
    """What would be measured is not there: a package, a second GPU. Its text is the reason."""


@dataclass(frozen=True)
class Record:
    """One line of a table.

    Attributes:
        table: title of the table.
        row: what was measured.
        values: by column. The end of a name is its unit: _ms, _s, _bytes, _gbs, _tflops, _share (of one).
        verdict: ok or wrong, of what was compared; failed: it raised; absent: it is not there; measured: a figure alone.
        message: a reason, or a remark.
        spans: of a time line: (lane, label, begin, end), in ms.
    """

    table: str
    row: str
    values: dict[str, Value] = field(default_factory=dict)
    verdict: Verdict = "measured"
    message: str = ""
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)

    @property
    def is_bad(self) -> bool:
        """True if not all is well."""
        return self.verdict in ("wrong", "failed")

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON knows it: a number that is not finite becomes text."""
        made = asdict(self)
        made["values"] = {name: _finite(value) for name, value in self.values.items()}
        made["spans"] = [
            [lane, label, _finite(begin) or 0.0, _finite(end) or 0.0] for lane, label, begin, end in self.spans
        ]
        return made


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def record_of(value: Any) -> Record:
    """Return the record that a JSON value is.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, dict) or set(value) != {"table", "row", "values", "verdict", "message", "spans"}:
        raise ValueError("a record has other fields")
    texts, values, spans = [value["table"], value["row"], value["message"]], value["values"], value["spans"]
    good = all(isinstance(text, str) for text in texts) and value["verdict"] in VERDICTS and isinstance(values, dict)
    good = good and all(
        isinstance(name, str) and (v is None or isinstance(v, (str, int, float))) for name, v in values.items()
    )
    if not good or not isinstance(spans, list) or not all(_is_span(span) for span in spans):
        raise ValueError("a field of a record is of another kind")
    return Record(
        value["table"], value["row"], values, value["verdict"], value["message"], [tuple(span) for span in spans]
    )


def _is_span(span: Any) -> bool:
    return (
        isinstance(span, list)
        and len(span) == 4
        and all(isinstance(x, str) for x in span[:2])
        and all(_is_time(x) for x in span[2:])
    )


def _is_time(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


@dataclass(frozen=True)
class Context:
    """What a part works with.

    Attributes:
        device: cpu or cuda.
        num_gpus: of this machine.
        tiny: small shapes and few rounds: does it run at all?
        keep: takes each record at once, so that what a part has measured survives its end.
    """

    device: Literal["cpu", "cuda"]
    num_gpus: int
    tiny: bool
    keep: Callable[[Record], None]

    @property
    def torch_device(self) -> torch.device:
        """The device with its number, without which torch makes no NCCL group for it."""
        import torch

        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    def record(
        self, table: str, row: str, verdict: Verdict = "measured", message: str = "", spans: Any = (), **values: Value
    ) -> None:
        """Keep one measurement (``Record``)."""
        self.keep(Record(table, row, values, verdict, message, list(spans)))

    def attempt(self, table: str, row: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Keep what ``measure`` returns: values by column, and ``verdict``, ``message``, ``spans`` if it says so.

        What it raises becomes a record, and the part goes on.

        Returns:
            what it returned; None if it raised.
        """
        try:
            found = measure()
        except NotThereError as lack:
            self.record(table, row, "absent", str(lack))
            return None
        except Exception as error:  # a kernel may fail in any way it likes, and the others are still worth measuring
            self.fail(table, row, error)
            return None
        self.record(table, row, **found)
        return found

    def fail(self, table: str, row: str, error: BaseException) -> None:
        """Keep why a measurement failed. A device with too little memory for it is not a fault: what it needs is not there."""
        traceback.print_exception(error)  # into the part's log
        is_too_large = is_out_of_memory(error)
        self.record(
            table,
            row,
            "absent" if is_too_large else "failed",
            f"{'too little memory: ' * is_too_large}{failure(error)}",
        )


def failure(error: BaseException) -> str:
    """Return type and text of an error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def to_stream(stream: TextIO) -> Callable[[Record], None]:
    """Return a ``Context.keep`` that writes a line of JSON for each record."""

    def keep(record: Record) -> None:
        stream.write(json.dumps(record.as_json()) + "\n")
        stream.flush()

    return keep
