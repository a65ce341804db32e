// A js-libp2p host: it gives back what comes, and asks whoever it is told to dial for as much.
import { createLibp2p } from 'libp2p'
import { tcp } from '@libp2p/tcp'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@libp2p/yamux'
import { multiaddr } from '@multiformats/multiaddr'

// Node 20 has none.
Promise.withResolvers ??= function () {
  const made = {}
  made.promise = new Promise((resolve, reject) => Object.assign(made, { resolve, reject }))
  return made
}

const [address, size] = process.argv.slice(2)
const ECHO = '/test/echo/1'

const node = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()]
})
await node.handle(ECHO, async (stream) => {
  for await (const data of stream) {
    if (!stream.send(data)) await stream.onDrain()
  }
  await stream.close()
})

if (address === undefined) {
  console.log(String(node.getMultiaddrs()[0]))
  process.stdin.on('end', () => process.exit(0)).resume()
} else {
  const stream = await node.dialProtocol(multiaddr(address), ECHO)
  const sent = new Uint8Array(Number(size)).map((_, at) => at * 31 + (at >> 8))
  const write = async () => {
    for (let at = 0; at < sent.length; at += 100_000) {
      if (!stream.send(sent.subarray(at, at + 100_000))) await stream.onDrain()
    }
    await stream.close()
  }
  const done = write()
  let at = 0
  for await (const data of stream) {
    for (const byte of data.subarray()) {
      if (byte !== sent[at]) throw new Error(`byte ${at} is ${byte}, not ${sent[at]}`)
      at++
    }
  }
  await done
  console.log(at)
  process.exit(0)
}
