#!/usr/bin/env bash
# Run a command on a network of limited bandwidth: in a network namespace whose loopback has the bandwidth of RANKS links
# of RATE, or on two hosts, each a namespace of its own, that a link of RATE joins.
#
# usage: scripts/shaped_net.sh RATE RANKS -- COMMAND...
#        scripts/shaped_net.sh --hosts 2 --inter RATE -- COMMAND...
#
#   RATE   bandwidth of one link in each direction: a number and kbit, mbit or gbit; with --inter also none
#   RANKS  number of processes that COMMAND starts; they share one loopback, which gets RANKS times RATE
#
# examples:
#   scripts/shaped_net.sh 1gbit 2 -- horovodrun -np 2 python examples/train.py
#   scripts/shaped_net.sh 250mbit 4 -- torchrun --standalone --nproc-per-node 4 train.py
#   scripts/shaped_net.sh 100mbit 2 -- bash -c 'horovodrun -np 2 python train.py; grep lo: /proc/net/dev'
#   scripts/shaped_net.sh --hosts 2 --inter 1gbit -- torchrun --nproc-per-node 2 train.py
#   scripts/shaped_net.sh --hosts 2 --inter none -- bash -c 'torchrun --nproc-per-node 2 train.py; grep inter: /proc/net/dev'
#
# Needs root and iproute2. Nothing outside changes and nothing needs cleaning up: an unnamed namespace ends with its last
# process. So several of these may run at once or nested.
#
# RATE RANKS: COMMAND replaces this process and keeps its input, output, signals and exit status. The namespace has only
# loopback (/proc/net/dev counts each byte once), and its host name is localhost, because the machine's own name may
# resolve to an interface outside.
#
# --hosts: COMMAND runs once on each host, named host0 and host1, with this number in HOST. The interface `inter` joins
# them, with the addresses 10.77.0.1 and 10.77.0.2; the loopback of a host has full speed. torchrun finds the other host
# by itself, and gloo the interface (PET_... and GLOO_SOCKET_IFNAME are set). host0 has the input. If COMMAND fails on one
# host, it is ended on the other. The exit status is that of the host that failed first.
set -euo pipefail

die() { # die WHAT REMEDY
  printf 'shaped_net: %s; %s\n' "$1" "$2" >&2
  exit 2
}

# Limit what an interface sends to this many bits per second.
shape() { # shape INTERFACE BITS
  # Loopback's default packets of 64 KiB would need a bucket as large: bursts of 5 ms at 100 Mb/s.
  local mtu=9000 frame=9014
  # The bucket is what may pass at once after a pause. One millisecond compensates for late timers on busy cores, and is
  # the most a short exchange can gain. The queue is long enough to drop nothing: TCP limits itself.
  local burst=$(($2 / 8000 > 2 * frame ? $2 / 8000 : 2 * frame))
  ip link set "$1" mtu $mtu
  local error
  error=$(tc qdisc add dev "$1" root tbf rate "${2}bit" burst "$burst" limit 64mb 2>&1) ||
    die "tc cannot shape to $2 bit/s: ${error%%$'\n'*}" "take a lower rate, or load the token bucket: modprobe sch_tbf"
}

run() { # run COMMAND...
  [[ -n $(type -P "$1") ]] || { echo "shaped_net: $1: command not found" >&2; exit 127; }
  exec "${through[@]}" "$@"
}

# Runs inside: shape loopback, then exec the command.
loopback() { # loopback BITS COMMAND...
  local through=()
  hostname localhost
  ip link set lo up
  shape lo "$1"
  run "${@:2}"
}

# Runs inside a host: shape its end of the link, then exec the command.
host() { # host NUMBER BITS COMMAND...
  hostname "host$1"
  ip link set lo up
  until ip link show inter &>/dev/null; do sleep 0.02; done # the other end makes both
  ip addr add "10.77.0.$(($1 + 1))/24" dev inter
  (($2 == 0)) || shape inter "$2"
  ip link set inter up
  export HOST=$1 GLOO_SOCKET_IFNAME=inter
  export PET_NNODES=2 PET_NODE_RANK=$1 PET_MASTER_ADDR=10.77.0.1 PET_MASTER_PORT=29400
  local through=()
  if command -v setpriv >/dev/null; then through=(setpriv --pdeathsig TERM --); fi # if the script is killed, so is this
  run "${@:3}"
}

