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


def groups_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]]


def test_manifest_is_a_ray_cluster_of_the_pinned_ray_with_its_token_and_one_image_without_root() -> None:
    manifest = yaml.safe_load((SCRIPTS / "raycluster.yaml").read_text(encoding="utf-8"))
    pins = (ROOT / "constraints/gpu.txt").read_text(encoding="utf-8").splitlines()
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    assert f"ray=={manifest['spec']['rayVersion']}" in pins
    assert manifest["spec"]["authOptions"] == {"mode": "token"}
    groups = groups_of(manifest)
    assert len(groups) == 2 and len({container_of(group)["image"] for group in groups}) == 1
    for group in groups:
        pod, container = group["template"]["spec"], container_of(group)
        assert not [variable for variable in container["env"] if variable["name"].startswith("RAY_AUTH")]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 10001)
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted == {"shared": "/shared", "shm": "/dev/shm"}
        assert {volume["name"] for volume in pod["volumes"]} == set(mounted)


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
