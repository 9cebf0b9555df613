"""Manifests for Kubernetes and SkyPilot follow the published schemas, restart after the right exit codes, and their scripts work.

The schema of a TrainJob and its runtime is that of the PyPI package kubeflow-trainer-api, which is made from Kubeflow
Trainer's own; so is that of a pod. Where there is no package of a sensible size it is a file in tests/schemas/, with
its source.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.paths import ROOT
from support.waiting import PATIENCE_S, wait_until

KUBERNETES = ROOT / "scripts/kubernetes"
SCHEMAS = ROOT / "tests/schemas"
GIVEN = ["IMAGE=registry/megatron_sp:1", "CLAIM=corpus"]
COMMAND = ["--", "pretrain_gpt.py", "--preset", "gpt-1.3b", "--save", "/data/runs/x", "--split", "97,3,0", "--name", 'a "quoted: one"']


@cache
def render_program() -> Any:
    """scripts/kubernetes/render.py as a module."""
    spec = importlib.util.spec_from_file_location("kubernetes_render", KUBERNETES / "render.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rendered(kind: str, *values: str, expect: int = 0, command: list[str] = COMMAND) -> Any:
    """The documents that render.py prints, or what it says if it is to refuse."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = render_program().main([kind, *values, *command])
    assert code == expect, stdout.getvalue() + stderr.getvalue()
    return list(yaml.safe_load_all(stdout.getvalue())) if expect == 0 else stderr.getvalue()


@cache
def published(name: str) -> dict[str, Any]:
    """The JSON schema of a model of kubeflow-trainer-api; what it does not name is refused, as kubectl does."""
    module = importlib.import_module(f"kubeflow_trainer_api.models.{re.sub(r'(?<!^)(?=[A-Z](?![A-Z]))', '_', name).lower()}")
    schema: dict[str, Any] = getattr(module, name).model_json_schema(by_alias=True)
    for each in [schema, *schema["$defs"].values()]:
        if "actual_instance" in each.get("properties", {}):  # one of several plain types: a quantity, a port
            each.clear()
            each["type"] = ["string", "number"]
        elif each.get("type") == "object" and each.get("properties"):
            each.setdefault("additionalProperties", False)
    return schema


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    """A validator for documents of a kind: those of Kubernetes by their name, "Task" for SkyPilot's."""
    if kind in MODELS:
        schema = published(MODELS[kind])
    elif kind == "Task":
        schema = json.loads((SCHEMAS / "skypilot-task.json").read_text())
    else:
        schema = json.loads((SCHEMAS / "pytorchjob-v1.json").read_text())
        for place, model in (("podTemplate", "IoK8sApiCoreV1PodTemplateSpec"), ("objectMeta", "IoK8sApimachineryPkgApisMetaV1ObjectMeta")):
            schema["$defs"] |= published(model)["$defs"]
            schema["$defs"][place] = {key: value for key, value in published(model).items() if key != "$defs"}
    if kind not in MODELS:
        jsonschema.Draft202012Validator.check_schema(schema)  # those of the package are made by a program
    return jsonschema.Draft202012Validator(schema)


def check(document: Any, kind: str | None = None) -> None:
    """Hold a document against the schema of its kind; raises jsonschema.ValidationError."""
    error = next(validator(kind or document["kind"]).iter_errors(document), None)
    if error is not None:
        raise error


MODELS = {"TrainingRuntime": "TrainerV1alpha1TrainingRuntime", "TrainJob": "TrainerV1alpha1TrainJob"}
VARIANTS = [(), ("NODES=4", "GPUS=4", "SHM=1Gi", "ENV_NCCL_IB_HCA=mlx5", "ENV_NCCL_SOCKET_IFNAME=eth0", "NAME=x", "NAMESPACE=teams")]


