// A js-libp2p host that takes part in the DHT. Arguments: the addresses to dial. Then commands on
// standard input, one a line; each is answered by one line of JSON.
import { createInterface } from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { identify } from '@libp2p/identify'
import { kadDHT, passthroughMapper } from '@libp2p/kad-dht'
import { ping } from '@libp2p/ping'
import { peerIdFromString } from '@libp2p/peer-id'
import { tcp } from '@libp2p/tcp'
import { yamux } from '@libp2p/yamux'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { CID } from 'multiformats/cid'
import * as raw from 'multiformats/codecs/raw'
import { create } from 'multiformats/hashes/digest'

// Node 20 has none.
Promise.withResolvers ??= function () {
  const made = {}
  made.promise = new Promise((resolve, reject) => Object.assign(made, { resolve, reject }))
  return made
}

const host = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: {
    identify: identify(),
    ping: ping(),
    dht: kadDHT({
      protocol: '/ipfs/kad/1.0.0',
      clientMode: false,
      allowQueryWithZeroPeers: true,
      peerInfoMapper: passthroughMapper
    })
  }
})

const cidOf = (hex) => CID.createV1(raw.code, create(0x12, Buffer.from(hex, 'hex')))

const commands = {
  peers: async () => host.services.dht.routingTable.size,
  find: async (peer) => {
    const found = await host.peerRouting.findPeer(peerIdFromString(peer))
    return found.multiaddrs.map(String)
  },
  providers: async (hex) => {
    const found = []
    for await (const each of host.contentRouting.findProviders(cidOf(hex))) {
      found.push(each.id.toString())
    }
    return found
  },
  provide: async (hex) => { await host.contentRouting.provide(cidOf(hex)) ; return null },
  ping: async (peer) => host.services.ping.ping(peerIdFromString(peer))
}

for (const address of process.argv.slice(2)) await host.dial(multiaddr(address))
console.log(JSON.stringify(host.getMultiaddrs().map(String)))

for await (const line of createInterface({ input: process.stdin })) {
  const [name, ...rest] = line.split(' ')
  try {
    const signal = AbortSignal.timeout(20000)
    console.log(JSON.stringify({ ok: await commands[name](...rest, { signal }) }))
  } catch (error) {
    console.log(JSON.stringify({ error: String(error) }))
  }
}
await host.stop()
