"""The step meter: micro-batches reduce to what one batch would give."""

import time

import pytest
import torch

from kit.meter import TOKEN_ROWS, StepMeter
from kit.mismatch import kl_k3, mismatch_metrics


def batch(rows=8, width=6, seed=0):
    """(trainer, sampler, base logprobs, mask) with completions of 1 to `width` tokens."""
    generator = torch.Generator().manual_seed(seed)
    trainer, sampler, base = (-3 * torch.rand(rows, width, generator=generator) for _ in range(3))
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    return trainer, sampler, base, (torch.arange(width) < lengths[:, None]).long()


def finished(trainer, sampler, base, mask, order, sizes) -> tuple[StepMeter, dict]:
    """A step whose rows arrive in this order, in micro-batches of these sizes, each cut to its longest completion."""
    meter = StepMeter()
    meter.start()
    for rows in torch.tensor(order).split(sizes):
        width = int(mask[rows].sum(1).max())
        meter.add_batch(trainer[rows, :width], sampler[rows, :width], mask[rows, :width], rows)
        meter.add_kl(trainer[rows, :width], base[rows, :width], mask[rows, :width])
    return meter, meter.finish()


@pytest.mark.parametrize("sizes", [[8], [4, 4], [1] * 8, [5, 3]])
@pytest.mark.parametrize("order", [list(range(8)), [3, 1, 7, 0, 2, 6, 5, 4]])
def test_micro_batches_give_what_one_batch_gives(sizes, order):
    trainer, sampler, base, mask = batch()
    _, found = finished(trainer, sampler, base, mask, order, sizes)
    for key, value in mismatch_metrics(trainer, sampler, mask).items():
        assert found[key] == pytest.approx(value, rel=1e-5)
    assert found["kl"] == pytest.approx(kl_k3(trainer, base, mask), rel=1e-5)


def test_every_tokens_mismatch_finds_its_completion_again_after_the_shuffle():
    trainer, sampler, base, mask = batch()
    meter, _ = finished(trainer, sampler, base, mask, [3, 1, 7, 0, 2, 6, 5, 4], [3, 5])
    expected = (trainer - sampler).abs()
    assert sorted(meter.token_mismatch) == list(range(8))
    for row, values in meter.token_mismatch.items():
        assert values == pytest.approx(expected[row, mask[row].bool()].tolist())


def test_token_mismatch_is_kept_for_the_first_completions_only():
    trainer, sampler, base, mask = batch(rows=TOKEN_ROWS + 4)
    meter, _ = finished(trainer, sampler, base, mask, list(range(TOKEN_ROWS + 4)), [TOKEN_ROWS + 4])
    assert sorted(meter.token_mismatch) == list(range(TOKEN_ROWS))


def test_kl_is_measured_on_the_rows_that_the_base_model_scored():
    trainer, sampler, base, mask = batch()
    meter = StepMeter()
    meter.start()
    meter.add_batch(trainer, sampler, mask, torch.arange(8))
    meter.add_kl(trainer, base[:3], mask)
    assert meter.finish()["kl"] == pytest.approx(kl_k3(trainer[:3], base[:3], mask[:3]))


def test_times_add_up_and_speed_counts_sampling_only():
    meter = StepMeter()
    meter.start()
    time.sleep(0.02)
    meter.start()  # a later micro-batch does not start the step again
    meter.add_rollout(tokens=30, sampling_seconds=0.005, rollout_seconds=0.008)
    meter.add_rollout(tokens=10, sampling_seconds=0.003, rollout_seconds=0.004)
    trainer, sampler, base, mask = batch()
    meter.add_batch(trainer, sampler, mask, torch.arange(8))
    meter.add_kl(trainer, base, mask)
    meter.values["sync/probe_abs"] = 0.25
    found = meter.finish()
    assert found["time/step"] >= 0.02
    assert found["time/rollout"] == pytest.approx(0.012)
    assert found["time/rollout"] + found["time/train"] == pytest.approx(found["time/step"])
    assert found["speed/tokens_per_s"] == pytest.approx(40 / 0.008)
    assert found["sync/probe_abs"] == 0.25


def test_a_step_without_sampling_has_no_speed():
    _, found = finished(*batch(), list(range(8)), [8])
    assert found["speed/tokens_per_s"] is None


def test_the_graph_is_not_kept_alive():
    trainer, sampler, base, mask = batch()
    trainer.requires_grad_()
    meter, _ = finished(trainer, sampler, base, mask, list(range(8)), [8])
    assert not any(part.requires_grad for part in meter._trainer)
