"""What a user is told who mistypes a command: never a traceback, and the word that was meant or the remedy."""

import json

import pytest

ROWS = [
    # a name of another case, or misspelt
    ("scheme=fp9", "scheme=fp9 (did you mean `fp8`?)"),
    ("experiment=qat_w4", "did you mean `qat_w4a"),
    ("model=gpt2", "A file, folder or name is given as model.path=gpt2"),
    ("export=onx", "unknown option export=onx (did you mean `onnx`?)"),
    ("export=onnx export.fil=m.onnx", "unknown key export.fil (did you mean `file`?)"),
    ("export=onnx export.backend=xnnpack", "export.backend: it belongs to export=program"),
    ("export.signed=true", "export.signed: it belongs to export=onnx"),
    ("export=onnx export.measure=no", "export.measure. Got 'no', expected true or false"),
    ("speed=fast", "Options of speed: full, quick"),
    ("observer=", "observer= chooses nothing"),
    ("observer.name=meanmax", "unknown observer 'meanmax'"),
    ("scheme.preset=FP9", "unknown scheme 'FP9' (did you mean `FP8`?)"),
    # a key that is not there
    ("schem=fp8", "unknown key schem (did you mean `scheme`?)"),
    ("export.dir=out", "Keys of export: _target_, backend, base, dynamic, engines, file, folder"),
    ("tokens=128", "unknown key tokens (did you mean `data.tokens`?)"),
    (
        "observer.averaging_constant=0.05",
        "unknown key observer.averaging_constant: it belongs to observer=minmax or observer=mse",
    ),
    ("budget=5", "budget: it belongs to task=plan"),
    ("trainer.max_epochs=3", "Add it with +trainer.max_epochs=..."),
    ("+schem=fp8", "no task reads an added key: schem"),
    ("~data", "data cannot be deleted"),
    # words that are no options
    ("--scheme fp8", "unknown flag --scheme. Remedy: write scheme=fp8"),
    ("scheme=fp8 -m data.batches=2,4", "write all flags (--multirun, --config-dir ...) before the options"),
    ("--multirun scheme=fp8,w8a8 export.folder=a", "runs of the --multirun would write to export.folder=a. Expected a"),
    (
        "--multirun scheme=fp8,w8a8 +export.file='a/ü.onnx' export=onnx",
        """'+export.file='"'"'a/ü-${hydra:job.num}.onnx'"'"'', or leave it out""",
    ),
    ("scheme fp8", "cannot read 'scheme', which has no `=`. Remedy: write scheme=fp8"),
    ("help", "--help"),
    ("fp8", "options are written key=value"),
    ("scheme=int8_static observer=minmax,mse", "add --multirun"),
    ("ignore=[lm_head", "is quoted whole: 'ignore=[lm_head]'"),
    ("data.path=größe", """needs quotes of its own, too: 'model.path="größe 1"'"""),
    ("scheme==fp8", "cannot read 'scheme==fp8'"),
    ("--config-dir nowhere scheme=fp8", "nowhere' not found"),
    # true or false, numbers, choices
    ("evaluate=1", "evaluate. Got 1, expected true or false"),
    ("weight_observer=imatrix_mse scheme=w4a16 weight_observer.signed=no", "expected true or false"),
    ("model.layerwise=ture", "model.layerwise. Got 'ture', expected true or false, or quantized"),
    ("data.batches=0", "data.batches. Got 0, expected a positive whole number"),
    ("data.tokens=1.5", "data.tokens. Got 1.5, expected a whole number"),
    ("data.path=", "data.path is empty"),
    ("task=finetune model.learning_rate=-1", "model.learning_rate. Got -1"),
    ("model.dtype=fp16", "expected one of auto, float32, bfloat16, float16"),
    ("on_missing=ignore", "on_missing. Got 'ignore', expected 'error', 'warn', 'siblings'"),
    ("export.engines=vlm", "did you mean `vllm`?"),
    ("rounding=gtpq", "rounding. Got 'gtpq', expected None, 'gptq'"),
    ("observer=minmax scheme=int8_static observer.averaging_constant=5", "expected a value in (0, 1]"),
    ("task=plan budget=4.7bit", "budget"),
    ("export.max_shard_size=5gigs", "max_shard_size"),
    ("trainer.devices=two", "two"),
    # options that do not go together
    ("group_size=64", "group_size with a scheme whose groups are fixed"),
    ("scheme=none", "for the kv cache alone: kv_cache=fp8"),
    ("scheme=w8a8 observer=minmax", "nothing static to observe"),
    ("task=plan scheme=w4a16", "does not read what was given: scheme"),
    ("data.train_batches=2", "does not read what was given: data.train_batches"),
    ("task=compare", "task=compare runs=[<folder of a run>,<another>]"),
    # files
    ("data.path=absent.txt", "data.path=absent.txt does not exist"),
    ("data.path=empty.jsonl", "data.path=empty.jsonl is empty"),
    ("data.path=body.jsonl", "has no text in the field 'text'"),
    ("data.path=body.jsonl data.text_field=boby", "did you mean `body`?"),
    ("model.path=./absent", "model.path=./absent does not exist"),
    ("ignore_from=absent.json", "absent.json does not exist"),
    ("imports=[absent_module]", "imports needs the package absent_module"),
]

