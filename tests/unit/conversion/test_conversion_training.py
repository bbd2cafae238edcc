"""Training, checkpoints and export of a conversion, on the CPU with a tiny model."""

import json
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from orthros_kernels import DocumentSpan
from orthros_kernels.errors import resolve_backend
from orthros_service.conversion.adapter import LowRankLinear, load_adapter, merge, updates
from orthros_service.conversion.checkpoint import Checkpoints
from orthros_service.conversion.examples import ExampleSource
from orthros_service.conversion.failures import ConversionError
from orthros_service.conversion.rows import TrainingRow
from orthros_service.conversion.run import convert
from orthros_service.conversion.schedule import schedule
from orthros_service.conversion.trainer import Trainer
from orthros_service.errors import ModelError
from orthros_service.model.loading import load_model
from orthros_service.model.reference import phase_logits
from orthros_service.model.transformer import full_logits
from orthros_service.tokenization import Tokenizer


def make_trainer(config, make_row=None):
    loaded = load_model(config.model, device="cpu", dtype="float32")
    if make_row is None:
        make_row = ExampleSource(config, Tokenizer.from_directory(config.model)).row
    return Trainer(config, loaded, make_row)


def row_of(tokens, spans, positions):
    learned = np.arange(len(tokens) - 1)
    weights = np.full(len(learned), 1 / len(learned), np.float32)
    return TrainingRow(
        tokens=tokens, positions=positions, spans=spans, learned=learned, weights=weights
    )


def test_a_packed_row_gives_the_logits_of_the_served_phases(make_config):
    trainer = make_trainer(make_config(attention={"window": 512, "rope_theta": None}))
    assert trainer.model.orthros.window == 512
    rng = np.random.default_rng(0)
    num_document, begin, num_segment = 1000, 1024, 30
    tokens, positions = np.zeros(1152, np.int64), np.zeros(1152, np.int64)
    tokens[:num_document] = rng.integers(3, 300, num_document)
    tokens[begin : begin + num_segment] = rng.integers(3, 300, num_segment)
    positions[:num_document] = np.arange(num_document)
    positions[begin : begin + num_segment] = num_document + np.arange(num_segment)
    span = DocumentSpan(start=0, num_tokens=num_document, segments=((begin, num_segment),))
    row = row_of(tokens, (span,), positions)
    with torch.no_grad():
        hidden = trainer.model.hidden_states(torch.from_numpy(tokens), trainer._batch(row))
        packed = trainer.model.logits(hidden)
    used = np.r_[0:num_document, begin : begin + num_segment]
    expected = phase_logits(trainer.model, torch.from_numpy(tokens[used]), num_prefill=num_document)
    torch.testing.assert_close(packed[used], expected, atol=2e-4, rtol=1e-3)


