// A js-libp2p host as it comes: it dials, identifies, and pings the whole time that it is told to.
import { createLibp2p } from 'libp2p'
import { tcp } from '@libp2p/tcp'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@libp2p/yamux'
import { identify } from '@libp2p/identify'
import { ping } from '@libp2p/ping'
import { multiaddr } from '@multiformats/multiaddr'

// Node 20 has none.
Promise.withResolvers ??= function () {
  const made = {}
  made.promise = new Promise((resolve, reject) => Object.assign(made, { resolve, reject }))
  return made
}

const [address, count] = process.argv.slice(2)
const node = await createLibp2p({
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: { identify: identify(), ping: ping() }
})
let ends = 0
const errors = []
node.addEventListener('connection:close', () => { ends++ })
// It identifies by itself.
const identified = new Promise((resolve) => {
  node.addEventListener('peer:identify', (event) => resolve(event.detail))
})
const connection = await node.dial(multiaddr(address))
const { protocols } = await identified
let pings = 0
while (pings < Number(count)) {
  try {
    await node.services.ping.ping(connection.remotePeer)
    pings++
  } catch (error) {
    // Its own monitor of connections is pinging just now; or, on a busy machine, the node has ended
    // the one stream that waited for too long.
    if (error.name !== 'TooManyOutboundProtocolStreamsError') errors.push(error.name)
    if (errors.length > 20 || node.getConnections().length === 0) throw error
    await new Promise((resolve) => setTimeout(resolve, 100))
  }
}
console.log(JSON.stringify({ protocols, pings, ends, errors, connections: node.getConnections().length }))
process.exit(0)
