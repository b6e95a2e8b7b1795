"""pytorch-tabular: a net with embedded categories and an FT-Transformer, on scikit-learn's breast cancer data."""

import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig, FTTransformerConfig
from sklearn.datasets import load_breast_cancer

from lightning_obs import CalibrationCallback, QuantizationAwareTraining, load_checkpoint, quantized
from tests.clients.row import Row

table = load_breast_cancer(as_frame=True).frame
numbers = [column for column in table.columns if column != "target"]
table["size"] = pd.cut(table[numbers[0]], 5, labels=list("abcde")).astype(str)
train, val = table.iloc[:450], table.iloc[450:]


def classify(name, config):
    row = Row(f"pytorch-tabular {name}")

    def fit(callback):
        quiet = {"progress_bar": "none", "trainer_kwargs": {"enable_model_summary": False}}
        plain = {"checkpoints": None, "early_stopping": None, "load_best": False}
        model = TabularModel(
            data_config=DataConfig(target=["target"], continuous_cols=numbers, categorical_cols=["size"]),
            model_config=config,
            optimizer_config=OptimizerConfig(),
            trainer_config=TrainerConfig(max_epochs=2, batch_size=64, accelerator="cpu", **plain, **quiet),
            verbose=False,
        )
        # gallery: begin
        model.fit(train=train, validation=val, callbacks=[callback])
        # gallery: end
        return model

    def predict(model):
        columns = model.predict(val)
        return columns[[column for column in columns if "probability" in column]].to_numpy()

    # gallery: begin
    callback = CalibrationCallback("INT8_STATIC", evaluate=True)
    model = fit(callback)
    row.fit(callback)
    folder = callback.export(f"{name}-int8")
    model.save_model(name)
    loaded = TabularModel.load_model(name)
    load_checkpoint(loaded.model, folder)
    # gallery: end
    row.export(callback, folder)
    original = predict(model)
    with quantized(model.model):
        row.reload(predict(loaded), predict(model), original)
    # gallery: begin
    training = QuantizationAwareTraining("INT8_STATIC")
    fit(training)
    # gallery: end
    row.qat(training)
    row.refused("resume", "TabularModel.fit takes no checkpoint of a Trainer")


classify("CategoryEmbedding", CategoryEmbeddingModelConfig(task="classification", layers="128-64"))
attention = {"num_heads": 4, "num_attn_blocks": 2, "input_embed_dim": 16}
classify("FT-Transformer", FTTransformerConfig(task="classification", **attention))
