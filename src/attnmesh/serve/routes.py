"""The routes: chat completions, completions, the model, health, figures and the page."""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial as partial_of
from importlib.resources import files
from pathlib import Path
from secrets import randbits
from traceback import extract_tb
from types import MappingProxyType
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from attnmesh.serve.access import AccessMiddleware, Limits
from attnmesh.serve.answer_parts import find_formats
from attnmesh.serve.body import Bodies
from attnmesh.serve.chat import (
    EncodedPrompt,
    decode_tokens,
    encode_chat,
    encode_either,
    encode_text,
    has_images,
    offered_tools,
)
from attnmesh.serve.completion_objects import CompletionObjects, encode_json
from attnmesh.serve.encoders import LONG_BODY_BYTES, PromptEncoders, too_long
from attnmesh.serve.grammars import Grammars, content_format
from attnmesh.serve.metrics import ServerState
from attnmesh.serve.refused import Refused
from attnmesh.serve.reply import ClientGone, EventStream, Reply, while_connected
from attnmesh.serve.request_fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, read_fields, shown
from attnmesh.serve.responses_reply import ResponseReply
from attnmesh.serve.responses_request import ResponseRequest
from attnmesh.serve.spelling import Spelling
from attnmesh.serve.supervisor import Supervisor

T = TypeVar("T")

NEW_OF_CHAT, NEW_OF_COMPLETION = 2048, 16
"""New tokens of requests that name no limit, if they fit."""

SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
"""Fields that say how the ranks draw tokens."""