@pytest.mark.parametrize("values", VARIANTS)
def test_a_trainjob_follows_the_published_schema(values: tuple[str, ...]) -> None:
    runtime, job = documents = rendered("trainjob", *GIVEN, *values)
    for document in documents:
        assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        check(document)
    assert [d["kind"] for d in documents] == list(MODELS) and runtime["metadata"]["name"] == job["spec"]["runtimeRef"]["name"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    # by these names Trainer finds the pods to which it gives torchrun's variables
    assert replicated["name"] == "node" == pod["containers"][0]["name"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert pod["restartPolicy"] == "Never", "podFailurePolicy is for such pods only"
    assert {m["mountPath"] for m in pod["containers"][0]["volumeMounts"]} == {"/data", "/dev/shm"}
    assert job["spec"]["trainer"]["args"] == ["/workspace/megatron_sp/pretrain_gpt.py", *COMMAND[2:]]
    environment = {e["name"]: e["value"] for e in pod["containers"][0]["env"]}
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert not {name for name in environment if name.startswith("PET_")}, "Trainer refuses these"
    assert ("NCCL_IB_HCA" in environment) == bool(values)


@pytest.mark.parametrize("values", VARIANTS)
def test_a_pytorchjob_follows_its_schema(values: tuple[str, ...]) -> None:
    (job,) = rendered("pytorchjob", *GIVEN, *values)
    check(job)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert sum(spec["replicas"] for spec in replicas.values()) == (4 if values else 1)
    pods = [spec["template"]["spec"] for spec in replicas.values()]
    assert all(pod == pods[0] for pod in pods) and {"name": "RESTART_CODE", "value": "143"} in pods[0]["containers"][0]["env"]


def change(*path: str | int, to: Any = None) -> Callable[[Any], None]:
    """A change of one entry; None takes it away."""

    def make(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        if to is None:
            del document[path[-1]]
        else:
            document[path[-1]] = to

    return make


JOB = ("spec", "template", "spec", "replicatedJobs", 0, "template", "spec")
POD = ("spec", "pytorchReplicaSpecs", "Master", "template", "spec")


@pytest.mark.parametrize("kind, number, wrong", [
    ("trainjob", 1, change("spec", "numNodes", to=2)),
    ("trainjob", 0, change(*JOB, "podFailurePolicy", "rules", 0, "onExitCodes", "values", to="2")),
    ("trainjob", 0, change(*JOB, "template", "spec", "terminationGracePeriod", to=300)),
    ("pytorchjob", 0, change(*POD, "containers", 0, "name", to="node")),
    ("pytorchjob", 0, change(*POD, "containers", 0, "resources", "limit", to={})),
])  # fmt: skip
def test_what_is_wrong_is_seen(kind: str, number: int, wrong: Callable[[Any], None]) -> None:
    document = copy.deepcopy(_two_nodes(kind))[number]
    wrong(document)
    with pytest.raises(jsonschema.ValidationError):
        check(document)


@cache
def _two_nodes(kind: str) -> Any:
    return rendered(kind, *GIVEN, "NODES=2")


@pytest.mark.parametrize("words, message", [
    (["trainjob", "IMAGE=x"], "no value for CLAIM: give CLAIM=..."),
    (["trainjob", *GIVEN, "NODES=0"], "NODES=0 must be a number, 1 or more"),
    (["trainjob", *GIVEN, "GRACE=30"], "GRACE=30 must be a number, 60 or more"),
    (["trainjob", *GIVEN, "NODE=2"], "'NODE=2' is not NAME=VALUE"),
    (["trainjob", *GIVEN, "NAME=My_Job"], "NAME=My_Job must be at most 40 small letters"), (["job", *GIVEN], "'job' is neither trainjob"),
    (["job"], "'job' is neither trainjob"),
])  # fmt: skip
def test_values_that_cannot_work_are_refused(words: list[str], message: str) -> None:
    assert message in rendered(words[0], *words[1:], expect=2)


def test_a_command_is_needed() -> None:
    assert "no command: after -- comes what to train" in rendered("trainjob", *GIVEN, expect=2, command=[])


def test_every_value_is_in_the_documentation() -> None:
    defaults: dict[str, str | None] = render_program().DEFAULTS
    page = (ROOT / "docs/how-to/launching/kubernetes.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([A-Z]+)` \|([^|]*)\|", page, flags=re.MULTILINE))
    assert {name: value.strip("` ") for name, value in rows.items()} == {name: value or "" for name, value in defaults.items()}


# ---------------------------------------------------------------------------------------------------------------- exit codes


def codes_for(advice: str) -> set[int]:
    """The codes of a training whose advice in docs/reference/exit_codes.md matches."""
    text = (ROOT / "docs/reference/exit_codes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \|$", text, flags=re.MULTILINE)
    return {int(code) for code, meaning, do in rows if re.search(advice, f"{meaning} | {do}") and "megatron-sp" not in meaning}


def test_who_restarts_which_exit_codes() -> None:
    final = set(rendered("trainjob", *GIVEN)[0]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]
                ["rules"][0]["onExitCodes"]["values"])  # fmt: skip
    again = codes_for(r"start (again|the same command again) with|another process is writing")
    assert again == {6, 7, 8, 75}, "6 needs a hand: free some space"
    assert final == {2, 3, 4, 5, 6} and not final & {7, 8, 75}
    task = yaml.safe_load((ROOT / "scripts/skypilot/pretrain.yaml").read_text())
    assert set(task["resources"]["job_recovery"]["recover_on_exit_codes"]) == again - {6}
    assert re.search(r'case "\$code" in 7 \| 8 \| 75\)', (KUBERNETES / "start.sh").read_text())


# ---------------------------------------------------------------------------------------------------------------- start.sh


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """start.sh beside a launch.sh that writes its words and variables down, and ends as it is told."""
    folder = tmp_path / "scripts/kubernetes"
    folder.mkdir(parents=True)
    (folder / "start.sh").write_text((KUBERNETES / "start.sh").read_text())
    (tmp_path / "scripts/launch.sh").write_text(
        'trap "exit 75" TERM\nenv >"$LOGS/env.txt"; printf "%s\\n" "$@" >"$LOGS/words.txt"\n'
        '[ -z "${WAIT:-}" ] || { while :; do sleep 0.05; done; }\nexit "${CODE:-0}"\n'
    )
    return tmp_path


def variables_seen(checkout: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (checkout / "env.txt").read_text().splitlines() if "=" in line)


def start(checkout: Path, **variables: object) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"LOGS": str(checkout), **{k: str(v) for k, v in variables.items()}}
    words = ["bash", str(checkout / "scripts/kubernetes/start.sh"), "pretrain_gpt.py", "--lr", "1e-4"]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


