"""Let the original and the quantized model continue the same texts, and detect loops in the continuations.

Perplexity is measured token by token on a given text. A quantized model can do well at that, and still fall into a loop
after some dozens of tokens of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from lightning_obs.app.console import step
from lightning_obs.app.job import Job
from lightning_obs.errors import CalibrationError, warn
from lightning_obs.forward.quantized_forward import quantized, weights_kept
from lightning_obs.model.offload import device_of

#: how many texts are continued, from how many tokens of each
PROMPTS, PROMPT_TOKENS = 3, 32
#: a text loops if it ends with the same tokens, repeated at least so often and over at least so many tokens
TIMES, SHORTEST = 3, 24
#: characters of a loop that are shown
_SHOWN = 80


def continuations(job: Job, as_quantized: bool) -> list[dict[str, Any]] | None:
    """Continue the first held-out texts greedily by ``generation_check`` tokens; None if that is 0.

    Returns:
        For each text ``{"text": ..., "loop": ...}``: the model's continuation, up to its end or to where it is known to
        loop, and the loop's length in tokens, None if it does not loop.

    Raises:
        CalibrationError: the model is not a causal language model.
    """
    model: Any = job.model
    wanted = int(job.config.generation_check)
    if wanted < 1:
        return None
    generates = hasattr(model, "can_generate") and model.can_generate() and not model.config.is_encoder_decoder
    if not generates or not hasattr(job.module, "tokenizer"):
        raise CalibrationError(
            "generation_check is for causal language models of transformers", got=type(model).__name__,
            remedy="generation_check=0.",
        )  # fmt: skip
    job.to_device()
    prompts = _prompts(job).to(device_of(model))
    which = "quantized" if as_quantized else "original"
    shown = step(f"continuing {len(prompts)} texts by {wanted} tokens with the {which} model")
    with shown, torch.inference_mode(), ExitStack() as stack:
        if as_quantized:
            stack.enter_context(quantized(model))
            stack.enter_context(weights_kept(model))
        written = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=wanted,
            do_sample=False,
        )
    ends, tokenizer = model.generation_config.eos_token_id, job.module.tokenizer
    found = [_up_to_loop(tokens, ends) for tokens in written[:, prompts.shape[1] :].tolist()]
    return [{"text": tokenizer.decode(tokens, skip_special_tokens=True), "loop": loop} for tokens, loop in found]


def loop_line(original: list[dict[str, Any]], quantized: list[dict[str, Any]]) -> str:
    """A line of the report on two results of :func:`continuations`; warns where only the quantized model loops.

    >>> loop_line([{"text": "a a a a", "loop": 1}], [{"text": "a a a a", "loop": 1}])
    'generation: the quantized model loops in none of 1 texts where the original does not (original 1, quantized 1)'
    """
    loops = [sum(each["loop"] is not None for each in texts) for texts in (original, quantized)]
    new = [
        after["text"] for before, after in zip(original, quantized, strict=True)
        if after["loop"] is not None and before["loop"] is None
    ]  # fmt: skip
    line = (
        f"generation: the quantized model loops in {len(new) or 'none'} of {len(original)} texts where the original "
        f"does not (original {loops[0]}, quantized {loops[1]})"
    )
    if new:
        line += f": ...{new[0][-_SHOWN:]!r}"
        warn(line)
    return line


def loop_at_end(tokens: Sequence[int]) -> int | None:
    """The length in tokens of the loop that a text ends with; None if it ends with none.

    >>> loop_at_end([9, 8, 7] + [1, 2, 3, 4] * 6), loop_at_end([1, 2, 3, 4] * 5), loop_at_end(range(99))
    (4, None, None)
    """
    for length in range(1, len(tokens) // TIMES + 1):
        span = max(TIMES * length, SHORTEST)
        tail = list(tokens[-span:])
        if len(tail) == span and tail[length:] == tail[:-length]:
            return length
    return None


def _up_to_loop(tokens: list[int], ends: int | list[int] | None) -> tuple[list[int], int | None]:
    """A text up to its end or to where it is known to loop, and the loop's length; ``ends``: tokens that end a text."""
    for written, token in enumerate(tokens):
        if token == ends or (isinstance(ends, list) and token in ends):
            return tokens[:written], None
        loop = loop_at_end(tokens[: written + 1])
        if loop is not None:
            return tokens[: written + 1], loop
    return tokens, None


def _prompts(job: Job) -> torch.Tensor:
    """The beginnings of the first held-out texts, ``(prompts, tokens)``, all of one length: nothing is padded."""
    rows: list[torch.Tensor] = []
    for batch in job.data.test_dataloader():
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        rows += [ids[counts][:PROMPT_TOKENS] for ids, counts in zip(batch["input_ids"], mask, strict=True)]
        if len(rows) >= PROMPTS:
            break
    length = min(map(len, rows[:PROMPTS]))
    return torch.stack([row[:length] for row in rows[:PROMPTS]])
