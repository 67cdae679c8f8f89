"""One rank's decisions: what each step computes, in which blocks, and when a request has ended.

Pure code: no Ray, no torch, no sockets, no threads, no clock of its own. One thread, the rank's loop in `cluster/`,
makes all calls (`interface`): messages and events come in between two steps, in any order, late or twice; then
`schedule(now)` → `StepPlan`, the model runner executes it, `update(plan, result, now)` → one `StepFrame` per router.
With async scheduling the next plan is made before that result is there.

Who does what: `scheduler` takes messages and keeps the order of a step; `rank_state` is what is owned (where each
sequence and each block is) and how it is given back. A step: `room` preempts for waiting ones of higher priority;
`running_pass` gives tokens to those that run, and blocks, preempting if none are free; `load_pass` starts KV loads, and
`prefetches` those of requests to come; `waiting_pass` admits; `plan_builder` makes the plan, with masks and drafts;
`steady_batch` does all of this at once where everybody only decodes. `result_intake` takes tokens in and finds stops
(`stop_strings`, `repetition`); `sessions` goes on with the next turn.

Beneath: `batch` (what runs, as arrays by slot), `sequence` (one request, its legal moves, its story),
`waiting_queue`, `needs` (what an admission would take), `kv_cache_manager` over `block_pool` and `prefix_hash` (both
in Python and, where it was built, in C: `extension`; `prefix_chain` says what is hashed, for routers too),
`encoder_cache`, `ngram` (drafts), `performance` (a step's cost). Told to others: `messages` (routers), `plan` (the
runner), `structured_output` (the grammar compiler), `kv_events`, `stats`, `explanation` (why a request waits),
`refusals` (why it never could run). `config` has every setting.

A request: `add` refuses or queues it, behind its grammar if it has one; it is admitted when a slot, tokens of the
step and blocks are there, sharing the blocks of equal prefixes; it takes part in steps until a stop, its length, an
abort or an error ends it. A preemption sends it back to the queue, ahead of its equals, with all its tokens.
"""
