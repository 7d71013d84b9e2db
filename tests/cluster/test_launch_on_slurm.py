"""slurm.sbatch runs under a real Slurm: two nodes, both ends of a job, nothing left behind.

Slurm is installed and started in a root file system that is thrown away, in a process namespace that ends with it. Both
nodes are this machine. Needs root, and a registry for Debian packages.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START = "--num-cpus 2 --num-gpus 1 --object-store-memory 200000000"
ENTER = """
set -euo pipefail
cd "$1"
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work merged
mount -t proc proc merged/proc && mount --rbind /dev merged/dev && mount --rbind /sys merged/sys
exec chroot merged bash -euo pipefail -c "$2"
"""
INSTALL = """
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null
"""
SLURM_UP = """
host=$(hostname -s)
echo "127.0.0.1 $host" >>/etc/hosts
mkdir -p /run/munge /var/spool/slurmctld /var/log/slurm /opt/gpus
chown munge /run/munge && chmod 755 /run/munge
setpriv --reuid=munge --regid=munge --clear-groups /usr/sbin/munged --force
touch /opt/gpus/g{0..7}
echo "Name=gpu File=/opt/gpus/g[0-7]" >/etc/slurm/gres.conf
echo "CgroupPlugin=cgroup/v1" >/etc/slurm/cgroup.conf
cat >/etc/slurm/slurm.conf <<CONF
ClusterName=emulated
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd-%n
SlurmdPidFile=/run/slurmd-%n.pid
SlurmdLogFile=/var/log/slurm/%n.log
SlurmctldLogFile=/var/log/slurm/controller.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=17001 CPUs=2 Gres=gpu:8
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=17002 CPUs=2 Gres=gpu:8
PartitionName=all Nodes=n1,n2 Default=YES State=UP
CONF
slurmctld
slurmd -N n1
slurmd -N n2
for _ in {1..30}; do [[ $(sinfo --noheader --states=idle --format=%D) == 2 ]] && break; sleep 1; done
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"),
    pytest.mark.skipif(ROOT.stat().st_dev != Path("/").stat().st_dev, reason="the repository is on another disk"),
]


def test_one_number_starts_and_ends_a_cluster(tmp_path: Path) -> None:
    printed = run_in_slurm(
        tmp_path,
        f"""
        cd {ROOT}
        export PYTHON={sys.executable} HEAD_OPTIONS="{START}" WORKER_OPTIONS="{START}"
        submit() {{ sbatch --wait --output=/log-%j "$@" >/dev/null || return $?; }}
        code=0; submit --nodes=2 scripts/cluster/slurm.sbatch bash -c 'echo on $NNODES at $RAY_ADDRESS' || code=$?
        echo "SUCCESS $code"
        code=0; submit --nodes=1 scripts/cluster/slurm.sbatch bash -c 'exit 3' || code=$?
        echo "FAILURE $code"
        sleep 5
        echo "LEFT $(pgrep --count 'raylet|gcs_server' || true) $(find outputs/slurm -name ray_token | wc -l)"
        cat /log-*
        """,
    )
    lines = printed.splitlines()
    assert "SUCCESS 0" in lines and "FAILURE 3" in lines, printed
    assert "LEFT 0 0" in lines, printed
    (on,) = [line for line in lines if line.startswith("on ")]
    assert on.startswith("on 2 at ") and on.endswith(":20001")
    assert sum(line.startswith("node ") and " ok " in line for line in lines) == 3, printed


def run_in_slurm(folder: Path, command: str) -> str:
    for name in ("upper", "work", "merged"):
        (folder / name).mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_", "PYTEST"))}
    script = INSTALL + SLURM_UP + command
    try:
        command = [*("unshare", "--mount", "--pid", "--fork", "bash", "-c"), ENTER, "enter", str(folder), script]
        given = {"env": own | {"VERL_PLATFORM": "cpu"}, "timeout": 800, "check": False}
        done = subprocess.run(command, capture_output=True, text=True, **given)
    finally:
        shutil.rmtree(folder / "upper")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout
