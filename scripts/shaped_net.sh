#!/usr/bin/env bash
# Run a command in a network namespace whose loopback has the bandwidth of RANKS links of RATE.
#
# usage: scripts/shaped_net.sh RATE RANKS -- COMMAND...
#
#   RATE   bandwidth of one rank's link: a number and kbit, mbit or gbit
#   RANKS  number of processes that COMMAND starts; they share one loopback, which gets RANKS times RATE
#
# examples:
#   scripts/shaped_net.sh 1gbit 2 -- horovodrun -np 2 python examples/train.py
#   scripts/shaped_net.sh 250mbit 4 -- torchrun --standalone --nproc-per-node 4 train.py
#   scripts/shaped_net.sh 100mbit 2 -- bash -c 'horovodrun -np 2 python train.py; grep lo: /proc/net/dev'
#
# Needs root and iproute2. COMMAND replaces this process and keeps its input, output, signals and exit status. Nothing
# outside changes and nothing needs cleaning up: the unnamed namespace ends with its last process. So several of these may
# run at once or nested. The namespace has only loopback (/proc/net/dev counts each byte once), and its host name is
# localhost, because the machine's own name may resolve to an interface outside.
set -euo pipefail

die() { # die WHAT REMEDY
  printf 'shaped_net: %s; %s\n' "$1" "$2" >&2
  exit 2
}

# Runs inside: shape loopback to this many bits per second, then exec the command.
shape() {
  local bits=$1
  shift
  # Loopback's default packets of 64 KiB would need a bucket as large: bursts of 5 ms at 100 Mb/s.
  local mtu=9000 frame=9014
  # The bucket is what may pass at once after a pause. One millisecond compensates for late timers on busy cores, and is
  # the most a short exchange can gain. The queue is long enough to drop nothing: TCP limits itself.
  local burst=$((bits / 8000 > 2 * frame ? bits / 8000 : 2 * frame))
  hostname localhost
  ip link set lo mtu $mtu up
  local error
  error=$(tc qdisc add dev lo root tbf rate "${bits}bit" burst "$burst" limit 64mb 2>&1) ||
    die "tc cannot shape to $bits bit/s: ${error%%$'\n'*}" "take a lower rate, or load the token bucket: modprobe sch_tbf"
  [[ -n $(type -P "$1") ]] || { echo "shaped_net: $1: command not found" >&2; exit 127; }
  exec "$@"
}

if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,/^set/ { /^#/ s/^# \{0,1\}//p }' "${BASH_SOURCE[0]}"
  exit
fi
(($# >= 4)) && [[ $3 == -- ]] || die "got '$*', expected RATE RANKS -- COMMAND..." "see --help"
[[ $1 =~ ^([0-9]{1,4})(\.([0-9]{1,3}))?(kbit|mbit|gbit)$ ]] ||
  die "got rate '$1', expected a number below 10000 and kbit, mbit or gbit" "try 1gbit or 250mbit"
decimals=${BASH_REMATCH[3]}000
thousandths=$((10#${BASH_REMATCH[1]}${decimals:0:3}))
case ${BASH_REMATCH[4]} in kbit) unit=1 ;; mbit) unit=1000 ;; gbit) unit=1000000 ;; esac
((thousandths > 0)) || die "got rate '$1', expected more than 0" "try 1gbit or 250mbit"
[[ $2 =~ ^[1-9][0-9]{0,3}$ ]] || die "got '$2' ranks, expected a number from 1 to 9999" "say how many COMMAND starts"
for tool in ip tc unshare hostname; do
  command -v $tool >/dev/null || die "no '$tool' on PATH" "install iproute2, util-linux and hostname"
done
((EUID == 0)) || die "only root may make a network namespace" "run this with sudo"
unshare --net --uts true 2>/dev/null ||
  die "this root may not make a network namespace" "start its container with --privileged, or use the machine itself"

bits=$((thousandths * unit * $2))
shift 3
exec unshare --net --uts -- bash -euo pipefail -c "$(declare -f die shape); shape \"\$@\"" shaped_net "$bits" "$@"
