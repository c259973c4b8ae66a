#!/usr/bin/env bash
# Train on machines that this one reaches through ssh without a password. Run it from the root of the repository; script,
# data and Python environment are at the same paths on all machines, and this shell's PATH is used on each.
#
# usage: recipes/ssh.sh [--dry-run] HOST:RANKS[,HOST:RANKS...] [ARGS of examples/train.py]
#
#   recipes/ssh.sh gpu1:8,gpu2:8 --compression acpsgd --steps 200
#   ENGINE=ddp INTERFACE=eth0 recipes/ssh.sh --dry-run gpu1:8,gpu2:8
#
# --dry-run prints the commands instead.
#
# Environment: ENGINE     horovod: horovodrun starts the ranks; ddp: torchrun does, one on each machine (default: horovod)
#              INTERFACE  network interface, if the default one is wrong
#              PORT       of the first machine, for the rendezvous of ddp (default: 29500)
set -euo pipefail

die() { # die WHAT REMEDY
  printf 'ssh.sh: %s\n  %s\n' "$1" "$2" >&2
  exit 2
}

run=()
if [[ ${1-} == --dry-run ]]; then
  run=(dry_run)
  shift
fi
dry_run() {
  printf '%q ' "$@"
  echo
}
hosts=${1-}
host='[[:alnum:]_][[:alnum:]_.-]*:[1-9][0-9]*'
[[ $hosts =~ ^$host(,$host)*$ ]] ||
  die "got '$hosts', expected HOST:RANKS[,HOST:RANKS...]" "As in: recipes/ssh.sh gpu1:8,gpu2:8"
shift
IFS=, read -ra nodes <<<"$hosts"
engine=${ENGINE:-horovod}

case $engine in
horovod)
  ranks=0
  for node in "${nodes[@]}"; do ranks=$((ranks + ${node##*:})); done
  "${run[@]}" horovodrun -np "$ranks" -H "$hosts" ${INTERFACE:+--network-interfaces "$INTERFACE"} \
    python examples/train.py --engine horovod "$@"
  ;;
ddp)
  # One torchrun on each machine. If one fails, the others are stopped: -tt ends the remote command with its ssh.
  pids=()
  trap '((${#pids[@]} == 0)) || kill "${pids[@]}" 2>/dev/null || true' EXIT
  for i in "${!nodes[@]}"; do
    command=(env PATH="$PATH" ${INTERFACE:+GLOO_SOCKET_IFNAME="$INTERFACE" NCCL_SOCKET_IFNAME="$INTERFACE"}
      torchrun --nnodes "${#nodes[@]}" --node-rank "$i" --nproc-per-node "${nodes[i]##*:}"
      --master-addr "${nodes[0]%:*}" --master-port "${PORT:-29500}" examples/train.py --engine ddp "$@")
    remote=(ssh -tt -o BatchMode=yes "${nodes[i]%:*}" "$(printf 'cd %q && exec' "$PWD")$(printf ' %q' "${command[@]}")")
    if ((${#run[@]})); then
      dry_run "${remote[@]}"
    else
      "${remote[@]}" </dev/null &
      pids+=($!)
    fi
  done
  for _ in "${pids[@]}"; do wait -n; done
  pids=()
  ;;
*) die "got ENGINE=$engine, expected horovod or ddp" "As in: ENGINE=ddp recipes/ssh.sh $hosts" ;;
esac
