"""CalibrationCallback in Lightning's own loops."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM

from lightning_obs import CalibrationCallback, CalibrationError, CalibrationSession, load_checkpoint, quantized
from lightning_obs.errors import CalibrationWarning
from lightning_obs.model.module_qparams import get_scheme, read_qparams
from tests.callbacks.calibration_modules import Language, Late, Plain, bare, hooks_on, loader, trainer
from tests.support.lightning_package import L, WeightAveraging, needs_weight_averaging

# ---------------------------------------------------------------------- validate


@pytest.mark.parametrize("make", [Plain, Late])
def test_validate_calibrates_a_module_of_ones_own(make):
    module, callback = make(), CalibrationCallback("INT8_STATIC")
    trainer(callback).validate(module, loader(), verbose=False)
    data = torch.cat([batch[0] for batch in loader()])
    torch.testing.assert_close(module.net[0].input_scale, data.abs().max().reshape(1) / 127.5, rtol=1e-6, atol=0)
    assert callback.result.batches == 4
    assert callback.result.modules == ["net.0", "net.2"]
    assert not hooks_on(module)


def test_validate_calibrates_a_transformers_model_by_its_own_names(tiny_llama, batches):
    module, callback = Language(tiny_llama()), CalibrationCallback("FP8", ignore=["lm_head"])
    trainer(callback).validate(module, DataLoader(batches, batch_size=None), verbose=False)
    assert "model.layers.0.self_attn.q_proj" in callback.result.modules
    assert "lm_head" not in callback.result.modules
    session_model = tiny_llama()
    with CalibrationSession(session_model, "FP8", ignore=["lm_head"]) as session:
        for batch in batches:
            session_model(**batch)
    assert session.result.qparams.keys() == callback.result.qparams.keys()
    for name, value in session.result.qparams.items():
        assert torch.equal(value, callback.result.qparams[name]), name


def test_outputs_metrics_and_state_dict_are_what_they_were(tiny_llama, batches):
    module, data = Language(tiny_llama()), DataLoader(batches, batch_size=None)
    keys, outputs = list(module.state_dict()), module.model(**batches[0]).logits
    plain = trainer().validate(module, data, verbose=False)
    calibrated = trainer(CalibrationCallback("FP8", ignore=["lm_head"])).validate(module, data, verbose=False)
    assert calibrated == plain
    assert list(module.state_dict()) == keys
    assert not dict(module.named_buffers()).keys() & {k for k in dict(module.named_buffers()) if "scale" in k}
    assert torch.equal(module.model(**batches[0]).logits, outputs)


def test_inputs_read_by_q_k_v_and_gate_up_are_searched_once_in_validate(tiny_llama, batches):
    callback = CalibrationCallback("FP8", ignore=["lm_head"], observers={"input": "mse"})
    trainer(callback).validate(Language(tiny_llama()), DataLoader(batches, batch_size=None), verbose=False)
    layers, reads_per_layer = 2, 4  # qkv, o, gate and up, down
    assert callback.result.measurements == len(batches) * layers * reads_per_layer * 2  # the extremes too


def test_export_gives_the_calibrated_models_logits(tiny_llama, batches, tmp_path):
    module, callback = Language(tiny_llama()), CalibrationCallback("INT8_STATIC", ignore=["lm_head"])
    trainer(callback).validate(module, DataLoader(batches, batch_size=None), verbose=False)
    callback.export(tmp_path / "out")
    with torch.no_grad(), quantized(module.model):
        expected = module.model(**batches[0]).logits
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(**batches[0]).logits, expected)


def test_under_autocast_scales_are_computed_in_the_dtype_of_the_weight():
    module, callback = Plain(), CalibrationCallback("INT8_STATIC")
    trainer(callback, precision="bf16-mixed").validate(module, loader(), verbose=False)
    scale, (low, high) = module.net[2].input_scale, callback.result.input_ranges["net.2"]  # a bfloat16 input
    assert scale.dtype is torch.float32
    assert scale.item() == (torch.tensor(max(-low, high)) / 127.5).item()
    assert scale.item() != scale.bfloat16().float().item()


def test_export_before_calibration_is_an_error(tmp_path):
    with pytest.raises(CalibrationError, match=r"nothing was calibrated yet.*trainer\.validate"):
        CalibrationCallback("FP8").export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_scheme_without_data_says_that_the_batches_were_not_used():
    with pytest.warns(UserWarning, match=r"W8A8 needs no data.*4 batches.*INT8_STATIC"):
        trainer(CalibrationCallback("W8A8")).validate(Plain(), loader(), verbose=False)


def test_two_val_loaders_are_one_calibration():
    module, callback = Plain(), CalibrationCallback("INT8_STATIC")
    module.validation_step = lambda batch, batch_idx, dataloader_idx=0: module(batch[0])
    trainer(callback).validate(module, [loader(1), loader(2)], verbose=False)
    data = torch.cat([batch[0] for seed in (1, 2) for batch in loader(seed)])
    assert callback.result.batches == 8
    assert callback.result.input_ranges["net.0"] == (data.min().item(), data.max().item())


# ---------------------------------------------------------------------- fit


def test_fit_after_validate_trains_on(recwarn):
    module, callback = Plain(), CalibrationCallback("INT8_STATIC")
    trainer(callback).validate(module, loader(), verbose=False)  # under inference mode
    first = module.net[2].input_scale.clone()
    trainer(callback, max_epochs=2).fit(module, loader(), loader())
    assert not module.net[2].input_scale.is_inference()
    assert not torch.equal(first, module.net[2].input_scale)


def test_every_validation_of_fit_observes_anew_and_the_last_one_stands():
    module, callback = Plain(), CalibrationCallback("INT8_STATIC")
    trainer(callback, max_epochs=3).fit(module, loader(), loader())
    expected = (module.net[0].weight.abs().amax(1, keepdim=True) / 127.5).detach()
    torch.testing.assert_close(module.net[0].weight_scale, expected, rtol=1e-6, atol=0)
    assert callback.result.batches == 4


def test_nothing_happens_in_the_sanity_check_unless_asked_for():
    seen = {}

    class Look(L.Callback):
        def on_sanity_check_end(self, trainer, pl_module):
            seen["scale"] = hasattr(pl_module.net[0], "weight_scale")

    for wanted in (False, True):
        trainer(CalibrationCallback("INT8_STATIC", sanity_check=wanted), Look(), max_epochs=1).fit(
            Plain(), loader(), loader()
        )
        assert seen["scale"] is wanted


def test_val_check_interval_calibrates_twice_an_epoch():
    counts = []

    class Look(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            counts.append(callback.result.batches)

    callback = CalibrationCallback("INT8_STATIC")
    trainer(callback, Look(), max_epochs=1, val_check_interval=0.5, num_sanity_val_steps=0).fit(
        Plain(), loader(), loader()
    )
    assert counts == [4, 4]


def test_a_wrong_target_is_found_before_training_starts():
    module, callback = Plain(), CalibrationCallback("INT8_STATIC", targets=["Conv2d"])
    module.training_step = lambda *_: pytest.fail("trained")
    with pytest.raises(CalibrationError, match="matches no module"):
        trainer(callback, max_epochs=1).fit(module, loader(), loader())


@needs_weight_averaging
def test_weight_averaging_beside_it_is_calibrated_with_the_averaged_weights():
    module, callback = Plain(), CalibrationCallback("INT8_STATIC")
    seen = {}

    class Look(L.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            seen["weight"] = pl_module.net[0].weight.detach().clone()

    trainer(callback, Look(), WeightAveraging(), max_epochs=2, num_sanity_val_steps=0).fit(module, loader(), loader())
    torch.testing.assert_close(
        callback.result.qparams["net.0.weight_scale"], seen["weight"].abs().amax(1, keepdim=True) / 127.5
    )


@needs_weight_averaging
def test_weight_averaging_before_it_is_refused_before_training():
    module = Plain()
    module.training_step = lambda *_: pytest.fail("trained")
    with pytest.raises(
        CalibrationError, match=r"before the calibration.*: WeightAveraging\. Remedy: list the calibration"
    ):
        trainer(WeightAveraging(), CalibrationCallback("INT8_STATIC"), max_epochs=1).fit(module, loader(), loader())


# ---------------------------------------------------------------------- leave nothing behind


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_middle_of_validation_leaves_nothing_behind(error):
    module = Plain()

    def fail(batch, batch_idx):
        module(batch[0])
        if batch_idx == 2:
            raise error("stop")

    module.validation_step = fail
    with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
        trainer(CalibrationCallback("INT8_STATIC")).validate(module, loader(), verbose=False)
    assert bare(module)
    compiled = torch.compile(module.net, backend="eager")
    compiled(torch.randn(1, 8))  # the stance of torch.compile is the user's again
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_nan_in_a_batch_names_the_module_and_writes_nothing():
    module = Plain()
    data = loader().dataset.tensors[0].clone()
    data[3, 0] = float("nan")
    with pytest.raises(CalibrationError, match=r"not finite: net\.0 \(input: 1 of 1 min_vals not finite"):
        trainer(CalibrationCallback("INT8_STATIC")).validate(
            module, DataLoader(TensorDataset(data), batch_size=4), verbose=False
        )
    assert bare(module)


def test_hooks_of_the_user_stay():
    module, calls = Plain(), []
    module.net[0].register_forward_pre_hook(lambda *_: calls.append(1))
    trainer(CalibrationCallback("INT8_STATIC")).validate(module, loader(), verbose=False)
    assert len(hooks_on(module)) == 1
    assert len(calls) == 4


def test_a_compiled_model_is_observed():
    module = Plain()
    module.net = torch.compile(module.net, backend="eager")
    module(torch.randn(4, 8))  # compiled before any hook is there
    callback = CalibrationCallback("INT8_STATIC", module="net")
    trainer(callback).validate(module, loader(), verbose=False)
    assert callback.result.modules == ["0", "2"]
    assert not hooks_on(module)


# ---------------------------------------------------------------------- the kv cache


def test_validate_calibrates_the_kv_cache(tiny_llama, batches, tmp_path):
    module, callback = Language(tiny_llama()), CalibrationCallback("FP8", kv_cache="FP8", ignore=["lm_head"])
    data, names = DataLoader(batches, batch_size=None), [name for name, _ in module.named_modules()]
    plain = trainer().validate(module, data, verbose=False)
    assert trainer(callback).validate(module, data, verbose=False) == plain
    assert not hooks_on(module)
    assert [name for name, _ in module.named_modules()] == names
    session_model = tiny_llama()
    with CalibrationSession(session_model, "FP8", kv_cache="FP8", ignore=["lm_head"]) as session:
        for batch in batches:
            session_model(**batch)
    assert callback.result.qparams.keys() == session.result.qparams.keys()
    for name, value in session.result.qparams.items():
        assert torch.equal(value, callback.result.qparams[name]), name
    with quantized(module):
        measured = trainer().validate(module, data, verbose=False)
        with torch.no_grad():
            expected = module.model(**batches[0]).logits
    assert measured != plain
    callback.export(tmp_path / "out")
    with torch.no_grad():
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert torch.equal(reloaded(**batches[0]).logits, expected)


def test_a_step_that_fails_leaves_nothing_in_attention(tiny_llama, batches):
    class Fails(Language):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            raise RuntimeError("stop")

    states = {"num_bits": 8, "type": "float"}
    scheme = {"attention": {"targets": ["LlamaAttention"], "input_activations": states}}
    module = Fails(tiny_llama())
    names, implementation = [name for name, _ in module.named_modules()], module.model.config._attn_implementation
    with pytest.raises(RuntimeError, match="stop"):
        trainer(CalibrationCallback(scheme)).validate(module, DataLoader(batches, batch_size=None), verbose=False)
    assert not hooks_on(module)
    assert [name for name, _ in module.named_modules()] == names
    assert module.model.config._attn_implementation == implementation


def test_a_resumed_run_has_the_scales_of_the_kv_cache(tiny_llama, batches, tmp_path):
    data = DataLoader(batches, batch_size=None)
    first = CalibrationCallback(None, kv_cache="FP8_HEAD")
    run, module = trainer(first), Language(tiny_llama())
    run.validate(module, data, verbose=False)
    run.save_checkpoint(tmp_path / "run.ckpt")
    second, resumed = CalibrationCallback(None, kv_cache="FP8_HEAD"), Language(tiny_llama())
    resumed.test_step = lambda batch, batch_idx: None
    trainer(second).test(resumed, data, ckpt_path=tmp_path / "run.ckpt", verbose=False)
    before, after = (read_qparams(m.model.model.layers[1].self_attn) for m in (module, resumed))
    assert set(before) == set(after) == {"k_scale", "v_scale"}
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_two_callbacks_on_one_model_export_each_its_own(tmp_path):
    module = Plain()
    first, second = CalibrationCallback("INT8_STATIC"), CalibrationCallback("FP8", ignore=["net.2"])
    trainer(first, second).validate(module, loader(), verbose=False)
    for callback, kinds in ((first, ("int", "int")), (second, ("float", None))):
        callback.export(tmp_path / callback.label)
        reloaded = load_checkpoint(Plain(), tmp_path / callback.label)
        schemes = (get_scheme(reloaded.net[0]), get_scheme(reloaded.net[2]))
        assert tuple(scheme and scheme.weights.type for scheme in schemes) == kinds
        scales = {f"{n}.input_scale": m.input_scale for n, m in reloaded.named_modules() if hasattr(m, "input_scale")}
        assert scales
        assert all(torch.equal(value, callback.result.qparams[name]) for name, value in scales.items())
    assert get_scheme(module.net[0]).weights.type == "float"  # the last one's is in force, as before


def test_a_callback_that_has_not_calibrated_does_not_export_what_another_has(tmp_path):
    module, idle = Plain(), CalibrationCallback("INT8_STATIC")
    trainer(CalibrationCallback("FP8")).validate(module, loader(), verbose=False)
    with pytest.warns(CalibrationWarning, match="will not validate"):
        trainer(idle, limit_val_batches=0, max_epochs=1).fit(module, loader(), loader())
    with pytest.raises(CalibrationError, match="nothing was calibrated yet"):
        idle.export(tmp_path / "out")


@pytest.mark.parametrize("observer", ["static_minmax", "minmax"])
def test_a_quantized_metric_in_validation_step_is_not_observed(observer):
    class Measuring(Plain):
        def validation_step(self, batch, batch_idx):
            self(batch[0])
            with quantized(self.net):
                self.log("quantized", self.net(3 * batch[0]).pow(2).mean())

    torch.manual_seed(0)
    alone, measuring = Plain(), Measuring()
    measuring.load_state_dict(alone.state_dict())
    results = []
    for module in (alone, measuring):
        callback = CalibrationCallback("INT8_STATIC", observers={"input": observer})
        with CalibrationSession(module, "W8A8"):
            pass
        trainer(callback).validate(module, loader(), verbose=False)
        results.append(callback.result)
    assert results[0].input_ranges == results[1].input_ranges
    assert results[0].measurements == results[1].measurements
    assert all(torch.equal(v, results[1].qparams[name]) for name, v in results[0].qparams.items())


def test_quantized_attention_in_validation_step_is_not_observed(tiny_llama, batches):
    class Measuring(Language):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            with quantized(self.model):
                self.model(**{**batch, "input_ids": batch["input_ids"].flip(0) * 0})

    results = []
    for kind in (Language, Measuring):
        callback = CalibrationCallback("FP8", ignore=["lm_head"], kv_cache="FP8")
        module, data = kind(tiny_llama()), DataLoader(batches, batch_size=None)
        for _ in range(2):  # calibrated in the first
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="quantized.. gives other numbers")
                trainer(callback).validate(module, data, verbose=False)
        results.append(callback.result)
    assert results[0].measurements == results[1].measurements
    assert any("k_scale" in name for name in results[0].qparams)
    assert all(torch.equal(v, results[1].qparams[name]) for name, v in results[0].qparams.items())


# ---------------------------------------------------------------------- padding


class Padded(Language):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss)


@pytest.mark.parametrize("make", [Language, Padded])
def test_padding_that_is_observed_is_said_once(make, tiny_llama, batches):
    mask = torch.ones_like(batches[0]["input_ids"])
    mask[0, -5:] = 0
    data = DataLoader([{**batch, "attention_mask": mask} for batch in batches], batch_size=None)
    module, callback = make(tiny_llama()), CalibrationCallback("FP8", ignore=["lm_head"])
    with pytest.warns(CalibrationWarning, match=r"masks 5 of 32 tokens.*token_mask='attention_mask'") as given:
        trainer(callback).validate(module, data, verbose=False)
    assert sum("masks" in str(warning.message) for warning in given) == 1
    trainer(callback).validate(module, data, verbose=False)  # a warning would be an error
    told = CalibrationCallback("FP8", ignore=["lm_head"], token_mask="attention_mask")
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        trainer(told).validate(module, data, verbose=False)