# Runs inside the namespace of host 0: makes host 1 and the link, and runs the command on both.
hosts() { # hosts BITS COMMAND...
  local pids=() status=0 i here there=
  here=$(readlink /proc/self/ns/net)
  trap 'kill "${pids[@]}" 2>/dev/null' TERM INT HUP
  unshare --net --uts -- bash -euo pipefail -c "$(declare -f die shape run host); host 1 \"\$@\"" shaped_net "$@" </dev/null &
  pids[1]=$!
  until [[ -n $there && $there != "$here" ]]; do
    sleep 0.02
    there=$(readlink "/proc/${pids[1]}/ns/net") || kill -0 "${pids[1]}" || exit 1
  done
  exec 9<"/proc/${pids[1]}/ns/net" # the link lasts until both have ended
  ip link add inter type veth peer name inter netns "${pids[1]}" ||
    { kill "${pids[1]}"; die "this machine cannot join two namespaces" "load the module: modprobe veth"; }
  (host 0 "$@") <&0 9<&- &
  pids[0]=$!
  while kill -0 "${pids[0]}" 2>/dev/null && kill -0 "${pids[1]}" 2>/dev/null; do
    sleep 0.05 &
    wait $! || true # a trap ends the wait
  done
  for i in 0 1; do
    kill -0 "${pids[i]}" 2>/dev/null || wait "${pids[i]}" || { status=$? && kill "${pids[1 - i]}" 2>/dev/null || true; }
  done
  for i in 0 1; do
    while kill -0 "${pids[i]}" 2>/dev/null; do wait "${pids[i]}" || true; done
    wait "${pids[i]}" || status=$((status ? status : $?))
  done
  exit "$status"
}

# Print the bits per second of a rate.
bits_of() { # bits_of RATE
  [[ $1 =~ ^([0-9]{1,4})(\.([0-9]{1,3}))?(kbit|mbit|gbit)$ ]] ||
    die "got rate '$1', expected a number below 10000 and kbit, mbit or gbit" "try 1gbit or 250mbit"
  local decimals=${BASH_REMATCH[3]}000 unit
  local thousandths=$((10#${BASH_REMATCH[1]}${decimals:0:3}))
  case ${BASH_REMATCH[4]} in kbit) unit=1 ;; mbit) unit=1000 ;; gbit) unit=1000000 ;; esac
  ((thousandths > 0)) || die "got rate '$1', expected more than 0" "try 1gbit or 250mbit"
  echo $((thousandths * unit))
}

if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,/^set/ { /^#/ s/^# \{0,1\}//p }' "${BASH_SOURCE[0]}"
  exit
fi
if [[ ${1-} == --hosts ]]; then
  (($# >= 6)) && [[ $3 == --inter && $5 == -- ]] || die "got '$*', expected --hosts 2 --inter RATE -- COMMAND..." "see --help"
  [[ $2 == 2 ]] || die "got '$2' hosts, expected 2" "see --help"
  [[ $4 == none ]] && bits=0 || bits=$(bits_of "$4") || exit
  inside=(hosts "$bits" "${@:6}")
else
  (($# >= 4)) && [[ $3 == -- ]] || die "got '$*', expected RATE RANKS -- COMMAND..." "see --help"
  bits=$(bits_of "$1") || exit
  [[ $2 =~ ^[1-9][0-9]{0,3}$ ]] || die "got '$2' ranks, expected a number from 1 to 9999" "say how many COMMAND starts"
  inside=(loopback $((bits * $2)) "${@:4}")
fi
for tool in ip tc unshare hostname; do
  command -v $tool >/dev/null || die "no '$tool' on PATH" "install iproute2, util-linux and hostname"
done
((EUID == 0)) || die "only root may make a network namespace" "run this with sudo"
unshare --net --uts true 2>/dev/null ||
  die "this root may not make a network namespace" "start its container with --privileged, or use the machine itself"

exec unshare --net --uts -- bash -euo pipefail -c "$(declare -f die shape run loopback host hosts); \"\$@\"" shaped_net "${inside[@]}"