TRAINER = {"PET_NNODES": 2, "PET_NODE_RANK": 1, "PET_NPROC_PER_NODE": 8, "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": 29500}
OPERATOR = {"PET_NNODES": 2, "PET_NODE_RANK": 1, "PET_NPROC_PER_NODE": 8, "MASTER_ADDR": "localhost", "MASTER_PORT": 29400, "RANK": 1,
            "WORLD_SIZE": 16}  # fmt: skip


@pytest.mark.parametrize("given, port", [(TRAINER, "29500"), (OPERATOR, "29400")], ids=["trainer", "training-operator"])
def test_a_pod_gets_what_the_launcher_takes(checkout: Path, given: dict[str, object], port: str) -> None:
    process = start(checkout, **given)
    assert process.wait(PATIENCE_S) == 0
    seen = variables_seen(checkout)
    assert {k: seen[k] for k in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")} == {
        "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "NPROC_PER_NODE": "8",
    }  # fmt: skip
    assert not [name for name in seen if name.startswith("PET_") or name in ("RANK", "WORLD_SIZE")], "torchrun would read them"
    assert (checkout / "words.txt").read_text().splitlines() == ["pretrain_gpt.py", "--lr", "1e-4"]


def test_a_single_pod_needs_no_address(checkout: Path) -> None:
    process = start(checkout, PET_NNODES=1, PET_NODE_RANK=0, PET_MASTER_ADDR="no-such-host.invalid", NPROC_PER_NODE=4, NODE_RANK=0)
    assert process.wait(PATIENCE_S) == 0
    seen = variables_seen(checkout)
    assert seen["NNODES"] == "1" and seen["NPROC_PER_NODE"] == "4" and not {"NODE_RANK", "MASTER_ADDR"} & set(seen)


