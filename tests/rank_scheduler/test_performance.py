import pytest

from rank_scheduler.performance import PerformanceModel, StepCost

# SmolLM2-135M: 30 layers, hidden 576, inner 1536, 9 query and 3 KV heads of 64, 49,152 tokens; bfloat16.
SMOLLM2 = PerformanceModel(
    num_layer_weights=106_168_320,
    num_head_weights=28_311_552,
    num_layers=30,
    num_attention_heads=9,
    head_dim=64,
    weight_dtype_size_bytes=2,
    kv_size_bytes_per_token=23_040,
    peak_flops_per_s=1e12,
    peak_bytes_per_s=1e11,
)


def test_one_decoded_token_counted_by_hand():
    """As a loop over the model's matrices would count it."""
    flops, size_bytes, context = 0, 0, 999
    for _ in range(30):
        for rows, columns in [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]:
            flops += 2 * rows * columns
            size_bytes += 2 * rows * columns
        for _ in range(9):
            flops += 2 * 64 * (context + 1) + 2 * 64 * (context + 1)
        for _ in range(3):
            size_bytes += 2 * 2 * 64 * (context + 1)
    flops += 2 * 576 * 49_152
    size_bytes += 2 * 576 * 49_152
    cost = SMOLLM2.estimate(num_tokens=1, num_sampled=1, num_attended=1000, num_context_tokens=999)
    assert cost == StepCost(flops, size_bytes) == StepCost(338_079_744, 291_999_744)


def test_a_prompt_costs_what_its_tokens_would_cost_one_by_one():
    """In FLOPs; but the weights are read once."""
    whole = SMOLLM2.estimate(num_tokens=100, num_sampled=1, num_attended=5050, num_context_tokens=0)
    singles = [
        SMOLLM2.estimate(num_tokens=1, num_sampled=int(n == 99), num_attended=n + 1, num_context_tokens=n)
        for n in range(100)
    ]
    assert whole.flops == sum(cost.flops for cost in singles)
    assert whole.size_bytes == 2 * (106_168_320 + 28_311_552) + 100 * 23_040


def test_the_head_is_read_only_for_logits():
    chunk = SMOLLM2.estimate(num_tokens=16, num_sampled=0, num_attended=136, num_context_tokens=0)
    assert chunk.size_bytes == 2 * 106_168_320 + 16 * 23_040


def test_a_step_without_tokens_costs_nothing():
    cost = SMOLLM2.estimate(num_tokens=0, num_sampled=0, num_attended=0, num_context_tokens=0)
    assert cost == StepCost(0, 0)


@pytest.mark.parametrize(
    ("cost", "duration_s", "expected"),
    [(StepCost(5e11, 1e10), 1, 0.5), (StepCost(1e10, 5e10), 1, 0.5), (StepCost(1e10, 5e10), 0.5, 1.0)],
)
def test_the_scarcer_limit_counts(cost, duration_s, expected):
    assert SMOLLM2.utilisation(cost, duration_s) == pytest.approx(expected)


def test_a_step_that_took_no_time_has_no_utilisation():
    assert SMOLLM2.utilisation(StepCost(1, 1), 0) == 0
