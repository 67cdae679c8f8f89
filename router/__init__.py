"""A request's way in and out: OpenAI-compatible HTTP, admission, placement, dispatch to ranks, streams.

Owns, by the way of a request:

- **HTTP**: `http_api`, around it `http_edge` with `timed_send`, `api_keys`, `request_headers` and `access_log`;
  `idempotency` with `shared_answer`; what routers ask each other (`inquiries`); `/metrics` (`metrics`).
- **APIs**: OpenAI's `protocol`, with `output_format`, `tools`, `tool_calls` and `call_text`; the Responses API
  (`responses_api_protocol`, `responses_api_format`, `conversation`, `response_store`) and Anthropic's
  (`messages_protocol`, `messages_format`) become chat completions; `formats` and `responses` write the answers.
- **Text and tokens**: `tokenizer`, `tool_prompt`, `detokenizer`, `token_lengths`, `grammar_check`.
- **Queue limits**: the router's side (`control_link`, `lease`, `retry_alias`, `admitted`), and the `ledger` with
  `bookings`, `promises` and `drain_rate`, which the control actor runs.
- **Ranks**: one connection each (`rank_pool`, `rank_link`; `peer` keeps connections), their figures (`rank_table`,
  `rank_rates`, `room`) and what they have in their prefix caches (`prefix_index`).
- **Placement**: who waits (`waiting_line`, `placing`), who goes where (`dispatcher`, `placement`,
  `placement_policies`, `session_affinity`, `named_rank`).
- **A request's life**: `request_flow` for its `caller`, with `preparation` before and `sequences` on the ranks, each a
  `choice`; why it waits (`explanation`).

`service` puts these together.

Concurrency: one event loop, and two worker threads beside it: one encodes and decodes long texts, so that a large
prompt does not hold up other requests' tokens, one checks grammars (`grammar_check`). Frames from ranks are handled in
callbacks; a request's own task is woken at most once per turn of the loop, whatever number of tokens has come, and no
task exists per token.

A request: `http_api` parses it (`protocol`) → `request_flow` counts its sequences (`control_link.acquire`), checks
its grammar, tokenizes (`preparation`), counts its prompt tokens; `sequences` has the `dispatcher` pick a rank
(`placement`), and submits one sequence per choice → frames fill the choices (`choice`), which turn tokens into text
(`detokenizer`) → `responses` writes SSE or one body, as `formats` encodes them. Whatever ends it, its `finally` aborts
what still runs on the rank and releases its counts, once.

Why a request waits: `service.explain` asks all ranks, and `explanation` puts their answers and the router's own
knowledge together.

`ledger`, `lease`, `waiting_line`, `room`, `placement`, `prefix_index` and `explanation` are pure: events and `now` in,
decisions out.
"""
