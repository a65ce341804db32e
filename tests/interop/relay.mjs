// A js-libp2p host as it comes: `serve` relays for others, `listen RELAY` is reached through a relay,
// and `dial ADDRESS` pings through one. The first two say where they are, and end with their input.
import { createLibp2p } from 'libp2p'
import { tcp } from '@libp2p/tcp'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@libp2p/yamux'
import { identify } from '@libp2p/identify'
import { ping } from '@libp2p/ping'
import { circuitRelayServer, circuitRelayTransport } from '@libp2p/circuit-relay-v2'
import { multiaddr } from '@multiformats/multiaddr'

// Node 20 has none.
Promise.withResolvers ??= function () {
  const made = {}
  made.promise = new Promise((resolve, reject) => Object.assign(made, { resolve, reject }))
  return made
}

const [role, address] = process.argv.slice(2)
const listen = { serve: ['/ip4/127.0.0.1/tcp/0'], listen: [`${address}/p2p-circuit`], dial: [] }
const services = { identify: identify(), ping: ping() }
if (role === 'serve') services.relay = circuitRelayServer()
const node = await createLibp2p({
  addresses: { listen: listen[role] },
  transports: [tcp(), circuitRelayTransport()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  // It refuses to dial loopback addresses of others otherwise.
  connectionGater: { denyDialMultiaddr: () => false },
  services
})
if (role === 'dial') {
  const connection = await node.dial(multiaddr(address))
  const took = await node.services.ping.ping(connection.remotePeer)
  console.log(JSON.stringify({ took, remote: connection.remoteAddr.toString() }))
  process.exit(0)
}
while (node.getMultiaddrs().length === 0) {
  await new Promise((resolve) => setTimeout(resolve, 20))
}
console.log(node.getMultiaddrs()[0].toString())
process.stdin.on('end', () => process.exit(0)).resume()