#: further words that one of these checks refuses
MORE_ROWS = [
    ("scheme=int8-static", "did you mean `int8_static`?"),
    ("scheme=W4A61", "did you mean `w4a16`?"),
    ("observer=Min_Max", "did you mean `minmax`?"),
    ("weight_observer=imatrix", "did you mean `imatrix_mse`?"),
    ("kv_cache=fp8-head", "did you mean `fp8_head`?"),
    ("task=plann", "did you mean `plan`?"),
    ("task=calibration", "did you mean `calibrate`?"),
    ("data=train.jsonl", "A file, folder or name is given as data.path=train.jsonl"),
    ("model=encoder", "A file, folder or name is given as model.path=encoder"),
    ("export=out", "A file, folder or name is given as export.folder=out"),
    ("scheme=null", "Options of scheme: fp8,"),
    ("observr=minmax", "unknown key observr (did you mean `observer`?)"),
    ("data.batch=3", "unknown key data.batch (did you mean `batches`?)"),
    ("model.pth=x", "unknown key model.pth (did you mean `path`?)"),
    ("observer.averaging_constan=1", "unknown key observer.averaging_constan (did you mean `averaging_constant`?)"),
    ("weight_observer.norm=2", "it belongs to"),
    ("runs=[a,b]", "runs: it belongs to task=compare"),
    ("model.learning_rate=1e-4", "it belongs to experiment=qat_"),
    ("--scheme=fp8", "unknown flag --scheme=fp8. Remedy: write scheme=fp8"),
    ("-scheme=fp8", "write scheme=fp8"),
    ("scheme:fp8", "write scheme=fp8"),
    ("export.overwrite=no", "export.overwrite. Got 'no', expected true or false"),
    ("evaluate=flase", "evaluate. Got 'flase', expected true or false"),
    ("calibrate_all_experts=yes", "calibrate_all_experts. Got 'yes', expected true or false"),
    ("trainer.logger=off", "trainer.logger. Got 'off', expected true or false"),
    ("data.batches=many", "data.batches. Got 'many', expected a whole number"),
    ("task=finetune model.learning_rate=fast", "model.learning_rate. Got 'fast', expected a number"),
    ("observer=minmax scheme=int8_static observer.averaging_constant=often", "expected a number"),
    ("data.path=empty.txt", "data.path=empty.txt is empty"),
]

#: these have to see the model
ROWS_WITH_A_MODEL = [
    ("ignore=[lmhead]", "ignore matches no module of LlamaForCausalLM: lmhead (did you mean `lm_head`?)"),
    ("scheme=w4a16 group_size=7", "use a group size of 64 or 32"),
    ("scheme=w4a16 group_size=96", "use a group size of 64 or 32"),
    ("scheme.targets=[Liner]", "did you mean `Linear`?"),
    ("scheme.targets=[q_porj]", "a target matches no module"),
    ("token_mask=attention_msk", "the batch has no 'attention_msk'"),
    ("scheme=mxfp4", "model.dtype=bfloat16"),
    ("module=modl", "modl"),
    (
        "data.tokens=513",
        "Got 513, expected at most 512 (max_position_embeddings of its config). Remedy: data.tokens=512",
    ),
    ("data.batches=100000", "too few calibration blocks of text"),
    ("task=observers scheme=int8_static data.batches=1", "data.batches"),
]


@pytest.fixture
def folder_of_mistakes(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "body.jsonl").write_text(json.dumps({"body": "some text"}))


def told(command_line, words, tiny):
    done = command_line(*words.split(" "), tiny=tiny)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "To append to your" not in done.stderr
    assert len(done.stderr) < 1500
    assert "perplexity" not in done.stdout  # nothing was measured
    return done.stderr


@pytest.mark.parametrize(("words", "hint"), [*ROWS, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE_ROWS)])
@pytest.mark.usefixtures("folder_of_mistakes")
def test_a_mistake_is_told_before_anything_is_loaded(command_line, words, hint, monkeypatch):
    monkeypatch.setattr("lightning_obs.app.models.pretrained.default_model_folder", lambda: pytest.fail("loaded"))
    assert hint in told(command_line, words, tiny=False)


@pytest.mark.parametrize(("words", "hint"), ROWS_WITH_A_MODEL)
def test_a_mistake_that_only_the_model_shows_is_told_before_anything_is_measured(command_line, words, hint):
    assert hint in told(command_line, words, tiny=True)


@pytest.mark.parametrize("words", ["scheme=FP8_Dynamic", "scheme=fp8 kv_cache=FP8", "observer=MinMax"])
def test_names_are_compared_without_case(command_line, words):
    from lightning_obs.app.overrides import checked_words

    assert checked_words(words.split()) == words.lower().split()


def test_an_option_of_the_users_own_keeps_its_case(tmp_path):
    from lightning_obs.app.overrides import checked_words

    (tmp_path / "scheme").mkdir()
    (tmp_path / "scheme" / "FP8.yaml").write_text("preset: FP8\n")
    words = ["--config-dir", str(tmp_path), "scheme=FP8", "kv_cache=FP8"]
    assert checked_words(words) == [*words[:3], "kv_cache=fp8"]
