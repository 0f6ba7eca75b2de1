"""The launch files in deploy/: valid for the service that reads them, with the ranks that their layout needs.

Kubernetes' and SageMaker's are held to the services' own descriptions of a request, which Python packages
carry; SLURM's and Accelerate's to torchrun's and Accelerate's own parsers. test_deploy_runs.py runs them all.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import minidist as md
from minidist.cli import commands
from tests.helpers.clocks import HANG
from tests.helpers.refusals import refuses

ROOT = Path(md.__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
HOSTS, RANKS = 2, 8
"""Of each launch file."""
EXTRA = "pip install 'minidist[deploy]'"


def document(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason=f"the launch files are YAML: {EXTRA}")
    found: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return found


def module(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that of others
        found: ModuleType = pytest.importorskip(name, reason=f"nothing to check the file against: {EXTRA}")
    return found


def check_words(words: Sequence[str], ranks: int = HOSTS * RANKS) -> None:
    """Fail where `minidist train` would not take these words, or they are not for so many ranks."""
    command = typer.main.get_command(commands.app).commands["train"]  # type: ignore[attr-defined]
    given = command.make_context("train", [*words]).params
    assert md.Layout.parse(given["layout"]).ranks == ranks
    assert given["save"] is not None  # or a restart begins anew


def torchrun_takes(words: Sequence[str]) -> Any:
    """What torchrun's own parser makes of words."""
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args([*words])


def after_train(words: Sequence[str]) -> list[str]:
    program = next(i for i, word in enumerate(words) if word.endswith("deploy/train.py"))
    return [*words[program + 1 :]]


# SLURM

SBATCH = {
    "job-name",
    "nodes",
    "ntasks-per-node",
    "gpus-per-node",
    "cpus-per-task",
    "time",
    "signal",
    "requeue",
    "output",
}
"""Options of sbatch's manual that the file uses."""
USED = ["--data", "bytes", "--layout", "dp=4,tp=4", "--save", "/shared/runs/7"]
SET_FOR_SAGEMAKER = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
)
"""Variables of the process that train.py sets there."""


def slurm(folder: Path, words: Sequence[str], **environment: str) -> list[str]:
    """Run the batch script where SLURM's programs only write down what they are asked; what srun starts."""
    for name, script in {
        "scontrol": '[ "$*" = "show hostnames host[0-1]" ] && printf "host0\\nhost1\\n"',
        "srun": f'printf "%s\\n" "$@" > {folder}/words; env > {folder}/environment',
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    given = {
        "SLURM_JOB_NODELIST": "host[0-1]",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "31",
        "SLURM_CPUS_PER_TASK": "64",
        **environment,
    }
    subprocess.run(
        ["bash", DEPLOY / "slurm.sh", *words],
        env={"PATH": f"{folder}:/usr/bin:/bin", **given},
        check=True,
        timeout=HANG,
    )
    option, cores, *asked = (folder / "words").read_text().splitlines()
    assert (option, cores) == ("--cpus-per-task", given["SLURM_CPUS_PER_TASK"])  # srun does not inherit it
    return asked


def test_slurm_starts_one_torchrun_a_host(tmp_path: Path) -> None:
    text = (DEPLOY / "slurm.sh").read_text()
    subprocess.run(["bash", "-n", DEPLOY / "slurm.sh"], check=True, timeout=HANG)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)", text, re.MULTILINE))
    assert options.keys() == SBATCH
    assert (int(options["nodes"]), int(options["ntasks-per-node"])) == (HOSTS, 1)
    assert int(options["gpus-per-node"]) == RANKS

    torchrun, *words = slurm(tmp_path, USED, SLURM_GPUS_ON_NODE=str(RANKS))
    assert torchrun == "torchrun"
    taken = torchrun_takes(words)
    assert (taken.nnodes, taken.nproc_per_node) == (str(HOSTS), str(RANKS))
    assert (taken.rdzv_backend, taken.rdzv_endpoint, taken.rdzv_id) == ("c10d", "host0:29500", "31")
    assert (taken.training_script, taken.training_script_args) == ("deploy/train.py", USED)
    check_words(USED)


