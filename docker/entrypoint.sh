#!/usr/bin/env bash
# Entrypoint of the images: install the job's ssh key, then serve ssh or run a command. Needs no root.
#
# usage: entrypoint.sh sshd           be a node: serve ssh until stopped; horovodrun starts ranks through it
#        entrypoint.sh COMMAND...     run the command: horovodrun, gradzip-test, bash, ...
#
# All nodes of a job share one key pair, which is both the user's key and every host's. ssh trusts only holders of that
# key. It is mounted; if the folder is an empty volume, the first node makes it. Images hold no key.
#
# Environment: GRADZIP_KEYS      folder of id_ed25519 (default: /keys)
#              GRADZIP_SSH_PORT  port of ssh (default: 2222)
set -euo pipefail

key=${GRADZIP_KEYS:-/keys}/id_ed25519
port=${GRADZIP_SSH_PORT:-2222}
ssh=$HOME/.ssh

die() { # die WHAT REMEDY
  printf 'entrypoint: %s\n  %s\n' "$1" "$2" >&2
  exit 1
}

# Nodes may start at the same moment: the first link wins, and none sees half a key.
make_key() {
  local fresh
  fresh=$(mktemp -d "${key%/*}/new.XXXXXX" 2>/dev/null) ||
    die "no key in ${key%/*} that uid $(id -u) may see, and it cannot make one there" \
      "Mount a folder with one (ssh-keygen -t ed25519 -N '' -f keys/id_ed25519), or a volume: -v keys:${key%/*}"
  ssh-keygen -q -t ed25519 -N '' -C gradzip -f "$fresh/key"
  ln "$fresh/key" "$key" 2>/dev/null || [[ -e $key ]]
  rm -r "$fresh"
}

# Copy the key: ssh refuses one that others may read or that another uid owns, as is usual for mounted files.
take_key() {
  local public
  [[ -r $key ]] || die "uid $(id -u) cannot read $key" "Make it that uid's own, or build with --build-arg UID=..."
  install -d -m 700 "$ssh"
  install -m 600 "$key" "$ssh/id_ed25519"
  public=$(ssh-keygen -y -P '' -f "$ssh/id_ed25519" 2>/dev/null) ||
    die "$key is not a private key without passphrase" "Make one: ssh-keygen -t ed25519 -N '' -f id_ed25519"
  echo "$public" >"$ssh/authorized_keys"
  echo "* $public" >"$ssh/known_hosts"
  printf '%s\n' 'Host *' "  Port $port" "  IdentityFile $ssh/id_ed25519" '  IdentitiesOnly yes' \
    "  UserKnownHostsFile $ssh/known_hosts" '  StrictHostKeyChecking yes' >"$ssh/config"
  chmod 600 "$ssh"/*
}

# Warn if the host's name resolves to loopback. Horovod's ranks listen at that address, whatever interface is set.
check_name() { # check_name NAME
  local address=''
  read -r address _ < <(getent ahosts "$1") || true
  [[ -z $address || $address == 127.* || $address == ::1 ]] || return 0
  printf 'entrypoint: %s\n  %s\n' \
    "this host's name, $1, stands for ${address:-no address}: ranks on other nodes will not reach its own" \
    "Mount a list of the nodes and their addresses: -v hosts:/etc/hosts:ro" >&2
}

main() {
  (($#)) || die "nothing to run" "Say what: entrypoint.sh sshd, or entrypoint.sh COMMAND..."
  if [[ $1 != sshd ]]; then
    [[ ! -e $key ]] || take_key
    exec "$@"
  fi
  (($# == 1)) || die "sshd takes no arguments, got: ${*:2}" "Its port is GRADZIP_SSH_PORT."
  [[ -e $key ]] || make_key
  take_key
  check_name "$(uname -n)"
  # sshd of root needs its privilege separation folder, which the package leaves to the init system.
  ((EUID)) || install -d -m 755 /run/sshd
  # MaxStartups: horovodrun opens one connection per rank at once. SetEnv: sessions would get sshd's own PATH.
  # StrictModes: the files were written above, and parent folders (a mounted home, /tmp) may have any mode.
  exec /usr/sbin/sshd -D -e -f /dev/null -p "$port" -h "$ssh/id_ed25519" \
    -o PidFile=none -o UsePAM=no -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no \
    -o "AuthorizedKeysFile=$ssh/authorized_keys" -o StrictModes=no -o MaxStartups=1000 \
    -o "SetEnv=PATH=$PATH"
}

# Sourced, it only defines its functions.
[[ ${BASH_SOURCE[0]} != "$0" ]] || main "$@"
