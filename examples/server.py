"""A small inference server that uses only the standard library: JSON in and out, a thread per request.

    python examples/server.py                 # serves a few requests to itself, and stops
    python examples/server.py --port 8000     # serves until interrupted
    curl -d '{"rows": [[0, 0, 0, 0, 0, 0, 0, 0]]}' localhost:8000

It needs no TorchScript: every thread calls the converted model. `build` captures the model three times before
the server starts: for the first batch size, with that dimension dynamic, and for a batch of one.
"""

from __future__ import annotations

import argparse
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

import torch
from torch import nn

import ampgraph

FEATURES, SIZES, CLIENTS = 8, (1, 7, 2, 33, 4, 12, 3, 64), 4


def build() -> ampgraph.AmpModule:
    """Level O3 stores the weights in bfloat16; the answers stay float32."""
    torch.manual_seed(0)
    body = (nn.Linear(FEATURES, 64), nn.LayerNorm(64), nn.GELU())
    model = nn.Sequential(*body, nn.Linear(64, 3), nn.Softmax(-1)).eval()
    amp = ampgraph.convert(model, (torch.zeros(2, FEATURES),), policy="O3", dtype=torch.bfloat16)
    with torch.inference_mode():
        for size in (3, 1):
            amp(torch.zeros(size, FEATURES))
    return amp


def server_of(amp: ampgraph.AmpModule, port: int = 0) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["rows"]
                x = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), FEATURES)
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                return self.answer(400, {"error": f'send {{"rows": [[{FEATURES} numbers], ...]}}: {error}'})
            with torch.inference_mode():  # it holds for one thread
                return self.answer(200, {"probabilities": amp(x).tolist()})

        def answer(self, status: int, content: dict) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def ask(port: int, rows: list) -> list:
    request = Request(f"http://127.0.0.1:{port}", json.dumps({"rows": rows}).encode())
    with urlopen(request, timeout=30) as answer:
        return json.load(answer)["probabilities"]


def main(clients: int = CLIENTS) -> dict[str, float]:
    """Serves each size to each of several clients at once, and compares with direct calls."""
    amp = build()
    batches = [torch.randn(size, FEATURES) for size in SIZES]
    with torch.inference_mode():
        expected = [amp(x) for x in batches]
    with server_of(amp) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with ThreadPoolExecutor(clients) as pool:
            answers = list(pool.map(lambda x: ask(server.server_port, x.tolist()), batches * clients))
        server.shutdown()
    pairs = zip(answers, expected * clients, strict=True)
    return {
        "requests": len(answers),
        "equal to the direct call": sum(torch.equal(torch.tensor(a), b) for a, b in pairs),
        "graphs captured": len(amp.graph_modules),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int)
    port = parser.parse_args().port
    if port is not None:
        server_of(build(), port).serve_forever()
    for name, value in main().items():
        print(f"{name:26} {value:g}")