def check_time_to_save(value: str, granted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where torchrun kills ranks long before the service would, or only after it."""
    from torch.distributed.launcher.api import LaunchConfig

    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", value)
    given = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)
    # torch 2.11 knows no such variable, and always waits for 30 s.
    assert granted - 30 <= int(value) == getattr(given, "shutdown_timeout", int(value)) < granted


def test_ranks_have_the_time_to_save_that_the_service_grants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, text = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", (DEPLOY / "slurm.sh").read_text()
    slurm(tmp_path, USED)
    told = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines())
    check_time_to_save(told[name], int(re.findall(r"--signal=TERM@(\d+)", text)[0]), monkeypatch)
    for variable in SET_FOR_SAGEMAKER:
        monkeypatch.setenv(variable, "")
    job = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "eth7"}
    sagemaker_program().accelerate(job, USED)
    check_time_to_save(os.environ[name], 120, monkeypatch)  # as SageMaker's manual says of StopTrainingJob
    pod = worker(document("kubernetes.yaml"))
    told = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    check_time_to_save(told[name], pod["terminationGracePeriodSeconds"], monkeypatch)


def sagemaker_program() -> ModuleType:
    """deploy/train.py."""
    spec = importlib.util.spec_from_file_location("deploy_train", DEPLOY / "train.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


# Kubernetes


def check_fields(value: Any, kind: str, models: Sequence[ModuleType], where: str = "") -> None:
    """Fail where a document has a field that its kind lacks, lacks one that it needs, or has another type."""
    inner = re.fullmatch(r"(?:dict\(str, |list\[)(.+)[\])]", kind)
    if inner:
        several = value.items() if kind.startswith("dict") else enumerate(value)
        assert isinstance(value, dict if kind.startswith("dict") else list), where
        for key, each in several:
            check_fields(each, inner[1], models, f"{where}.{key}")
        return
    plain = {"str": str, "int": int, "bool": bool, "float": float, "object": object}
    if kind in plain:
        assert isinstance(value, plain[kind]), f"{where} is {value!r}, not a {kind}"
        return
    model = next(getattr(each, kind) for each in models if hasattr(each, kind))
    names = {there: here for here, there in model.attribute_map.items()}
    for key, each in value.items():
        assert key in names, f"{where}.{key}: a {kind} has no such field"
        check_fields(each, model.openapi_types[names[key]], models, f"{where}.{key}")
    model(**{names[key]: each for key, each in value.items()})  # raises where one is missing


def check_job(change: Callable[[dict[str, Any]], object] = lambda job: None) -> None:
    """Hold the job, with a change, to the operator's description of one."""
    job = document("kubernetes.yaml")
    models = module("kubeflow.training.models"), module("kubernetes.client.models")
    change(job)
    check_fields(job, "KubeflowOrgV1PyTorchJob", models, "job")


def test_kubernetes_takes_the_job() -> None:
    check_job()


test_kubernetes_description_sees_mistakes = refuses(
    check_job,
    (lambda job: job["spec"].update(nprocPerNode=8), AssertionError, "is 8, not a str"),
    (lambda job: job["spec"]["runPolicy"].update(cleanPods="None"), AssertionError, "has no such field"),
    (lambda job: job["spec"].pop("pytorchReplicaSpecs"), "pytorch_replica_specs"),
    (lambda job: worker(job)["containers"][0].pop("name"), "name"),
)


def worker(job: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    return found


def test_kubernetes_job_is_what_its_operator_asks_for() -> None:
    """What the operator's own check at admission adds (training operator 1.9), and its fixed words."""
    job = document("kubernetes.yaml")
    spec, pod = job["spec"], worker(job)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    assert [*spec["pytorchReplicaSpecs"]] == ["Worker"]  # with an elastic policy there has to be one
    restarts = spec["pytorchReplicaSpecs"]["Worker"]["restartPolicy"]
    assert restarts in {"Always", "OnFailure", "Never", "ExitCode"}
    assert spec["runPolicy"]["cleanPodPolicy"] in {"All", "Running", "None"}
    elastic = spec["elasticPolicy"]
    assert elastic["rdzvBackend"] in {"c10d", "etcd", "etcd-v2"}
    assert "nProcPerNode" not in elastic  # which is all that version 1.7 reads, where there is no master
    assert (
        elastic["minReplicas"]
        == elastic["maxReplicas"]
        == spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
        == HOSTS
    )
    (container,) = (each for each in pod["containers"] if each["name"] == "pytorch")
    assert container["image"]
    assert spec["nprocPerNode"] == container["resources"]["limits"]["nvidia.com/gpu"] == str(RANKS)
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    check_words(container["args"])
    assert container["args"][-1].startswith(container["volumeMounts"][0]["mountPath"])


# SageMaker


def check_request(value: Any, shape: Any, where: str = "") -> None:
    """Fail where a value is outside of what the service's description allows: also choices and patterns."""
    if shape.type_name == "structure":
        for key, each in value.items():
            check_request(each, shape.members[key], f"{where}.{key}")
    elif shape.type_name == "list":
        for i, each in enumerate(value):
            check_request(each, shape.member, f"{where}[{i}]")
    elif shape.type_name == "string":
        assert value in (shape.enum or [value]), f"{where} is {value!r}, which is none of {shape.enum[:5]}..."
        pattern = shape.metadata.get("pattern", ".*")
        assert re.fullmatch(pattern, value), f"{where} is {value!r}, which is not like {pattern}"
        assert len(value) <= shape.metadata.get("max", len(value)), where


def create_training_job() -> tuple[Any, Any]:
    session, validate = module("botocore.session"), module("botocore.validate")
    shape = (
        session.get_session().get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape
    )
    return shape, validate.ParamValidator()


def test_sagemaker_takes_the_request() -> None:
    request = document("sagemaker.yaml")
    shape, validator = create_training_job()
    report = validator.validate(request, shape)
    assert not report.has_errors(), report.generate_report()
    check_request(request, shape)
    assert request["ResourceConfig"]["InstanceCount"] == HOSTS
    check_words(after_train(container_words(request)))

    request["StoppingCondition"]["MaxRuntime"] = request["StoppingCondition"].pop("MaxRuntimeInSeconds")
    assert validator.validate(request, shape).has_errors()
    request = document("sagemaker.yaml")
    request["ResourceConfig"]["InstanceType"] = "ml.p4d.12xlarge"
    with pytest.raises(AssertionError, match="none of"):
        check_request(request, shape)


def container_words(request: Mapping[str, Any]) -> list[str]:
    """What SageMaker runs on each host."""
    asked = request["AlgorithmSpecification"]
    return [*asked["ContainerEntrypoint"], *asked["ContainerArguments"]]


def test_sagemakers_hosts_become_one_accelerate_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = module("accelerate.commands.launch")
    program = sagemaker_program()
    monkeypatch.setenv("RANKS_PER_HOST", str(RANKS))
    for name in SET_FOR_SAGEMAKER:
        monkeypatch.setenv(name, "")
    for number, host in enumerate(("algo-1", "algo-2")):
        job = {"current_host": host, "hosts": ["algo-2", "algo-1"], "network_interface_name": "eth7"}
        python, _, module_name, *words = program.accelerate(job, USED)
        assert (python, module_name) == (sys.executable, launch.__name__)
        taken = ranks_of_accelerate(words)
        assert (taken.nnodes, taken.nproc_per_node, taken.node_rank) == (str(HOSTS), str(RANKS), number)
        assert (taken.rdzv_backend, taken.rdzv_endpoint) == ("c10d", "algo-1:29500")
        assert after_train([taken.training_script, *taken.training_script_args]) == USED


# Accelerate


def ranks_of_accelerate(words: Sequence[str]) -> Any:
    """The settings of torchrun that `accelerate launch` makes of words, by its own functions."""
    launch = module("accelerate.commands.launch")
    args, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args([*words]))
    assert args.multi_gpu
    launch.prepare_multi_gpu_env(args)
    return args


@pytest.mark.parametrize("number", range(HOSTS))
def test_accelerate_starts_torchruns_ranks(number: int) -> None:
    (line,) = re.findall(r"accelerate launch .*", (DEPLOY / "accelerate.yaml").read_text())
    words = line.replace("--machine_rank 0", f"--machine_rank {number}").split()[2:]
    taken = ranks_of_accelerate([str(ROOT / word) if word.startswith("deploy/") else word for word in words])
    assert (taken.nnodes, taken.nproc_per_node, taken.node_rank) == (str(HOSTS), str(RANKS), number)
    assert (taken.rdzv_endpoint, taken.rdzv_backend) == ("node0:29500", "static")
    check_words([*taken.training_script_args, "--save", "runs"])


def test_the_image_has_the_program_where_the_jobs_start_it() -> None:
    """`COPY . /minidist` puts it there; both services start it by that path."""
    assert "COPY . /minidist\n" in (DEPLOY / "Dockerfile").read_text()
    for words in (
        worker(document("kubernetes.yaml"))["containers"][0]["command"],
        container_words(document("sagemaker.yaml")),
    ):
        (path,) = (word for word in words if word.endswith("train.py"))
        assert (ROOT / Path(path).relative_to("/minidist")).is_file()
