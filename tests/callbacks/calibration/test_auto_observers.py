"""``observers="auto"``: the first validation chooses, the later ones calibrate with the choice."""

import pytest
import torch

from lightning_obs import CalibrationCallback, CalibrationError, CalibrationSession, load_checkpoint, quantized
from lightning_obs.callbacks.auto_observers import AutoObservers
from lightning_obs.model.module_qparams import read_qparams
from lightning_obs.ranks.collectives import Collectives
from tests.callbacks.calibration_modules import Plain, hooks_on, loader, trainer
from tests.support.lightning_package import MESSAGES, Callback

SCHEME = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "strategy": "channel"},
    "input_activations": {"num_bits": 4, "strategy": "tensor", "dynamic": False},
}


class Outliers(Plain):
    """One input in a hundred is thirty times as large: the range of everything observed is a poor one."""

    def validation_step(self, batch, batch_idx):
        spread = torch.where(torch.arange(batch[0].numel()).view_as(batch[0]) % 31 == 0, 30.0, 1.0)
        self.log("val_loss", self(batch[0] * spread).pow(2).mean())


def automatic(**kwargs):
    return CalibrationCallback(SCHEME, observers="auto", module="net", **kwargs)


def qparams(module):
    return {name: read_qparams(layer) for name, layer in module.net.named_children() if len(read_qparams(layer))}


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name][key]) for name, of in first.items() for key, value in of.items()
    )


def test_the_choice_is_scored_said_and_the_whole_validation_calibrates_with_it(caplog):
    torch.manual_seed(0)
    module, callback = Outliers(), automatic()
    with caplog.at_level("INFO", logger=MESSAGES):
        trainer(callback).validate(module, loader(count=64), verbose=False)
    found, choice = qparams(module), callback.choice
    counts = ", ".join(f"{name} {count}" for name, count in choice.counts["input"].most_common())
    assert f'observers="auto", input: {counts}' in [record.message for record in caplog.records]
    assert set(choice.lines) <= {record.message for record in caplog.records}
    assert choice.taken["input"].divergence < choice.divergences["input"]["static_minmax"]
    assert all(
        choice.taken[of].divergence == min(divergences.values()) for of, divergences in choice.divergences.items()
    )
    assert callback.result.batches == 16
    again = Outliers()
    again.load_state_dict(module.state_dict())
    by_hand = CalibrationCallback(choice.config, module="net")
    trainer(by_hand).validate(again, loader(count=64), verbose=False)
    assert same(found, qparams(again))
    assert not hooks_on(module)


def test_training_is_the_same_bit_for_bit_and_only_the_first_validation_chooses():
    def fitted(*callbacks):
        torch.manual_seed(0)
        module = Outliers()
        trainer(*callbacks, max_epochs=2).fit(module, loader(2), loader())
        return module

    callback = automatic()
    choices = []

    class RecordChoice(Callback):
        def on_validation_end(self, run, *_):
            if not run.sanity_checking:
                choices.append(callback.choice)

    module, plain = fitted(callback, RecordChoice()), fitted()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    assert len(choices) == 2
    assert choices[0] is choices[1]


def test_a_resumed_run_has_the_chosen_observers_and_the_same_qparams(tmp_path):
    torch.manual_seed(0)
    module, callback = Outliers(), automatic()
    first = trainer(callback, max_epochs=1)
    first.fit(module, loader(2), loader())
    first.save_checkpoint(tmp_path / "a.ckpt")
    resumed, again = Outliers(), automatic()
    trainer(again, max_epochs=1).fit(resumed, loader(2), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert same(qparams(module), qparams(resumed))
    assert again.options.config == callback.options.config
    assert again.choice is None
    trainer(again).validate(resumed, loader(), verbose=False)
    assert again.choice is None  # it calibrates with what the earlier run chose
    assert same(qparams(module), qparams(resumed))


def test_it_is_exported_and_loaded_again(tmp_path):
    module, callback = Outliers(), automatic(evaluate=True, export_to=tmp_path / "net")
    run = trainer(callback)
    run.validate(module, loader(), verbose=False)
    assert "val_loss_quantized" in run.callback_metrics
    assert set(qparams(module)) == {"0", "2"}
    load_checkpoint(Plain().net, tmp_path / "net")


def test_batches_that_are_not_observed_are_not_kept():
    callback = automatic(max_batches=2)
    trainer(callback).validate(Outliers(), loader(), verbose=False)
    assert callback.result.batches == 2  # all kept inputs were run again


class Silent(Plain):
    """Its module gives no logits."""

    def build(self):
        class Pair(torch.nn.Sequential):
            def forward(self, x):
                return (super().forward(x),)

        return Pair(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2))

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])


