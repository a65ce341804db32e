#!/bin/sh
# Impairs the network namespace that it runs in until it is stopped, then undoes it.
#
# NETEM_DELAY_MS, NETEM_JITTER_MS, NETEM_LOSS_PCT hold for each direction: what leaves by the
# interface, and, where the kernel has ifb devices, what comes in by it. Needs NET_ADMIN.
set -eu

interface="${NETEM_INTERFACE:-eth0}"
delay="${NETEM_DELAY_MS:-100}"
jitter="${NETEM_JITTER_MS:-10}"
loss="${NETEM_LOSS_PCT:-1}"
incoming=ifb-netem

case "$delay$jitter$loss" in
*[!0-9.]*)
    echo "error: NETEM_DELAY_MS, NETEM_JITTER_MS and NETEM_LOSS_PCT are numbers" >&2
    exit 2
    ;;
esac

impair() {
    # The queue holds a second of full-size packets at 120 Mbit/s; the default drops beyond 1000.
    tc qdisc replace dev "$1" root netem limit 10000 delay "${delay}ms" "${jitter}ms" loss "$loss%"
}

undo() {
    tc qdisc del dev "$interface" root 2>/dev/null || true
    tc qdisc del dev "$interface" ingress 2>/dev/null || true
    ip link del "$incoming" 2>/dev/null || true
}

# A shell's trap waits for the foreground command; `wait` ends at once.
sleep infinity &
sleeper=$!
trap 'undo; kill $sleeper; exit 0' TERM INT
undo
if ! impair "$interface"; then
    echo "error: netem did not start; the machine, not the container, needs it: modprobe sch_netem" >&2
    kill $sleeper
    exit 1
fi
both="leaves"
if ip link add "$incoming" type ifb 2>/dev/null; then
    ip link set "$incoming" up
    tc qdisc add dev "$interface" handle ffff: ingress
    tc filter add dev "$interface" parent ffff: matchall \
        action mirred egress redirect dev "$incoming"
    impair "$incoming"
    both="leaves and enters"
else
    echo "no ifb device in this kernel: what comes in is not impaired" >&2
fi
echo "$interface: ${delay}±${jitter} ms and $loss % loss for what $both" >&2
wait $sleeper
