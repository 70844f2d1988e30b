"""Scripts and files of docs/scale.md, checked without a cluster."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.raising import mentions

TEXT = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
BASH, YAML = (re.findall(rf"^```{kind}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE) for kind in ("bash", "yaml"))
SLURM = {
    "SLURM_JOB_NODELIST": "node[1-8]",
    "SLURM_JOB_NUM_NODES": "8",
    "SLURM_CPUS_PER_TASK": "16",
    "SLURM_JOB_ID": "7",
}

needs_ray = pytest.mark.needs("ray")


def called(script, folder):
    """Return the environment and the arguments of a script's srun calls."""
    stand_ins = {
        "scontrol": "echo node1; echo node2",
        "getent": '[ "$*" = "ahostsv4 node1" ] && echo "10.0.0.1 STREAM node1"',
        "srun": 'echo "$OMP_NUM_THREADS $TORCH_DISABLE_SHARE_RDZV_TCP_STORE"; printf "%s\\n" "$@"',
    }
    for name, body in stand_ins.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, **SLURM, "PATH": f"{folder}:{os.environ['PATH']}"}
    for name in ("OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        environment.pop(name, None)
    ran = subprocess.run(["bash", "-eu"], input=script, env=environment, capture_output=True, text=True, check=True)
    first, *arguments = ran.stdout.splitlines()
    assert arguments.pop(0) == "--cpus-per-task=16"
    return first, arguments


def test_slurm_ranks(tmp_path):
    from torch.distributed.run import parse_args

    environment, (command, *arguments) = called(BASH[0], tmp_path)
    assert (environment, command) == ("16 1", "torchrun")
    asked = parse_args(arguments)
    assert (asked.nnodes, asked.nproc_per_node, asked.rdzv_backend, asked.max_restarts) == ("8", "1", "c10d", 3)
    assert (asked.rdzv_endpoint, asked.rdzv_id) == ("node1:29500", "7")
    assert asked.module and [asked.training_script, *asked.training_script_args] == ["whet", *TRAIN]


TRAIN = ["train", "grpo", "grpo.toml"]


@needs_ray
def test_slurm_pool(tmp_path):
    from ray.scripts.symmetric_run import symmetric_run

    _, (ray, command, *arguments) = called(BASH[1], tmp_path)
    assert (ray, command) == ("ray", "symmetric-run")
    split = arguments.index("--")
    options = symmetric_run.make_context("symmetric-run", arguments[:split]).params
    assert (options["address"], options["min_nodes"]) == ("10.0.0.1:6379", 8)
    assert list(options["ray_args_and_entrypoint"]) == ["--num-cpus=16"]
    pool = ["--engine", "ray", "--rollout-workers", "8", "--ray-address", "auto"]
    assert arguments[split + 1 :] == ["whet", *TRAIN, *pool]


@needs_ray
def test_ray_up_cluster():
    import yaml
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load(YAML[0])
    validate_config(prepare_config(config))
    with pytest.raises(Exception, match=mentions("worker_commands")):
        validate_config(prepare_config({**config, "worker_commands": []}))


@needs_ray
def test_kubernetes_cluster():
    import yaml
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
    from ray.autoscaler._private.util import validate_config

    job = yaml.safe_load(YAML[1])
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = {"metadata": {**job["metadata"], "namespace": "default"}, "spec": job["spec"]["rayClusterSpec"]}
    config = _derive_autoscaling_config_from_ray_cr(cluster)
    validate_config(config)
    head, workers = (config["available_node_types"][name] for name in ("headgroup", "samplers"))
    assert head["resources"]["CPU"] == 0 and workers["resources"]["CPU"] == 16
    assert workers["min_workers"] == workers["max_workers"] == 7
    assert "--rollout-workers 7" in job["spec"]["entrypoint"]
