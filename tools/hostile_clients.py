"""Hostile clients of a server: what they do, and the statuses that it may get.

They run in a process of their own, which imports nothing that takes a second.
"""

import http.client
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from random import Random
from typing import Any

MODEL = "small"
HOSTILE = 6
"""Clients at a time."""
MAX_BODY = 1 << 20
PATIENCE = 120.0
"""Seconds after which a client gives up waiting."""

Status = int | str
"""The status of a response; "closed" without one."""
REFUSED: tuple[Status, ...] = (400, 429, 503)
ANY: tuple[Status, ...] = (200, *REFUSED)


# --- raw requests ---


def connect(port: int) -> socket.socket:
    """Return a connection to the server."""
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def head(path: str, length: int | None, *, method: str = "POST", more: str = "") -> bytes:
    """Return the head of a request; without a length its body comes in chunks."""
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    lines = f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", size
    return "\r\n".join((*lines, *([more] if more else []), "", "")).encode()


def status_of(connection: socket.socket) -> Status:
    """Return the status of the response that comes, and see that it is of OpenAI's shape if it is a refusal."""
    response = http.client.HTTPResponse(connection)
    try:
        response.begin()
        body = response.read()
    except (http.client.HTTPException, OSError):
        return "closed"
    finally:
        response.close()
    if response.status >= 400 and "message" not in json.loads(body or b"{}").get("error", {}):
        return f"{response.status} in another shape"
    return response.status


def ask(port: int, body: bytes, path: str = "/v1/completions", **options: str) -> Status:
    """Send a whole request. Return the status of its response."""
    with connect(port) as connection:
        with suppress(OSError):  # a refusal may come, and the connection end, before all is sent
            connection.sendall(head(path, len(body), **options) + body)
        return status_of(connection)


def completion(random: Random, **fields: Any) -> dict[str, Any]:
    """Return a small request that fits."""
    prompt = "".join(random.choices("abc xyz", k=random.randrange(1, 60)))
    return {"model": MODEL, "prompt": prompt, "max_tokens": random.randrange(1, 20), "temperature": 0, **fields}


def chat(random: Random, **fields: Any) -> dict[str, Any]:
    """Return a small chat that fits."""
    messages = [{"role": "user", "content": "".join(random.choices("abc xyz", k=20))}]
    return {"model": MODEL, "messages": messages, "max_tokens": random.randrange(1, 20), **fields}


# --- what hostile clients do ---


def many_names(port: int, random: Random) -> Status:
    """Send a body with many names: comparing all pairs of them would take minutes."""
    names = (f'"{n}":0' for n in range(random.choice((10_000, 40_000))))
    return ask(port, f"{{{','.join(names)}}}".encode())


def same_names(port: int, random: Random) -> Status:
    """Send one name again and again, also inside of a message."""
    twice = ",".join(['"role":"user"'] * random.randrange(2, 20_000))
    return ask(port, f'{{"model":"{MODEL}","messages":[{{{twice}}}]}}'.encode(), "/v1/chat/completions")


def deep_body(port: int, random: Random) -> Status:
    """Send lists in lists, or objects in objects."""
    depth = random.choice((100, 1_000, 100_000))
    opening, closing = random.choice((("[", "]"), ('{"a":', "}")))
    inner = opening * depth + "1" + closing * depth
    return ask(port, f'{{"model":"{MODEL}","prompt":{inner}}}'.encode()[:MAX_BODY])


def broken_json(port: int, random: Random) -> Status:
    """Send a body with some bytes changed."""
    body = bytearray(json.dumps(completion(random)).encode())
    for _ in range(random.randrange(1, 6)):
        body[random.randrange(len(body))] = random.randrange(256)
    return ask(port, bytes(body))


def odd_numbers(port: int, random: Random) -> Status:
    """Send numbers that no field can have."""
    number = random.choice(("NaN", "1e999", "-1", "1" * 5_000, "0.1", "true", "null", "[]", '"1"', "-0"))
    name = random.choice(("max_tokens", "temperature", "top_p", "top_k", "seed", "n", "logprobs", "prompt", "stop"))
    return ask(port, f'{{"model":"{MODEL}","prompt":"a","max_tokens":3,"{name}":{number}}}'.encode())


def random_field(port: int, random: Random) -> Status:
    """Send a field with a value of some other kind."""
    value: Any = random.choice(("", "\ud800", [[]], {"type": "x"}, [1, -5, 2**40], ["a"] * 500, 7e20, False, "\0"))
    name = random.choice(("messages", "tools", "stop", "stream_options", "response_format", "logit_bias", "model", "x"))
    body = json.dumps(chat(random) | {name: value}).encode()
    return ask(port, body, "/v1/chat/completions")


