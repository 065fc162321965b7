"""What the lab needs: Linux, torch, `unshare`, `ip`, `tc`, and the right to make namespaces and shaped links.

The lab runs in namespaces of its own: as root, or in an unprivileged user namespace. Nothing outside is changed, and
when the first process in there dies, by whatever cause, the kernel takes everything down with it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import lru_cache

from shardplan.errors import Infeasible

MOST_TRIALS = 8  # remembered: one a user and command, of which a process has one
TRIAL_TIMEOUT = 20.0  # seconds: the trial takes a fraction of one, on a busy machine a few
_TOOLS = {"unshare": "util-linux", "ip": "iproute2", "tc": "iproute2"}
# Each line of the trial is announced before it runs, so that the last announced is the one that failed.
_TRIAL = {
    "a private tmpfs": "mount -t tmpfs none /run && mkdir -p /run/netns",
    "named network namespaces": "ip netns add a",
    "veth links (kernel module veth)": "ip link add name up netns a type veth peer name down",
    "namespaces that forward (sysctl net.ipv4.ip_forward)": "echo 1 > /proc/sys/net/ipv4/ip_forward",
    "links without slow start (sysctl net.ipv4.tcp_slow_start_after_idle)": "echo 0 >"
    " /proc/sys/net/ipv4/tcp_slow_start_after_idle",
    "routes by sender (kernel option IP_MULTIPLE_TABLES)": "ip rule add from 10.0.0.1/32 lookup 100 pref 40000",
    "the shaper tbf (kernel module sch_tbf)": "tc qdisc add dev down root tbf rate 1mbit burst 80k limit 1m",
    "congestion control cubic (kernel module tcp_cubic)": "ip link set dev down up && ip addr add 10.0.0.1/16 dev down"
    " && ip route replace 10.0.0.0/16 dev down congctl cubic",
}


class Unavailable(Infeasible):
    """This machine cannot run the lab: a tool, a kernel module or a privilege is missing."""


def namespace_command() -> list[str]:
    """Return the command that runs what follows it in namespaces which die with it."""
    own = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return own if os.geteuid() == 0 else [own[0], "--user", "--map-root-user", *own[1:]]


def require() -> None:
    """Raise `Unavailable`, which names what is missing and what to do, where the lab cannot run."""
    found = missing()
    if found:
        raise Unavailable(found)


def missing() -> str:
    """Return what the lab lacks here and what to do; an empty text where it can run."""
    if sys.platform != "linux":
        return f"the lab needs Linux (network namespaces), this is {sys.platform}; run it in a Linux virtual machine"
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"the lab needs the command {tool!r}, which is not installed; install the package {package}"
    if importlib.util.find_spec("torch") is None:
        return "the lab runs its ranks on torch.distributed, and torch is not installed; install shardplan[torch]"
    return _try_namespaces(os.geteuid(), tuple(namespace_command()))


@lru_cache(maxsize=MOST_TRIALS)
def _try_namespaces(user: int, command: tuple[str, ...]) -> str:
    """Try every kind of thing that the lab makes, in namespaces that are gone at once."""
    script = "set -e\n" + "\n".join(f"echo {what!r}; {line}" for what, line in _TRIAL.items())
    try:
        done = subprocess.run(
            [*command, "sh", "-c", script],
            capture_output=True,
            text=True,
            timeout=TRIAL_TIMEOUT,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"the lab's trial of namespaces did not end within {TRIAL_TIMEOUT:g} s"
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()[-1:] or ["no message"]
    tried = done.stdout.strip().splitlines()
    if tried:
        return f"the lab needs {tried[-1]}, which this machine refuses ({said[0]}); load the module, or run as root"
    how = (
        "run it outside the container, or give that CAP_SYS_ADMIN and CAP_NET_ADMIN"
        if user == 0
        else "run as root, or allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone, "
        "user.max_user_namespaces, or the AppArmor setting kernel.apparmor_restrict_unprivileged_userns)"
    )
    return f"the lab needs the privilege to make namespaces, which is refused ({said[0]}); {how}"
