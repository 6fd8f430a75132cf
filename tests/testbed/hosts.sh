#!/usr/bin/env bash
# hosts.sh: N "hosts" on one machine, each with its own network, hostname, process table, /etc/hosts, /run, /tmp, /dev/shm,
# ~/.ssh, uptime, sshd and SLURM daemon (munged, slurmd; slurmctld on the first). Needs root, iproute2, openssh-server, slurm-wlm,
# munge and gcc.
#
#   hosts.sh up [N]              idempotent: starts what is missing (3 hosts h1..hN unless given)
#   hosts.sh on HOST COMMAND...  runs a command on a host (as a login there, without ssh)
#   hosts.sh cut|mend HOST       pulls or plugs the host's cable
#   hosts.sh shape HOST [ARGS]   tc in both directions: tbf rate 400mbit burst 512kb latency 100ms, or netem delay 5ms; none = remove
#   hosts.sh off HOST            power off: ends every process of the host at once (up boots it again)
#   hosts.sh slow HOST [PERCENT] limits the processes of the host to PERCENT of one CPU (cgroup); none = no limit
#   hosts.sh clock HOST [SECONDS] shifts the wall clock of programs that ssh starts from now on; none = right clock
#   hosts.sh ps HOST, ls HOST    processes, listeners (ss -ltnp) of the host
#   hosts.sh down                ends and removes everything
#
# BED       folder of the testbed's state (keys, logs, configurations); ${TMPDIR:-/tmp}/bed unless set
# BED_SHARE folders below /tmp that all hosts share (project, shared folder); BED_READ: the same, read-only (interpreter).
#           Everything outside /tmp, /run, /dev/shm and ~/.ssh is the machine's own file system
# BED_CPUS  CPUs that SLURM counts per host, 4 unless set
set -euo pipefail
BED="${BED:-${TMPDIR:-/tmp}/bed}" NET=10.77.0 CPUS="${BED_CPUS:-4}"
SELF="$(readlink -f "${BASH_SOURCE[0]}")"

pid_of() { local pid; pid="$(cat "$BED/$1/pid" 2>/dev/null)" && [ -d "/proc/$pid" ] && echo "$pid"; }
enter() { local pid; pid="$(pid_of "$1")" || { echo "$1 is off" >&2; return 1; }; nsenter -t "$pid" -m -u -i -n -p -- "${@:2}"; }
# The CPU controller of cgroups has its own hierarchy in version 1.
if [ -d /sys/fs/cgroup/cpu ]; then CGROUPS=/sys/fs/cgroup/cpu; else CGROUPS=/sys/fs/cgroup; fi
hosts() { seq -f 'h%g' 1 "$(cat "$BED/count")"; }

prepare() {
  mkdir -p "$BED/slurm" "$HOME/.ssh" /run/munge; echo "$1" >"$BED/count"
  [ -f "$BED/id" ] || ssh-keygen -q -t ed25519 -N '' -f "$BED/id"
  [ -f "$BED/munge.key" ] || { head -c 1024 /dev/urandom >"$BED/munge.key"; chmod 400 "$BED/munge.key"; }
  { echo "127.0.0.1 localhost"; for i in $(seq "$1"); do echo "$NET.$((10 + i)) h$i"; done; } >"$BED/hosts"
  : >"$BED/known_hosts"
  for host in $(hosts); do
    mkdir -p "$BED/$host"
    [ -f "$BED/$host/hostkey" ] || ssh-keygen -q -t ed25519 -N '' -f "$BED/$host/hostkey"
    echo "$host,$NET.$((10 + ${host#h})) $(cut -d' ' -f1,2 "$BED/$host/hostkey.pub")" >>"$BED/known_hosts"
    printf '%s\n' "HostKey $BED/$host/hostkey" "AuthorizedKeysFile $BED/id.pub" "StrictModes no" "UsePAM no" \
      "PermitRootLogin prohibit-password" "PasswordAuthentication no" "PidFile /run/sshd.pid" \
      "Subsystem sftp internal-sftp" >"$BED/$host/sshd_config"
  done
  cat >"$BED/slurm/slurm.conf" <<CONF
ClusterName=bed
SlurmctldHost=h1
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=${BED_SLURMD_TIMEOUT:-40}
KillWait=${BED_KILL_WAIT:-30}
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/run/slurmctld.log
SlurmdLogFile=/run/slurmd.log
NodeName=h[1-$1] CPUs=$CPUS State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
  echo "CgroupPlugin=cgroup/v1" >"$BED/slurm/cgroup.conf"  # no plugin here uses it
}

cable() {  # the switch is a namespace of its own, so that the machine's network is not involved
  local host="$1" address="$NET.$((10 + ${1#h}))"
  [ -e /run/netns/bed-switch ] || { ip netns add bed-switch; ip -n bed-switch link add br0 type bridge; ip -n bed-switch link set br0 up; }
  if ip -n bed-switch link show "bed-$host" >/dev/null 2>&1; then return; fi
  ip netns del "bed-$host" 2>/dev/null || true  # of a testbed that was killed
  ip netns add "bed-$host"
  ip link add "bed-$host" netns bed-switch type veth peer name eth0 netns "bed-$host"
  ip -n bed-switch link set "bed-$host" master br0 up
  ip -n "bed-$host" link set lo up
  ip -n "bed-$host" address add "$address/24" dev eth0
  ip -n "bed-$host" link set eth0 up
  ip -n "bed-$host" route add default via "$NET.1"  # no such router: packets to elsewhere are lost, as behind a firewall
}

