"""A LightningModule and data of the user's own on the command line."""

import json
import os
import subprocess
import sys

import peft
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_obs import CalibrationError
from lightning_obs.app.main import run
from lightning_obs.app.tasks.compare import _multirun_command
from tests.support.markdown import ROOT


class Two(LightningModule):
    """Logs two values, and says which one counts."""

    metric = "accuracy"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
        self.accuracy = MulticlassAccuracy(3)

    def model_inputs(self, batch):
        return {"input": batch[0]}

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])

    def test_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.accuracy.update(logits, batch[1])
        self.log("loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log("accuracy", self.accuracy)


class Silent(Two):
    """Does not say which one."""

    metric = None


class Points(LightningDataModule):
    """Knows nothing of tokenizers."""

    def __init__(self, batches=2):
        super().__init__()
        torch.manual_seed(1)
        self.rows = TensorDataset(torch.randn(4 * batches, 32), torch.randint(0, 3, (4 * batches,)))

    def val_dataloader(self):
        return DataLoader(self.rows, batch_size=4)

    test_dataloader = val_dataloader


def words_of(name):
    return [
        "~model", f"+model._target_={__name__}.{name}", "~data", f"+data._target_={__name__}.Points", "module=net",
        "trainer=cpu", "trainer.enable_progress_bar=false", "scheme=int8_static", "ignore=[]",
    ]  # fmt: skip


def own(composed, name, *overrides):
    return composed(*words_of(name), *overrides, tiny=False)


def test_a_module_of_ones_own_is_judged_by_the_value_that_it_names(composed, capsys):
    row = run(own(composed, "Two"))
    assert (row["metric"], row["higher_is_better"]) == ("accuracy", True)
    assert "loaded by load_checkpoint into a new model: largest difference of outputs 0.0" in capsys.readouterr().out


def test_of_several_values_one_has_to_be_named(composed):
    with pytest.raises(CalibrationError, match=r"Silent\.test_step logs loss, accuracy.*metric = 'loss'"):
        run(own(composed, "Silent", "export=none"))


class Mute(Two):
    """Logs nothing."""

    def test_step(self, batch, batch_idx):
        pass


def test_a_module_that_logs_nothing_cannot_be_evaluated(composed):
    words = [word for word in words_of("Mute") if not word.startswith(("module", "scheme", "ignore"))]
    with pytest.raises(CalibrationError, match=r"test_step logs nothing. Got Mute.*self\.log"):
        run(composed(*words, "task=evaluate", tiny=False))


def test_model_and_data_are_replaced_on_the_command_line(command_line):
    done = command_line(*words_of("Two"), "export=none", tiny=False)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


def test_a_model_is_not_deleted_without_another_in_its_place(command_line):
    done = command_line("~model", tiny=False)
    assert done.returncode == 1
    assert "model cannot be deleted" in done.stderr


def test_a_config_of_ones_own_can_require_a_key(command_line, tmp_path):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "two.yaml").write_text(f"_target_: {__name__}.Two\nwidth: ???\n")
    done = command_line("--config-dir=mine", "model=two", *words_of("Two")[2:], tiny=False)
    assert done.returncode == 1
    assert "model.width has to be given" in done.stderr


def test_the_command_of_a_multirun_has_the_folder_of_its_configs():
    runtime = {"config_sources": [{"provider": "main", "path": "/a"}, {"provider": "command-line", "path": "/mine"}]}
    config = OmegaConf.create({"hydra": {"runtime": runtime, "overrides": {"task": ["scheme=fp8,w8a8"]}}})
    command = "python -m lightning_obs --multirun --config-dir=/mine scheme=fp8,w8a8"
    assert _multirun_command(config) == command


class Adapted(Two):
    """Has adapters, and takes no argument that loads others."""

    def __init__(self, learning_rate=0.1):
        super().__init__()
        self.learning_rate = learning_rate
        self.model = peft.get_peft_model(self.net, peft.LoraConfig(target_modules=["0"]))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.learning_rate)


class TrainedOn(Points):
    """Has batches to train on, too."""

    def __init__(self, train_batches=2):
        super().__init__(train_batches)

    train_dataloader = Points.val_dataloader


@pytest.mark.filterwarnings("ignore")  # of Lightning: no validation in this fit, few workers
def test_adapters_of_a_module_of_ones_own_are_trained_and_written(composed, tmp_path, capsys):
    words = [word for word in words_of("Adapted") if not word.startswith(("module", "scheme", "ignore", "+data"))]
    data = f"+data._target_={__name__}.TrainedOn"
    folder = f"export.folder={tmp_path / 'adapters'}"
    run(composed(*words, data, "task=lora", "data.train_batches=2", "trainer.max_steps=2", folder, tiny=False))
    assert (tmp_path / "adapters" / "adapter_config.json").is_file()
    assert "loaded again" not in capsys.readouterr().out


METRICS = ("perplexity", "accuracy")


