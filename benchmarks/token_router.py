"""A real router with its own HTTP server, for the rank of `benchmarks.token_rank`. A process of its own.

    python -m benchmarks.token_router CONTROL_PORT

Every byte is a token. Prints the port once requests can be served.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.token_rank import HOST, SECRET
from router.http_api import build_app
from router.service import RouterService, RouterSettings

MODEL = "bytes"


def write_model_dir(path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")


async def serve(control_port: int) -> None:
    async def control_address() -> tuple[str, int]:
        return HOST, control_port

    with tempfile.TemporaryDirectory() as folder:
        write_model_dir(Path(folder))
        service = RouterService(RouterSettings(model_name=MODEL, model_dir=Path(folder), max_model_len=8_192))
    await service.start(control_address, SECRET, "router")
    server = uvicorn.Server(
        uvicorn.Config(build_app(service), host=HOST, port=0, log_level="warning", access_log=False, lifespan="off")
    )
    serving = asyncio.create_task(server.serve())
    while not (server.started and service.readiness()[0]):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
