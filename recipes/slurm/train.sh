#!/usr/bin/env bash
# Train on the nodes of a Slurm job. Submit it from the root of the repository, with the Python environment on PATH, both
# in a file system that all nodes share:
#
#   sbatch --nodes=2 --gpus-per-node=8 recipes/slurm/train.sh --compression acpsgd --steps 200
#
# Arguments go to examples/train.py.
#
# Environment: ENGINE     horovod: horovodrun starts the ranks; ddp: torchrun does, one on each node (default: horovod)
#              RANKS      on each node (default: its GPUs, 1 without GPUs)
#              INTERFACE  network interface, if the default one is wrong
#              PORT       of the first node, for the rendezvous of ddp (default: 29500)
#
#SBATCH --job-name=gradzip
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
set -euo pipefail

die() { # die WHAT REMEDY
  printf 'train.sh: %s\n  %s\n' "$1" "$2" >&2
  exit 2
}

[[ -n ${SLURM_JOB_NODELIST-} ]] || die "this is no Slurm job" "Submit it: sbatch --nodes=2 recipes/slurm/train.sh"
cd "$SLURM_SUBMIT_DIR"
[[ -e examples/train.py ]] || die "no examples/train.py in $SLURM_SUBMIT_DIR" "Submit it from the root of the repository."
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
ranks=${RANKS:-${SLURM_GPUS_ON_NODE:-1}}
engine=${ENGINE:-horovod}

case $engine in
horovod)
  # horovodrun starts ranks through `ssh`. The one in recipes/slurm/bin takes srun, as ssh between nodes may be forbidden.
  hosts=$(printf ",%s:$ranks" "${nodes[@]}")
  PATH=$PWD/recipes/slurm/bin:$PATH horovodrun -np $((ranks * ${#nodes[@]})) -H "${hosts:1}" \
    ${INTERFACE:+--network-interfaces "$INTERFACE"} python examples/train.py --engine horovod "$@"
  ;;
ddp)
  if [[ -n ${INTERFACE-} ]]; then export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE; fi
  srun --ntasks="${#nodes[@]}" --ntasks-per-node=1 torchrun --nnodes "${#nodes[@]}" --nproc-per-node "$ranks" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "${nodes[0]}:${PORT:-29500}" \
    examples/train.py --engine ddp "$@"
  ;;
*) die "got ENGINE=$engine, expected horovod or ddp" "As in: ENGINE=ddp sbatch recipes/slurm/train.sh" ;;
esac
