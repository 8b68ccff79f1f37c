"""One request to one server."""

import asyncio
import socket

from workmem.gateway.config import UpstreamConfig
from workmem.gateway.sending import Hop, Outgoing, Sender
from workmem.gateway.servers import UpstreamServer


def test_a_connection_notices_that_its_host_is_gone():
    async def look():
        ended = asyncio.Event()

        async def stall(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99\r\n\r\n")
            await reader.read()
            writer.close()
            await writer.wait_closed()
            ended.set()

        listener = await asyncio.start_server(stall, "127.0.0.1", 0)
        server = UpstreamServer(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        sender = Sender(UpstreamConfig())
        await sender.open()
        try:
            hop = await sender.send(server, Outgoing(method="POST", target="/x", headers={}, body=b"{}"))
            assert isinstance(hop, Hop)
            assert server.in_flight == 1
            used = hop.answer.connection.transport.get_extra_info("socket")
            found = [used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
            found += [
                used.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            ]
            hop.close()
            hop.close()
            assert server.in_flight == 0
            await ended.wait()
            return found
        finally:
            await sender.close()
            listener.close()

    is_on, idle_s, every_s, times = asyncio.run(look())
    assert is_on
    assert idle_s + every_s * times <= 30
