"""The RayCluster manifest has what a tree run needs, and one number makes it N nodes."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts/cluster"
# Stands for kubectl, which needs a cluster: notes what it is asked for, and keeps what it is given to apply.
KUBECTL = """#!/usr/bin/env bash
echo "$@" >>"$SEEN/calls"
case "$*" in
*" apply "*) cat >"$SEEN/applied" ;;
*" get pod "*) echo pod/tree-rl-head ;;
esac
"""


@pytest.fixture
def manifest() -> dict[str, Any]:
    return yaml.safe_load((SCRIPTS / "raycluster.yaml").read_text(encoding="utf-8"))


def groups_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]]


def test_manifest_is_a_ray_cluster_of_the_pinned_ray_whose_token_is_on(manifest: dict[str, Any]) -> None:
    pins = (ROOT / "constraints/gpu.txt").read_text(encoding="utf-8").splitlines()
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    assert f"ray=={manifest['spec']['rayVersion']}" in pins
    assert manifest["spec"]["authOptions"] == {"mode": "token"}
    variables = {variable["name"] for group in groups_of(manifest) for variable in container_of(group)["env"]}
    assert not [name for name in variables if name.startswith("RAY_AUTH")]


def test_every_node_trains_in_the_same_image_without_root(manifest: dict[str, Any]) -> None:
    groups = groups_of(manifest)
    assert len(groups) == 2
    assert len({container_of(group)["image"] for group in groups}) == 1
    for group in groups:
        assert container_of(group)["resources"]["limits"] == container_of(group)["resources"]["requests"]
        assert container_of(group)["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert group["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
        assert group["template"]["spec"]["securityContext"]["runAsUser"] == 10001
        mounted = {mount["name"]: mount["mountPath"] for mount in container_of(group)["volumeMounts"]}
        assert mounted == {"shared": "/shared", "shm": "/dev/shm"}
        assert {volume["name"] for volume in group["template"]["spec"]["volumes"]} == set(mounted)


@pytest.mark.parametrize("nodes", [1, 4])
def test_one_number_makes_the_cluster(tmp_path: Path, nodes: int) -> None:
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SEEN": str(tmp_path), "NAMESPACE": "lab"}
    environment |= {"IMAGE": "registry.example/tree_rl@sha256:" + "0" * 64}
    recipe = ["env", "STEPS=3", "bash", "recipes/grpo/run.sh"]
    command = ["bash", str(SCRIPTS / "kubernetes.sh"), str(nodes), "--", *recipe]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
    applied = yaml.safe_load((tmp_path / "applied").read_text())
    (workers,) = applied["spec"]["workerGroupSpecs"]
    assert {workers[field] for field in ("replicas", "minReplicas", "maxReplicas")} == {nodes - 1}
    assert {container_of(group)["image"] for group in groups_of(applied)} == {environment["IMAGE"]}
    calls = (tmp_path / "calls").read_text().splitlines()
    assert all(call.startswith("--namespace lab ") for call in calls)
    assert calls[-1].endswith(f'scripts/cluster/submit.sh "$@" submit {nodes} -- env STEPS=3 bash recipes/grpo/run.sh')


def container_of(group: dict[str, Any]) -> dict[str, Any]:
    (container,) = group["template"]["spec"]["containers"]
    return container