def test_training_lowers_the_loss_and_writes_a_model_that_the_service_loads(make_config):
    config = make_config(training={"steps": 16, "checkpoint_every": 5})
    reports, started = [], []
    target = convert(config, on_start=lambda *x: started.append(x), on_step=reports.append)
    assert np.mean([r.loss for r in reports[-3:]]) < 0.9 * reports[0].loss
    needs, done = started[0]
    assert (done, needs.tokens) == (0, 16 * 1536)
    assert needs.memory_bytes > 0
    assert needs.seconds > 0
    log = [json.loads(line) for line in (config.output / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(1, 17))

    loaded = load_model(target, device="cpu", dtype="float32")
    assert loaded.orthros.is_converted
    assert (loaded.orthros.window, loaded.orthros.trained_context_tokens) == (128, 600)
    assert loaded.config.rope_theta == 5e4
    assert Tokenizer.from_directory(target).stop_ids

    trainer = make_trainer(config)
    trainer.resume()
    merge(trainer.model)
    ids = torch.arange(5, 60)
    trainer.model.config = loaded.config
    # The export rounds to bfloat16.
    written, trained = full_logits(loaded.model, ids), full_logits(trainer.model, ids)
    assert (written - trained).norm() < 2e-2 * trained.norm()


def test_a_run_that_was_cut_goes_on_to_the_same_bits(make_config, tmp_path):
    whole = make_trainer(make_config(output=tmp_path / "whole"))
    whole.run(lambda _: None)

    class CutError(Exception):
        pass

    def cut(report):
        if report.step == 3:
            raise CutError

    config = make_config(output=tmp_path / "cut")
    with pytest.raises(CutError):
        make_trainer(config).run(cut)
    again = make_trainer(config)
    assert again.resume() == 2
    steps = []
    again.run(lambda report: steps.append(report.step))
    assert steps == [3, 4]
    for name, tensor in updates(whole.model).items():
        assert torch.equal(tensor, updates(again.model)[name]), name
    lines = (config.output / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_a_finished_adapter_starts_another_run_and_no_other_model_takes_it(
    make_config, tmp_path, tiny_model
):
    first = make_config(output=tmp_path / "first")
    convert(first)
    second = make_trainer(make_config(output=tmp_path / "second"))
    second.start_from(first.output / "adapter.safetensors")
    ups = [t for name, t in updates(second.model).items() if name.endswith("up")]
    assert all(tensor.abs().max() > 0 for tensor in ups)

    path = first.output / "adapter.safetensors"
    with pytest.raises(ModelError, match="another model"):
        load_adapter(second.model, path, base_digest="other")
    other_rank = make_trainer(make_config(training={"rank": 8}))
    with pytest.raises(ModelError, match="another rank"):
        other_rank.start_from(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ModelError, match="cannot be read"):
        second.start_from(path)


def test_checkpoints_of_other_settings_and_damaged_ones_are_refused(make_config):
    config = make_config()
    make_trainer(config).run(lambda _: None)
    with pytest.raises(ModelError, match="other settings"):
        make_trainer(make_config(training={"learning_rate": 1e-3})).resume()
    last = config.output / "checkpoints" / "step-0000004"
    (last / "state.json").write_text("{")
    with pytest.raises(ModelError, match="damaged"):
        make_trainer(config).resume()
    shutil.rmtree(last)
    assert make_trainer(config).resume() == 2


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_checkpoint(make_config):
    config = make_config()
    source = ExampleSource(config, Tokenizer.from_directory(config.model))

    def row(number):
        made = source.row(number)
        if number == 3:
            made.weights[:] = np.nan
        return made

    trainer = make_trainer(config, row)
    with pytest.raises(ConversionError, match="step 4 is nan"):
        trainer.run(lambda _: None)
    assert make_trainer(config).resume() == 2


def test_a_checkpoint_that_cannot_be_written_leaves_those_before(make_config, monkeypatch):
    config = make_config()
    trainer = make_trainer(config)

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(config.output / "checkpoints", base_digest="x")
    optimizer = torch.optim.AdamW(list(updates(trainer.model).values()))
    checkpoints.save(trainer.model, optimizer, step=1, settings="s")
    monkeypatch.setattr("torch.save", full)
    with pytest.raises(ModelError, match="No space left"):
        checkpoints.save(trainer.model, optimizer, step=2, settings="s")
    assert checkpoints.restore(trainer.model, optimizer, "s") == 1


def test_an_update_that_was_not_trained_changes_nothing(make_config):
    config = make_config()
    plain = load_model(config.model, device="cpu", dtype="float32").model
    trainer = make_trainer(config)
    ids = torch.arange(5, 40)
    assert torch.equal(full_logits(plain, ids), full_logits(trainer.model, ids))
    assert sum(isinstance(m, LowRankLinear) for m in trainer.model.modules()) == 8
    assert not any(p.requires_grad for p in trainer.model.embed_tokens.parameters())


def test_the_rate_warms_up_and_falls_to_its_floor():
    rates = [schedule(step, 100, warm_up=0.1, floor=0.2) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.2, abs=1e-3)
    assert all(a >= b for a, b in pairwise(rates[9:]))


@pytest.mark.parametrize(
    ("has_gradients", "requires_grad", "chosen"),
    [(False, True, "reference"), (True, True, "triton"), (False, False, "triton")],
)
def test_a_kernel_without_gradients_is_not_taken_where_one_is_wanted(
    has_gradients, requires_grad, chosen
):
    class OnGpu:
        is_cuda = True

    x = OnGpu()
    x.requires_grad = requires_grad
    assert resolve_backend("auto", x, has_gradients=has_gradients) == chosen


def test_the_command_converts_and_says_what_is_wrong(make_config, tmp_path):
    from orthros_deployments.cli import app

    config = make_config()
    path = tmp_path / "conversion.toml"
    path.write_text(
        f'model = "{config.model}"\noutput = "{tmp_path}/out"\n'
        f'[data]\ntexts = ["{config.data.texts[0]}"]\npassages = 0\nneedles = 1\n'
        "min_document_tokens = 300\nmax_document_tokens = 300\ncontinuation_tokens = 8\n"
        "[training]\nsteps = 2\nrow_tokens = 768\nrank = 2\n[attention]\nwindow = 128\n"
    )
    done = CliRunner().invoke(app, ["convert", str(path), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert f"{tmp_path}/out/model" in done.output
    missing = CliRunner().invoke(app, ["convert", str(path), "--model", str(tmp_path / "none")])
    assert missing.exit_code == 1