def test_a_model_without_logits_is_an_error_at_the_first_batch():
    module = Silent()
    with pytest.raises(CalibrationError, match="measured on logits"):
        trainer(automatic()).validate(module, loader(), verbose=False)
    assert not hooks_on(module)


def test_a_token_mask_and_several_devices_are_refused():
    with pytest.raises(CalibrationError, match=r"without a token mask.*a token mask"):
        trainer(automatic(token_mask=lambda batch: torch.ones(4, 1))).validate(Outliers(), loader(), verbose=False)
    session = CalibrationSession(Plain().net, SCHEME, collectives=Collectives(size=2))
    with pytest.raises(CalibrationError, match=r"on one device.*2 devices"):
        AutoObservers(session.options, {}, is_masked=False).start(session)


#: inputs that lose little: what weights lose decides
WEIGHTS = SCHEME | {"input_activations": SCHEME["input_activations"] | {"num_bits": 8}}
LISTS = {"weight": ["memoryless_mse", {"name": "hessian", "signed": True, "rounding": "gptq"}], "input": "histogram"}


def test_a_list_of_observers_is_chosen_from_and_a_single_one_is_taken(tmp_path):
    torch.manual_seed(1)
    module = Outliers()
    callback = CalibrationCallback(WEIGHTS, observers=LISTS, module="net", export_to=tmp_path / "net")
    trainer(callback).validate(module, loader(count=64), verbose=False)
    labels = ["memoryless_minmax", "memoryless_mse", "hessian(signed=True, rounding=gptq)"]
    assert {of: list(losses) for of, losses in callback.choice.losses.items()} == {"weight": labels}
    assert {args.observer for args in (g.input_activations for g in callback.choice.config.config_groups.values())} == {
        "histogram"
    }
    assert all(hasattr(module.net[place], "weight_rounded") for place in (0, 2))
    x = torch.randn(16, 8)
    with quantized(module.net):
        expected = module.net(x)
    assert torch.equal(load_checkpoint(Plain().net, tmp_path / "net")(x), expected)
    state = callback.state_dict()
    for candidates, is_taken in ((LISTS, True), (LISTS | {"weight": ["memoryless_mse"]}, False)):
        resumed = CalibrationCallback(WEIGHTS, observers=candidates, module="net")
        resumed.load_state_dict(state)
        assert (resumed.options.config == callback.options.config) == is_taken


def test_a_candidate_that_does_not_fit_is_refused_before_the_first_batch():
    candidates = {"input": [{"name": "minmax", "signed": True}]}
    callback = CalibrationCallback(SCHEME, observers=candidates, module="net")
    with pytest.raises(CalibrationError, match="signed"):
        trainer(callback, max_epochs=1).fit(Outliers(), loader(2), loader())
    with pytest.raises(CalibrationError, match=r"expected one for each base name.*choose_observers"):
        CalibrationSession(Plain().net, SCHEME, observers=candidates)


def test_rounding_holds_for_all_that_auto_tries():
    module, callback = Outliers(), automatic(rounding="gptq")
    trainer(callback).validate(module, loader(count=64), verbose=False)
    assert "hessian(signed=True)" in callback.choice.losses["weight"]
    assert all(hasattr(module.net[place], "weight_rounded") for place in (0, 2))
