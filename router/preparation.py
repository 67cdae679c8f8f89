"""What a request asks for, in tokens: its prompts, how many tokens each may get, how they are picked.

Refuses what this model, or this server's scheduling policy, cannot do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rank_scheduler.messages import SamplingParams
from router.errors import ApiError, Cause, invalid
from router.protocol import (
    DEFAULT_COMPLETION_MAX_TOKENS,
    MAX_NUM_PROMPT_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
)
from router.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    max_tokens: int
    """To be generated behind it."""
    text: str = ""
    """If the answer shows it."""


class Preparation:
    """Of one request. Everything raises ApiError for what is refused."""

    def __init__(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        tokenizer: ChatTokenizer,
        *,
        max_model_len: int,
        policy: str,
    ) -> None:
        """`policy`: the ranks' scheduling policy."""
        self.request = request
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._policy = policy
        self._bad_words: tuple[tuple[int, ...], ...] = ()

    def check(self) -> None:
        """What can be told without the prompts' tokens."""
        request = self.request
        self._check_vocabulary(request.stop_token_ids or (), "stop_token_ids")
        self._check_vocabulary(request.allowed_token_ids or (), "allowed_token_ids")
        self._check_vocabulary(tuple(request.logit_bias or ()), "logit_bias")
        self._check_policy()

    async def prompts(self) -> list[Prompt]:
        """In the order in which they stand in the request."""
        prompts = []
        for index, token_ids in enumerate(await self._tokenize()):
            max_tokens = self._max_tokens(token_ids)
            self._check_vocabulary(token_ids, "prompt")
            prompts.append(Prompt(token_ids, max_tokens, await self._shown_text(index, token_ids)))
        self._check_size(sum(len(prompt.token_ids) for prompt in prompts))
        self._bad_words = await self._encode_bad_words()
        return prompts

    def sampling(self, seed: int, max_tokens: int) -> SamplingParams:
        request = self.request
        return SamplingParams(
            seed=seed,
            max_tokens=max_tokens,
            temperature=1.0 if request.temperature is None else float(request.temperature),
            top_p=1.0 if request.top_p is None else float(request.top_p),
            top_k=max(0, request.top_k or 0),
            min_p=0.0 if request.min_p is None else float(request.min_p),
            stop=tuple(request.stop),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            num_logprobs=request.num_logprobs,
            num_prompt_logprobs=request.num_prompt_logprobs,
            min_tokens=request.min_tokens or 0,
            repetition=request.repetition,
            repetition_penalty=1.0 if request.repetition_penalty is None else float(request.repetition_penalty),
            frequency_penalty=float(request.frequency_penalty or 0),
            presence_penalty=float(request.presence_penalty or 0),
            logit_bias=tuple((request.logit_bias or {}).items()),
            allowed_token_ids=tuple(request.allowed_token_ids or ()),
            bad_words=self._bad_words,
        )

    async def _tokenize(self) -> list[list[int]]:
        request = self.request
        if isinstance(request, ChatCompletionRequest):
            messages = [message.for_template() for message in request.messages]
            text = self._tokenizer.render_chat(
                messages,
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
                variables=request.chat_template_kwargs,
                tools=[tool.for_template() for tool in request.usable_tools],
            )
            return [self._truncated(await self._encode(text, add_special_tokens=bool(request.add_special_tokens)))]
        prompts = []
        for prompt in request.prompt:
            if isinstance(prompt, str):
                prompt = await self._encode(prompt, add_special_tokens=request.add_special_tokens is not False)
            prompts.append(self._truncated(prompt))
        return prompts

    async def _shown_text(self, index: int, token_ids: list[int]) -> str:
        """Of the prompt, as it was given, if that is its text."""
        request = self.request
        if isinstance(request, ChatCompletionRequest) or not request.echo:
            return ""
        given = request.prompt[index]
        if isinstance(given, str) and request.truncate_prompt_tokens is None:
            return given
        return await self._tokenizer.decode(token_ids)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Raises ApiError, without the work, if it is far too long for the model."""
        if self.request.truncate_prompt_tokens is None:
            at_least = self._tokenizer.min_num_tokens(text)
            if at_least >= self._max_model_len:
                raise self._too_long(f"has {len(text)} characters, which make {at_least} tokens or more")
        return await self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _truncated(self, token_ids: list[int]) -> list[int]:
        """The last tokens, as many as are asked for; -1: as leave room for what is to be generated."""
        most = self.request.truncate_prompt_tokens
        if most is None:
            return token_ids
        if most == -1:
            most = max(1, self._max_model_len - (self.request.asked_max_tokens or 1))
        return token_ids[-most:]

    async def _encode_bad_words(self) -> tuple[tuple[int, ...], ...]:
        """Each as it is, and as it stands behind a space, which other tokens may stand for."""
        spellings = dict.fromkeys(
            spelling for word in self.request.bad_words for spelling in (word, f" {word.lstrip()}")
        )
        encoded = [await self._tokenizer.encode(spelling, add_special_tokens=False) for spelling in spellings]
        return tuple(dict.fromkeys(tuple(token_ids) for token_ids in encoded if token_ids))

    def _check_size(self, num_prompt_tokens: int) -> None:
        """`num_prompt_tokens`: of all prompts, which each choice has for itself."""
        num_choices = self.request.num_choices
        num_tokens = num_prompt_tokens * num_choices
        if num_tokens > MAX_NUM_PROMPT_TOKENS:
            raise invalid(
                f"n: {num_prompt_tokens} prompt tokens for each of {num_choices} choices are {num_tokens} tokens, at "
                f"most {MAX_NUM_PROMPT_TOKENS} are allowed in one request; lower n, or send fewer or shorter prompts",
                "n" if num_choices > 1 else self._prompt_param,
            )

    @property
    def _prompt_param(self) -> str:
        return "messages" if isinstance(self.request, ChatCompletionRequest) else "prompt"

    def _too_long(self, size: str) -> ApiError:
        return ApiError(
            Cause.CONTEXT_LENGTH_EXCEEDED,
            f"{self._prompt_param}: {size}, the model's maximum length is {self._max_model_len} tokens "
            "including at least one generated; shorten it",
            self._prompt_param,
        )

    def _check_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = self._tokenizer.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            unknown = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise invalid(f"{param}: token id {unknown} is not in the model's vocabulary of {vocab_size}", param)

    def _check_policy(self) -> None:
        if self.request.priority and self._policy != "priority":
            raise invalid(
                f"priority: {self.request.priority} means nothing under this server's scheduling policy "
                f"{self._policy!r}; leave it out, or have the server run with policy 'priority'",
                "priority",
            )

    def _max_tokens(self, prompt: Sequence[int]) -> int:
        """Tokens to generate for `prompt`. Raises ApiError if the model has no room for that, or for `min_tokens`."""
        most, least = self._most_tokens(prompt), self.request.min_tokens or 0
        if least > most:
            raise invalid(
                f"min_tokens: {least} is more than the {most} tokens that are generated at most; lower it, or raise "
                f"{self.request.max_tokens_param} if the model has room",
                "min_tokens",
            )
        return most

    def _most_tokens(self, prompt: Sequence[int]) -> int:
        request = self.request
        param = self._prompt_param
        if not prompt:
            raise invalid(f"{param}: has no tokens; at least one is needed", param)
        room = self._max_model_len - len(prompt)
        asked = request.asked_max_tokens
        if room < 1:
            raise self._too_long(f"has {len(prompt)} tokens")
        if asked is None:
            return room if isinstance(request, ChatCompletionRequest) else min(DEFAULT_COMPLETION_MAX_TOKENS, room)
        if asked > room:
            raise ApiError(
                Cause.CONTEXT_LENGTH_EXCEEDED,
                f"{request.max_tokens_param}: {asked} together with the {len(prompt)} tokens of {param} exceeds the "
                f"model's maximum length of {self._max_model_len} tokens; ask for at most {room}",
                request.max_tokens_param,
            )
        return asked
