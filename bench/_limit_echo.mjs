// A js-libp2p host. Without arguments it serves; with an address it dials, and measures what it is told on standard input.
import { createLibp2p } from 'libp2p'
import { tcp } from '@libp2p/tcp'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@libp2p/yamux'
import { multiaddr } from '@multiformats/multiaddr'
import { createInterface } from 'node:readline'

// Node 20 has none.
Promise.withResolvers ??= function () {
  const made = {}
  made.promise = new Promise((resolve, reject) => Object.assign(made, { resolve, reject }))
  return made
}

const [address] = process.argv.slice(2)
const TAKE = '/limit/take/1'
const ECHO = '/limit/echo/1'

const node = await createLibp2p({
  addresses: { listen: address === undefined ? ['/ip4/127.0.0.1/tcp/0'] : [] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()]
})

if (address === undefined) {
  // A transfer begins with its size, and is answered with one byte.
  await node.handle(TAKE, async (stream) => {
    let left = 0
    for await (const data of stream) {
      const start = left === 0 ? 8 : 0
      if (start) left = Number(new DataView(Uint8Array.from(data.subarray(0, 8)).buffer).getBigUint64(0))
      left -= data.byteLength - start
      if (left === 0) stream.send(new Uint8Array(1))
    }
  })
  await node.handle(ECHO, async (stream) => {
    for await (const data of stream) stream.send(data)
  })
  console.log(JSON.stringify([String(node.getMultiaddrs()[0])]))
  process.stdin.on('end', () => process.exit(0)).resume()
} else {
  const open = async (protocol) => {
    const stream = await node.dialProtocol(multiaddr(address), protocol)
    return { stream, incoming: stream[Symbol.asyncIterator]() }
  }
  const take = await open(TAKE)
  const echo = await open(ECHO)
  const piece = new Uint8Array(256 * 1024)
  const bulk = async (size) => {
    const started = performance.now()
    const head = new Uint8Array(8)
    new DataView(head.buffer).setBigUint64(0, BigInt(size))
    take.stream.send(head)
    for (let left = size; left > 0; left -= piece.length) {
      if (!take.stream.send(piece.subarray(0, left))) await take.stream.onDrain()
    }
    await take.incoming.next()
    return [(performance.now() - started) / 1000]
  }
  const roundTrips = async (count) => {
    const times = []
    for (; count > 0; count--) {
      const started = performance.now()
      echo.stream.send(new Uint8Array(64))
      let left = 64
      while (left > 0) left -= (await echo.incoming.next()).value.byteLength
      times.push((performance.now() - started) / 1000)
    }
    return times
  }
  console.log('[]')
  for await (const line of createInterface({ input: process.stdin })) {
    const [what, count] = line.split(' ')
    const times = await (what === 'bulk' ? bulk : roundTrips)(Number(count))
    console.log(JSON.stringify(times))
  }
  process.exit(0)
}