class App:
    """The server of one model, of whose names responses have the first.

    A `processor` reads images; `defaults` are those of the model's generation_config.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        tokenizer: Any,
        names: Sequence[str],
        limits: Limits,
        processor: Any = None,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        tool_format: str = "auto",
    ) -> None:
        self.supervisor = supervisor
        self.names = tuple(names)
        self.limits = limits
        self.defaults = defaults
        self.formats = find_formats(tokenizer, tool_format)
        self.spelling = Spelling(tokenizer)
        self.grammars = Grammars(tokenizer, self.formats)
        self._bodies = Bodies(limits.max_body)
        self._encoders = PromptEncoders(processor or tokenizer)  # copies: the tokenizer itself decodes meanwhile
        self._page = files("attnmesh.serve").joinpath("page.html").read_text(encoding="utf-8")
        self._page_headers = {"content-security-policy": content_policy(self._page)}

    def asgi(self) -> ASGIApp:
        """Return the application, with the front's life as its own."""
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/", self.page),
        ]
        handlers: Any = {
            Refused: refuse_request,
            HTTPException: refuse_http,
            ClientGone: answer_nobody,
            Exception: self.refuse_unforeseen,
        }
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self.lifespan)
        return AccessMiddleware(app, self.limits, self.supervisor.metrics)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Start the ranks, and end them."""
        await self.supervisor.start()
        self.grammars.start()
        try:
            yield
        finally:
            await self.supervisor.close()
            self._encoders.close()
            self.grammars.close()

    async def refuse_unforeseen(self, _: HttpRequest, error: Exception) -> Response:
        """Return an error of the server's own, and log its kind and place: its text may hold parts of requests."""
        frame = extract_tb(error.__traceback__)[-1]
        self.supervisor.log(f"a request failed: {type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}")
        return JSONResponse(Refused(500, "The server failed on this request.").body, 500)

    # --- routes ---

    async def chat(self, http: HttpRequest) -> Response:
        """Answer messages."""
        fields, prompt = await self._read(http, partial_of(read_fields, known_fields=CHAT), encode_chat)
        return await self._answer_chat(http, fields, prompt, Reply)

    async def responses(self, http: HttpRequest) -> Response:
        """Answer items."""
        request = ResponseRequest()
        with request.naming_fields():
            fields, prompt = await self._read(http, request.read, encode_chat)
            return await self._answer_chat(http, fields, prompt, partial_of(ResponseReply, request))

    async def completions(self, http: HttpRequest) -> Response:
        """Go on with a prompt."""
        fields, prompt = await self._read(http, partial_of(read_fields, known_fields=COMPLETION), encode_text)
        objects = CompletionObjects(self.spelling, self.names[0], is_chat=False, top=fields["logprobs"])
        new_count = fields["max_tokens"] or self._default_new(len(prompt.ids), NEW_OF_COMPLETION)
        return await self._answer(http, fields, prompt, new_count, objects)

    async def tokenize(self, http: HttpRequest) -> Response:
        """Return the tokens of a text, or of messages."""
        _, (ids, texts) = await self._read_and_run(http, partial_of(read_fields, known_fields=TOKENIZE), encode_either)
        longest = self.supervisor.engine_sizes["max_model_len"]
        fields = {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": texts}
        return Response(await encode_json(fields), media_type="application/json")

    async def detokenize(self, http: HttpRequest) -> Response:
        """Return the text of tokens."""
        _, text = await self._read_and_run(http, partial_of(read_fields, known_fields=DETOKENIZE), decode_tokens)
        return Response(await encode_json({"prompt": text}), media_type="application/json")

    async def models(self, _: HttpRequest) -> Response:
        """List the one model by each of its names."""
        return JSONResponse({"object": "list", "data": [*map(self._model, self.names)]})

    async def model(self, http: HttpRequest) -> Response:
        """Describe the model."""
        self._check_model(http.path_params["name"], "name")
        return JSONResponse(self._model(http.path_params["name"]))

    async def health(self, _: HttpRequest) -> Response:
        """Return 200 if requests are served."""
        return JSONResponse(
            {"status": self.supervisor.status}, 200 if self.supervisor.status == ServerState.READY else 503
        )

    async def metrics(self, _: HttpRequest) -> Response:
        """Return the figures for Prometheus."""
        return Response(self.supervisor.metrics.text(), media_type="text/plain; version=0.0.4")

    async def page(self, _: HttpRequest) -> Response:
        """Return the page."""
        return Response(self._page, media_type="text/html", headers=self._page_headers)

    # --- a request ---

    def _model(self, name: str) -> dict[str, Any]:
        length = self.supervisor.engine_sizes.get("max_model_len")
        return {"id": name, "object": "model", "created": 0, "owned_by": "attnmesh", "max_model_len": length}

    def _check_model(self, name: str, param: str) -> None:
        if name not in self.names:
            expected = " or ".join(map(repr, self.names))
            raise Refused(404, f"model: expected {expected}, given {shown(name)}", param, "model_not_found")

    async def _read(
        self, http: HttpRequest, read: Callable[..., dict[str, Any]], encode: Callable[..., EncodedPrompt]
    ) -> tuple[dict[str, Any], EncodedPrompt]:
        """Return the fields of a request, tested, and the tokens of its prompt, which fits."""
        fields, prompt = await self._read_and_run(http, read, encode)
        longest = self.supervisor.engine_sizes["max_model_len"]
        if not prompt.ids:
            name = "messages" if "messages" in fields else "prompt"
            raise Refused(400, f"{name}: expected at least one token", name)
        if len(prompt.ids) >= longest:
            raise too_long(f"{len(prompt.ids)} tokens,", longest)
        return fields, prompt

    async def _read_and_run(
        self, http: HttpRequest, read: Callable[..., dict[str, Any]], convert: Callable[..., T]
    ) -> tuple[dict[str, Any], T]:
        """Return the fields of a request, which a thread reads, and what another one makes of them."""
        self.supervisor.check_ready()
        longest = self.supervisor.engine_sizes["max_model_len"]
        read_with_defaults = partial_of(read, defaults=self.defaults)
        async with self._bodies.read(http, longest, read_with_defaults) as (fields, nbytes):
            if fields["model"] is not None:
                self._check_model(fields["model"], "model")
            with self.supervisor.admit(fields.get("n", 1)):
                is_long = nbytes > LONG_BODY_BYTES or has_images(fields)
                work = self._encoders.run(convert, fields, is_long, longest)
                return fields, await while_connected(http.receive, work)

    def _default_new(self, prompt_tokens: int, most: int) -> int:
        """Return how many new tokens fit without passing a length at which ropes change."""
        sides = [switch for switch in self.supervisor.engine_sizes.get("rope_switches", ()) if prompt_tokens < switch]
        limit: int = min(self.supervisor.engine_sizes["max_model_len"], *sides, prompt_tokens + most)
        return limit - prompt_tokens

    def _biases(self, given: dict[str, float] | None) -> list[tuple[int, float]]:
        """Return the tokens of a bias with their numbers, or raise on one that the tokenizer has not got."""
        tokens = len(self.spelling.tokenizer)
        biases = {int(name): value for name, value in (given or {}).items()}
        if unknown := [token for token in biases if token >= tokens]:
            raise Refused(400, f"logit_bias: expected token ids of 0 to {tokens - 1}, given {unknown[0]}", "logit_bias")
        return sorted(biases.items())

    async def _answer_chat(
        self, http: HttpRequest, fields: dict[str, Any], prompt: EncodedPrompt, make: Callable[..., Reply]
    ) -> Response:
        """Answer messages, which follow the grammar that is asked for."""
        new_count = fields["max_completion_tokens"] or fields["max_tokens"]
        new_count = new_count or self._default_new(len(prompt.ids), self.defaults.get("max_new_tokens", NEW_OF_CHAT))
        top = (fields["top_logprobs"] or 0) if fields["logprobs"] else None
        either = content_format(fields) is not None
        split = self.formats.parts(offered_tools(fields), prompt.end, either=either)
        objects = CompletionObjects(
            self.spelling,
            self.names[0],
            is_chat=True,
            top=top,
            make_parts=split,
            parallel=fields["parallel_tool_calls"],
        )
        with self.supervisor.admit(fields["n"]):
            fields["grammar"] = await while_connected(http.receive, self.grammars.of(fields, prompt.end))
        return await self._answer(http, fields, prompt, new_count, objects, make)

    async def _answer(
        self,
        http: HttpRequest,
        fields: dict[str, Any],
        prompt: EncodedPrompt,
        new_count: int,
        objects: CompletionObjects,
        make: Callable[..., Reply] = Reply,
    ) -> Response:
        """Submit a request for each choice, and answer with their tokens. The fields are let go: they may be large."""
        longest = self.supervisor.engine_sizes["max_model_len"]
        room = longest - len(prompt.ids)
        if new_count > room:
            name = "max_tokens" if fields["max_tokens"] is not None else "max_completion_tokens"
            left = f"what the context of {longest} tokens leaves beside a prompt of {len(prompt.ids)}"
            raise Refused(400, f"{name}: expected 1 to {room}, {left}, given {new_count}", name)
        seed = randbits(63) if fields["seed"] is None else fields["seed"]  # a replay needs the same seed
        options = {name: fields[name] for name in SAMPLED} | {"logit_bias": self._biases(fields["logit_bias"])}
        options |= {"max_new_tokens": new_count, "logprobs": 0 if objects.top is None else max(1, objects.top)}
        options["salt"] = salt_of(http.scope["api_key"], fields["cache_salt"])
        if (grammar := fields.get("grammar")) is not None:
            options["grammar"] = grammar
        choices = [options | {"seed": (seed + index) % (1 << 63)} for index in range(fields["n"])]
        stop = fields["stop"] or []
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        streams, include_usage = fields["stream"], bool((fields["stream_options"] or {}).get("include_usage"))
        fields.clear()
        reply = make(self.supervisor, objects, prompt, choices, stops)
        if streams:
            await reply.while_connected(http.receive, reply.wait_until_accepted())
            return EventStream(reply, include_usage)
        whole = await reply.while_connected(http.receive, reply.whole())
        return Response(whole, media_type="application/json")


def salt_of(key: str, salt: str | None) -> str:
    """Return the name of those who share prefixes, from which nobody finds their key.

    >>> salt_of("", None), salt_of("secret", "a") == salt_of("secret", "b")
    ('', False)
    """
    given = json.dumps([key, salt]) if key or salt else ""
    return hashlib.sha256(given.encode()).hexdigest() if given else ""


def content_policy(page: str) -> str:
    """Return the policy that lets a page run its own script and style, and reach this server alone."""
    digests = []
    for kind in ("script", "style"):
        texts = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        hashes = " ".join(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
        digests.append(f"{kind}-src {hashes}")
    return "; ".join(("default-src 'none'", *digests, "connect-src 'self'", "frame-ancestors 'none'"))


async def refuse_request(_: HttpRequest, error: Exception) -> Response:
    """Return what was refused, in OpenAI's shape."""
    assert isinstance(error, Refused)
    return JSONResponse(error.body, error.status, error.headers)


async def refuse_http(http: HttpRequest, error: Exception) -> Response:
    """Return an unknown path or method in OpenAI's shape, with those that are known."""
    assert isinstance(error, HTTPException)
    known = [
        f"{min(route.methods - {'HEAD'})} {route.path.replace('{name:path}', 'NAME')}" for route in http.app.routes
    ]
    given = shown(f"{http.method} {http.url.path}")
    text = f"{'path' if error.status_code == 404 else 'method'}: expected one of {', '.join(known)}, given {given}"
    text = text if error.status_code in (404, 405) else error.detail
    return JSONResponse(Refused(error.status_code, text).body, error.status_code, error.headers)


async def answer_nobody(_: HttpRequest, error: Exception) -> Response:
    """Return something that nobody reads: the client has gone."""
    return Response(status_code=499)
