"""The HTTP surface: OpenAI-compatible routes, and those for operation.

Bodies are parsed by `protocol` instead of by the framework, so that every refusal has the same shape; the schemas
shown in /openapi.json come from the same models.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from router import idempotency, request_headers
from router.access_log import AccessLog
from router.api_keys import ApiKeys
from router.conversation import Conversation
from router.errors import ApiError, Cause, invalid
from router.formats import ChatFormat, CompletionFormat, Format, openai_error
from router.http_edge import Arrival, HttpEdge
from router.idempotency import key_id, request_digest
from router.messages_format import MessagesFormat, anthropic_error
from router.messages_protocol import CountTokensRequest, MessagesRequest
from router.protocol import (
    MAX_TOKENIZE_CHARACTERS,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from router.request_flow import RequestFlow
from router.responses import Generation, GenerationResponse
from router.responses_api_protocol import ResponsesRequest
from router.service import RouterService
from router.shared_answer import SharedAnswer
from router.tokenizer import ChatTokenizer

AnyRequest = TypeVar("AnyRequest", ChatCompletionRequest, CompletionRequest)
NOT_SERVED = {
    "/v1/audio": "speech, which a model of text neither hears nor speaks",
    "/v1/classify": "classes, which a generative model does not give",
    "/v1/embeddings": "embeddings, which a generative model does not give",
    "/v1/images": "pictures, which a model of text does not make",
    "/v1/moderations": "classes, which a generative model does not give",
    "/v1/pooling": "embeddings, which a generative model does not give",
    "/v1/rerank": "scores, which a generative model does not give",
    "/v1/score": "scores, which a generative model does not give",
}
"""Routes that clients of this API know, by their beginning, and what they are for."""
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_app(service: RouterService) -> FastAPI:
    """The application around `service`, which may be started before or after; requests need it started."""
    app = FastAPI(title="serried", docs_url=None, redoc_url=None)
    app.add_middleware(
        HttpEdge,
        api_keys=ApiKeys(service.settings.api_keys),
        max_body_bytes=service.settings.max_body_bytes,
        body_timeout_s=service.settings.body_timeout_s,
        send_timeout_s=service.settings.send_timeout_s,
        count=service.metrics.rejected,
        access_log=AccessLog(),
        error_body=_error_body,
    )
    _add_error_handlers(app, service)
    _add_generation_routes(app, service)
    _add_token_routes(app, service)
    _add_operation_routes(app, service)
    return app


def _add_generation_routes(app: FastAPI, service: RouterService) -> None:
    async def answer(
        http: Request,
        id_prefix: str,
        parse_body: Callable[[bytes], AnyRequest],
        kind: Callable[[AnyRequest, str, str, ChatTokenizer], Format],
        error_body: Callable[[ApiError], bytes] = openai_error,
    ) -> Response:
        arrival: Arrival = http.state.arrival
        headers = http.scope["headers"]
        caller = request_headers.caller(headers, arrived_at=arrival.at, api_key=arrival.api_key)
        key = request_headers.name(headers, idempotency.HEADER)
        body = await http.body()
        request_id = f"{id_prefix}-{arrival.request_id}"

        async def open_flow() -> tuple[RequestFlow, Format]:
            admitted = await service.admit(request_id, caller, headers, body)
            try:
                request = parse_body(body)
                _check_model(service, request.model)
                form = kind(request, request_id, service.settings.model_name, service.tokenizer)
            except BaseException:
                admitted.release()
                raise
            return service.open_flow(request, request_id, admitted.caller, admitted), form

        generation = Generation(request_id, open_flow, service.metrics.rejected, error_body, arrival.figures.update)
        if key is None:
            return GenerationResponse(generation.run)
        key, digest = key_id(caller.account, key), request_digest(http.url.path, body)
        return _keyed_response(service, key, digest, generation, arrival)

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer to a conversation."""
        return await answer(request, "chatcmpl", lambda body: parse(body, ChatCompletionRequest), ChatFormat)

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continuation of one or more prompts."""
        return await answer(request, "cmpl", lambda body: parse(body, CompletionRequest), CompletionFormat)

    @app.post("/v1/responses", openapi_extra=_body_schema(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer to a conversation that may be gone on with by its id."""
        arrival: Arrival = request.state.arrival
        conversation = Conversation(service.responses, arrival.account)
        return await answer(request, "resp", conversation.parse, conversation.form)

    @app.get("/v1/responses/{response_id}")
    async def response_by_id(response_id: str, request: Request) -> Response:
        """One that was stored."""
        arrival: Arrival = request.state.arrival
        return Response(service.responses.get(response_id, arrival.account).response, media_type="application/json")

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> Response:
        """Forget one that was stored."""
        arrival: Arrival = request.state.arrival
        service.responses.get(response_id, arrival.account)
        service.responses.drop(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(response_id: str, request: Request) -> Response:
        """End one that is being written, wherever that is."""
        arrival: Arrival = request.state.arrival
        await service.cancel(response_id, arrival.account)
        return _json({"id": response_id, "object": "response", "status": "cancelled", "output": []})

    @app.post("/v1/messages", openapi_extra=_body_schema(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Answer to a conversation, in Anthropic's form."""
        return await answer(
            request, "msg", lambda body: parse(body, MessagesRequest).chat(), MessagesFormat, anthropic_error
        )

    @app.post("/v1/messages/count_tokens", openapi_extra=_body_schema(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        """How many tokens a conversation's prompt has."""
        chat = parse(await request.body(), CountTokensRequest).chat()
        _check_model(service, chat.model)
        return _json({"input_tokens": len(await service.prompt_tokens(chat))})


def _keyed_response(
    service: RouterService, key: str, digest: bytes, generation: Generation, arrival: Arrival
) -> Response:
    """The answer under this idempotency key: the one that is there or on its way, else a new one."""
    loop, answers = asyncio.get_running_loop(), service.answers
    answer = answers.find(key, digest, loop.time())
    if answer is not None:
        arrival.figures["is_replayed"] = True
        return GenerationResponse(partial(answer.read, is_joining=True))

    def ended(answer: SharedAnswer, is_whole: bool) -> None:
        answers.ended(key, answer, is_whole=is_whole, now=loop.time())

    answer = SharedAnswer(digest, service.settings.idempotency_max_bytes, ended)
    answers.add(key, answer)
    answer.start(partial(generation.run, before=partial(service.begin_keyed, key)))
    return GenerationResponse(partial(answer.read, is_joining=False))


def _add_token_routes(app: FastAPI, service: RouterService) -> None:
    tokenizer = service.tokenizer

    @app.post("/tokenize", openapi_extra=_body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or a conversation."""
        asked = parse(await request.body(), TokenizeRequest)
        _check_model(service, asked.model)
        if asked.messages is not None:
            text = tokenizer.render_chat(
                [message.for_template() for message in asked.messages],
                add_generation_prompt=asked.begins_answer,
                continue_final_message=bool(asked.continue_final_message),
                variables=asked.chat_template_kwargs,
                tools=[tool.for_template() for tool in asked.tools or ()],
            )
        else:
            text = asked.prompt or ""
        add_special_tokens = asked.messages is None if asked.add_special_tokens is None else asked.add_special_tokens
        _check_length(text, "prompt" if asked.messages is None else "messages")
        token_ids = await tokenizer.encode(text, add_special_tokens=add_special_tokens)
        token_strs = await tokenizer.token_strs(token_ids) if asked.return_token_strs else None
        return _json(
            {
                "count": len(token_ids),
                "max_model_len": service.settings.max_model_len,
                "tokens": token_ids,
                "token_strs": token_strs,
            }
        )

    @app.post("/detokenize", openapi_extra=_body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        asked = parse(await request.body(), DetokenizeRequest)
        _check_model(service, asked.model)
        if asked.tokens and (largest := max(asked.tokens)) >= tokenizer.vocab_size:
            raise invalid(
                f"tokens: token id {largest} is not in the model's vocabulary of {tokenizer.vocab_size}", "tokens"
            )
        return _json({"prompt": await tokenizer.decode(asked.tokens)})


def _add_operation_routes(app: FastAPI, service: RouterService) -> None:
    settings = service.settings
    model = {
        "id": settings.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "serried",
        "max_model_len": settings.max_model_len,
    }

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model that this cluster serves."""
        return _json({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def model_by_name(name: str) -> Response:
        """The same, by name."""
        _check_model(service, name)
        return _json(model)

    @app.get("/v1/requests/{request_id:path}/explain")
    async def explain(request_id: str) -> Response:
        """Where a request is, why it waits, and what has happened to it, by the id of its answer."""
        return _json(await service.explain(request_id))

    @app.delete("/v1/requests/{request_id:path}")
    async def cancel(request_id: str, request: Request) -> Response:
        """End a request wherever it is, by the id of its answer; its client gets the error `cancelled`."""
        arrival: Arrival = request.state.arrival
        await service.cancel(request_id, arrival.account)
        return _json({"id": request_id, "cancelled": True})

    @app.get("/version")
    async def version() -> Response:
        """Of this software."""
        return _json({"version": metadata.version("serried")})

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """200 while the process answers."""
        return _json({"status": "ok"})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """200 while the control actor and at least one rank are connected, 503 otherwise; figures in both cases."""
        is_ready, figures = service.readiness()
        return _json(figures, status=200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(service.metrics.exposition(), headers={"content-type": METRICS_CONTENT_TYPE})


def _not_served(path: str) -> str | None:
    return next((what for prefix, what in NOT_SERVED.items() if path == prefix or path.startswith(f"{prefix}/")), None)


def _error_body(path: str, error: ApiError) -> bytes:
    """In the shape of the API that the path belongs to."""
    is_anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
    return anthropic_error(error) if is_anthropic else openai_error(error)


def _add_error_handlers(app: FastAPI, service: RouterService) -> None:
    """For what fails outside of a request's flow, which counts and answers its own failures."""

    def refusal(request: Request, error: ApiError) -> Response:
        service.metrics.rejected(error)
        request.state.arrival.figures["cause"] = str(error.cause)
        body = _error_body(request.url.path, error)
        return Response(body, error.status, error.headers(), media_type="application/json")

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return refusal(request, error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        place = f"{request.method} {request.url.path}"
        if error.status_code == 404 and (what := _not_served(request.url.path)):
            message = f"{place} is for {what}; only {service.settings.model_name!r} is served here"
            return refusal(request, ApiError(Cause.NOT_FOUND, message))
        if error.status_code == 404:
            return refusal(request, ApiError(Cause.NOT_FOUND, f"no such route: {place}; see /openapi.json"))
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            response = refusal(request, ApiError(Cause.METHOD_NOT_ALLOWED, f"{place} is not allowed; use {allowed}"))
            response.headers["allow"] = allowed
            return response
        response = refusal(request, invalid(f"{place}: {error.detail}"))
        response.status_code = error.status_code
        return response

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return refusal(request, invalid(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"))

    @app.exception_handler(ClientDisconnect)
    async def on_client_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return refusal(request, ApiError(Cause.CLIENT_GONE, "the client left within its request"))  # nobody reads it


def _check_model(service: RouterService, name: str | None) -> None:
    known = service.settings.model_name
    if name is not None and name != known:
        shown = name if len(name) <= 200 else f"{name[:200]}…"
        raise ApiError(Cause.MODEL_NOT_FOUND, f"model: {shown!r} is not served here; use {known!r}", "model")


def _check_length(text: str, param: str) -> None:
    if len(text) > MAX_TOKENIZE_CHARACTERS:
        raise invalid(
            f"{param}: has {len(text)} characters, at most {MAX_TOKENIZE_CHARACTERS} are allowed; split the text", param
        )


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def _body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(kind)}}}}


def _inlined(kind: type[BaseModel]) -> dict[str, Any]:
    """The model's JSON schema without references, which would point nowhere inside the application's document."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if isinstance(node, dict):
            if "$ref" in node:
                return resolve(definitions[node["$ref"].rsplit("/", 1)[1]])
            return {key: resolve(value) for key, value in node.items()}
        return node

    resolved: dict[str, Any] = resolve(schema)
    return resolved
