"""One rank's decisions: what each step computes, in which blocks, and when a request has ended.

Pure code: no Ray, no torch, no sockets, no threads, no clock of its own. The rank's loop (in `cluster/`) owns a
`Scheduler` and drives it from one thread: `add`/`abort` what has arrived, `schedule(now)` → `StepPlan`, let the
model runner execute it, `update(plan, result, now)` → one `StepFrame` per router.

A request: `add` checks that it can ever run and queues it; `schedule` admits it when a slot, token budget and
blocks for its whole prompt are there, reusing blocks of equal prefixes; it then takes part in each step until a
stop, its length, an abort or an error ends it, or running out of blocks sends it back to the queue's head.
The running batch is a structure of arrays (`batch`), blocks are owned by `block_pool`, and what routers, ranks
and runners tell each other is in `messages` and `plan`.
"""
