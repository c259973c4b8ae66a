#!/usr/bin/env bash
# Build an image with buildah, which needs neither a daemon nor a registry and works inside a container, too.
#
# usage: scripts/build_image.sh cpu|gpu    builds docker/Dockerfile.cpu or docker/Dockerfile, as localhost/gradzip:cpu or :gpu
#
# Needs root, Debian's package buildah and, for a base of its own, debootstrap. pip finds packages where it finds them on
# this machine: its indexes, certificates and local folders are mounted while the image is built.
#
# Environment: BASE         base image (default: localhost/gradzip-base, which debootstrap makes if it is not there)
#              TORCH_INDEX  package index of PyTorch (default: that of the Dockerfile)
#              GRADZIP_UID  uid of the image's user (default: 1000)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/gradzip-image.XXXXXX")
scratch=''
cleanup() {
  rm -rf "$work"
  [[ -z $scratch ]] || buildah rm "$scratch" >/dev/null
}
trap cleanup EXIT

die() { # die WHAT REMEDY
  printf 'build_image: %s\n  %s\n' "$1" "$2" >&2
  exit 2
}

need() { # need PACKAGE: one that has a command of this name
  command -v "$1" >/dev/null || die "no $1 here" "Install it (Debian, Ubuntu: apt install $1)."
}

make_base() { # make_base NAME
  need debootstrap
  scratch=$(buildah from scratch)
  debootstrap --variant=minbase bookworm "$(buildah mount "$scratch")"
  buildah commit --quiet "$scratch" "$1"
}

# pip's configuration on this machine, as a file. Of two values, the environment's is the first.
pip_configuration() {
  echo '[global]'
  python3 -m pip config list |
    sed -nE "s/^(:env:|global|install)\.((extra-)?index-url|find-links|trusted-host|cert|(default-)?timeout)='(.*)'$/\2 = \5/p" |
    sed 's/\\n/ /g' | awk '!seen[$1]++'
}

kind=${1-}
case $kind in
cpu) dockerfile=docker/Dockerfile.cpu ;;
gpu) dockerfile=docker/Dockerfile ;;
*) die "got '$kind', expected cpu or gpu" "As in: scripts/build_image.sh cpu" ;;
esac
((EUID == 0)) || die "this is not root, who alone can build without an engine" "Run it with sudo."
need buildah

if [[ -z ${BASE-} ]]; then
  BASE=localhost/gradzip-base
  buildah inspect --type image $BASE >/dev/null 2>&1 || make_base $BASE
fi
# Docker's format keeps SHELL.
options=(--format docker --isolation chroot --network host --build-arg "BASE=$BASE" --build-arg "UID=${GRADZIP_UID:-1000}")

# Mounted where pip looks, so that nothing of it stays in the image. Certificates are copied there: a mount at their own
# place would be in the way of Debian's package of certificates.
mkdir "$work/pip"
configuration=$work/pip/pip.conf
pip_configuration >"$configuration"
setting() { # setting NAMES: their values, as words
  sed -nE "s/^($1) = //p" "$configuration"
}
if [[ -n $(setting cert) ]]; then
  cp "$(setting cert)" "$work/pip/cert.pem"
  sed -i 's|^cert = .*|cert = /etc/xdg/pip/cert.pem|' "$configuration"
fi

# Where local wheels have a PyTorch for CPUs, another index is needless; for GPUs, pip would take that one as the newer.
for folder in $(setting find-links); do
  if compgen -G "${folder#file://}/torch-*+cpu*.whl" >/dev/null; then
    TORCH_INDEX=${TORCH_INDEX:-https://pypi.org/simple}
    [[ $kind == cpu ]] || sed -i '/^find-links = /d' "$configuration"
  fi
done
[[ -z ${TORCH_INDEX-} ]] || options+=(--build-arg "TORCH_INDEX=$TORCH_INDEX")

# Folders are mounted at their own paths; an index with what is beside it, where the files that it links to may be.
for folder in $(setting '(extra-)?index-url|find-links'); do
  folder=${folder#file://} folder=${folder%/} folder=${folder%/simple}
  [[ ! -d $folder ]] || options+=(--volume "$folder:$folder:ro")
done

buildah bud "${options[@]}" --volume "$work/pip:/etc/xdg/pip:ro" --file "$root/$dockerfile" --tag "gradzip:$kind" "$root"
