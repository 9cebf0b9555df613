"""Section with the whole configuration of a run, highlighting values that are not the default or differ between runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_sp.config.schema import GROUPS, Config
from megatron_sp.report.html import Html, tag
from megatron_sp.report.reading import RunFiles
from megatron_sp.report.sections import Section, section, text
from megatron_sp.utils.flag_field import described


def configuration_section(runs: Sequence[RunFiles]) -> Section | None:
    """Return the section: every flag with its value in each run and its default; a run without a configuration has no column."""
    told = [run for run in runs if run.config]
    if not told:
        return None
    defaults = Config().to_dict()
    configs = [run.config for run in told]
    helps = {group: {f.name: described(f) for f in dataclasses.fields(cls)} for group, cls in GROUPS.items()}
    rows, changed, differ = [], 0, 0
    for group, entries in defaults.items():
        about = tag("span", (GROUPS[group].__doc__ or "").partition("\n")[0].rstrip("."), class_="quiet")
        rows.append(tag("tr", tag("th", f"{group} options ", about, colspan=len(told) + 2, scope="colgroup"), class_="group"))
        for name, default in entries.items():
            values = [config[group][name] for config in configs]
            is_changed, is_other = any(v != default for v in values), any(v != values[0] for v in values)
            changed, differ = changed + is_changed, differ + is_other
            rows.append(_row(name, helps[group][name], values, default, is_changed=is_changed, is_other=is_other))
    head = tag("tr", tag("th", "flag", scope="col"), [tag("th", run.name, scope="col") for run in told], tag("th", "default", scope="col"))
    body = tag(
        "div", tag("table", tag("thead", head), tag("tbody", rows), class_="config", id="config-table"), class_="scroll", tabindex="0"
    )
    words = f"{changed} flags differ from their defaults"
    words += (f"; {differ} between the runs" if differ else "; the runs have the same configuration") if len(told) > 1 else ""
    missing = [run.name for run in runs if not run.config]
    if missing:
        words += f". The configuration of {', '.join(missing)} is unknown: neither a start record nor a checkpoint has it"
    return section(
        "configuration", "Configuration", tag("div", tag("p", words + ".", class_="quiet"), _controls(len(told) > 1), body, class_="card")
    )


def _row(name: str, help_: str, values: Sequence[object], default: object, *, is_changed: bool, is_other: bool) -> Html:
    looks = " ".join(word for word, holds in (("changed", is_changed), ("other", is_other)) if holds)
    mark = tag("span", "● ", class_="mark", title="not the default") if is_changed else None
    cells = [tag("td", text(v), class_="differs" if v != values[0] else None) for v in values]
    flag = tag("th", mark, "--" + name.replace("_", "-"), scope="row", title=help_)
    return tag("tr", flag, cells, tag("td", text(default), class_="quiet"), class_=looks or None)


def _controls(several: bool) -> Html:
    """Return the filter for the table, which only the page's script shows; without the script the table has every row."""
    choices = [("changed", "not the default"), ("all", "all flags")]
    if several:
        choices.insert(0, ("other", "where the runs differ"))
    options = [tag("option", words, value=value) for value, words in choices]
    return tag(
        "div",
        tag("label", "show ", tag("select", options, id="config-show")),
        tag("label", "filter ", tag("input", type="search", id="config-filter", autocomplete="off", size="18")),
        class_="controls needs-script",
    )