def long_text(port: int, random: Random) -> Status:
    """Send a text beyond every context, which a tokenizer would take long for."""
    text = random.choice(("a", "é", " a", "\u4e2d")) * (MAX_BODY // 8)
    return ask(port, json.dumps(completion(random, prompt=text)).encode())


def large_body(port: int, random: Random) -> Status:
    """Send more than a body may have, and sometimes less than announced."""
    announced, sent = random.choice(((MAX_BODY * 3, MAX_BODY * 3), (10**15, 1000), (None, MAX_BODY * 2)))
    with connect(port) as connection, suppress(OSError):
        connection.sendall(head("/v1/completions", announced))
        data = b"x" * sent
        connection.sendall(data if announced is not None else b"%x\r\n" % sent + data + b"\r\n0\r\n\r\n")
        if announced == sent or announced is None:
            return status_of(connection)
    return "closed"


def images(port: int, random: Random) -> Status:
    """Send images, or what calls itself one, to a model that sees none."""
    url = random.choice(("data:image/png;base64,AAAA", "http://127.0.0.1:1/x.png", "file:///etc/passwd", "data:,"))
    content = [{"type": "image_url", "image_url": {"url": url}}] * random.randrange(1, 200)
    body = chat(random, messages=[{"role": "user", "content": content}], n=16)
    return ask(port, json.dumps(body).encode(), "/v1/chat/completions")


def odd_http(port: int, random: Random) -> Status:
    """Send what is no HTTP, or hardly."""
    data = random.choice(
        (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(100),
            random.randbytes(500) + b"\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -1\r\n\r\n",
            b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            b"GET /health HTTP/1.1\r\nhost: evil.example\r\n\r\n",
            b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 9_000 + b"\r\n",
            head("/v1/models", 0, method="GET") * 300,
        )
    )
    with connect(port) as connection, suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return status_of(connection)
    return "closed"


def odd_path(port: int, random: Random) -> Status:
    """Ask for what is not there."""
    path = random.choice(("/v1/../etc", "/v1/models/%00", "/v1/embeddings", "//", "/v1/models/" + "a" * 5_000))
    return ask(port, b"", path, method=random.choice(("GET", "PUT", "DELETE", "POST", "TRACE")))


def slow_head(port: int, random: Random) -> Status:
    """Send a head byte by byte, and never its end."""
    with connect(port) as connection, suppress(OSError):
        for byte in head("/v1/completions", 10)[: random.randrange(5, 20)]:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
    return "closed"


def slow_body(port: int, random: Random) -> Status:
    """Send a body in small pieces, and go before its end."""
    with connect(port) as connection, suppress(OSError):
        connection.sendall(head("/v1/completions", 100_000))
        for _ in range(random.randrange(5, 20)):
            connection.sendall(b" " * 500)
            time.sleep(0.05)
    return "closed"


def cancel(port: int, random: Random) -> Status:
    """Begin a stream, and go in its middle, politely or not."""
    body = json.dumps(completion(random, stream=True, max_tokens=200, n=random.choice((1, 4)))).encode()
    with connect(port) as connection, suppress(OSError):
        connection.sendall(head("/v1/completions", len(body)) + body)
        connection.recv(random.choice((1, 200, 4_000)))
        if random.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return "closed"


def slow_reader(port: int, random: Random) -> Status:
    """Begin streams with all their log-probabilities, and read nothing for a while."""
    body = json.dumps(completion(random, stream=True, max_tokens=300, logprobs=5, n=2)).encode()
    with connect(port) as connection, suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        connection.sendall(head("/v1/completions", len(body)) + body)
        time.sleep(random.uniform(0.2, 1.5))
    return "closed"


def flood(port: int, random: Random) -> Status:
    """Ask for far more than the queue takes, and wait for none of it."""
    connections = []
    for _ in range(random.randrange(10, 60)):
        body = json.dumps(completion(random, max_tokens=100, n=random.choice((1, 16)))).encode()
        with suppress(OSError):
            connections.append(connect(port))
            connections[-1].sendall(head("/v1/completions", len(body)) + body)
    time.sleep(random.uniform(0.0, 0.3))
    for connection in connections:
        connection.close()
    return "closed"


def ordinary(port: int, random: Random) -> Status:
    """Ask for what is served: neighbours that honest clients share the server with."""
    fields = {"temperature": random.choice((0, 1)), "n": random.choice((1, 2)), "seed": random.randrange(2**40)}
    return ask(port, json.dumps(completion(random, **fields)).encode())


Act = Callable[[int, Random], Status]
ACTS: dict[Act, tuple[Status, ...]] = {
    many_names: (400, 413, 503),
    same_names: (400, 413, 503),
    deep_body: (400, 413, 503),
    broken_json: (404, *ANY),
    odd_numbers: ANY,
    random_field: (404, *ANY),
    long_text: REFUSED,
    large_body: (413, 503, "closed"),
    images: REFUSED,
    odd_http: (200, 400, 403, 404, 405, "closed"),
    odd_path: (200, 400, 404, 405, "closed"),
    slow_head: ("closed",),
    slow_body: ("closed",),
    cancel: ("closed",),
    slow_reader: ("closed",),
    flood: ("closed",),
    ordinary: (200, 429, 503),
}
"""What hostile clients do, and the statuses that it may get. 500 is never among them."""


def harass(port: int, seed: int, pause: float, going: Any, ended: Any, seen: Any) -> None:
    """Act while it is going, first each act once, then at random, with pauses of up to `pause` seconds."""
    os.nice(5)  # clients stand for other machines: they should not take the processor from the server
    order = Random(seed).sample([*ACTS], len(ACTS))
    clients = [(Random(f"{seed}-{client}"), order[client::HOSTILE]) for client in range(HOSTILE)]
    threads = [threading.Thread(target=_harass_alone, args=(port, *one, pause, going, ended, seen)) for one in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _harass_alone(port: int, random: Random, first: list[Act], pause: float, going: Any, ended: Any, seen: Any) -> None:
    acts = chain(first, iter(lambda: random.choice([*ACTS]), None))
    while not ended.is_set():
        if not going.wait(0.2):
            continue
        act = next(acts)
        try:
            status: Status = act(port, random)
        except OSError:
            status = "closed" if port_listens(port) else "no server"
        seen.put((act.__name__, status, status in ACTS[act] or status == "closed"))
        ended.wait(random.uniform(0.0, pause))


def port_listens(port: int) -> bool:
    """Return whether somebody listens."""
    with suppress(OSError), connect(port):
        return True
    return False
