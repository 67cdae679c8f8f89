"""One rank's model: loading, paged KV, attention, sampling.

Owns the weights, the KV pool and the persistent batch of one rank. Nothing here has a thread or a lock: a rank calls
`load` before it starts its threads, then `execute` once per step, always from one thread (`rank-steps`, or with async
scheduling `rank-executor`); torch parallelizes inside its kernels. Only the pool's mirror in host memory (`kv_mirror`),
of a pool on a device, is called by threads of a KV connector. The persistent batch gets its tokens here, not from
the scheduler, so that a plan may be made before the result of the one before it is known.

A request's way through a step (`torch_runner`): the plan's delta is applied to the persistent batch (`batch`: tokens,
computed counts, block tables as arrays), block copies reach the pool (`kv_pool`), the step's index arrays are built
once (`attention.AttentionPlan`), `llama` runs all scheduled tokens of all sequences flattened, each layer writing its
K and V before any of its attention reads, `token_masks` and `sampling` turn the logits of all sampled positions (a
row's last, and its drafts) into tokens, and the batch keeps those up to the first wrong draft and appends them by
itself.

`runner` is the protocol; `torch_runner` the real one; `simulated` a deterministic one without torch, with what models
may have besides: windows, an encoder, pooling. `embedded` finds or converts a checkpoint (`gguf_conversion`),
`model_config` and `weights` read it, `linear` packs it, `memory` decides how large the pool may be, `calibration`
measures the machine.
Only `torch_runner` and what it needs import torch; `simulated`, `embedded` and `model_config` stay quick to import.
"""