boot() {
  pid_of "$1" >/dev/null && return; rm -f "$BED/$1/ready"
  local up=$((1000 * ${1#h}))  # the monotonic clocks of hosts differ by the times of their boots
  setsid ip netns exec "bed-$1" unshare --mount --uts --ipc --pid --time --monotonic "$up" --boottime "$up" --fork --kill-child \
    env -i HOME="$HOME" PATH="$PATH" BED="$BED" BED_SHARE="${BED_SHARE:-}" BED_READ="${BED_READ:-}" bash "$SELF" init "$1" >"$BED/$1/log" 2>&1 </dev/null &
  for _ in $(seq 100); do  # the first process inside, as seen from here
    local outer; outer="$(pgrep -f "bash $SELF init $1\$" | while read -r pid; do
      [ "$(awk '/^NSpid/ {print $NF}' "/proc/$pid/status")" = 1 ] && echo "$pid"; done || true)"
    [ -n "$outer" ] && [ -e "$BED/$1/ready" ] && { echo "$outer" >"$BED/$1/pid"; return; }
    sleep 0.2
  done
  echo "$1 did not boot: $(cat "$BED/$1/log")" >&2; return 1
}

init() {  # runs as process 1 of a host
  local host="$1" root="$BED/$1/root"
  mount --make-rprivate /; hostname "$host"; mount -t proc proc /proc
  mkdir -p "$root"; mount -t tmpfs -o mode=1777 tmp "$root"
  for folder in "$BED" ${BED_SHARE:-} ${BED_READ:-}; do
    case "$folder" in /tmp/*) mkdir -p "$root/${folder#/tmp/}"; mount --rbind "$folder" "$root/${folder#/tmp/}" ;; esac
  done
  for folder in ${BED_READ:-}; do mount -o remount,bind,ro "$root/${folder#/tmp/}"; done
  mount --move "$root" /tmp
  mount -t tmpfs run /run; mkdir -p /run/sshd /run/munge /run/slurmd /run/slurmctld
  mount -t tmpfs -o mode=1777,size=3g shm /dev/shm
  mount -t tmpfs -o mode=700 ssh "$HOME/.ssh"
  cp "$BED/id" "$BED/known_hosts" "$HOME/.ssh/"; mv "$HOME/.ssh/id" "$HOME/.ssh/id_ed25519"
  mount --bind "$BED/hosts" /etc/hosts
  : >/run/resolv.conf; mount --bind /run/resolv.conf /etc/resolv.conf 2>/dev/null || true
  mount --bind "$BED/slurm" /etc/slurm
  cp "$BED/munge.key" /run/munge.key; chmod 400 /run/munge.key
  /usr/sbin/sshd -f "$BED/$host/sshd_config" -E /run/sshd.log
  munged --force --key-file=/run/munge.key --socket=/run/munge/munge.socket.2 --pid-file=/run/munged.pid \
    --log-file=/run/munged.log --seed-file=/run/munge.seed
  [ "$host" != h1 ] || slurmctld
  slurmd -N "$host" || echo "slurmd failed"
  touch "$BED/$host/ready"
  while :; do sleep 3600 & wait $!; done  # reaps orphans
}

case "${1:-}" in
  up)
    prepare "${2:-3}"
    for host in $(hosts); do cable "$host"; boot "$host"; done
    for host in $(hosts); do echo "$host $NET.$((10 + ${host#h})) process $(pid_of "$host")"; done ;;
  init) init "$2" ;;
  on) enter "$2" env -i HOME="$HOME" PATH="$PATH" TERM=dumb LANG=C.UTF-8 USER="$(id -un)" "${@:3}" ;;
  cut) ip -n bed-switch link set "bed-$2" down ;;
  mend) ip -n bed-switch link set "bed-$2" up ;;
  shape)
    for side in "bed-switch bed-$2" "bed-$2 eth0"; do
      read -r space device <<<"$side"
      tc -n "$space" qdisc del dev "$device" root 2>/dev/null || true
      [ $# -le 2 ] || tc -n "$space" qdisc add dev "$device" root "${@:3}"
    done ;;
  off) kill -KILL "$(pid_of "$2")" ;;
  clock)
    gcc -O2 -shared -fPIC -o "$BED/clock.so" "$(dirname "$SELF")/clock.c"
    sed -i /^SetEnv/d "$BED/$2/sshd_config"
    [ $# -le 2 ] || echo "SetEnv LD_PRELOAD=$BED/clock.so CLOCK_OFFSET=$3" >>"$BED/$2/sshd_config"
    enter "$2" sh -c 'kill -HUP "$(cat /run/sshd.pid)"' ;;
  slow)
    group="$CGROUPS/bed-$2" quota=$((${3:-0} * 1000))
    mkdir -p "$group"
    if [ -e "$group/cpu.max" ]; then
      [ "$quota" -gt 0 ] && echo "$quota 100000" >"$group/cpu.max" || echo max >"$group/cpu.max"
    else
      [ "$quota" -gt 0 ] && echo "$quota" >"$group/cpu.cfs_quota_us" || echo -1 >"$group/cpu.cfs_quota_us"
    fi
    # Later processes of the host are in the group of their parents.
    for pid in $(pgrep --ns "$(pid_of "$2")" --nslist pid); do echo "$pid" >"$group/cgroup.procs" 2>/dev/null || true; done ;;
  ps) enter "$2" ps -eo pid,ppid,stat,etimes,args ;;
  ls) enter "$2" ss -ltnp ;;
  down)
    [ -f "$BED/count" ] || exit 0
    for host in $(hosts); do
      if pid="$(pid_of "$host")"; then kill -KILL "$pid"; fi
      ip netns del "bed-$host" 2>/dev/null || true
      rmdir "$CGROUPS/bed-$host" 2>/dev/null || true
    done
    ip netns del bed-switch 2>/dev/null || true
    rm -rf "$BED" ;;
  *) sed -n '2,21s/^# \{0,1\}//p' "$SELF"; exit 2 ;;
esac
