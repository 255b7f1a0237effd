"""The parts of a model: its list of blocks, and in a block the attention, the MLP, norms and experts."""

from __future__ import annotations

import re

from torch import nn

from pca_torch.sites.names import unwrapped
from pca_torch.sites.tree import Tree, bare, is_linear, parent, spatial_axes

__all__ = [
    "blocks",
    "decoder_layers",
    "down_projections",
    "experts",
    "final_norm",
    "is_block",
    "is_convolutional",
    "is_in_expert",
    "layer_of",
    "middle_norm",
]

ATTENTION = re.compile(r"att(n|ention)", re.IGNORECASE)
FINAL_NORMS = (
    *("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm", "layernorm"),
    *("layer_norm", "post_layernorm", "ln_post", "ln_final", "ln_out"),
)
DOWN = {
    *("down_proj", "fc2", "c_proj", "dense_4h_to_h", "w2", "wo", "Wo", "lin2", "linear2", "linear_fc2"),
    *("fc_out", "output_dense", "pwconv2", "proj_2"),
}
MIDDLE_NORMS = (
    *("pre_feedforward_layernorm", "pre_ff_layernorm", "post_attention_layernorm", "ln_2", "ln2"),
    *("layernorm_after", "layer_norm2", "ffn_norm", "layer.1.layer_norm"),
)
PARALLEL = ("use_parallel_residual", "parallel_attn", "parallel_residual")  # attention beside the MLP
SENSES = re.compile(r"vis(ion|ual)|image|audio", re.IGNORECASE)
SEQ2SEQ_STACKS = {"encoder", "decoder"}


def decoder_layers(model: nn.Module) -> str:
    """Pattern of the blocks of a model: the longest list of modules of one class that is in no other list.

    Where a configuration has a part for text, as of models that see pictures too, it is the list of as
    many blocks as that part says.

    Args:
        model: the model.

    Raises:
        ValueError: it has no such list.
    """
    name = _main_list(model)
    return f"{name}.*" if name else "*"


def blocks(tree: Tree) -> list[str]:
    """Paths of the blocks: those of the longest list, and of an encoder-decoder those of both stacks.

    Raises:
        ValueError: the model has no list of equal blocks.
    """
    if tree.blocks is not None:
        return tree.blocks
    lists = [name for _, name in _equal_lists(tree.model)]
    chosen = [_main_list(tree.model)]
    if getattr(getattr(tree.root, "config", None), "is_encoder_decoder", False):
        stacks = [name for name in lists if SEQ2SEQ_STACKS & set(name.split("."))]
        chosen = stacks if len(stacks) > 1 else chosen
    named = dict(tree.model.named_modules())
    found = {child for name in chosen for child in named[name].children()}
    first = {module: path for path, module in reversed(tree.modules.items()) if module in found}
    tree.blocks = [path for path, module in tree.modules.items() if first.get(module) == path]
    return tree.blocks


def is_block(tree: Tree, path: str) -> bool:
    """Whether the module is one of the blocks, so that it carries the residual stream."""
    if not path.rpartition(".")[2].isdigit():
        return False
    try:
        return path in blocks(tree)
    except ValueError:  # no blocks at all
        return False


def layer_of(path: str) -> int | None:
    """The index of the block in a path: its first segment of digits."""
    return next((int(segment) for segment in path.split(".") if segment.isdigit()), None)


def is_convolutional(tree: Tree, block: str) -> bool:
    """Whether a block works on maps (B, C, ...): it convolves and does not attend."""
    inside = list(tree.below(block))
    attends = any(ATTENTION.search(path.removeprefix(block)) for path in inside)
    return not attends and any(spatial_axes(tree.modules[p]) == 2 for p in inside)


def final_norm(tree: Tree, block: str) -> str | None:
    """The norm after the last block: beside the list of blocks, or beside what holds that."""
    holder = parent(block)
    above = tree.ancestors(holder) if holder in tree.modules else iter(())
    return next((norm for path in above if (norm := tree.child(path, *FINAL_NORMS))), None)


def middle_norm(tree: Tree, block: str) -> str | None:
    """The norm whose input is the residual stream between attention and MLP; None where there is none.

    Parallel blocks have no such place, and blocks that normalise after each part put it elsewhere.
    """
    if any(tree.setting(block, name) for name in PARALLEL):
        return None
    found = tree.child(block, *MIDDLE_NORMS)
    if found and found.endswith("layer.1.layer_norm"):  # T5: the MLP is the last of two or three parts
        return tree.child(block, "layer.2.layer_norm", "layer.1.layer_norm")
    if found and found.endswith("post_attention_layernorm"):  # OLMo-2: on the way out of the attention
        return None if tree.child(block, "post_feedforward_layernorm") else found
    if found is None and tree.setting(block, "do_layer_norm_before"):  # OPT
        return tree.child(block, "final_layer_norm")
    if found is None and tree.setting(block, "norm_first"):  # nn.TransformerEncoderLayer
        return tree.child(block, "norm2")
    return found


def down_projections(tree: Tree, path: str) -> list[str]:
    """Projections that end the MLPs inside `path`, but for those of attention and of routed experts."""

    def ends_mlp(found: str) -> bool:
        *before, last = found.removeprefix(path).strip(".").split(".")
        is_bert = last == "dense" and found.endswith("output.dense") and len(before) <= 1
        return (last in DOWN or is_bert) and not any(ATTENTION.search(s) or "expert" in s for s in before)

    inside = [p for p in tree.below(path) if p != path and is_linear(tree.modules[p])]
    return [p for p in inside if ends_mlp(p)]


def experts(tree: Tree, path: str) -> str | None:
    """The module inside `path` that holds the experts between which tokens are routed."""
    return next((p for p in tree.below(path) if p.rpartition(".")[2] == "experts"), None)


def is_in_expert(tree: Tree, path: str) -> bool:
    """Whether the module is one of a list of experts, or inside one: it gets the tokens routed there."""
    return any(
        parent(p).rpartition(".")[2] == "experts"
        and isinstance(bare(tree.modules.get(parent(p), tree.root)), nn.ModuleList | nn.ModuleDict)
        for p in (path, *tree.ancestors(path))
    )


def _main_list(model: nn.Module) -> str:
    """The name of the list of blocks that is meant.

    Raises:
        ValueError: there is none.
    """
    lists = _equal_lists(model)
    if not lists:
        raise ValueError(
            "`sites` must be given: this model has no list of equal blocks; see `model.named_modules()`."
        )
    text = getattr(getattr(unwrapped(model), "config", None), "text_config", None)
    depth = getattr(text, "num_hidden_layers", None)
    of_text = [(n, name) for n, name in lists if n == depth and not SENSES.search(name)]
    lists = of_text or lists
    longest = max(length for length, _ in lists)
    return next(name for length, name in lists if length == longest)


def _equal_lists(model: nn.Module) -> list[tuple[int, str]]:
    """Length and name of the lists of modules of one class that are in no other list."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    return [
        (len(module), name)
        for name, module in found.items()
        if len({type(bare(child)) for child in module}) == 1
        and not any(name.startswith(f"{other}.") for other in found)  # experts inside a block
    ]
