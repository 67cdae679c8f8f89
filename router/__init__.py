"""A request's way in and out: OpenAI-compatible HTTP, admission, placement, dispatch to ranks, streams.

Owns: the HTTP surface (`http_api`, around it `http_edge` with `timed_send`, `api_keys`, `request_headers` and
`access_log`; `idempotency` with `shared_answer`), what routers ask each other (`inquiries`), `/metrics` (`metrics`),
validation (`protocol`, `output_format`), text and tokens (`tokenizer`, `detokenizer`, `token_lengths`), the router's
side of the queue limits (`control_link`, `lease`; who gets what of them is for the `ledger`, which the control actor
runs), one connection per rank (`rank_pool`, `rank_link`; `peer` keeps connections), what each rank has in its prefix
cache (`prefix_index`) and the life of each request (`request_flow`, with `preparation` before and `sequences` on the
ranks).
`service` puts these together.

Concurrency: one event loop, and two worker threads beside it: one encodes and decodes long texts, so that a large
prompt does not hold up other requests' tokens, one checks grammars (`grammar_check`). Frames from ranks are handled in
callbacks; a request's own task is woken at most once per turn of the loop, whatever number of tokens has come, and no
task exists per token.

A request: `http_api` parses it (`protocol`) → `request_flow` counts its sequences (`control_link.acquire`), checks
its grammar, tokenizes (`preparation`), counts its prompt tokens; `sequences` lets `rank_pool` pick a rank
(`placement`), and submits one sequence per choice → frames fill the choices (`choice`), which turn tokens into text
(`detokenizer`) → `responses` writes SSE or one body, as `formats` encodes them. Whatever ends it, its `finally` aborts
what still runs on the rank and releases its counts, once.

Why a request waits: `service.explain` asks all ranks, and `explanation` puts their answers and the router's own
knowledge together.

`ledger`, `lease`, `placement`, `prefix_index` and `explanation` are pure: events and `now` in, decisions out.
"""
