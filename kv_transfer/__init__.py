"""KV between ranks, and the authenticated framed connections that all control traffic uses.

`wire` is pure: frames and the handshake as bytes in, bytes out. `connection` is its asyncio edge, used by routers,
ranks and the control actor alike, on the owner's event loop; nothing here has a thread.

`connector` is the contract between a rank's scheduler and a KV connector's deciding half, which is pure as well: asked
while requests wait what it could load, told of the blocks that it may fill, asked at a request's end whether somebody
still reads its blocks. What moves the data is at the rank's edge, gets each plan's metadata, and answers with events.
No connector ships yet.
"""
