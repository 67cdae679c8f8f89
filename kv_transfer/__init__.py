"""KV between ranks, and the authenticated framed connections that all control traffic uses.

`wire` is pure: frames and the handshake as bytes in, bytes out. `connection` is its asyncio edge, used by
routers, ranks and the control actor alike. Everything runs on the owner's event loop; nothing here has a thread.
"""
