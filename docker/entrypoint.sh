#!/usr/bin/env bash
# What a container runs first: it takes the job's ssh key, then serves ssh or runs a command. Needs no root.
#
# usage: entrypoint.sh sshd           a node: serves ssh until it is stopped; horovodrun starts ranks through it
#        entrypoint.sh COMMAND...     runs the command: horovodrun, gradzip-test, bash, ...
#
# All nodes of a job share one key pair. It is the user's key and every host's: who holds it is a node of the job, and
# ssh trusts no one else. It is mounted, or made by the first node where the folder is an empty volume. No image holds
# one.
#
# Environment: GRADZIP_KEYS      the folder with id_ed25519 (default: /keys)
#              GRADZIP_SSH_PORT  where nodes serve ssh (default: 2222)
set -euo pipefail

key=${GRADZIP_KEYS:-/keys}/id_ed25519
port=${GRADZIP_SSH_PORT:-2222}
ssh=$HOME/.ssh

die() { # die WHAT REMEDY
  printf 'entrypoint: %s\n  %s\n' "$1" "$2" >&2
  exit 1
}

# Nodes may start at the same moment: the first link wins, and no one sees half a key.
make_key() {
  local fresh
  fresh=$(mktemp -d "${key%/*}/new.XXXXXX" 2>/dev/null) ||
    die "no key in ${key%/*} that uid $(id -u) may see, and it cannot make one there" \
      "Mount a folder with one (ssh-keygen -t ed25519 -N '' -f keys/id_ed25519), or a volume: -v keys:${key%/*}"
  ssh-keygen -q -t ed25519 -N '' -C gradzip -f "$fresh/key"
  ln "$fresh/key" "$key" 2>/dev/null || [[ -e $key ]]
  rm -r "$fresh"
}

# Copied, because ssh refuses a key that others may read, or that another uid owns, as mounted ones often are.
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

# Horovod's ranks listen at the address of their host's name, whatever interface they are told.
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
  # Where root's sshd confines what it does for strangers; the package leaves it to the init system.
  ((EUID)) || install -d -m 755 /run/sshd
  # MaxStartups: horovodrun opens a connection per rank, all at once. SetEnv: else a session has a PATH of sshd's own.
  # StrictModes: what it looks at was written above, or is a folder over it (a mounted home, /tmp), as others made it.
  exec /usr/sbin/sshd -D -e -f /dev/null -p "$port" -h "$ssh/id_ed25519" \
    -o PidFile=none -o UsePAM=no -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no \
    -o "AuthorizedKeysFile=$ssh/authorized_keys" -o StrictModes=no -o MaxStartups=1000 \
    -o "SetEnv=PATH=$PATH"
}

# Sourced, it only defines its functions.
[[ ${BASH_SOURCE[0]} != "$0" ]] || main "$@"
