#!/usr/bin/env bash
# Start the server, which waits for members and for ./run.sh. Ctrl-C or SIGTERM stops it.
# What ends by itself is started again. LOG=FILE writes to a file, which is rotated.
set -e
. "$(dirname "$0")/env.sh"
mkdir -p -m 700 server
LISTEN="${LISTEN:-127.0.0.1}"
LOCAL="$LISTEN"
[ "$LOCAL" != 0.0.0.0 ] || LOCAL=127.0.0.1

# The first process talks to the members, the second one runs the rounds.
exec python -m fedproto.deploy.supervisor server "$FLWR_HOME" \
  -- python -m fedproto.deploy.flower_node superlink --database server/flower.db \
    --host "$LISTEN" --port "$PORT" --enable-supernode-auth \
    --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.pem --ssl-keyfile keys/server.key \
    --isolation process --superexec-auth-secret-file {secret} \
  -- python -m fedproto.deploy.warm_worker --runtime-api-address "$LOCAL:$PORT" \
    --root-certificates keys/ca.crt --superexec-auth-secret-file {secret}