def test_a_host_0_that_the_dns_does_not_know(checkout: Path) -> None:
    process = start(checkout, **{**TRAINER, "PET_MASTER_ADDR": "no-such-host.invalid", "JOIN_TIMEOUT": 0})
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 7 and "has not known no-such-host.invalid" in said and not (checkout / "env.txt").exists()


@pytest.mark.parametrize("code, alone, under_operator", [(0, 0, 0), (1, 1, 1), (3, 3, 3), (7, 7, 143), (8, 8, 143), (75, 75, 143)])
def test_the_exit_code_of_a_pod(checkout: Path, code: int, alone: int, under_operator: int) -> None:
    first, second = start(checkout, CODE=code, LOCK_WAIT=0), start(checkout, CODE=code, LOCK_WAIT=0, RESTART_CODE=143)
    assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (alone, under_operator)
    assert first.stdout is not None and ("when the lock of a pod" in first.stdout.read()) == (code == 8)


def test_sigterm_reaches_the_launcher(checkout: Path) -> None:
    """Kubernetes sends it to the first process of a container only; the save that follows decides the exit code."""
    process = start(checkout, WAIT=1)
    wait_until((checkout / "words.txt").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 75


# ---------------------------------------------------------------------------------------------------------------- SkyPilot


@pytest.mark.parametrize("name", ["pretrain", "preprocess"])
def test_a_skypilot_task_follows_its_schema(name: str) -> None:
    task = yaml.safe_load((ROOT / f"scripts/skypilot/{name}.yaml").read_text())
    check(task, "Task")
    wrongs = [
        change("resources", "spot", to=True), change("num_nodes", to="2"), change("run", to=["ls"]), change("envs", "A-B", to="1"),
        change("resources", "job_recovery", "recover_on_exit_codes", to=[256]),
    ]  # fmt: skip
    for wrong in wrongs:
        other = copy.deepcopy(task)
        wrong(other)
        with pytest.raises(jsonschema.ValidationError):
            check(other, "Task")


def test_the_scripts_of_the_skypilot_tasks(tmp_path: Path) -> None:
    """With SkyPilot's variables, and stand-ins for what they start."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    write = 'printf "%s\\n" "$NNODES $NODE_RANK $MASTER_ADDR $JOB_ID" "$@" >out.txt\n'
    (tmp_path / "scripts/launch.sh").write_text(write)
    (tmp_path / ".venv/bin/python").write_text("#!/usr/bin/env bash\nNNODES= NODE_RANK= MASTER_ADDR= JOB_ID=\n" + write)
    (tmp_path / ".venv/bin/python").chmod(0o755)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    sky = {
        "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_TASK_ID": "sky-managed-1", "EXPORT": "x", "PREFIX": "/shared/data/c",
    }  # fmt: skip
    asked = {"COMMAND": "pretrain_gpt.py --save '/shared/runs/a b'", "FLAGS": "--input *.jsonl --append-eod"}
    said = {}
    for name in ("pretrain", "preprocess"):
        task = yaml.safe_load((ROOT / f"scripts/skypilot/{name}.yaml").read_text())
        assert all(variable in {**sky, **asked} for variable in task["envs"])
        subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env={**os.environ, **sky, **asked}, check=True, timeout=PATIENCE_S)
        said[name] = (tmp_path / "out.txt").read_text().splitlines()
        subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)
    assert said["pretrain"] == ["2 1 10.0.0.1 sky-managed-1", "8", "pretrain_gpt.py", "--save", "/shared/runs/a b", "--auto-resume"]
    assert said["preprocess"][1:8] == ["-m", "megatron_sp", "preprocess", "--input", "a.jsonl", "b.jsonl", "--append-eod"]
    assert said["preprocess"][8:10] == ["--output-prefix", "/shared/data/c"] and said["preprocess"][-2:] == ["--part", "2/2"]
