"""Measures the highest token rate that the client of `kvferry bench serve` can receive.

Run as `python -m kvferry.ops.bench.serve.ceiling`. Another process streams prepared events, one per token and each
stream in turn, without a model. The ceiling follows from the client's CPU time per token: 6 to 12 us on two busy cores
of an AMD EPYC, so about 100,000 tokens per second. A run with a `client.cpu_share` near 1 is limited by the client.
"""

import argparse
import asyncio
import subprocess
import sys

from kvferry.common.base.python_command import python_command
from kvferry.ops.bench.serve.load import RequestLoad
from kvferry.ops.bench.serve.run import ServeBench, measure_server
from kvferry.ops.cli.numbers import positive

_TOKENS = 2000
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_CONFIG = b'{"vocab_size": 1000}'


def main() -> int:
    """Print one line for each number of streams."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.ops.bench.serve.ceiling", description=__doc__)
    parser.add_argument(
        "--streams", type=positive, nargs="+", default=[1, 32, 256], help="numbers of streams (1 32 256)"
    )
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.server:
        asyncio.run(_serve())
        return 0
    command = python_command("kvferry.ops.bench.serve.ceiling", "--server")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            for streams in args.streams:
                load = RequestLoad(2 * streams, 8, _TOKENS, streams, None, 1, 1000)
                report = asyncio.run(measure_server(ServeBench(url, "m", "infer", load, 1, 600.0), lambda _: None))
                cpu_s = report.client.cpu_share * report.duration_s / report.output_tokens
                sys.stdout.write(
                    f"{streams:4d} streams: {cpu_s * 1e6:5.1f} us per token: at most {1 / cpu_s:7.0f} tokens/s; "
                    f"received {report.output_tok_s:.0f}\n"
                )
        finally:
            server.terminate()
    return 0


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    events = [_chunk(b'data: {"id":"1","index":%d,"token_ids":[%d]}\n\n' % (i, i % 1000)) for i in range(_TOKENS - 1)]
    last = b'data: {"id":"1","index":%d,"token_ids":[7],"finish_reason":"length"}\n\n' % (_TOKENS - 1)
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(_CONFIG) + _CONFIG)
                continue
            writer.write(_HEAD)
            for event in events:
                writer.write(event)
                await writer.drain()
                # Switch to the other streams: one token per stream, as from a server's step.
                await asyncio.sleep(0)
            writer.write(_chunk(last) + b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


if __name__ == "__main__":
    sys.exit(main())
