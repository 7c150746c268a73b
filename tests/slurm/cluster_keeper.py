"""The first process of a test cluster's namespaces: builds it, switches nodes off and on, and ends with its input.

Started by `tests.slurm.cluster` below ``unshare``: everything that it starts lives in its PID namespace, so the kernel
ends all of it with this process. It takes one command a line (``up I``, ``kill I``, ``limit RATE``) and answers each
with one line: ``done``, or what failed.
"""

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HOME = "/run/slurm"  # the cluster's folder as everything inside sees it: a short path without surprises
BRIDGE, NETWORK = "cluster", "10.77.0"
DEADLINE_S = 60.0
USERS = {"alice": 60001, "bob": 60002}
GPUS = 4

SLURM_CONF = """\
ClusterName=ringtap
SlurmctldHost=login({network}.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/tmp/munge.sock
StateSaveLocation={home}/state
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldLogFile={home}/log/slurmctld.log
SlurmdLogFile={home}/log/slurmd.%n.log
MailProg=/bin/true
# what needs more of the machine than a container gives is left out: cgroups, accounting
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={home}/log/jobcomp.log
JobSubmitPlugins=lua
# jobs start at once
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=256
EnforcePartLimits=ALL
# nodes may claim more processors than there are
SlurmdParameters=config_overrides
# a partition of a higher PriorityTier, which a test may create, takes the nodes of jobs of this one
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# a node that comes back is used again, and a dead one is noticed soon
ReturnToService=2
SlurmdTimeout=5
MessageTimeout=5
KillWait=30
Prolog={home}/prolog.sh
Epilog={home}/epilog.sh
TaskProlog={home}/taskprolog.sh
PrologFlags=Alloc
GresTypes=gpu
NodeName=n[0-{last}] NodeAddr={network}.[10-{last_address}] CPUs=8 RealMemory=4000 Gres=gpu:h100:{gpus} State=UNKNOWN
PartitionName=cpu Nodes=ALL Default=YES MaxTime=1-0 State=UP
"""

