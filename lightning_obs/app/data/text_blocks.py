"""Blocks of equal length, cut from the tokens of texts, each with the beginning that the model knows."""

from __future__ import annotations

from typing import Any

import torch


def opening_token(tokenizer: Any) -> int | None:
    """The token with which the tokenizer begins every text (``<bos>``); None if it adds none.

    A model that was trained with it predicts far worse without: every text that it has seen began so. ``TextData``
    asks it for its blocks.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return None
    beginning = tokenizer("", verbose=False).input_ids[:1]
    return bos if beginning == [bos] else None


def cut_into_blocks(ids: torch.Tensor, count: int, tokens: int, opening: int | None) -> list[torch.Tensor]:
    """Cut token ids into blocks of equal length, each with the opening token at its beginning.

    ``TextData`` calls this for its blocks. Text that begins with the token itself, as the template of a chat may, gets
    no second one.

    Args:
        ids: ``(N,)``.
        count: the most blocks.
        tokens: in a block, the opening token among them.
        opening: of :func:`opening_token`.

    Returns:
        Up to ``count`` blocks ``(tokens,)``; a rest that is shorter than a block is left out.
    """
    blocks: list[torch.Tensor] = []
    start = 0
    while len(blocks) < count:
        has_opening = opening is None or ids[start : start + 1].tolist() == [opening]
        stop = start + tokens - (0 if has_opening else 1)
        if stop > len(ids):
            break
        block = ids[start:stop]
        blocks.append(block if has_opening else torch.cat([block.new_tensor([opening]), block]))
        start = stop
    return blocks


def without_opening(block: torch.Tensor, opening: int | None) -> torch.Tensor:
    """The tokens of a block ``(tokens,)`` behind its opening token; ``TextData`` compares these with other text."""
    return block if opening is None else block[1:]
