#!/usr/bin/env bash
# Train on two containers of an image, as on two machines: each has a network namespace, a host name and an ssh server.
#
# usage: scripts/two_containers.sh IMAGE [ARGS of examples/train.py]
#
#   scripts/two_containers.sh localhost/gradzip:cpu --compression none --compression fft-range:theta=0.85,bits=10
#
# Needs root, buildah and what scripts/shaped_net.sh needs. The containers are named a and b; horovodrun runs in a.
set -euo pipefail

die() { # die WHAT REMEDY
  printf 'two_containers: %s\n  %s\n' "$1" "$2" >&2
  exit 2
}

# Runs on each host: be a node, as the user of the image, until the job has ended. The first one starts it.
node() { # node IMAGE ARGS...
  local names=(a b)
  container=$(buildah from --pull-never "$1")
  trap 'kill "$sshd"; wait "$sshd" || true; buildah rm "$container" >/dev/null' EXIT
  enter() { # enter COMMAND...: replaces this shell, so that a signal to it reaches the container
    exec buildah run --isolation chroot --network host --hostname "${names[HOST]}" --no-hosts \
      --volume "$work/hosts:/etc/hosts:ro" --volume "$work/keys:/keys" "$container" -- "$@"
  }
  enter gradzip-entrypoint sshd &
  sshd=$!
  if ((HOST == 0)); then
    until (: <>/dev/tcp/10.77.0.1/2222 <>/dev/tcp/10.77.0.2/2222) 2>/dev/null; do kill -0 "$sshd"; sleep 0.2; done
    # Not through the entrypoint: the node's has made what ssh needs.
    (enter horovodrun -np 2 -H a:1,b:1 --network-interfaces inter python examples/train.py --threads 1 "${@:2}")
    touch "$work/done"
  else
    until [[ -e $work/done ]]; do kill -0 "$sshd"; sleep 0.2; done
  fi
}

[[ ${1-} && $1 != -* ]] || die "got '${1-}', expected the name of an image" "As in: $0 localhost/gradzip:cpu"
command -v buildah >/dev/null || die "no buildah here" "Install it (Debian, Ubuntu: apt install buildah)."

export work
work=$(mktemp -d "${TMPDIR:-/tmp}/gradzip-containers.XXXXXX")
trap 'rm -rf "$work"' EXIT
# The first node to start makes the key. Its user may have any uid.
mkdir -m 1777 "$work/keys"
printf '%s\n' '127.0.0.1 localhost' '10.77.0.1 a' '10.77.0.2 b' >"$work/hosts"
"$(dirname "${BASH_SOURCE[0]}")/shaped_net.sh" --hosts 2 --inter none -- \
  bash -euo pipefail -c "$(declare -f node); node \"\$@\"" node "$@"