def test_runs_with_different_metrics_stand_side_by_side(composed, tmp_path, capsys):
    for name, metric in zip("ab", METRICS, strict=True):
        (tmp_path / name).mkdir()
        found = {"run": name, "metric": metric, metric: [0.5, 0.25], "size": 2**20}
        (tmp_path / name / "report.json").write_text(json.dumps(found))
    run(composed("task=compare", f"runs=[{tmp_path / 'a'},{tmp_path / 'b'}]"))
    table = capsys.readouterr().out
    assert "perplexity 0.25000" in table
    assert "accuracy 0.25000" in table
    assert (tmp_path / "run" / "report.html").is_file()
    shown = json.loads((tmp_path / "run" / "report.json").read_text())["runs"]
    assert [(row["metric"], row[row["metric"]]) for row in shown] == [(name, [0.5, 0.25]) for name in METRICS]


@pytest.mark.parametrize(("direction", "best"), [(True, [True, True]), (False, [True, False]), (None, [False, False])])
def test_a_comparison_judges_a_metric_in_its_own_direction(composed, tmp_path, direction, best):
    for name, power, size in (("a", 1.0, 2**20), ("b", 2.0, 2**21)):
        row = {"metric": "power", "power": [3.0, power], "higher_is_better": direction}
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps({"run": name, "size": size, **row}))
    run(composed("task=compare", f"runs=[{tmp_path / 'a'},{tmp_path / 'b'}]"))
    shown = json.loads((tmp_path / "run" / "report.json").read_text())["runs"]
    assert [row["is_best"] for row in shown] == best


def test_a_report_whose_metric_has_no_readable_direction_is_refused(composed, tmp_path):
    row = {"run": "a", "metric": "power", "power": [3.0, 1.0], "higher_is_better": "up"}
    (tmp_path / "report.json").write_text(json.dumps(row))
    with pytest.raises(CalibrationError, match="direction of the metric is neither true nor false"):
        run(composed("task=compare", f"runs=[{tmp_path}]"))


#: a user's file for the other package of Lightning
PYTORCH_LIGHTNING = """
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

class Module(pl.LightningModule):
    def __init__(self, learning_rate=1e-3):
        super().__init__()
        torch.manual_seed(0)
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
        self.mse = MeanSquaredError()

    def model_inputs(self, batch):
        return {"input": batch[0]}

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])

    def test_step(self, batch, batch_idx):
        self.mse.update(self.net(batch[0]), batch[1])
        self.log("mse", self.mse)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.learning_rate)

def module():
    return Module()

class Data(pl.LightningDataModule):
    def __init__(self, train_batches=2):
        super().__init__()
        self.rows = TensorDataset(torch.randn(8, 32), torch.randn(8, 3))

    def val_dataloader(self):
        return DataLoader(self.rows, batch_size=4)

    train_dataloader = test_dataloader = val_dataloader
"""


#: command lines, and what they do: fine-tune a class, calibrate what a function returns, and leave out its Trainer
RUNS = {
    "Module": ["task=finetune", "task.callback.distill=0"],
    "module": ["trainer._target_=pytorch_lightning.Trainer", "evaluate=false"],
    "module without a trainer": [],
}
IN_A_NEW_PROCESS = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from tests.support.in_process import run_command_line

runs = json.loads(sys.argv[1])
print(json.dumps({name: asdict(run_command_line(*words, folder=Path.cwd() / name)) for name, words in runs.items()}))
"""


@pytest.fixture(scope="module")
def of_pytorch_lightning(tmp_path_factory):
    """What each run printed, in a new process: the other package, once imported, takes the messages of the first."""
    folder = tmp_path_factory.mktemp("pytorch_lightning")
    commands = {}
    for name, words in RUNS.items():
        (folder / name).mkdir()
        (folder / name / "other.py").write_text(PYTORCH_LIGHTNING)
        target = f"+model._target_=other.{name.partition(' ')[0]}"
        model = ("~model", target, "~data", "+data._target_=other.Data", "module=net")
        commands[name] = [*model, "trainer=cpu", "scheme=int8_static", "ignore=[]", *words]
    command = [sys.executable, "-W", "ignore", "-c", IN_A_NEW_PROCESS, json.dumps(commands)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Module", "module"])
def test_a_module_of_pytorch_lightning_is_run_by_the_trainer_of_its_package(of_pytorch_lightning, name):
    done = of_pytorch_lightning[name]
    assert done["returncode"] == 0, done["stderr"]
    assert "loaded by load_checkpoint into a new model: largest difference of outputs 0.0" in done["stdout"]
    assert done["stdout"].count("calibrating Sequential (`net`)") == 1  # the Trainer's messages are kept quiet
    assert "GPU available" not in done["stdout"] + done["stderr"]


@pytest.mark.slow
def test_a_module_that_only_a_function_knows_of_names_the_trainer_to_set(of_pytorch_lightning):
    done = of_pytorch_lightning["module without a trainer"]
    assert done["returncode"] == 1
    assert "Module is a LightningModule of pytorch_lightning, and the Trainer is of lightning.pytorch" in done["stderr"]
    assert "Remedy: add trainer._target_=pytorch_lightning.Trainer." in done["stderr"]
