#!/usr/bin/env bash
# Start the server, which waits for members and for ./run.sh. Ctrl-C stops it.
set -e
. "$(dirname "$0")/env.sh"
mkdir -p -m 700 server
exec flower-superlink --database server/flower.db \
  --host "${LISTEN:-127.0.0.1}" --port "$PORT" --enable-supernode-auth \
  --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.pem --ssl-keyfile keys/server.key
