// What js-libp2p's decoders make of messages: a line of JSON comes with lists of them in hexadecimal,
// and one goes with what is in each, or null for those that it refuses.
import { createInterface } from 'node:readline'
import { fileURLToPath, pathToFileURL } from 'node:url'
import { dirname, join } from 'node:path'

// The decoders are not exported by name.
const inside = async (name, file) => {
  let folder = dirname(fileURLToPath(import.meta.resolve(name)))
  while (!folder.endsWith(join('node_modules', ...name.split('/')))) folder = dirname(folder)
  return await import(pathToFileURL(join(folder, 'dist', 'src', file)))
}
const { Identify } = await inside('@libp2p/identify', 'pb/message.js')
const { NoiseHandshakePayload } = await inside('@chainsafe/libp2p-noise', 'proto/payload.js')

const hex = (bytes) => Buffer.from(bytes ?? []).toString('hex')
const decoded = (decode) => (message) => {
  try {
    return decode(Buffer.from(message, 'hex'))
  } catch {
    return null
  }
}
for await (const line of createInterface({ input: process.stdin })) {
  const { identify, payloads } = JSON.parse(line)
  console.log(JSON.stringify({
    identify: identify.map(decoded((bytes) => {
      const found = Identify.decode(bytes)
      return [
        hex(found.publicKey), found.listenAddrs.map(hex), found.protocols, hex(found.observedAddr),
        found.protocolVersion, found.agentVersion
      ]
    })),
    payloads: payloads.map(decoded((bytes) => {
      const found = NoiseHandshakePayload.decode(bytes)
      return [hex(found.identityKey), hex(found.identitySig)]
    }))
  }))
}
