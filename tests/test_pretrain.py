"""The bundled model: its recipe still gives the recorded curve, and its files are what they say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit import arithmetic, pretrain
from kit.pretrain import Recipe, batches, build_model, build_optimizers, generate, measure, save, train

TINY = Path(pretrain.__file__).parent / "models" / "tiny"
TRAINING = json.loads((TINY / "training.json").read_text())
RECORDED = Recipe(**TRAINING["recipe"])
SMALL = replace(RECORDED, hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1, head_dim=16)


@pytest.fixture(scope="module")
def weights():
    return load_file(TINY / "model.safetensors")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def test_the_packaged_model_is_of_the_default_recipe():
    assert Recipe() == RECORDED
    assert [point["step"] for point in TRAINING["loss"]] == list(range(50, RECORDED.steps + 1, 50))


def test_a_run_cut_short_gives_the_recorded_losses():
    _, curve = train(RECORDED, stop_after=50, report=lambda line: None)
    # Rounding (one thread or two) moves this loss by less than 1e-5; a Muon learning rate of 0.011 by 0.8 %.
    assert [point["step"] for point in curve] == [50]
    assert curve[0]["loss"] == pytest.approx(TRAINING["loss"][0]["loss"], rel=0.005)


def test_learning_rate_warms_up_holds_and_decays():
    recipe = Recipe(steps=1000, warmup_steps=50, decay_share=0.4)
    assert [recipe.lr_factor(step) for step in (0, 24, 49, 300, 600)] == pytest.approx([0.02, 0.5, 1, 1, 1])
    assert [recipe.lr_factor(step) for step in (700, 800, 999)] == pytest.approx([0.75, 0.5, 0.0025])


def test_muon_moves_the_matrices_of_the_layers_and_adamw_the_rest():
    model = build_model(SMALL)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, adamw = ({names[id(p)] for p in o.param_groups[0]["params"]} for o in build_optimizers(model, SMALL))
    assert muon == {name for name in names.values() if name.endswith("_proj.weight")} and len(muon) == 7
    assert adamw == set(names.values()) - muon
    assert "model.embed_tokens.weight" in adamw


def test_batches_score_the_completion_and_its_end_only():
    input_ids, labels = next(batches(RECORDED))
    tokenizer = arithmetic.build_tokenizer()
    assert len(input_ids) == RECORDED.batch_size
    for row, targets in zip(input_ids, labels, strict=True):
        scored = targets != -100
        assert torch.equal(row[scored], targets[scored])
        completion = tokenizer.decode(row[scored])
        assert completion.startswith("<think>") and completion.endswith("<eos>")
        prompt, padding = tokenizer.decode(row).split(completion)
        assert prompt.startswith("Q: ") and prompt.endswith("=?\nA: ")
        assert set(padding.split("<pad>")) == {""}


def test_padding_after_a_sequence_does_not_change_it():
    model = build_model(SMALL).eval()
    alone, padded = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 7, 0, 0]])
    with torch.no_grad():
        torch.testing.assert_close(model(alone).logits, model(padded).logits[:, :3], rtol=1e-5, atol=1e-6)


def test_files_are_bfloat16_small_and_of_qwen3(weights, model):
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 6_000_000
    config = json.loads((TINY / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert (config["dtype"], config["max_position_embeddings"]) == ("bfloat16", arithmetic.MAX_LENGTH)
    assert model.num_parameters() == sum(tensor.numel() for tensor in weights.values())


def test_attention_is_grouped_query_with_trained_norms_and_the_head_is_tied(weights, model):
    layer = "model.layers.0.self_attn"
    assert weights[f"{layer}.q_proj.weight"].shape == (4 * 32, 128)
    assert weights[f"{layer}.k_proj.weight"].shape == weights[f"{layer}.v_proj.weight"].shape == (2 * 32, 128)
    for name in (f"{layer}.q_norm.weight", f"{layer}.k_norm.weight"):
        assert weights[name].shape == (32,)
        assert (weights[name] - 1).abs().max() > 0.01
    assert "lm_head.weight" not in weights
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_packaged_tokenizer_and_generation_config_are_the_tasks(model):
    packaged, built = AutoTokenizer.from_pretrained(TINY), arithmetic.build_tokenizer()
    assert packaged.get_vocab() == built.get_vocab()
    assert (packaged.padding_side, packaged.model_max_length) == ("left", arithmetic.MAX_LENGTH)
    text = "Q: 24+67=?\nA: <think>steps: 4+7+0=1c 2+6+1=9</think> 91"
    assert packaged.decode(packaged(text).input_ids) == text
    defaults = json.loads((TINY / "generation_config.json").read_text())
    plain = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "pad_token_id": 0, "eos_token_id": 1}
    assert defaults == plain | {"transformers_version": defaults["transformers_version"]}


def test_quality_is_as_recorded(model):
    recorded = TRAINING["quality"]
    found = measure(model, problems=48, seed=1)
    # 48 problems of 8 samples each: a standard error of about 0.03.
    assert found["pass_at_1"] == pytest.approx(recorded["pass_at_1"], abs=0.1)
    assert found["rl_pass_at_1"] == pytest.approx(recorded["rl_pass_at_1"], abs=0.1)
    assert found["length"] == pytest.approx(recorded["length"], abs=2)
    assert found["greedy"] >= 0.95 and found["pass_at_8"] >= 0.9 and found["ended"] == 1.0


def test_recorded_quality_leaves_room_to_learn():
    quality = TRAINING["quality"]
    assert 0.3 <= quality["pass_at_1"] <= 0.6 and quality["rl_band"] >= 0.7
    assert 30 <= quality["length"] <= 60


def test_generate_groups_samples_by_prompt_and_repeats_for_a_seed(model):
    prompts = ["Q: 24+67=?\nA: ", "Q: 957+168=?\nA: "]
    first, again, other = (generate(model, prompts, samples=4, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert [len(texts) for texts in first] == [4, 4]
    (two_digits,), (three_digits,) = generate(model, prompts, samples=0, seed=0)
    assert two_digits.endswith("</think> 91<eos>") and three_digits.endswith("</think> 1125<eos>")


def test_save_writes_a_model_that_loads_with_rounded_weights(tmp_path):
    model = build_model(SMALL)
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    save(model, {"note": "small"}, tmp_path / "small")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert json.loads((tmp_path / "small" / "training.json").read_text()) == {"note": "small"}
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_save_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        save(build_model(SMALL), {"note": object()}, tmp_path / "small")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_model_is_refused_before_training(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="already holds files and is left as it is: choose a new folder"):
        pretrain.main(["--out", str(tmp_path), "--steps", "1"])
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("steps", ["0", "-5"])
def test_no_steps_is_refused(tmp_path, steps, capsys):
    with pytest.raises(SystemExit):
        pretrain.main(["--out", str(tmp_path / "new"), "--steps", steps])
    assert f"--steps {steps}: expected at least 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