JOB_SUBMIT = """\
function slurm_job_submit(job, partitions, uid)
  if job.account == nil then
    slurm.log_user("You are associated with no default account: please specify one with --account")
    return slurm.ERROR
  end
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""

LOCAL = '"/tmp/localscratch/$SLURM_JOB_USER.$SLURM_JOB_ID.0"'
PROLOG = f'#!/bin/bash\nmkdir -p {LOCAL} && chown "$SLURM_JOB_UID" {LOCAL} && chmod 700 {LOCAL}\n'
# what cgroups do on a real cluster: nothing of a job outlives it on the node
EPILOG = f"""\
#!/bin/bash
for file in $(grep -lzxF "SLURM_JOB_ID=$SLURM_JOB_ID" /proc/[0-9]*/environ 2>/dev/null); do
    pid=${{file//[!0-9]/}}
    [ "$pid" = $$ ] || kill -9 "$pid" 2>/dev/null
done
rm -rf {LOCAL}
"""
TASK_PROLOG = f"#!/bin/bash\necho export SLURM_TMPDIR={LOCAL}\n"

# one on each machine, as on real clusters: Slurm refuses a credential that its munged has already decoded
MUNGED = (
    "munged --force --key-file={home}/munge.key --log-file={home}/log/munged.{name}.log"
    " --socket=/tmp/munge.sock --pid-file=/tmp/munged.pid --seed-file=/tmp/munge.seed"
)
# a machine of its own: name, interfaces, memory for /dev/shm, disk for /tmp; then it reaps whatever is left to it
NODE = """\
hostname "$1"
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
{own_disk}
echo here; read -r
ip -batch - <<END
link set lo up
addr add $2/24 dev eth0
link set eth0 up
END
{munged}
slurmd -N "$1" -f {home}/slurm.conf
while :; do sleep 1000 & wait; done
"""


def sh(*command: str, text: str | None = None) -> str:
    """Run a command to its end; an error names it."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)[:200]}: {done.stderr.strip()}")
    return done.stdout


def until(what: str, is_so: Callable[[], bool]) -> None:
    """Wait for something."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} took more than {DEADLINE_S:.0f} s")
        time.sleep(0.03)


def is_closed(path: Path) -> bool:
    """Whether other users may not pass through a folder."""
    return not path.stat().st_mode & 0o001


def covers(paths: list[Path]) -> list[Path]:
    """Folders to hide behind a disk of each machine's own: /tmp, and what keeps other users from what they need."""
    found = {Path("/tmp")}
    for path in paths:
        above = [*reversed(path.parents)]
        if Path("/tmp") not in above:
            found.update([folder for folder in above if is_closed(folder)][:1])
    return sorted(found)


def own_disk(paths: list[Path]) -> str:
    """Shell words that give a machine empty disks at the covers, with what all machines share put in again."""
    hidden = covers(paths)
    words = []
    for cover in hidden:
        mode = "1777" if cover == Path("/tmp") else "755"
        words.append(f"mount -t tmpfs -o mode={mode} tmpfs {shlex.quote(str(cover))}")
    for number, path in enumerate(paths):
        if any(cover in path.parents for cover in hidden):
            name = shlex.quote(str(path))
            words.append(f"mkdir -p {name} && mount --bind /run/shared/{number} {name}")
    return "\n".join(words)


class Keeper:
    """The cluster.

    Args:
        folder: its own folder.
        count: number of nodes.
        shared: paths that every machine sees, as they are called outside.
    """

    def __init__(self, folder: Path, count: int, shared: list[Path]) -> None:
        self._folder, self._names = folder, [f"n{number}" for number in range(count)]
        self._shared = shared
        self._own_disk = own_disk(shared)  # while the machine's own folders can still be seen
        self._nodes: dict[int, tuple[subprocess.Popen[str], int]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._rate = "none"

    def build(self) -> None:
        """Bring everything up."""
        self._write_files()
        self._furnish()
        sh(*shlex.split(MUNGED.format(home=HOME, name="login")))
        self._daemons.append(self._daemon("slurmctld", ["slurmctld", "-D", "-c", "-f", f"{HOME}/slurm.conf"]))
        for number in range(len(self._names)):
            self._start(number)
        for number in range(len(self._names)):
            self._wait_for(number)

    def _write_files(self) -> None:
        last = len(self._names) - 1
        addresses = [f"{NETWORK}.{10 + number} {name}" for number, name in enumerate(self._names)]
        hosts = ["127.0.0.1 localhost", f"{NETWORK}.1 login", *addresses]
        homes = self._folder / "home"
        accounts = [f"{name}:x:{uid}:{uid}::{homes / name}:/bin/bash" for name, uid in USERS.items()]
        groups = [f"{name}:x:{uid}:" for name, uid in USERS.items()]
        values = {"home": HOME, "network": NETWORK, "last": last, "last_address": 10 + last, "gpus": GPUS}
        files = {
            "hosts": "\n".join(hosts) + "\n",
            "passwd": "\n".join(accounts) + "\n" + Path("/etc/passwd").read_text(),
            "group": "\n".join(groups) + "\n" + Path("/etc/group").read_text(),
            "slurm.conf": SLURM_CONF.format(**values),
            "gres.conf": f"NodeName=n[0-{last}] Name=gpu Type=h100 File=/run/gpu/[0-{GPUS - 1}]\n",
            "cgroup.conf": "CgroupPlugin=cgroup/v1\n",  # only to keep slurmd from looking for it, which ends it here
            "plugstack.conf": "",
            "job_submit.lua": JOB_SUBMIT,
            "node.sh": NODE.format(own_disk=self._own_disk, home=HOME, munged=MUNGED.format(home=HOME, name="$1")),
            "prolog.sh": PROLOG,
            "epilog.sh": EPILOG,
            "taskprolog.sh": TASK_PROLOG,
        }
        for name, text in files.items():
            (self._folder / name).write_text(text)
        for name in ("prolog.sh", "epilog.sh", "taskprolog.sh"):
            (self._folder / name).chmod(0o755)
        for name in ("log", "state"):
            (self._folder / name).mkdir()
        for name, uid in {"root": 0, **USERS}.items():
            home = homes / name
            home.mkdir(parents=True, mode=0o700)
            os.chown(home, uid, uid)
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def _furnish(self) -> None:
        """What the login host and all nodes see alike, then the login host's own."""
        sh("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
        for source, target in [
            (self._folder, "slurm"),
            *((path, f"shared/{n}") for n, path in enumerate(self._shared)),
        ]:
            Path("/run", target).mkdir(parents=True)
            sh("mount", "--bind", str(source), f"/run/{target}")
        for name in ("hosts", "passwd", "group"):
            sh("mount", "--bind", f"{HOME}/{name}", f"/etc/{name}")
        Path("/run/gpu").mkdir()
        for number in range(GPUS):  # Slurm wants a device for each: these are /dev/null
            os.mknod(f"/run/gpu/{number}", 0o20666, os.makedev(1, 3))
        sh("bash", "-ec", self._own_disk)
        sh("hostname", "login")
        sh("mount", "-t", "sysfs", "sysfs", "/sys")
        lines = ["link set lo up", f"link add {BRIDGE} type bridge", f"addr add {NETWORK}.1/24 dev {BRIDGE}"]
        sh("ip", "-batch", "-", text="\n".join([*lines, f"link set {BRIDGE} up"]))

    def _daemon(self, name: str, command: list[str]) -> "subprocess.Popen[bytes]":
        with Path(HOME, "log", f"{name}.out").open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _start(self, number: int) -> None:
        """Switch a node on."""
        name = self._names[number]
        apart = ["--net", "--uts", "--ipc", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
        command = ["unshare", *apart, "--", "bash", f"{HOME}/node.sh", name, f"{NETWORK}.{10 + number}"]
        with Path(HOME, "log", f"node.{name}.out").open("ab") as log:
            node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        assert node.stdin is not None
        assert node.stdout is not None
        if node.stdout.readline() != "here\n":
            raise RuntimeError(f"{name} did not come up: {Path(HOME, 'log', f'node.{name}.out').read_text()}")
        pid = int(Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()[0])
        lines = [f"link add to-{name} type veth peer name eth0 netns {pid}"]
        lines += [f"link set to-{name} master {BRIDGE} up"]
        sh("ip", "-batch", "-", text="\n".join(lines))
        self._nodes[number] = node, pid
        if self._rate != "none":
            self._shape(number, self._rate)
        node.stdin.write("\n")
        node.stdin.flush()

    def _wait_for(self, number: int) -> None:
        name = self._names[number]
        until(f"{name} to be in service", lambda: self._state(name) in ("idle", "mixed", "allocated"))

    @staticmethod
    def _state(name: str) -> str:
        with contextlib.suppress(RuntimeError):
            return sh("env", f"SLURM_CONF={HOME}/slurm.conf", "sinfo", "-h", "-n", name, "-o", "%T").strip()
        return ""

    def up(self, number: str) -> None:
        """Switch a node on that is off; returns when Slurm uses it."""
        if int(number) not in self._nodes:
            self._start(int(number))
        self._wait_for(int(number))

    def kill(self, number: str) -> None:
        """Take a node's power away."""
        node, pid = self._nodes.pop(int(number))
        os.kill(pid, signal.SIGKILL)
        node.wait()
        for stream in (node.stdin, node.stdout):
            assert stream is not None
            stream.close()
        # the kernel takes its time over the network namespace: the link goes now
        subprocess.run(["ip", "link", "del", f"to-{self._names[int(number)]}"], capture_output=True, check=False)

    def limit(self, rate: str) -> None:
        """Give every link so much in each direction; ``none``: no limit."""
        self._rate = rate
        for number in self._nodes:
            self._shape(number, rate)

    def _shape(self, number: int, rate: str) -> None:
        name, pid = self._names[number], self._nodes[number][1]
        bucket = ["burst", "64kb", "limit", "400kb"]
        for inside, nic in (([], f"to-{name}"), (["nsenter", f"--net=/proc/{pid}/ns/net"], "eth0")):
            change = ["del", "dev", nic, "root"]
            if rate != "none":
                change = ["replace", "dev", nic, "root", "tbf", "rate", rate, *bucket]
            sh(*inside, "tc", "qdisc", *change)
            # few packets in one piece, or a slow link is blocked for milliseconds
            sh(*inside, "ip", "link", "set", nic, "gso_max_segs", "65535" if rate == "none" else "4")

    def reap(self) -> None:
        """Take in what has ended among the orphans that the first process inherits."""
        own = {daemon.pid for daemon in self._daemons} | {node.pid for node, _ in self._nodes.values()}
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and found.si_pid not in own:
                os.waitpid(found.si_pid, 0)


def answer(words: str) -> None:
    """One line for the maker."""
    sys.stdout.write(words.replace("\n", " ") + "\n")
    sys.stdout.flush()


def main() -> None:
    """Build, then obey until the input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    item = json.loads(sys.argv[1])
    keeper = Keeper(Path(item["folder"]), item["nodes"], [Path(path) for path in item["shared"]])
    try:
        keeper.build()
        answer("done")
        os.set_blocking(0, False)
        while True:
            keeper.reap()
            if not select.select([0], [], [], 0.2)[0]:
                continue
            line = os.read(0, 4096).decode()
            if not line:
                return
            verb, value = line.split()
            {"up": keeper.up, "kill": keeper.kill, "limit": keeper.limit}[verb](value)
            answer("done")
    except (RuntimeError, OSError) as error:
        answer(str(error))


if __name__ == "__main__":
    main()
