#!/usr/bin/env bash
# Start a member: ./member.sh NAME, with NAME.toml and keys/NAME in this folder.
# LOCAL_PORT must differ between members on one machine. Ctrl-C or SIGTERM stops it.
set -e
FLWR_HOME="${FLWR_HOME:-$(cd "$(dirname "$0")" && pwd)/.flwr-$1}"
. "$(dirname "$0")/env.sh"

start_member() {
  exec flower-supernode --superlink "$SERVER:$PORT" \
    --root-certificates keys/ca.crt --auth-supernode-private-key "keys/$1" \
    --host 127.0.0.1 --port "${LOCAL_PORT:-9094}" --node-config "member=\"$PWD/$1.toml\""
}

# Run a command in the background and wait for it: while one runs in the foreground, the shell
# handles no signal. With -m it is a process group of its own, so that Ctrl-C reaches it only by
# `stop`: of a second signal, Flower dies before it has taken its leave of the server.
set -m
await() {
  "$@" &
  wait "$!"
}

# End what runs in the background, wait for its end, and exit.
stop() {
  trap '' HUP INT TERM
  running=$(jobs -p)
  [ -z "$running" ] || kill -TERM $running 2> /dev/null || true
  wait
  exit "$1"
}
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM

# The server takes a member that was killed for alive, and refuses it, for a minute: try again.
until await start_member "$1"; do
  echo "$1 keeps trying; Ctrl-C stops it"
  await sleep "${RETRY:-10}"
done
